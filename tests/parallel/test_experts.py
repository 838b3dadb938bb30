"""Experts on several ranks: where they are placed, what is read of them, and ranks that nobody asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import core_model_loading

from moetune.cli.quantize import quantize
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.experts.context import read_received
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import resolve
from tests import small
from tests.parallel import layouts, steps, world
from tests.resolved import build

EP_4 = {"fsdp": 4, "ep": 4}


# --- Placement ------------------------------------------------------------------------------------------------------


def placement_of(
    adapt: dict[str, Any], ep: int, model: Path, load: dict[int, list[float]] | None = None
) -> dict[int, Any]:
    parallel: dict[str, Any] = {"fsdp": ep, "ep": ep}
    if load is not None:
        file = model.parent / "load.json"
        file.write_text(json.dumps({"expert_load": load}))
        parallel["load"] = str(file)
    run = {"model": {"path": str(model)}, "adapt": adapt, "parallel": parallel, "hardware": {"count": ep}}
    return dict(resolve(RunConfig.model_validate(run), "cuda").placement)


def test_ids_are_contiguous_where_experts_are_alike(small_model: Path) -> None:
    assert placement_of({"router": "all"}, 2, small_model) == {0: ((0, 1), (2, 3)), 1: ((0, 1), (2, 3))}
    every = {"lora": {"rank": 2, "alpha": 2, "targets": ["experts"]}}
    assert placement_of(every, 4, small_model)[0] == ((0,), (1,), (2,), (3,))


def test_trained_experts_are_spread(small_model: Path) -> None:
    """Contiguous ids would put both on one rank."""
    for held in placement_of({"experts": {"layers": "all", "ids": [0, 1]}}, 2, small_model).values():
        assert sorted(len({0, 1} & set(ids)) for ids in held) == [1, 1]


def test_odd_ones_even_out_over_layers(small_model: Path) -> None:
    found = placement_of({"experts": {"layers": "all", "ids": [0]}}, 2, small_model)
    assert {rank for held in found.values() for rank, ids in enumerate(held) if 0 in ids} == {0, 1}


def test_a_known_load_is_balanced(small_model: Path) -> None:
    load = {layer: [10.0, 9.0, 1.0, 0.0] for layer in (0, 1)}
    for held in placement_of({"router": "all"}, 2, small_model, load).values():
        assert sorted(sum(load[0][expert] for expert in ids) for ids in held) == [10.0, 10.0]
    with pytest.raises(UserError, match=r"parallel\.load: has 3 experts for layer 0, which has 4"):
        placement_of({"router": "all"}, 2, small_model, {0: [1.0, 2.0, 3.0]})


# --- Ranks without tokens -------------------------------------------------------------------------------------------


def one_word(model: Path, parallel: dict[str, Any], adapt: str) -> tuple[steps.Taken, int]:
    """Steps in which every token is the same; and how often nothing came to this rank."""
    config = layouts.config_of(parallel, (adapt, "nf4"), model)
    idle = 0

    def counted(receive: Any, send: Any, rank: int) -> list[list[int]]:
        nonlocal idle
        rows = read_received(receive, send, rank)
        idle += not any(map(sum, rows))
        return rows

    taken = steps.take(config, Ranks.join(config.parallel, "cpu"), 2, 4, word=77, count_received=counted)
    return taken, idle


@pytest.mark.parametrize("adapt", ["experts", "lora"])
def test_a_rank_without_tokens(adapt: str, small_model: Path) -> None:
    (alone, _), *_ = world.run(1, one_word, small_model, {}, adapt)
    found = world.run(4, one_word, small_model, EP_4, adapt)
    assert any(idle for _, idle in found), "every rank had tokens, so this shows nothing"
    for taken, _ in found:
        assert layouts.difference(taken, alone) < layouts.TOLERANCE


# --- Reading --------------------------------------------------------------------------------------------------------


def bytes_read(config: RunConfig) -> dict[str, int]:
    """Of a checkpoint's experts, and of all else, on one rank."""
    sums = {"experts": 0, "rest": 0}
    materialize = core_model_loading._materialize_copy

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = materialize(tensor, *args, **kwargs)
        kind = "experts" if {*made.shape} == {64, 96} else "rest"  # as `tests.small` has them
        sums[kind] += made.nbytes
        return made

    core_model_loading._materialize_copy = counting
    build(config, "cpu", ranks=Ranks.join(config.parallel, "cpu"))
    return sums


@pytest.mark.parametrize("adapt", ["router", "experts"])
def test_a_rank_reads_its_own_experts(adapt: str, small_model: Path) -> None:
    (whole,) = world.run(1, bytes_read, layouts.config_of({}, (adapt, "nf4"), small_model))
    assert whole["experts"] == small.LAYERS * small.EXPERTS * 3 * 64 * 96 * 4
    for mine in world.run(4, bytes_read, layouts.config_of(EP_4, (adapt, "nf4"), small_model)):
        assert mine == {"experts": whole["experts"] // 4, "rest": whole["rest"]}


def banks(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What each bank holds: ids and bytes."""
    adapted = build(config, "cpu", ranks=Ranks.join(config.parallel, "cpu"))
    found = {}
    for layer in adapted.structure.moe_layers:
        bank = adapted.model.get_submodule(layer.experts)
        found[layer.experts] = {"held": bank.held, **{name: buffer.clone() for name, buffer in bank.named_buffers()}}
    return found


def test_a_packed_base_gives_each_rank_its_own(small_model: Path, tmp_path: Path) -> None:
    quantize(str(small_model), out=tmp_path / "packed")
    (whole,) = world.run(1, banks, layouts.config_of({}, ("router", "nf4"), tmp_path / "packed"))
    ranks = world.run(2, banks, layouts.config_of({"fsdp": 2, "ep": 2}, ("router", "nf4"), tmp_path / "packed"))
    for path, bank in whole.items():
        assert sorted(expert for mine in ranks for expert in mine[path]["held"]) == list(bank["held"])
        for mine in ranks:
            rows = list(mine[path]["held"])
            for name in bank.keys() - {"held"}:
                expected = bank[name] if name.endswith("nested_code") else bank[name][rows]
                assert torch.equal(mine[path][name], expected), name
