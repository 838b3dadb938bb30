"""`predict_trl`: the memory of a TRL trainer, traced from its own steps."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from math import ceil
from typing import Any

from moetune.errors import UserError
from moetune.experts.context import CountRows
from moetune.memory.allocator import Allocator
from moetune.memory.assumed_routing import BALANCED, UNKNOWN, AssumedRouting
from moetune.memory.predict import cards_of, predict_memory
from moetune.memory.report import MemoryReport
from moetune.memory.trace.loading import load_peaks
from moetune.memory.trace.tracing import faked
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.run.resolve import AnyRun, ResolvedRun, resolve
from moetune.run.validation import refuse_unpredictable
from moetune.training.trl import TrlTrainer, prompt_length, trl_arguments


def predict_trl(
    run: AnyRun,
    trainer: TrlTrainer,
    more: Mapping[str, Any] | None = None,
    *,
    gpu: str | Gpu | None = None,
    routing: AssumedRouting = UNKNOWN,
    allocator: Allocator | None = None,
    cached: bool = False,
) -> MemoryReport:
    """Predict the peak memory of a run in a TRL trainer, with the arguments of `trl_arguments`, phase by phase.

    Every row is as long as `max_length`, and its prompt has one token; GRPO's rows have `train.sequence_length` tokens,
    of which the last `max_completion_length` are generated. The report has no time and no changes.
    As in a real run, `train.checkpointing: auto` counts as `full` and `train.keep_rows: auto` as `none`.

    Args:
        more: arguments of TRL's configuration that replace those of `trl_arguments`. With `use_vllm` the completions of
            GRPO come from vLLM by `moetune.vllm_rollouts`: on the run's card, of which it takes
            `vllm_gpu_memory_utilization`, or with `vllm_mode: server` on another one.
        run, gpu, routing, allocator: as in `predict`.
        cached: whether reports are read from disk, or written there. What TRL warns of is then said only once.

    Raises:
        UserError: as `predict` and `trl_arguments`; TRL is not installed or refuses the arguments; the run has several
            ranks.
        NotTraceable: as `predict`.
    """
    if find_spec("trl") is None:
        raise UserError("a prediction for TRL runs its trainers; install it: pip install 'moetune[trl]'")
    run = resolve(run, "cuda")
    if run.config.parallel.ranks > 1:
        raise UserError("TRL trains a model of one rank; set parallel: to 1 rank")
    tracing, generator = partial(trace_trl, trainer=trainer, more=more or {}), list[tuple[str, str]]()
    cached_as = [trainer, dict(more or {}), version("trl")] if cached else None
    if trainer == "grpo" and (more or {}).get("use_vllm"):
        gpu, generator = _beside_vllm(run, more or {}, gpu)
    report = predict_memory(run, gpu=gpu, routing=routing, allocator=allocator, tracing=tracing, cached_as=cached_as)
    assumptions = [line for line in report.assumptions if not line.startswith("every sequence has")]
    named = ("trainer", f"TRL's {trainer.upper()}" + "".join(f", {key}={value}" for key, value in (more or {}).items()))
    about = dict((named, *generator, *report.about))
    if trainer == "grpo":
        assumptions += _of_generation(run, trl_arguments(run, trainer) | dict(more or {}))
        by_mask = about["attention"].startswith("flash, by") and not generator
        about["attention"] += ", until it generates: then by a mask" * by_mask
    else:
        assumptions += ["rows of train.sequence_length tokens, of which the prompt has one; some are padded"]
    report = replace(report, assumptions=tuple(assumptions), about=tuple(about.items()))
    return replace(report, trainer=trainer, time=None)


def _beside_vllm(
    run: ResolvedRun, more: Mapping[str, Any], gpu: str | Gpu | None
) -> tuple[str | Gpu | None, list[tuple[str, str]]]:
    """Return the GPU less what a vLLM that generates for `moetune.vllm_rollouts` takes of it, and what says so.

    vLLM fills its part of a card's memory with weights, cache and workspaces (`request_memory` of vLLM 0.32); the CUDA
    context of its process comes on top. `more` has the arguments of TRL that describe it.

    Raises:
        UserError: that part cannot hold the model, or is none; there is no card to take it of; or vLLM is to sleep.
    """
    if more.get("vllm_enable_sleep_mode"):
        raise UserError("vllm_enable_sleep_mode: vLLM keeps its memory beside moetune.vllm_rollouts; leave it out")
    if (mode := more.get("vllm_mode", "colocate")) == "server":
        return gpu, [("generator", "vLLM on another card")]
    share = more.get("vllm_gpu_memory_utilization", 0.3)
    if mode != "colocate" or not isinstance(share, float) or not 0 < share < 1:
        raise UserError(
            f"vllm_mode={mode}, vllm_gpu_memory_utilization={share}: give server or colocate, and a number below 1"
        )
    if not (gpu or run.config.hardware.names):
        raise UserError("vLLM takes a part of a card, and none is known; name one with --gpu")
    card = cards_of(run, gpu)[0]
    weights = 2 * sum(weight.numel() for weight in run.model.plain.parameters())
    if run.model.source.quantization.method in ("", "moetune") and weights > card.memory.value * share:
        raise UserError(
            f"vLLM holds the model a second time, in 16 bits: {weights / card.memory.value:.3g} of this card, and "
            f"vllm_gpu_memory_utilization is {share:g}; give more, or a card of its own (vllm_mode=server)"
        )
    left = card.memory.value - ceil(card.memory.value * share) - card.context.value
    said = f"vLLM in a process of its own: {share:g} of the card, with the model a second time, and a CUDA context"
    memory = replace(card.memory, value=max(left, 0))
    return replace(card, memory=memory, full_name=f"{card.full_name} less vLLM's {share:g}"), [("generator", said)]


def _of_generation(run: ResolvedRun, arguments: Mapping[str, Any]) -> list[str]:
    """Return sentences for the report's assumptions: how much GRPO generates at once, with these arguments of TRL's
    configuration, and what the reward takes."""
    length, steps = arguments["max_completion_length"], arguments.get("steps_per_generation")
    rows = arguments["per_device_train_batch_size"] * (steps or run.config.train.accumulate)
    return [
        f"{arguments.get('generation_batch_size') or rows} completions of {length:,} tokens are generated at once, "
        f"{arguments['num_generations']} for each prompt of {prompt_length(run.config, length):,} tokens",
        "the reward is a function that takes no memory of the card",
    ]


def trace_trl(
    run: AnyRun,
    routing: AssumedRouting | CountRows = BALANCED,
    *,
    trainer: TrlTrainer,
    more: Mapping[str, Any],
    shortened: bool = True,
    rank: int = 0,
    gpu: Gpu | None = None,
) -> Trace:
    """Trace the first two steps of a run in a TRL trainer on fake tensors, and its reference's pass before them.

    `more` are arguments of TRL's configuration that replace those of `trl_arguments`; all others are those of `trace`.
    Raises the errors of `trace`, and `UserError` if TRL refuses the arguments.
    """
    from moetune.memory.trace.trl_steps import TrlSteps

    whole = resolve(run, "cuda")
    refuse_unpredictable(whole.config)
    with faked(whole, routing, rank, gpu, shortened=shortened) as (adapted, short, mode):
        kept = None if short is None else short.stack.kept
        steps = TrlSteps(adapted, trainer, more, min(2, whole.config.train.accumulate), mode, kept, gpu)
        traced = steps.run(steps.tracker(), short)
    return replace(traced, load=load_peaks(whole, traced))
