"""Experts on several ranks: ranks that no token is sent to, and what a rank reads and holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.adapt.weights.quantize import quantize
from moetune.config.schema import RunConfig
from moetune.experts.context import read_received
from moetune.parallel.ranks import Ranks
from moetune.tensor_files import Stored
from tests import small
from tests.parallel import layouts, steps, world
from tests.resolved import build

EP_4 = {"fsdp": 4, "ep": 4}


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


@pytest.mark.full
@pytest.mark.one_in(2)
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
    rows = Stored.rows

    def counting(self: Stored, *args: Any, **kwargs: Any) -> torch.Tensor:
        read = rows(self, *args, **kwargs)
        kind = "experts" if {*read.shape} == {64, 96} else "rest"  # as `tests.small` has them
        sums[kind] += read.nbytes
        return read

    Stored.rows = counting
    build(config, "cpu", ranks=Ranks.join(config.parallel, "cpu"))
    return sums


@pytest.mark.one_in(2)
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


@pytest.mark.full
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
