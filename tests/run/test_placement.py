"""Which rank holds which experts."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.run.resolve import resolve


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
