"""`moetune train`: check all input, print what will run, build the model, run the loop."""

import hashlib
import json
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil
from pathlib import Path

import torch
from rich.console import Console

from moetune.adapt.build import Adapted, build
from moetune.adapt.count import count_trainable
from moetune.adapt.guard import checked, note_dropped
from moetune.adapt.start_from.start import open_start
from moetune.adapt.weights.base import noting_base, refuse_changed_base
from moetune.adapt.weights.quantized_base import check_quantized_base
from moetune.compat.deepspeed import keep_quiet
from moetune.config.load import load_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError, collected, counted, raise_problems
from moetune.files import expanded
from moetune.json_files import Answer
from moetune.models.hub.fingerprint import Base
from moetune.parallel.deepspeed import require_deepspeed
from moetune.parallel.ranks import Ranks, local_tensor
from moetune.run import validation
from moetune.run.deepspeed_json import deepspeed_json
from moetune.run.keeps import is_open
from moetune.run.resolve import ResolvedRun
from moetune.training.data.load import Datasets, data_of, pad_token_id
from moetune.training.folder.run_folder import (
    BASE_FILE,
    METRICS_FILE,
    OUT_OF_MEMORY_FILE,
    RUN_FILE,
    is_stopped,
    step_of,
)
from moetune.training.folder.run_writer import RunWriter
from moetune.training.folder.trainer_state import read_state
from moetune.training.isolation import refuse_leaky_packing
from moetune.training.loop import Loop, Watcher
from moetune.training.optim.values import generator_states
from moetune.training.preview import notes, steps_an_epoch
from moetune.training.reporters import check_reporters
from moetune.training.run_warnings import RunWarnings
from moetune.training.same_run import Inputs
from moetune.training.step.pipelined import stages_on

MANY_EPOCHS = 10
"""With more epochs than this, `train` prints a warning that the length may be a mistake."""


@dataclass(frozen=True)
class TrainResult(Answer):
    """The result of a run, or of a dry run, which has 0 steps and tokens and no losses.

    Attributes:
        output: the run folder, as the run file names it.
        steps: number of updates since the run began.
        trainable: number of parameters that train: `total`, and for each of `router`, `experts`, `lora`, `other`.
        train_tokens: number of tokens trained on since the run began, without padding.
        eval_loss_before: held-out loss before the first step, in nats per predicted token; None without held-out data,
            or if it was not finite.
        eval_loss_after: the last held-out loss, in the same unit; None likewise.
    """

    output: str
    steps: int
    trainable: dict[str, int]
    train_tokens: int
    eval_loss_before: float | None
    eval_loss_after: float | None


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
        run: the run file, resolved for the kind of `device`. Its `problems`, if any, are raised with all others.
        watcher: observes the run, and computes the values of `auto` settings that depend on the GPU.
        console: where notes, warnings and the summary are printed.
        resume: `never`; `auto` to continue from the newest checkpoint, if there is one; or a checkpoint folder.
        overwrite: whether to replace an earlier run in the output folder.
        dry_run: whether to stop after the checks that need no weights, before any file is written.

    Raises:
        UserError: bad input, found before any file is written; or an error of `Loop.train`.
        DoesNotFit: memory ran out, and the watcher found the reason.
        torch.OutOfMemoryError: memory ran out for another reason.
        Interrupted: SIGINT or SIGTERM was received, and a checkpoint written.
    """
    keep_quiet(device)
    missing = [name for name in ("data", "output") if getattr(run.config, name) is None]
    if missing:
        raise UserError(f"moetune train needs {' and '.join(f'{name}:' for name in missing)} in the run file")
    output = str(run.config.output)
    now = ranks.gather(datetime.now())[0]  # one time for all, of which templates write the date
    with closing(RunWriter(Path(output), ranks)) as folder:
        # Check run folder, run file, trackers, DeepSpeed and data, and report all problems at once.
        problems: list[str] = []
        with collected(problems):
            checkpoint = folder.check(run.config, resume, overwrite)
        with collected(problems):
            plain = _without_weights(run)
        with collected(problems):
            if overwrite:
                _refuse_start_inside(run.config)
        with collected(problems):
            check_reporters(run.config.train.report_to)
        with collected(problems):
            if run.config.parallel.engine == "deepspeed":
                require_deepspeed()
        with collected(problems):
            began = (None if resume == "never" else folder.clock()) or now
            data, tokenizer = data_of(run.config, run.model.source, run.model.settings, began)
        raise_problems(problems)
        # A resumed run does not read `adapt.start_from`, which may have been deleted since.
        start = open_start(plain) if checkpoint is None else None
        counts = count_trainable(plain)
        if run.config.train.epochs is not None:
            steps = ceil(run.config.train.epochs * steps_an_epoch(len(data.train), run.config))
            run = run.but(train={"steps": steps, "epochs": None})
        config, packing = run.config, run.config.data is not None and run.config.data.packing
        for line in _summary(config, counts, data):
            console.print(line)
        if dry_run:
            return TrainResult(output, 0, counts, 0, None, None)
        if checkpoint is not None and (way := _way_to_go_on(folder, checkpoint, config)) is not None:
            console.print(f"{checkpoint} is where this run ends; to go on, raise {way}")
            _complete(run, folder, console)
            step, _, tokens = read_state(checkpoint)
            return TrainResult(output, step, counts, tokens, *_held_out(folder))

        # Build the model. Check model, inputs and kernels.
        if checkpoint is not None:
            folder.base()  # raises if base.json is damaged, before the weights are read
        run = checked(run, device, ranks, console.print)
        # what was in place of `auto` before the interruption gives the same numbers again
        before = None if checkpoint is None else load_run_config(folder.path / RUN_FILE).train
        if is_open(run.config.train) and not ranks.is_single and before is None:
            console.print(
                "note: what fits is not known before the ranks start, so layers keep nothing more than their input"
            )
        stages = ranks.gather(run.stages)[0]  # the first rank's, should others have predicted otherwise
        run = run.cut_into(stages) if run.config.parallel.pp > 1 else run
        run = watcher.settled(run, before) if ranks.is_single else run.settled_as(before)
        config = run.config
        inputs = _inputs(run, folder, data, checkpoint, console)
        weights = run.model.source.folder if config.model.weights == "pretrained" else None
        with noting_base(run.model, ranks) as noted, watcher.reading(weights) as on_read:
            try:
                adapted = build(run, device, on_read, ranks)
            except torch.OutOfMemoryError as error:
                raise watcher.out_of_memory(run, None) or error from None
            base = noted()
        if not inputs.config:  # `build` has downloaded the model, and its config.json is there now
            inputs = _inputs(run, folder, data, checkpoint, console)
        _refuse_different_ranks(adapted, inputs, base)
        run.refuse_other_scores(None if base is None else base.fingerprint.content)
        if checkpoint is not None and base is not None:
            _refuse_other_base(folder, config, base, console)
        for note in start.load(adapted, base) if start is not None else ():
            console.print(f"{config.adapt.start_from}: {note}")
        if start is not None:
            own = bool(data.counts.chats) and config.data is not None and config.data.chat_template is None
            for note in start.other_texts(tokenizer, own):
                console.print(f"note: {config.adapt.start_from}: {note}")
        # Before any forward pass: under FSDP2 gathered weights are then in the place of those that train.
        warnings = RunWarnings(adapted, counts["total"], console)
        if packing:
            rows = max(config.train.micro_batch, config.train.eval_micro_batch or 0)
            refuse_leaky_packing(adapted.model, rows, config.train.sequence_length, stages_on(adapted))

        # Optimizer states are counted after the first step; without room for the weights alone nothing is replaced.
        folder.refuse_full_disk(sum(local_tensor(p).nbytes for p in adapted.trainable().values()))

        # From here on files are written to the run folder.
        folder.lock()
        folder.create(config, checkpoint, overwrite, base, inputs)
        warnings.about_data(data)
        if checkpoint is not None:
            for reason in folder.damaged:
                console.print(f"skipping damaged {reason}")
            console.print(f"resuming from {checkpoint}")
            steps, schedule = config.train.steps, config.train.schedule
            if before is not None and before.steps != steps and schedule != "constant":
                console.print(
                    f"the {schedule} schedule of {before.steps} steps is now that of {steps}, so learning rates jump"
                )
            if not folder.metrics():
                console.print(f"{METRICS_FILE} is gone or was moved away: the run goes on without its earlier losses")
        loop, failed = None, None
        try:
            loop = Loop(adapted, data, folder, pad_token_id(tokenizer), console, warnings, watcher, checkpoint)
            loop.train()
        except torch.OutOfMemoryError as error:
            failed = error.with_traceback(None)  # the traceback would keep the step's tensors alive
        finally:
            if (without := note_dropped(adapted.run, device)) is not adapted.run:
                folder.write_if_possible(RUN_FILE, without.config.to_yaml())
            if failed is None:
                watcher.end()
        if failed is not None:
            explained = watcher.out_of_memory(run, loop)
            watcher.end()
            if explained is None:
                raise failed
            folder.write_if_possible(OUT_OF_MEMORY_FILE, json.dumps(explained.found, indent=2) + "\n")
            raise explained
        assert loop is not None
        warnings.at_end(loop.total_load)
        return TrainResult(output, loop.step, counts, loop.tokens, *_held_out(folder))


def _refuse_start_inside(config: RunConfig) -> None:
    """Raise `UserError` if the run starts from what is in the run folder, which is to be overwritten."""
    if config.adapt.start_from is not None:
        start, output = (expanded(path).resolve() for path in (config.adapt.start_from, str(config.output)))
        if output in (start, *start.parents):
            raise UserError(
                f"adapt.start_from: {config.adapt.start_from!r} is in output {config.output!r}, which --overwrite "
                "empties; choose another output"
            )


def _without_weights(run: ResolvedRun) -> Adapted:
    """Raise `UserError` with all problems of the run file, or return the adapted model on the meta device."""
    pretrained, source = run.config.model.weights == "pretrained", run.model.source
    drawn = "parallel.pp: each rank would draw random weights of its own; set model.weights: pretrained, or pp: 1"
    no_weights = [f"model {source.name!r} has no weights to load; use model.weights=random"]
    raise_problems(
        (
            *run.problems,
            *validation.untrainable_settings(run.config),
            *([drawn] if run.config.parallel.pp > 1 and not pretrained else []),
            *validation.missing_packages(run.config, run.device_type),
            *(no_weights if pretrained and source.folder is None else []),
        )
    )
    if pretrained:
        check_quantized_base(run)
    return build(run, "meta")


def _summary(config: RunConfig, counts: dict[str, int], sets: Datasets) -> list[str]:
    """Return the lines printed before training: trainable parameters, data, length, and warnings of many epochs and
    of a warmup that has no end.

    `counts` is part, or `total` -> number of parameters that train.
    """
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items() if part != "total" and count)
    data = sets.counts
    an_epoch = steps_an_epoch(data.sequences, config)
    epochs = config.train.steps / an_epoch
    padding = f", {data.padding:,} of padding" if data.padding else ""
    left_out = f"; {counted(data.dropped, 'record')} dropped, {data.cut:,} cut" if data.dropped or data.cut else ""
    lines = [
        f"{config.model.path}: trains {counts['total']:,} parameters ({parts})",
        f"data: {counted(len(data.lengths), 'example')} in {counted(data.sequences, 'sequence')}, {data.tokens:,} "
        f"training tokens, {data.loss_tokens:,} with loss{padding}{left_out}",
        *(f"data: {note}" for note in notes(sets)),
        f"length: {counted(config.train.steps, 'step')} of {an_epoch:,} an epoch, {epochs:.3g} epochs",
    ]
    if epochs > MANY_EPOCHS:
        lines.append(f"warning: every example is seen {epochs:.0f} times; train.steps={an_epoch} would be once")
    if config.train.warmup >= config.train.steps:
        lines.append(f"warning: train.warmup: {config.train.warmup} is never over, so optimizer.lr is not reached")
    return lines


def _complete(run: ResolvedRun, folder: RunWriter, console: Console) -> None:
    """Finish the folder of a run that was killed after its last step: write a missing `base.json`, remove temporary
    files."""
    folder.lock()
    if run.config.model.weights == "pretrained" and folder.base() is None:
        with noting_base(run.model, folder.ranks) as noted:
            base = noted()
        assert base is not None  # only random weights have none
        _refuse_other_base(folder, run.config, base, console)
        folder.write_base(base)
    folder.remove_leftovers()


def _inputs(run: ResolvedRun, folder: RunWriter, data: Datasets, checkpoint: Path | None, console: Console) -> Inputs:
    """Return the inputs of the run (data, tokenizer, configuration), to be recorded in `inputs.json`.

    With a `checkpoint` to resume from, compare them with those that it recorded. Print a note for each harmless change;
    raise `UserError` if the training data, the model's configuration or its tokenizer have changed.
    """
    inputs = Inputs.of(data, run.model.source.local_folder())
    if checkpoint is None:
        return inputs
    before = folder.inputs(checkpoint)
    for note in before.refuse_others(inputs, f"the run in {str(folder.path)!r}"):
        console.print(note)
    return replace(inputs, run=before.run)


def _refuse_other_base(folder: RunWriter, config: RunConfig, now: Base, console: Console) -> None:
    """Raise `UserError` if the base, as it is `now`, is not the one that the resumed run began with (`base.json`).

    Print a note instead if `base.json` is missing.
    """
    before = folder.base()
    if before is not None:
        refuse_changed_base(before, now.fingerprint, f"the run in {str(folder.path)!r}", config.model.path)
        return
    console.print(
        f"{folder.path / BASE_FILE} is missing: whether {config.model.path} is what the run was trained on cannot "
        "be known; it is taken to be, and noted now"
    )


def _refuse_different_ranks(adapted: Adapted, inputs: Inputs, base: Base | None) -> None:
    """Raise `UserError` if ranks differ in configuration, data, weights or torch version, so that the sum of their
    gradients would be wrong. Every rank must call this."""
    ranks, config = adapted.ranks, adapted.run.config
    drawn = b"".join(state.numpy().tobytes() for state in generator_states(adapted.model.device))
    mine = {
        "the run file": config.to_yaml(),
        "the data": inputs.data,
        "the file of parallel.deepspeed": deepspeed_json(config) if config.parallel.deepspeed else None,
        "the base": None if base is None else base.fingerprint.content,
        "the version of torch": torch.__version__,
        # each stage of a pipeline draws its own
        "what random weights were drawn": hashlib.sha256(drawn).hexdigest() if ranks.parallel.pp == 1 else None,
    }
    for rank, of_rank in enumerate(ranks.gather(mine)):
        for what, value in of_rank.items():
            if value != mine[what]:
                raise UserError(f"{what} differs between rank {ranks.rank} and rank {rank}; give all ranks the same")


def _way_to_go_on(folder: RunWriter, checkpoint: Path, config: RunConfig) -> str | None:
    """Return the setting to raise so that a run that has ended with this checkpoint goes on, `train.steps` or
    `train.early_stopping.patience`; None if it has not ended."""
    step = step_of(checkpoint)
    if step >= config.train.steps:
        return "train.steps"
    held_out = {at: loss for at, loss in folder.held_out().items() if at <= step}
    return "train.early_stopping.patience" if is_stopped(held_out, config.train.early_stopping) else None


def _held_out(folder: RunWriter) -> tuple[float | None, float | None]:
    """Return the first and the last held-out loss in `metrics.jsonl`, None for one that was not finite; (None, None)
    without any."""
    losses = [line["eval_loss"] for line in folder.metrics() if "eval_loss" in line]
    return (losses[0], losses[-1]) if losses else (None, None)
