"""Exercises make the calls of a run's training step: the same operators, layouts and numbers, whatever its rows."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.adapt.build import build
from moetune.adapt.guard.comparison import CallsSeen
from moetune.adapt.guard.exercise import samples, sizes_of
from moetune.kernels.registry import OPERATORS, Operator
from moetune.run.resolve import resolve
from moetune.training.step.micro_step import token_loss
from tests.kernels.recorded import kind_of
from tests.nullcuda import runs

CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 4, "targets": ["attention", "experts"]}


def kinds(run: Callable[[], Any]) -> set[Hashable]:
    """What compiled kernels the operators of a function's calls need; of grouped products, whose rows are in any
    dimension, only which of the two it is."""
    found: set[Hashable] = set()

    def compute(operator: Operator, args: Sequence[Any]) -> Any:
        is_product = operator.name == "grouped_mm"
        found.add((operator.name, args[1].dim()) if is_product else (operator.name, *map(kind_of, args)))
        return operator.reference(*args)

    with CallsSeen(compute):
        run()
    return found


def named(found: set[Hashable]) -> set[Any]:
    return {kind[0] for kind in found}  # type: ignore[index]


ADAPT: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "experts": {"experts": {"layers": "all", "ids": [0, 2]}},
    "lora": {"lora": LORA},
    "split lora on some": {"lora": LORA | {"gate_up": "split", "ids": [1, 3]}},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("adapt", "model", "train"),
    [
        ("router", {"base": "int8"}, {}),
        ("experts", {"base": "nf4"}, {"expert_memory": "1GiB"}),
        ("lora", {"base": "nf4"}, {"expert_memory": "1GiB"}),
        ("lora", {"base": "nf4", "double_quant": False}, {"checkpointing": "none"}),
        ("lora", {"base": "nf4"}, {"keep_rows": 1}),
        ("split lora on some", {"base": "fp32"}, {}),
        ("split lora on some", {"base": "mxfp4"}, {"expert_memory": "1GiB"}),
    ],
)
def test_no_kind_of_call_is_left_out(adapt: str, model: dict[str, Any], train: dict[str, Any], tmp_path: Path) -> None:
    section = {"path": str(runs.write_toy(tmp_path / "model")), "weights": "random", "dtype": "fp32"}
    run = {"model": section | model, "adapt": ADAPT[adapt], "train": {"micro_batch": 2, "sequence_length": 40} | train}
    config = runs.RunConfig.model_validate(run)
    resolved = resolve(config, "cpu")
    adapted = build(resolved, "cpu")
    adapted.model.train()
    ids = torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    in_training = kinds(lambda: token_loss(adapted.model, batch).backward())
    exercised = set().union(*(kinds(partial(sizes.exercise, CPU, tokens=80)) for sizes in sizes_of(resolved)))
    missing = {kind for kind in in_training if kind not in exercised}
    assert in_training
    assert not sorted(map(str, missing))


def test_sizes_do_not_depend_on_what_layers_keep(tmp_path: Path) -> None:
    """It is known only after the comparison."""
    run = resolve(runs.toy_run(runs.write_toy(tmp_path / "model"), "lora"), "cpu")
    assert sizes_of(run.keeping({1: frozenset(("rows", "rest"))})) == sizes_of(run)


def test_the_samples_call_every_operator() -> None:
    assert named(
        set().union(*(kinds(partial(sizes.exercise, CPU)) for sizes in samples("fp32")))
    ) == OPERATORS.keys() - {
        "low_rank_product_"  # a bank calls it on a GPU only
    }
