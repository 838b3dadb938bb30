"""`predict_trl`: the memory report of a run in one of TRL's trainers, traced from that trainer's own steps."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from moetune.errors import UserError
from moetune.experts.context import CountRows
from moetune.memory.assumed_routing import BALANCED, UNKNOWN, AssumedRouting
from moetune.memory.predict import predict_memory
from moetune.memory.rank_memory import Allocator
from moetune.memory.report import MemoryReport
from moetune.memory.trace.loading import load_peaks
from moetune.memory.trace.tracing import faked
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.run.keeps import is_open
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
) -> MemoryReport:
    """Predict the peak memory of a run in a TRL trainer, with the arguments of `trl_arguments`, phase by phase.

    Every row is as long as `max_length`, and its prompt has one token; GRPO's rows have `train.sequence_length` tokens,
    of which the last `max_completion_length` are generated. The report has no time and no changes.
    As in a real run, `train.checkpointing: auto` counts as `full` and `train.keep_rows: auto` as `none`.

    Args:
        more: arguments of TRL's configuration that replace those of `trl_arguments`.
        run, gpu, routing, allocator: as in `predict`.

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
    run = run.keeping(run.keeps) if is_open(run.config.train) else run
    tracing = partial(trace_trl, trainer=trainer, more=more or {})
    report = predict_memory(run, tracing=tracing, gpu=gpu, routing=routing, allocator=allocator)
    assumptions = [line for line in report.assumptions if not line.startswith("every sequence has")]
    named = ("trainer", f"TRL's {trainer.upper()}" + "".join(f", {key}={value}" for key, value in (more or {}).items()))
    about = dict((named, *report.about))
    if trainer == "grpo":
        assumptions += _of_generation(run, trl_arguments(run, trainer) | dict(more or {}))
        about["attention"] += ", until it generates: then by a mask" * about["attention"].startswith("flash, by")
    else:
        assumptions += ["rows of train.sequence_length tokens, of which the prompt has one; some are padded"]
    report = replace(report, assumptions=tuple(assumptions), about=tuple(about.items()))
    return replace(report, trainer=trainer, time=None)


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
