"""`moetune train`: find everything that can be wrong before a weight is loaded or a file is written; then train."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moetune.adapt.build import Adapted, build
from moetune.adapt.count import count_trainable
from moetune.adapt.start_from.start import Start, open_start
from moetune.adapt.weights.base import folder_of, noting_base, refuse_changed_base
from moetune.adapt.weights.quantized_base import check_manifest, is_quantized_base
from moetune.compat.deepspeed import keep_quiet
from moetune.config.schema import RunConfig
from moetune.errors import UserError, counted
from moetune.files import expanded
from moetune.models.hub.fingerprint import Base
from moetune.parallel.deepspeed import require_deepspeed
from moetune.parallel.ranks import Ranks, local_tensor
from moetune.run import validation
from moetune.run.deepspeed_json import deepspeed_json
from moetune.run.resolve import ResolvedRun, raise_problems
from moetune.training.data.load import (
    DataCounts,
    Datasets,
    load_data,
    pad_token_id,
    refuse_unknown_tokens,
    tokenizer_of,
)
from moetune.training.data.preview import notes, steps_an_epoch
from moetune.training.inputs import Inputs
from moetune.training.isolation import refuse_leaky_packing
from moetune.training.loop import Loop, Watcher
from moetune.training.optim.saved import saved_bytes
from moetune.training.optim.values import generator_states
from moetune.training.reporters import check_reporters
from moetune.training.run_folder import BASE_FILE, step_of
from moetune.training.run_warnings import RunWarnings
from moetune.training.run_writer import RunWriter
from moetune.training.step.router_losses import refuse_silent_routers
from moetune.training.trainer_state import check_checkpoint, read_state

MANY_EPOCHS = 10
"""More are taken for a mistake, and warned of."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. Losses are None without `data.eval`; a dry run has taken no step."""

    output: str
    steps: int
    trainable: dict[str, int]
    train_tokens: int
    eval_loss_before: float | None
    eval_loss_after: float | None

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **self.__dict__}


def train(
    run: ResolvedRun,
    watcher: Watcher,
    console: Console,
    device: torch.device,
    *,
    resume: str,
    overwrite: bool,
    dry_run: bool,
    ranks: Ranks,
) -> TrainResult:
    """Train as the run file says, and leave the result in its run folder.

    Args:
        run: resolved for the kind of `device`; its problems are reported with those of data and output.
        watcher: observes the run.
        console: takes messages.
        resume, overwrite, dry_run, ranks: as in `moetune.train`.

    Raises:
        UserError: bad input, before any file is written.
    """
    keep_quiet(device)
    config = run.config
    missing = [name for name in ("data", "output") if getattr(config, name) is None]
    if missing:
        raise UserError(f"moetune train needs {' and '.join(f'{name}:' for name in missing)} in the run file")
    with closing(RunWriter(Path(str(config.output)), ranks)) as folder:
        return _train(run, watcher, folder, resume, overwrite, dry_run, device, console)


def _train(
    run: ResolvedRun,
    watcher: Watcher,
    folder: RunWriter,
    resume: str,
    overwrite: bool,
    dry_run: bool,
    device: torch.device,
    console: Console,
) -> TrainResult:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    # Everything that can be wrong with the run file, the run folder, the start and the data, all of it at once. A run
    # that is resumed reads no start, which may be gone.
    ranks, output = folder.ranks, str(run.config.output)
    checkpoint, (plain, start), _, (data, padding) = _all_of(
        lambda: folder.check(run.config, resume, overwrite),
        lambda: _without_weights(run, overwrite, reads_start=resume == "never"),
        lambda: check_reporters(run.config.train.report_to),
        lambda: _data(run),
    )
    counts = count_trainable(plain)
    if run.config.train.epochs is not None:
        run = _with_steps(run, ceil(run.config.train.epochs * steps_an_epoch(len(data.train), run.config)))
    config, packing = run.config, run.config.data is not None and run.config.data.packing
    for line in _summary(config, counts, data.counts):
        say(line)
    if checkpoint is None and resume != "never":
        start = _start(plain, overwrite)
    if dry_run:
        return TrainResult(output, 0, counts, 0, None, None)
    if checkpoint is not None and step_of(checkpoint) >= config.train.steps:
        say(f"{checkpoint} is where this run ends; to go on, raise train.steps")
        _complete(run, folder, say)
        step, _, tokens = read_state(checkpoint)
        return TrainResult(output, step, counts, tokens, *_held_out(folder))

    # The model, and what can be wrong with it, its inputs, the checkpoint and the disk.
    if checkpoint is not None:
        check_checkpoint(checkpoint)
        folder.base()  # a damaged one is named before the weights are read
    inputs = _inputs(run, folder, data, checkpoint, say)
    weights = run.model.source.folder if config.model.weights == "pretrained" else None
    with noting_base(run.model, ranks) as noted, watcher.reading(weights) as on_read:
        try:
            adapted = build(run, device, on_read, ranks)
        except torch.OutOfMemoryError as error:
            raise watcher.out_of_memory(run, None) or error from None
        base = noted()
    if not inputs.config:  # the model was downloaded meanwhile
        inputs = _inputs(run, folder, data, checkpoint, say)
    _refuse_different_ranks(adapted, inputs, base)
    run.refuse_other_scores(None if base is None else base.fingerprint.content)
    if checkpoint is not None and base is not None:
        _refuse_other_base(folder, config, base, say)
    for note in start.load(adapted, base) if start is not None else ():
        say(f"{config.adapt.start_from}: {note}")
    # An old checkpoint is removed after the new one is complete.
    folder.refuse_full_disk(_checkpoint_bytes(adapted) * (2 if checkpoint is None else 1))
    if packing:
        rows = max(config.train.micro_batch, config.train.eval_micro_batch or 0)
        refuse_leaky_packing(adapted.model, rows, config.train.sequence_length)
    if config.train.router_aux_loss or config.train.router_z_loss:
        refuse_silent_routers(adapted)

    # From here on the run folder is written.
    folder.lock()
    folder.create(config, checkpoint, overwrite, base, inputs)
    warnings = RunWarnings(adapted, counts["total"], console)
    warnings.about_data(data)
    if checkpoint is not None:
        for reason in folder.damaged:
            say(f"skipping damaged {reason}")
        say(f"resuming from {checkpoint}")
    loop = Loop(adapted, data, folder, padding, console, warnings, watcher, checkpoint)
    failed = None
    try:
        loop.train()
    except torch.OutOfMemoryError as error:
        failed = error.with_traceback(None)  # which refers to the step's tensors
    finally:
        if failed is None:
            watcher.end()
    if failed is not None:
        found = watcher.out_of_memory(run, loop)
        watcher.end()
        if found is None:
            raise failed
        folder.write_out_of_memory(found.found)
        raise found
    warnings.at_end(loop.total_load)
    return TrainResult(output, loop.step, counts, loop.tokens, *_held_out(folder))


def _all_of(*checks: Callable[[], Any]) -> list[Any]:
    """Return the results of all checks, or raise one `UserError` with all that they found."""
    results, problems = [], []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return results


def _without_weights(run: ResolvedRun, overwrite: bool, *, reads_start: bool) -> tuple[Adapted, Start | None]:
    """Return the adapted model on the meta device, and what training starts from; raise `UserError` for all problems of
    the run file."""
    pretrained, source = run.config.model.weights == "pretrained", run.model.source
    no_weights = [f"model {source.name!r} has no weights to load; use model.weights=random"]
    if run.config.parallel.engine == "deepspeed":
        require_deepspeed()
    raise_problems(
        (
            *run.problems,
            *validation.untrainable_settings(run.config),
            *validation.missing_packages(run.config, run.device_type),
            *(no_weights if pretrained and source.folder is None else []),
        )
    )
    if pretrained and is_quantized_base(source.folder):
        check_manifest(Path(str(source.folder)), run.config.model, run.selection)
    plain = build(run, "meta")
    return plain, _start(plain, overwrite) if reads_start else None


def _start(plain: Adapted, overwrite: bool) -> Start | None:
    """Return what training starts from, checked on the meta device; None for the base as it is."""
    config = plain.run.config
    if config.adapt.start_from is not None and overwrite:
        start, output = (expanded(path).resolve() for path in (config.adapt.start_from, str(config.output)))
        if output in (start, *start.parents):
            raise UserError(
                f"adapt.start_from: {config.adapt.start_from!r} is in output {config.output!r}, which --overwrite "
                "empties; choose another output"
            )
    return open_start(plain)


def _data(run: ResolvedRun) -> tuple[Datasets, int]:
    """Return both data sets, and the token that pads them."""
    config = run.config
    assert config.data is not None
    tokenizer = tokenizer_of(run.model.source.name, run.model.source.folder)
    data = load_data(config.data, tokenizer, config.train)
    padding = pad_token_id(tokenizer)
    refuse_unknown_tokens(run.model.settings, config.model.path, padding, data.train, data.eval)
    return data, padding


def _with_steps(run: ResolvedRun, steps: int) -> ResolvedRun:
    """Return the run with its length in steps instead of epochs."""
    return replace(run, config=run.config.but(train={"steps": steps, "epochs": None}))


def _summary(config: RunConfig, counts: dict[str, int], data: DataCounts) -> list[str]:
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items() if part != "total" and count)
    an_epoch = steps_an_epoch(data.sequences, config)
    epochs = config.train.steps / an_epoch
    padding = f", {data.padding:,} of padding" if data.padding else ""
    left_out = f"; {counted(data.dropped, 'record')} dropped, {data.cut:,} cut" if data.dropped or data.cut else ""
    lines = [
        f"{config.model.path}: trains {counts['total']:,} parameters ({parts})",
        f"data: {counted(len(data.lengths), 'example')} in {counted(data.sequences, 'sequence')}, {data.tokens:,} "
        f"training tokens, {data.loss_tokens:,} with loss{padding}{left_out}",
        *(f"data: {note}" for note in notes(data)),
        f"length: {counted(config.train.steps, 'step')} of {an_epoch:,} an epoch, {epochs:.3g} epochs",
    ]
    if epochs > MANY_EPOCHS:
        lines.append(
            f"warning: every example is seen {epochs:.0f} times; train.epochs says how often it should be, and "
            f"train.steps={an_epoch} is once"
        )
    return lines


def _complete(run: ResolvedRun, folder: RunWriter, say: Callable[[str], None]) -> None:
    """Record the base of a run at its end where that is missing, and remove what a kill left."""
    folder.lock()
    if run.config.model.weights == "pretrained" and folder.base() is None:
        with noting_base(run.model, folder.ranks) as noted:
            base = noted()
        assert base is not None  # only random weights have none
        _refuse_other_base(folder, run.config, base, say)
        folder.write_base(base)
    folder.remove_leftovers()


def _inputs(
    run: ResolvedRun, folder: RunWriter, data: Datasets, checkpoint: Path | None, say: Callable[[str], None]
) -> Inputs:
    """Return the inputs of the run; raise `UserError` if a resumed run began with others."""
    inputs = Inputs.of(data, folder_of(run.model.source))
    before = None if checkpoint is None else folder.inputs(checkpoint)
    if before is None:
        return inputs
    for note in before.refuse_others(inputs, f"the run in {str(folder.path)!r}"):
        say(note)
    return replace(inputs, run=before.run)


def _refuse_other_base(folder: RunWriter, config: RunConfig, now: Base, say: Callable[[str], None]) -> None:
    """Raise `UserError` if a resumed run began with another base; say so where none is recorded."""
    before = folder.base()
    if before is not None:
        refuse_changed_base(before, now.fingerprint, f"the run in {str(folder.path)!r}", config.model.path)
        return
    say(
        f"{folder.path / BASE_FILE} is missing: whether {config.model.path} is what the run was trained on cannot "
        "be known; it is taken to be, and noted now"
    )


def _refuse_different_ranks(adapted: Adapted, inputs: Inputs, base: Base | None) -> None:
    """Raise `UserError` if ranks have different run files, data or weights, whose gradients cannot be summed."""
    ranks, config = adapted.ranks, adapted.run.config
    drawn = b"".join(state.numpy().tobytes() for state in generator_states(adapted.model.device))
    mine = {
        "the run file": config.to_yaml(),
        "the data": inputs.data,
        "the file of parallel.deepspeed": deepspeed_json(config) if config.parallel.deepspeed else None,
        "the base": None if base is None else base.fingerprint.content,
        "the version of torch": torch.__version__,
        "what random weights were drawn": hashlib.sha256(drawn).hexdigest(),
    }
    for rank, its in enumerate(ranks.gather(mine)):
        for what, value in its.items():
            if value != mine[what]:
                raise UserError(f"{what} differs between rank {ranks.rank} and rank {rank}; give all ranks the same")


def _checkpoint_bytes(adapted: Adapted) -> int:
    """Return the bytes of trained weights, master weights and optimizer states, of all ranks."""
    optimizers, ranks, experts = adapted.run.optimizers, adapted.ranks, set(adapted.of_experts())
    mine = sum(
        saved_bytes(optimizers[adapted.part_of(name)], tuple(local_tensor(p).shape), p.itemsize)
        / ranks.copies(p, of_expert=p in experts)
        for name, p in adapted.trainable().items()
    )
    return ceil(sum(ranks.gather(mine)))


def _held_out(folder: RunWriter) -> tuple[float | None, float | None]:
    """Return the first and the last held-out loss since the run began."""
    losses = [line["eval_loss"] for line in folder.metrics() if "eval_loss" in line]
    return (losses[0], losses[-1]) if losses else (None, None)
