"""TRL's trainers on CUDA take what is predicted, as torch's allocator counts."""

from __future__ import annotations

import gc
from contextlib import nullcontext, suppress
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
from moetune.memory.measurement.measure import catalog_name
from moetune.run.resolve import ResolvedRun, resolve
from moetune.training.trl import trl_arguments, trl_model
from tests.nullcuda import runs
from tests.toys import toy_config
from tests.training.test_trl import LAYERS

aten = torch.ops.aten


class NullAnswers(Answers):
    """The null device computes no values either."""

    def lacks_values(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.index_put, aten.index_put_, aten._index_put_impl_):
            return args[0]  # the gradient of what a mask selected
        if func is aten._to_copy.default and args[0].is_cuda and "cpu" in str((kwargs or {}).get("device")):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
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
    assert predicted.peak_allocated == pytest.approx(measured(run, kind, more, tmp_path), rel=0.03)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("part", "train", "more", "fullest"),
    [
        ("lora", {}, {"beta": 0.1}, "generation"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("experts", {}, {"beta": 0.1}, "generation"),
                ("router", {}, {"num_iterations": 2}, "generation"),
                ("lora", {}, {"cache_implementation": "static"}, "generation"),
                ("experts", {"sequence_length": 64, "micro_batch": 16, "accumulate": 1}, {}, "backward"),
            ]
        ),
    ],
)
def test_generating_and_training_takes_what_is_predicted(
    part: str, train: dict[str, Any], more: dict[str, Any], fullest: str, toy_model: Path, tmp_path: Path
) -> None:
    train = {"sequence_length": 512, "micro_batch": 1, "accumulate": 8} | train
    run = resolve(runs.toy_run(toy_model, part, train=train), "cuda")
    more = {"max_completion_length": 24, **more}
    report = predict_trl(run, "grpo", more, gpu=catalog_name(torch.device("cuda", 0)), routing=BALANCED)
    assert max(report.phases, key=lambda one: one[1])[0] == fullest
    found = measured(run, "grpo", more, tmp_path)
    print(part, report.phases, report.fullest.peak_allocated / found - 1)
    assert report.fullest.peak_allocated == pytest.approx(found, rel=0.03)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", LAYERS)
def test_a_hybrid_takes_what_is_predicted(model_type: str, tmp_path: Path) -> None:
    toy_config(model_type, num_hidden_layers=2, **LAYERS[model_type]).save_pretrained(tmp_path / "toy")
    train = {"sequence_length": 512, "micro_batch": 1, "accumulate": 8}
    run = resolve(runs.toy_run(tmp_path / "toy", "lora", train=train, model={"base": "bf16"}), "cuda")
    more = {"max_completion_length": 24, "beta": 0.1}
    report = predict_trl(run, "grpo", more, gpu=catalog_name(torch.device("cuda", 0)), routing=BALANCED)
    assert report.fullest.peak_allocated == pytest.approx(measured(run, "grpo", more, tmp_path), rel=0.03)


class Enough(Exception):
    """All tokens were generated, which the values of no tensor say here."""


def measured(run: ResolvedRun, kind: Any, more: dict[str, Any], folder: Path) -> int:
    """Train two steps; return the most bytes that were allocated."""
    card = torch.device("cuda", 0)
    gc.collect()
    before = torch.cuda.memory_allocated(card)
    torch.cuda.reset_peak_memory_stats(card)
    adapted = build(run, card)
    steps = 1 + more.get("num_iterations", 1)  # GRPO generates anew in the last
    arguments = trl_arguments(run, kind) | more | {"max_steps": steps, "output_dir": str(folder), "disable_tqdm": True}
    length, generate, left = arguments.get("max_completion_length", 0), adapted.model.generate, 0
    answers = NullAnswers(length or None)

    def count(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        nonlocal left
        left -= 1
        if not left:
            raise Enough
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def generating(input_ids: Tensor, **given: Any) -> Tensor:
        nonlocal left
        left = length
        with suppress(Enough):
            generate(input_ids=input_ids, **given, stopping_criteria=[count])
        return input_ids.new_ones((len(input_ids), input_ids.shape[1] + length))

    adapted.model.generate = generating  # type: ignore[method-assign]
    with adapted.expert_context.hooks.using(count_rows=BALANCED.count_rows):
        prompt = run.config.train.sequence_length - length if length else 1
        trainer = make_trainer(kind, trl_model(adapted), arguments, 8 * run.config.train.micro_batch, prompt)
        # ORPO has no masks; and under a dispatch mode autograd would not add gradients of logits in place.
        with nullcontext() if kind == "orpo" else answers:
            trainer.train()
    found = torch.cuda.max_memory_allocated(card) - before
    return found
