"""TRL's trainers on CUDA take what is predicted, as torch's allocator counts."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")

from moetune.adapt.build import build
from moetune.compat.trl import Answers, make_trainer
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.commands.trl import predict_trl
from moetune.memory.measurement.verify import catalog_name
from moetune.run.resolve import resolve
from moetune.training.trl import trl_arguments, trl_model
from tests.nullcuda import runs

aten = torch.ops.aten


class NullAnswers(Answers):
    """The null device computes no values either."""

    def lacks_values(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.index_put, aten.index_put_, aten._index_put_impl_):
            return args[0]  # the gradient of what a mask selected
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("dpo", "lora"),
        *(pytest.param(kind, "experts", marks=pytest.mark.full) for kind in ("sft", "dpo", "kto", "orpo")),
        *(pytest.param(kind, "router", marks=pytest.mark.full) for kind in ("dpo", "orpo")),
    ],
)
def test_a_trainer_takes_what_is_predicted(kind: Any, part: str, toy_model: Path, tmp_path: Path) -> None:
    run = resolve(runs.toy_run(toy_model, part, train={"sequence_length": 512}), "cuda")
    more = {"precompute_ref_log_probs": False} if kind in ("dpo", "kto") else {}
    card = torch.device("cuda", 0)
    predicted = predict_trl(run, kind, more, gpu=catalog_name(card), routing=BALANCED).fullest
    gc.collect()
    before = torch.cuda.memory_allocated(card)
    torch.cuda.reset_peak_memory_stats(card)
    adapted = build(run, card)
    arguments = trl_arguments(run, kind) | more | {"max_steps": 2, "output_dir": str(tmp_path), "disable_tqdm": True}
    with adapted.expert_context.hooks.using(count_rows=BALANCED.count_rows):
        trainer = make_trainer(kind, trl_model(adapted), arguments, rows=8)
        # ORPO has no masks; and under a dispatch mode autograd would not add gradients of logits in place.
        with nullcontext() if kind == "orpo" else NullAnswers():
            trainer.train()
    measured = torch.cuda.max_memory_allocated(card) - before
    print(kind, part, predicted.peak_allocated, measured, predicted.peak_allocated / measured - 1)
    assert predicted.peak_allocated == pytest.approx(measured, rel=0.03)
