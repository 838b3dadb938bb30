"""The training loop: `Loop.train`, and `Watcher`, the interface of what observes a run."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import set_seed

from moetune.adapt.attention import document_inputs
from moetune.adapt.build import Adapted
from moetune.config.schema import TrainConfig
from moetune.errors import DoesNotFit, UserError
from moetune.parallel.ranks import local_tensor
from moetune.run.resolve import ResolvedRun
from moetune.training.data.load import Datasets
from moetune.training.folder import checkpoint, trainer_state
from moetune.training.folder.run_folder import best_step, is_stopped
from moetune.training.folder.run_writer import RunWriter
from moetune.training.folder.trainer_state import refusing_damage
from moetune.training.interrupt import Interrupted, recorded_signals
from moetune.training.metrics import Interval, Pace, Sums
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.optim.schedule import rate_factor
from moetune.training.optim.values import as_float, generator_states, set_generator_states
from moetune.training.order import share, shuffled
from moetune.training.reporters import Reporters
from moetune.training.run_warnings import RunWarnings, refuse_broken_weights
from moetune.training.step.batch import Batch, Row, collate, collate_evenly, uncounted
from moetune.training.step.loss import IGNORED
from moetune.training.step.observer import Where
from moetune.training.step.router_losses import RouterWatch
from moetune.training.step.stepper import Stepper


class Loop:
    """Trains an adapted model, and writes checkpoints and `metrics.jsonl`.

    Args:
        folder: the run folder, locked and created.
        pad_token_id: the token that fills rows shorter than the longest of their batch.
        resume: the checkpoint folder to continue from; None to begin at step 0.

    Attributes:
        step: number of updates since the run began.
        micro_batch: rows per forward pass: `train.micro_batch`, or fewer after memory ran out (`train.on_oom`).
        tokens: tokens trained on up to the last line of metrics, without padding, on all ranks.
        total_load: expert load up to the last line of metrics: layer index -> tokens [E].
        held_out: step -> held-out loss, of the evaluations after the first update.
        where: the current step, micro-step and phase, for memory reports.
    """

    def __init__(
        self,
        adapted: Adapted,
        data: Datasets,
        folder: RunWriter,
        pad_token_id: int,
        console: Console,
        warnings: RunWarnings,
        watcher: "Watcher",
        resume: Path | None = None,
    ) -> None:
        self.adapted, self.config, self.ranks = adapted, adapted.run.config, adapted.ranks
        self.data, self.folder, self.device = data, folder, adapted.model.device
        self.console, self.warnings, self.watcher = console, warnings, watcher
        self.collate = partial(collate, pad_token_id=pad_token_id, document_inputs=document_inputs(adapted.model))
        self.where = Where()
        self.step, self.tokens, self.micro_batch = 0, 0, self.config.train.micro_batch
        self.total_load: dict[int, Tensor] = {}
        self.held_out: dict[int, float] = {}
        self.resume = resume
        if resume is not None:  # before the optimizer makes copies or shards of the weights
            self._restore_weights(resume)
        self.optimizer = make_optimizer(adapted)
        self.stepper = Stepper(adapted, self.optimizer, RouterWatch(adapted), self.where)
        self.reporters: Reporters | None = None
        self.checkpoint_bytes = 0

    def train(self) -> None:
        """Run the remaining steps up to `train.steps`, and save a checkpoint after the last.

        Raises:
            UserError: a gradient or weight is not finite, a file cannot be written (disk full), or the checkpoint is
                damaged.
            Interrupted: SIGINT or SIGTERM was received; a checkpoint of the last step has been written.
            torch.OutOfMemoryError: GPU memory ran out, and `train.on_oom` did not allow a smaller micro-batch.
        """
        train, ranks, rows, resume = self.config.train, self.ranks, self.data.train, self.resume
        set_seed(train.seed)
        if not ranks.is_single:  # ranks with different data or layers draw different dropout masks
            torch.manual_seed(train.seed + ranks.generator)
        if resume is not None:
            with refusing_damage(resume):
                checkpoint.read_optimizer(resume, self.adapted, self.optimizer)
        self.adapted.model.train()
        self.watcher.begin(self)
        if ranks.is_first:
            self.reporters = Reporters(self.config, self.folder.path)
        if resume is not None:
            with refusing_damage(resume):
                trainer_state.read_generators(resume, ranks.generator, self.device)
        elif self.data.eval is not None:
            self._evaluate(0.0)
        interval = Interval()  # its clock starts here

        with recorded_signals(ranks) as received:
            an_epoch = -(-len(share(range(len(rows)), train.micro_batch, ranks)) // train.accumulate)
            for epoch in count(self.step // an_epoch):
                # The micro-batches of this rank in this epoch, in seeded order; each step takes `accumulate` of them.
                mine = share(shuffled(len(rows), train.seed, epoch), train.micro_batch, ranks)
                left = mine[self.step % an_epoch * train.accumulate :]
                for first in range(0, len(left), train.accumulate):
                    taken = left[first : first + train.accumulate]
                    batches = [([rows[index] for index in batch.rows], batch.counts) for batch in taken]

                    # One step: forward and backward of each micro-batch; reduce and clip the gradients; update.
                    factor = rate_factor(train, self.step)
                    for group in self.optimizer.param_groups:
                        group["lr"] = group["initial_lr"] * factor
                    self.watcher.step_begins()
                    with self._naming_the_step():
                        sums = self._micro_steps(batches)
                        self.where.phase = "optimizer"
                        reduced = self.stepper.reduce_and_clip()
                    self.stepper.update(reduced)
                    self.step += 1
                    if not self.checkpoint_bytes:
                        self._refuse_full_disk()
                    interval.add(sums, reduced)
                    self.watcher.step_ends()

                    # After the step: metrics, held-out loss, checkpoint.
                    ends, signal = self.step == train.steps, received()
                    saves = ends or bool(signal) or self.step % train.save_every == 0
                    evaluates = self.data.eval is not None and (ends or self.step % train.eval_every == 0)
                    so_far = epoch + (min(first + train.accumulate, len(left)) + len(mine) - len(left)) / len(mine)
                    may_save = saves or (evaluates and train.early_stopping is not None)
                    if may_save or self.step % train.log_every == 0:  # a checkpoint does not save `interval`
                        lrs = [group["lr"] for group in self.optimizer.param_groups[:1]]  # a stage may train nothing
                        lr = next(chain.from_iterable(ranks.gather(lrs)))
                        moves = lr > 0 and self.step > train.warmup
                        tokens = torch.tensor(interval.sums.tokens, device=self.device)
                        self.tokens += int(ranks.total_over_data(tokens))
                        self._log(
                            interval.line(
                                self.step, train.steps - self.step, lr, reduced.norm, moves, self.total_load, ranks,
                                self.watcher.pace, self.warnings,
                            ),
                            so_far,
                        )  # fmt: skip
                        interval = Interval()
                    if evaluates:
                        self._evaluate(so_far)
                        interval.restart_clock()
                        ends |= is_stopped(self.held_out, train.early_stopping)
                        saves |= ends or (train.early_stopping is not None and best_step(self.held_out) == self.step)
                    if saves:
                        self._save()
                    if ends:
                        if self.reporters is not None:
                            self.reporters.end()
                        return
                    if signal:
                        ranks.barrier()  # the launcher stops the first rank, which still writes, once another has ended
                        interrupted = Interrupted(signal)
                        self.console.print(
                            f"{interrupted}: step {self.step} is saved in {self.folder.checkpoints()[-1]}"
                        )
                        raise interrupted

    # --- A step -----------------------------------------------------------------------------------------------------

    def _micro_steps(self, batches: Sequence[tuple[list[Row], bool]]) -> Sums:
        """Run forward and backward of all micro-batches of a step, and return this rank's sums over them.

        `batches` has (rows, `MicroBatch.counts`) for each micro-batch. When memory runs out and `train.on_oom` allows
        it, the whole step is repeated with a smaller micro-batch and the same random numbers.
        """
        drawn = generator_states(self.device)
        while True:
            try:
                return self._attempt(batches)
            except torch.OutOfMemoryError as error:
                self._halve(error)
            # after the `except` block, whose exception would keep the tensors of the failed attempt alive
            self.stepper.forget()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.watcher.step_begins()
            set_generator_states(drawn, self.device)

    def _attempt(self, batches: Sequence[tuple[list[Row], bool]]) -> Sums:
        """Do the work of `_micro_steps` once, `self.micro_batch` rows at a time; raise `torch.OutOfMemoryError` if
        memory runs out."""
        predicted = sum(
            int((np.asarray(row["labels"])[1:] != IGNORED).sum()) for rows, counts in batches if counts for row in rows
        )
        tokens = self.ranks.total_over_data(torch.tensor(predicted, device=self.device))
        size, sums = self.micro_batch, Sums()
        parts = [(rows[at : at + size], counts) for rows, counts in batches for at in range(0, len(rows), size)]
        made = self._collated(parts, size)
        together: Iterable[list[dict[str, Any]]] = [[*made]] if self.stepper.takes_all else ([batch] for batch in made)
        for number, given in enumerate(together):
            self.where.step, self.where.micro_step, self.where.phase = self.step + 1, number, "forward"
            last = self.stepper.takes_all or number == len(parts) - 1
            results = self.stepper.micro_steps([*map(self._on_device, given)], tokens, last=last)
            for batch, done in zip(given, results, strict=True):
                sums.add(done, batch["input_ids"].numel(), _unpadded(batch))
            del batch  # which on a CPU is memory of the device
        return sums

    def _collated(self, parts: list[tuple[list[Row], bool]], size: int) -> Iterable[dict[str, Any]]:
        """Return the micro-batches of a step, each made when it is asked for: of a pipeline as many as it needs."""
        if self.ranks.parallel.pp > 1:
            return collate_evenly(parts, size, self.config.train.accumulate, self.collate)
        return (self.collate(rows) if counts else uncounted(self.collate(rows)) for rows, counts in parts)

    def _on_device(self, batch: dict[str, Any]) -> Batch:
        return {name: x.to(self.device) if torch.is_tensor(x) else x for name, x in batch.items()}

    def _halve(self, error: torch.OutOfMemoryError) -> None:
        """Divide `self.micro_batch` by its smallest divisor above 1, and report this in the metrics and on the console.

        Raise `error` again if `train.on_oom` is `error` or the micro-batch has one row.
        """
        size, where = self.micro_batch, self.where
        if self.config.train.on_oom == "error" or size == 1:
            raise error
        self.micro_batch = size // next(n for n in range(2, size + 1) if size % n == 0)
        run, prefetcher = self.smaller_run(), self.adapted.expert_context.prefetcher
        if prefetcher is not None:
            prefetcher.carried = run.carried_layers
        train = run.config.train
        moment = {"phase": where.phase, "micro_step": where.micro_step}
        smaller = {"micro_batch": train.micro_batch, "accumulate": train.accumulate}
        self.folder.append_metrics({"step": where.step, "out_of_memory": moment, **smaller})
        self.console.print(
            f"step {where.step}: out of memory in {where.phase}, micro-step {where.micro_step}; the step is run again "
            f"with train.micro_batch {train.micro_batch}, train.accumulate {train.accumulate}"
        )

    def smaller_run(self) -> ResolvedRun:
        """Return the run with the current `micro_batch`, and with as much more `accumulate` as keeps the rows per
        step."""
        train = self.config.train
        accumulate = train.accumulate * train.micro_batch // self.micro_batch
        return self.adapted.run.but(train={"micro_batch": self.micro_batch, "accumulate": accumulate})

    @contextmanager
    def _naming_the_step(self) -> Iterator[None]:
        """Context manager: add the step's number to the message of a `UserError` that the `with` block raises.

        In the first step the error may come from a base that is not finite: then raise one that names the weight.
        """
        try:
            yield
        except UserError as error:
            if self.step == 0:
                refuse_broken_weights(self.adapted.model)
            raise UserError(f"step {self.step + 1}: {error}") from None

    # --- Between steps ----------------------------------------------------------------------------------------------

    def _log(self, line: dict[str, Any], epoch: float) -> None:
        """Write a line to `metrics.jsonl`, and pass it to the watcher and, with the fractional `epoch`, to trackers."""
        self.folder.append_metrics(line)
        self.watcher.logged(line)
        if self.reporters is not None:
            load = {f"expert_load_{name}": value for name, value in line.get("expert_load", {}).items()}
            numbers = {"learning_rate" if name == "lr" else name: value for name, value in line.items()}
            self.reporters.log(numbers.pop("step"), numbers | load | {"epoch": epoch})

    def _evaluate(self, epoch: float) -> None:
        """Compute and log the held-out loss: nats per predicted token, independent of batch sizes and ranks.

        `epoch` is the number of epochs trained so far, a fraction included.
        """
        self.where.step, self.where.phase = self.step, "evaluation"
        model, train, rows = self.adapted.model.eval(), self.config.train, self.data.eval
        assert rows is not None
        batches = share(range(len(rows)), train.eval_micro_batch or train.micro_batch, self.ranks)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        at_once = train.accumulate if self.ranks.parallel.pp > 1 else 1  # micro-batches in the pipeline together
        for first in range(0, len(batches), at_once):
            parts = [([rows[index] for index in part.rows], part.counts) for part in batches[first : first + at_once]]
            made = self._collated(parts, len(batches[0].rows))
            loss, predicted = self.stepper.held_out_loss([*map(self._on_device, made)])
            sums += torch.stack([loss.double(), predicted.double()])
        model.train()
        total, tokens = self.ranks.total_over_data(sums).tolist()
        mean = total / tokens
        as_json = mean if math.isfinite(mean) else None  # JSON has no NaN
        self._log({"step": self.step, "eval_loss": as_json, "eval_tokens": int(tokens)}, epoch)
        if self.step:
            self.held_out[self.step] = mean

    def _save(self) -> None:
        """Write a checkpoint; raise `UserError` if a trained weight is not finite."""
        self._refuse_broken()
        train = self.config.train
        best = None if train.early_stopping is None else best_step(self.held_out)
        needed = self.checkpoint_bytes + 2**20  # 1 MiB for the other files
        with self.folder.new_checkpoint(self.step, train.keep_checkpoints, needed, best) as aside:
            checkpoint.write(aside, self.adapted, self.optimizer, self.step)
            if self.ranks.coordinates.tp == 0:  # the other tp ranks have the same random numbers
                trainer_state.write_generators(aside, self.ranks.generator, self.device)
            if self.ranks.is_first:
                trainer_state.write_state(aside, self.step, self.micro_batch, self.tokens, self.total_load)

    def _refuse_full_disk(self) -> None:
        """Note how many bytes a checkpoint takes, now that the optimizer has its states; raise `UserError` if the disk
        has too little room. Every rank must call this.

        An old checkpoint is removed only when the new one is complete, so a new run needs room for two.
        """
        ranks, optimizer, of_experts = self.ranks, self.optimizer, set(self.adapted.of_experts())
        if self.stepper.engine is not None:  # DeepSpeed's states are divided over the ranks, and are not by parameter
            mine = float(sum(state.nbytes for state in (*optimizer.states(), *optimizer.masters())))
        else:
            saved = chain.from_iterable(updater.saved() for updater in optimizer.updaters)
            mine = sum(
                sum(value.nbytes for value in (weight, *states.values()) if isinstance(value, Tensor))
                / ranks.copies(parameter, of_expert=parameter in of_experts)
                for parameter, weight, states in saved
            )
        self.checkpoint_bytes = math.ceil(sum(ranks.gather(mine)))
        self.folder.refuse_full_disk(self.checkpoint_bytes * (2 if self.resume is None else 1))

    @torch.no_grad()
    def _refuse_broken(self) -> None:
        """Raise `UserError` if a trained weight, or its float32 copy, is NaN or infinite on any rank.

        Gradients would show this only in the next step, when the checkpoint is already written.
        """
        weights = {name: local_tensor(weight) for name, weight in self.adapted.trainable().items()}
        weights |= {f"a float32 copy of a weight ({n})": copy for n, copy in enumerate(self.optimizer.masters())}
        weights = {name: weight for name, weight in weights.items() if weight.numel()}
        largest = [torch.linalg.vector_norm(weight, math.inf) for weight in weights.values()]
        mine = [name for name, value in zip(weights, largest, strict=True) if not math.isfinite(as_float(value))]
        broken = [name for of_rank in self.ranks.gather(mine) for name in of_rank]
        if broken:
            last = [f"the last good one is {folder}" for folder in self.folder.checkpoints()][-1:]
            raise UserError(
                f"step {self.step}: its update has made {broken[0]} not finite (NaN, infinity), so no checkpoint of it "
                f"is kept; {last[0] if last else 'there is none before it'}. Lower optimizer.lr or train.max_grad_norm "
                "and start a new run"
            )

    def _restore_weights(self, folder: Path) -> None:
        """Restore weights, step, tokens, micro-batch and expert load from a checkpoint folder."""
        with refusing_damage(folder):
            checkpoint.read_trained(folder, self.adapted)
            self.warnings.begin()
            self.held_out = self.folder.held_out()
            self.total_load.update(trainer_state.read_total_load(folder, self.adapted))
            self.step, self.micro_batch, self.tokens = trainer_state.read_state(folder)


def _unpadded(batch: Batch) -> int:
    """Return the number of tokens of a micro-batch that are not padding."""
    return int((batch["is_token"] if "is_token" in batch else batch["attention_mask"]).sum())


class Watcher:
    """Interface of an observer of a run; this base class does nothing. The implementation is in `moetune/watch/`.

    Order of the calls: `settled`, `reading`, `begin`; `step_begins` and `step_ends` in each step, `logged` at each line
    of metrics; `out_of_memory` if memory runs out; `end`. `pace` is the predicted work of a step, set in `begin`; it
    goes into each line of metrics.
    """

    pace = Pace()

    def settled(self, run: ResolvedRun, before: TrainConfig | None) -> ResolvedRun:
        """Return the run with values in place of `auto` in `train.checkpointing`, `train.keep_rows`,
        `train.layer_by_layer` and `train.expert_memory`, as fit the GPU.

        Called if the run has a single rank, before the model is built, once it is known which kernels work. `before`
        are the settings before the run was interrupted; None for a new run.
        """
        return run.settled_as(before)

    def reading(self, folder: str | None) -> AbstractContextManager[Callable[[float], None] | None]:
        """Return a context manager to enter while weights are read from `folder`; None for random weights.

        It yields a function to call with the fraction read so far (0 to 1), or None if progress is not shown.
        """
        return nullcontext()

    def begin(self, loop: Loop) -> None:
        """Called before the first step."""

    def step_begins(self) -> None:
        """Called before the micro-steps of each step, and again when a step is repeated with a smaller micro-batch."""

    def step_ends(self) -> None:
        """Called after each update."""

    def logged(self, line: Mapping[str, Any]) -> None:
        """Called with each line that was written to `metrics.jsonl`, as a dict."""

    def out_of_memory(self, run: ResolvedRun, loop: Loop | None) -> DoesNotFit | None:
        """Return an error that explains why memory ran out, or None; `loop` is None without an optimizer yet."""
        return None

    def end(self) -> None:
        """Called once when training ends, also after an error."""
