"""The `train` command's work: everything that can be wrong is found before a weight is loaded or a file is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from moetune.adapt.base import noting_base
from moetune.adapt.build import Adapted, build, compute_dtype, count_trainable, refuse_indivisible
from moetune.adapt.start import Start, open_start
from moetune.anatomy.source import resolve
from moetune.config import RunConfig, refuse_untrainable, require
from moetune.errors import UserError, one_line, suggest
from moetune.experts.packed import dtype_name
from moetune.hub.fingerprint import Base
from moetune.memory.optimizers import PartOptimizers
from moetune.parallel.deepspeed import keep_quiet, require_deepspeed
from moetune.parallel.deepspeed_json import deepspeed_json
from moetune.parallel.ranks import ALONE, Ranks, here
from moetune.step.optimizers import make_optimizer
from moetune.step.router_losses import refuse_silent_routers
from moetune.step.values import generator_states
from moetune.train.data import Datasets, load_data, pad_token_id
from moetune.train.interrupt import Interruptible
from moetune.train.isolation import refuse_leaky_packing
from moetune.train.memory_record import MemoryRecord
from moetune.train.progress import ProgressBar, reading
from moetune.train.run_folder import BASE_FILE, RunFolder, step_of
from moetune.train.trainer import MoeTrainer, check_checkpoint


@dataclass(frozen=True)
class TrainResult:
    """What a run did. Losses are None without `data.eval`; a dry run has taken no step."""

    output: str
    steps: int
    trainable: dict[str, int]
    train_tokens: int
    eval_loss_before: float | None
    eval_loss_after: float | None

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **self.__dict__}


def train(
    config: RunConfig,
    *,
    resume: str = "never",
    overwrite: bool = False,
    dry_run: bool = False,
    device: torch.device | str | None = None,
    console: Console | None = None,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Trains what the run file says and leaves the result in its run folder.

    Args:
        resume: `never`, `auto` or a checkpoint folder.
        dry_run: check run file, data and output, count what would train, and stop.
        device: CUDA if there is any, else the CPU.
        ranks: the ranks of the run, of which this process is one; a dry run needs none.

    Raises:
        UserError: anything that the user can mend. No file has been written then.
    """
    console = console or Console(stderr=True, quiet=not ranks.is_first)
    require(config, "train", "data", "output")
    refuse_untrainable(config)
    assert config.data is not None
    assert config.output is not None
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    keep_quiet(device)
    config = _with_dtype(config, device)
    folder = RunFolder(Path(config.output), ranks)
    # A run that is resumed has its values from a checkpoint, so that what it started from may be gone.
    checkpoint, start, _, _, counts, (data, padding) = _all_of(
        lambda: folder.check(config, resume, overwrite),
        lambda: _start(config, overwrite) if resume == "never" else None,
        lambda: _check_reporters(config.train.report_to),
        lambda: _check_engine(config),
        lambda: _check_parts(config),
        lambda: _data(config),
    )
    tokens = sum(len(row) for row in data.train["input_ids"])
    _announce(console, config, counts, tokens)
    if checkpoint is None and resume != "never":
        start = _start(config, overwrite)
    if dry_run:
        return TrainResult(config.output, 0, counts, tokens, None, None)
    if checkpoint is not None and step_of(checkpoint) >= config.train.steps:
        console.print(
            f"{checkpoint} is where this run ends; to go on, raise train.steps", highlight=False, soft_wrap=True
        )
        if config.model.weights == "pretrained" and folder.base() is None:
            with noting_base(config.model, ranks) as noted:
                base = noted()
            _refuse_other_base(folder, config, base, console)
            folder.write_base(base)
        folder.remove_leftovers()
        return TrainResult(config.output, step_of(checkpoint), counts, tokens, *_held_out(folder))

    if checkpoint is not None:
        check_checkpoint(checkpoint)
        folder.base()  # a damaged one is named before the weights are read
    weights = resolve(config.model.path).folder if config.model.weights == "pretrained" else None
    with noting_base(config.model, ranks) as noted, reading(console, weights) as on_read:
        adapted = build(config, device, on_read, ranks)
        base = noted()
    _refuse_different_ranks(adapted, config, tokens, base)
    if checkpoint is not None and base is not None:
        _refuse_other_base(folder, config, base, console)
    for note in start.load(adapted, base) if start is not None else ():
        console.print(f"{config.adapt.start_from}: {note}", highlight=False, soft_wrap=True)
    # A new one is whole before an old one goes.
    folder.refuse_full_disk(_checkpoint_bytes(adapted, config) * (2 if checkpoint is None else 1))
    if config.data.packing:
        rows = max(config.train.micro_batch, config.train.eval_micro_batch or 0)
        refuse_leaky_packing(adapted.model, rows)
    if config.train.router_aux_loss or config.train.router_z_loss:
        refuse_silent_routers(adapted)
    folder.create(config, checkpoint, overwrite, base)
    progress = ProgressBar(console)
    memory = MemoryRecord(adapted, config, folder, console)
    interruptible = Interruptible()
    trainer = MoeTrainer(adapted, config, data, folder, padding, callbacks=[progress, memory, interruptible])
    memory.load = trainer.total_load
    if checkpoint is not None:
        for reason in folder.damaged:
            console.print(f"skipping damaged {reason}", highlight=False, soft_wrap=True)
        console.print(f"resuming from {checkpoint}", highlight=False, soft_wrap=True)
        trainer.args.eval_on_start = False
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        interruptible.end()
        progress.stop()
        memory.finish()
    return TrainResult(config.output, trainer.state.global_step, counts, tokens, *_held_out(folder))


def _check_engine(config: RunConfig) -> None:
    """Raises `UserError` if the run is DeepSpeed's, and it is not installed or cannot do what the run file asks for."""
    if config.parallel.engine == "deepspeed":
        require_deepspeed()
        deepspeed_json(config)


def _check_parts(config: RunConfig) -> dict[str, int]:
    """Counts what trains, by part, makes its optimizers on the meta device, and checks that the ranks can divide it.

    Raises:
        UserError: as `build` and `make_optimizer`, before any weight is loaded.
    """
    adapted = build(config, "meta")
    make_optimizer(adapted, config)
    refuse_indivisible(adapted, config.parallel)
    return count_trainable(adapted)


def _refuse_different_ranks(adapted: Adapted, config: RunConfig, tokens: int, base: Base | None) -> None:
    """Raises `UserError` if ranks were given different run files, data or weights: their gradients would not add up."""
    ranks = adapted.ranks
    drawn = b"".join(state.numpy().tobytes() for state in generator_states(adapted.model.device))
    mine = {
        "the run file": config.to_yaml(),
        "the number of training tokens": tokens,
        "the file of parallel.deepspeed": deepspeed_json(config) if config.parallel.deepspeed else None,
        "the base": None if base is None else base.fingerprint.content,
        "the version of torch": torch.__version__,
        "what random weights were drawn": hashlib.sha256(drawn).hexdigest(),  # from here on generators may differ
    }
    for rank, its in enumerate(ranks.everyones(mine)):
        for what, value in its.items():
            if value != mine[what]:
                raise UserError(f"{what} differs between rank {ranks.rank} and rank {rank}; give all ranks the same")


def _start(config: RunConfig, overwrite: bool) -> Start | None:
    """What the run begins with, checked; None for the base as it is."""
    if config.adapt.start_from is not None and overwrite:
        start, output = (Path(path).expanduser().resolve() for path in (config.adapt.start_from, str(config.output)))
        if output in (start, *start.parents):
            raise UserError(
                f"adapt.start_from: {config.adapt.start_from!r} is in output {config.output!r}, which --overwrite "
                "empties; choose another output"
            )
    return open_start(config)


def _refuse_other_base(folder: RunFolder, config: RunConfig, now: Base, console: Console) -> None:
    """Refuses to resume on a base that is not what the run began with. One that was not noted is said to be taken."""
    before = folder.base()
    if before is None:
        console.print(
            f"{folder.path / BASE_FILE} is missing: whether {config.model.path} is what the run was trained on cannot "
            "be known; it is taken to be, and noted now",
            highlight=False,
            soft_wrap=True,
        )
        return
    difference = before.fingerprint.difference(now.fingerprint)
    if difference is not None:
        raise UserError(
            f"the run in {str(folder.path)!r} cannot be resumed: model.path {config.model.path!r} has changed since it "
            f"began: {difference}. Put back what it was, or choose another output"
        )


def _checkpoint_bytes(adapted: Adapted, config: RunConfig) -> int:
    """What trains, its master weights and its optimizer's states, of all ranks."""
    optimizers, ranks, experts = PartOptimizers.of(config), adapted.ranks, set(adapted.of_experts())
    mine = sum(
        optimizers.saved(adapted.part_of(name), tuple(here(p).shape), p.itemsize)
        / ranks.copies(p, of_expert=p in experts)
        for name, p in adapted.trainable().items()
    )
    return ceil(sum(ranks.everyones(mine)))


def _held_out(folder: RunFolder) -> tuple[float | None, float | None]:
    """The first and the last held-out loss of the run, over all its parts if it was resumed."""
    losses = [line["eval_loss"] for line in folder.metrics() if "eval_loss" in line]
    return (losses[0], losses[-1]) if losses else (None, None)


def _check_reporters(names: tuple[str, ...]) -> None:
    """Raises `UserError` for a reporter that transformers does not know, or whose package is not installed."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            hint = suggest(name, INTEGRATION_TO_CALLBACK) or f" There are: {', '.join(INTEGRATION_TO_CALLBACK)}."
            raise UserError(f"train.report_to: {name!r} is not a reporter.{hint}")
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (ImportError, RuntimeError, ValueError) as error:  # reporters do not agree on one
            raise UserError(f"train.report_to: {name!r} cannot be used: {error}") from None


def _all_of(*checks: Callable[[], Any]) -> list[Any]:
    """The results of all checks, or one `UserError` with everything that any of them found."""
    results, problems = [], []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return results


def _with_dtype(config: RunConfig, device: torch.device) -> RunConfig:
    """The run file with `dtype: auto` resolved: a run that is continued elsewhere keeps its precision or is refused."""
    dtype = dtype_name(compute_dtype(config, device))
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _data(config: RunConfig) -> tuple[Datasets, int]:
    """Both data sets, and the token that pads them."""
    assert config.data is not None
    tokenizer = _tokenizer(config)
    data = load_data(config.data, tokenizer, config.train)
    known = resolve(config.model.path).config.get_text_config().vocab_size
    largest = max(max(row) for part in (data.train, data.eval) if part is not None for row in part["input_ids"])
    if largest >= known:
        raise UserError(
            f"the tokenizer of {config.model.path!r} gives token {largest}; the model has embeddings for {known} only"
        )
    return data, pad_token_id(tokenizer)


def _tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    source = resolve(config.model.path)
    try:
        return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = one_line(error)
        raise UserError(
            f"the tokenizer of {source.name!r} cannot be loaded from {source.folder!r}: {reason}"
        ) from error


def _announce(console: Console, config: RunConfig, counts: dict[str, int], tokens: int) -> None:
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items() if part != "total" and count)
    console.print(
        f"{config.model.path}: trains {counts['total']:,} parameters ({parts})", highlight=False, soft_wrap=True
    )
    console.print(f"data: {tokens:,} training tokens", highlight=False, soft_wrap=True)
