"""The exercise of a run makes the calls of its training step, and a comparison in it finds every wrong kernel."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.adapt.build import build
from moetune.adapt.exercise import exercise
from moetune.adapt.guard.check import compared_as
from moetune.adapt.guard.comparison import CallsSeen, compare_call, kind_of
from moetune.adapt.layers.table import HostTable
from moetune.kernels.registry import OPERATORS, Operator
from moetune.planning.doctor import samples
from moetune.run.resolve import resolve
from moetune.training.step.micro_step import token_loss
from tests.memory.models import toy_run, write_toy
from tests.nullcuda import runs

CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 4, "targets": ["attention", "experts"]}


class Kinds(set[Hashable]):
    """What compiled kernels the operators of calls need; of grouped products, whose rows are in any dimension, only
    which of the two it is."""

    def compute(self, operator: Operator, args: Sequence[Any]) -> Any:
        kinds = (None if isinstance(arg, list) else kind_of(arg) for arg in args)
        self.add((operator.name, args[1].dim()) if operator.name == "grouped_mm" else (operator.name, *kinds))
        return operator.reference(*args)


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
    path = runs.write_toy(tmp_path / "model", num_hidden_layers=4)
    section = {"path": str(path), "weights": "random", "dtype": "fp32"}
    run = {"model": section | model, "adapt": ADAPT[adapt], "train": {"micro_batch": 2, "sequence_length": 50} | train}
    resolved = resolve(runs.RunConfig.model_validate(run), "cpu")
    adapted = build(resolved, "cpu")
    adapted.model.train()
    ids = torch.randint(0, 100, (2, 50), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    in_training, exercised = Kinds(), Kinds()
    with CallsSeen(in_training.compute):
        token_loss(adapted.model, batch).backward()
    exercise(resolve(compared_as(resolved), "cpu"), CPU, exercised.compute)
    assert in_training
    assert not sorted(map(str, in_training - exercised))


def test_tables_on_the_host_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.8's of n-grams has 95 GiB."""
    monkeypatch.setattr(HostTable, "allocate", None)
    folder = write_toy(tmp_path, "qwen4_exp_text", ple_layer_ids=[2], eos_token_id=1, indexer_budget=64)
    run = resolve(toy_run(folder, "qwen4_exp_text", {"lora": LORA}, model={"embeddings_on": "host"}), "cpu")
    assert run.tables_on_host
    calls = Kinds()
    exercise(resolve(compared_as(run), "cpu"), CPU, calls.compute)
    assert calls


def planted(operator: Operator, off: float) -> Operator:
    """The operator with a kernel whose results are off by this part of their largest value."""
    written = getattr(torch.ops.moetune, operator.name).default._schema.arguments
    changes = [arg.alias_info is not None and arg.alias_info.is_write for arg in written]

    def launch(*args: Any) -> Any:
        result = operator.reference(*args)
        changed = [arg for arg, is_changed in zip(args, changes, strict=True) if is_changed]
        for tensor in (*changed, *(result if isinstance(result, tuple) else (result,))):
            if tensor is not None and tensor.numel():
                if tensor.is_floating_point():
                    tensor += off * tensor.abs().max()
                elif off:
                    tensor.zero_()
        return result

    return replace(operator, kernel=lambda *_: launch)


@pytest.mark.parametrize("off", [0.2, pytest.param(0.0, marks=pytest.mark.full)])
def test_every_kernel_that_is_wrong_is_found(off: float) -> None:
    called, done = set[str](), set[Hashable]()

    def compute(operator: Operator, args: Sequence[Any]) -> Any:
        called.add(operator.name)
        broken = planted(operator, off)
        return compare_call(broken, args, dtype=torch.bfloat16, done=done, say=lambda line: None)

    for run in samples("bf16"):
        exercise(resolve(run, "cpu"), CPU, compute)
    assert called == OPERATORS.keys() - {"low_rank_product_"}  # a bank calls it on a GPU only
    assert done & called == (called if off else set())
