"""What training is. `Loop.train` is to be read from top to bottom."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import get_scheduler, set_seed

from moetune.adapt.attention import wants_cu_seqlens
from moetune.adapt.build import Adapted
from moetune.errors import DoesNotFit, UserError
from moetune.parallel.ranks import local_tensor
from moetune.run.resolve import ResolvedRun
from moetune.training import checkpoint, trainer_state
from moetune.training.data.load import Datasets
from moetune.training.interrupt import Interrupted, Signals
from moetune.training.metrics import Interval, Sums
from moetune.training.optim.optimizers import CombinedOptimizer, make_optimizer
from moetune.training.optim.values import as_float, generator_states, set_generator_states
from moetune.training.order import MicroBatch, share, shuffled
from moetune.training.pace import Pace
from moetune.training.reporters import Reporters
from moetune.training.run_folder import RunFolder
from moetune.training.run_warnings import RunWarnings, refuse_broken_weights
from moetune.training.step.batch import Batch, Row, collate, uncounted
from moetune.training.step.loss import IGNORED
from moetune.training.step.micro_step import held_out_loss
from moetune.training.step.observer import Where
from moetune.training.step.router_losses import RouterWatch
from moetune.training.step.stepper import Stepper
from moetune.training.trainer_state import whole

_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


class Loop:
    """Trains an adapted model: what is learned goes to checkpoints, what is known of it to `metrics.jsonl`.

    Attributes:
        step: updates that have been made.
        micro_batch: rows of a forward pass: `train.micro_batch`, or what is left of it since memory ran out.
        tokens: that were trained on since the run began, on all ranks, padding left out, up to the last line.
        total_load: by layer, the tokens that each expert has received since then.
        where: the step, micro-step and phase that the run is in.
    """

    def __init__(
        self,
        adapted: Adapted,
        data: Datasets,
        folder: RunFolder,
        pad_token_id: int,
        console: Console,
        notices: RunWarnings,
        watcher: Watcher,
        resume: Path | None = None,
    ) -> None:
        self.adapted, self.config, self.ranks = adapted, adapted.run.config, adapted.ranks
        self.data, self.folder, self.device = data, folder, adapted.model.device
        self.console, self.notices, self.watcher = console, notices, watcher
        self.collate = partial(
            collate, pad_token_id=pad_token_id, documents_by_cu_seqlens=wants_cu_seqlens(adapted.model)
        )
        self.where = Where()
        self.step, self.tokens, self.micro_batch = 0, 0, self.config.train.micro_batch
        self.total_load: dict[int, Tensor] = {}
        self.resume = resume
        if resume is not None:  # an optimizer copies, or takes away, the weights that it finds
            self._restore_weights(resume)
        self.optimizer: CombinedOptimizer = make_optimizer(adapted)
        self.stepper = Stepper(adapted, self.optimizer, RouterWatch(adapted), self.where)
        self.reporters = Reporters(adapted.model)
        if self.ranks.is_first:
            self.reporters = Reporters.of(self.config.train, folder.path, adapted.model)

    def train(self) -> None:
        """Takes the steps of a run, from its beginning or from a checkpoint.

        Raises:
            UserError: what a step gives is not finite; the disk is full; the checkpoint is damaged.
            Interrupted: SIGINT or SIGTERM came; what had been trained is in a checkpoint.
            torch.OutOfMemoryError: and `train.on_oom` does not help.
        """
        train, ranks, rows, resume = self.config.train, self.ranks, self.data.train, self.resume
        set_seed(train.seed)
        if not ranks.is_single:  # dropout differs between ranks that see different data, and there only
            torch.manual_seed(train.seed + ranks.data_index)

        # Learning rates are a function of the step: each part's own, times this one for all.
        schedule = get_scheduler(_SCHEDULES[train.schedule], self.optimizer, train.warmup, train.steps)
        factor = schedule.lr_lambdas[0]
        if resume is not None:
            with whole(str(resume)):
                checkpoint.read_optimizer(resume, self.adapted, self.optimizer)
        self.adapted.model.train()
        self.watcher.begin(self)
        self.reporters.begin()
        interval = Interval()
        if self.data.eval is not None and resume is None:
            self._evaluate(0.0)

        with Signals(ranks, self.device) as signals:
            an_epoch = -(-len(share(range(len(rows)), train.micro_batch, ranks)) // train.accumulate)
            for epoch in count(self.step // an_epoch):
                # Rows for this rank and epoch, in a seeded order, as micro-batches; those of a step belong together.
                mine = share(shuffled(len(rows), train.seed, epoch), train.micro_batch, ranks)
                left = mine[self.step % an_epoch * train.accumulate :]
                if resume is not None and len(left) == len(mine):
                    self._restore_generators(resume)
                    resume = None
                loader = iter(DataLoader(rows, batch_sampler=[batch.rows for batch in left], collate_fn=list))
                if resume is not None:  # within an epoch, which draws from them when it begins
                    self._restore_generators(resume)
                    resume = None
                for first in range(0, len(left), train.accumulate):
                    batches = [(next(loader), batch) for batch in left[first : first + train.accumulate]]

                    # Forward and backward of each micro-batch; then all gradients are added up and clipped.
                    rate = factor(self.step)
                    for group in self.optimizer.param_groups:
                        group["lr"] = group["initial_lr"] * rate
                    self.watcher.step_begins()
                    with self._at_this_step():
                        sums = self._micro_steps(batches)
                        self.where.phase = "optimizer"
                        reduced = self.stepper.reduce_and_clip()
                    self.stepper.update(reduced)
                    self.step += 1
                    interval.add(sums, reduced)
                    self.watcher.step_ends()

                    # What is known of it, what it does on held-out data, and what is kept of it.
                    ends, asked = self.step == train.steps, signals.asked()
                    saves = ends or bool(asked) or self.step % train.save_every == 0
                    so_far = epoch + (min(first + train.accumulate, len(left)) + len(mine) - len(left)) / len(mine)
                    if saves or self.step % train.log_every == 0:  # what was summed up is not in a checkpoint
                        lr = self.optimizer.param_groups[0]["lr"]
                        moves = lr > 0 and self.step > train.warmup
                        self.tokens += int(
                            ranks.total_over_data(torch.tensor(interval.sums.tokens, device=self.device))
                        )
                        self._log(
                            interval.line(
                                self.step, train.steps - self.step, lr, reduced.norm, moves, self.total_load, ranks,
                                self.watcher.pace, self.notices,
                            ),
                            so_far,
                        )  # fmt: skip
                        interval = Interval()
                    if self.data.eval is not None and (ends or self.step % train.eval_every == 0):
                        self._evaluate(so_far)
                        interval.pause()
                    if saves:
                        self._save()
                    if ends:
                        self.reporters.end()
                        return
                    if asked:
                        raise self._interrupted(asked)

    # --- A step -----------------------------------------------------------------------------------------------------

    def _micro_steps(self, batches: Sequence[tuple[list[Row], MicroBatch]]) -> Sums:
        """Forward and backward of a step's micro-batches; in pieces of `micro_batch` rows. Where memory runs out they
        become smaller (`train.on_oom`), and the step begins anew, from the same random numbers."""
        drawn = generator_states(self.device)
        while True:
            try:
                return self._attempt(batches)
            except torch.OutOfMemoryError as error:
                self._halve(error)
            # out of the handler, so that what failed holds nothing any more
            self.stepper.forget()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.watcher.step_begins()
            set_generator_states(drawn, self.device)

    def _attempt(self, batches: Sequence[tuple[list[Row], MicroBatch]]) -> Sums:
        predicted = [
            np.asarray(row["labels"])[1:] != IGNORED for rows, batch in batches if batch.counts for row in rows
        ]
        tokens = self.ranks.total_over_data(torch.tensor(sum(int(one.sum()) for one in predicted), device=self.device))
        size, sums = self.micro_batch, Sums()
        pieces = [(rows[at : at + size], batch.counts) for rows, batch in batches for at in range(0, len(rows), size)]
        for number, (rows, counts) in enumerate(pieces):
            self.where.step, self.where.micro_step, self.where.phase = self.step + 1, number, "forward"
            batch = self._batch(rows, counts)
            sums.positions += batch["input_ids"].numel()
            sums.tokens += int(batch.get("is_token", batch.get("attention_mask")).sum())  # type: ignore[union-attr]
            sums.add(self.stepper.micro_step(self._on_device(batch), tokens, last=number == len(pieces) - 1))
        return sums

    def _batch(self, rows: list[Row], counts: bool) -> dict[str, Any]:
        batch = self.collate(rows)
        return batch if counts else uncounted(batch)

    def _on_device(self, batch: dict[str, Any]) -> Batch:
        return {name: x.to(self.device) if torch.is_tensor(x) else x for name, x in batch.items()}

    def _halve(self, error: torch.OutOfMemoryError) -> None:
        """Halves the micro-batch, as `train.on_oom` says; one of an odd number of rows is divided by the next number
        that divides it."""
        size, where = self.micro_batch, self.where
        if self.config.train.on_oom == "error" or size == 1:
            raise error
        self.micro_batch = size // next(n for n in range(2, size + 1) if size % n == 0)
        train = self.smaller_run().config.train
        found = {"phase": where.phase, "micro_step": where.micro_step}
        pieces = {"micro_batch": train.micro_batch, "accumulate": train.accumulate}
        self.folder.append_metrics({"step": where.step, "out_of_memory": found, **pieces})
        self.console.print(
            f"step {where.step}: out of memory in {where.phase}, micro-step {where.micro_step}; the same steps go on "
            f"in smaller pieces: train.micro_batch {train.micro_batch}, train.accumulate {train.accumulate}",
            highlight=False,
            soft_wrap=True,
        )

    def smaller_run(self) -> ResolvedRun:
        """The run with the micro-batches that are taken now; its steps are the same."""
        train = self.config.train
        pieces = {
            "micro_batch": self.micro_batch,
            "accumulate": train.accumulate * train.micro_batch // self.micro_batch,
        }
        return replace(self.adapted.run, config=self.config.but(train=pieces))

    @contextmanager
    def _at_this_step(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if self.step == 0:
                refuse_broken_weights(self.adapted.model)
            raise UserError(f"step {self.step + 1}: {error}") from None

    # --- Between steps ----------------------------------------------------------------------------------------------

    def _log(self, line: dict[str, Any], epoch: float) -> None:
        """One line of `metrics.jsonl`, and its numbers to whoever watches or reports."""
        self.folder.append_metrics(line)
        self.watcher.logged(line)
        numbers = {"learning_rate" if name == "lr" else name: value for name, value in line.items() if name != "step"}
        numbers |= {f"expert_load_{name}": value for name, value in line.get("expert_load", {}).items()}
        self.reporters.log(self.step, epoch, numbers | {"epoch": epoch})

    def _evaluate(self, epoch: float) -> None:
        """Held-out loss: the mean over every predicted token of the set, whatever the batches and ranks."""
        self.where.step, self.where.phase = self.step, "evaluation"
        model, train, rows = self.adapted.model.eval(), self.config.train, self.data.eval
        assert rows is not None
        batches = share(range(len(rows)), train.eval_micro_batch or train.micro_batch, self.ranks)
        loader = DataLoader(rows, batch_sampler=[batch.rows for batch in batches], collate_fn=list)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for some, batch in zip(loader, batches, strict=True):
            loss, predicted = held_out_loss(model, self._on_device(self._batch(some, batch.counts)), train.loss_bytes)
            sums += torch.stack([loss.double(), predicted.double()])
        model.train()
        total, tokens = self.ranks.total_over_data(sums).tolist()
        self._log({"step": self.step, "eval_loss": total / tokens, "eval_tokens": int(tokens)}, epoch)

    def _save(self) -> None:
        """Writes a checkpoint.

        Raises:
            UserError: a weight is not finite. The last update broke it: a gradient since would have said so.
        """
        self._refuse_broken()
        optimizer, trained = self.optimizer, self.adapted.trainable().values()
        # what trains, its master weights, the optimizer's states, and a mebibyte for all else
        needed = 2**20 + sum(x.nbytes for x in (*trained, *optimizer.states(), *optimizer.masters()))
        with self.folder.new_checkpoint(self.step, self.config.train.keep_checkpoints, needed) as aside:
            checkpoint.write(aside, self.adapted, optimizer, self.step)
            if self.ranks.coordinates.tp == 0:  # ranks that see the same data draw the same numbers
                trainer_state.write_generators(aside, self.ranks.data_index, self.device)
            if self.ranks.is_first:
                trainer_state.write_state(aside, self.step, self.micro_batch, self.tokens, self.total_load)

    @torch.no_grad()
    def _refuse_broken(self) -> None:
        held = {name: local_tensor(weight) for name, weight in self.adapted.trainable().items()}
        held |= {f"a float32 copy of a weight ({number})": copy for number, copy in enumerate(self.optimizer.masters())}
        held = {name: weight for name, weight in held.items() if weight.numel()}
        largest = [torch.linalg.vector_norm(weight, math.inf) for weight in held.values()]
        mine = [name for name, value in zip(held, largest, strict=True) if not math.isfinite(as_float(value))]
        broken = [name for of_rank in self.ranks.gather(mine) for name in of_rank]
        if broken:
            last = [f"the last good one is {folder}" for folder in self.folder.checkpoints()][-1:]
            raise UserError(
                f"step {self.step}: its update has made {broken[0]} not finite (NaN, infinity), so no checkpoint of it "
                f"is kept; {last[0] if last else 'there is none before it'}. Lower optimizer.lr or train.max_grad_norm "
                "and start anew"
            )

    def _interrupted(self, number: int) -> Interrupted:
        interrupted = Interrupted(number)
        self.console.print(
            f"{interrupted}: step {self.step} is saved in {self.folder.checkpoints()[-1]}",
            highlight=False,
            soft_wrap=True,
        )
        return interrupted

    def _restore_weights(self, folder: Path) -> None:
        """What trains, and where the run is."""
        with whole(str(folder)):
            checkpoint.read_trained(folder, self.adapted)
            losses = (line["loss"] for line in self.folder.metrics() if line.get("loss") is not None)
            self.notices.begin(next(losses, None))
            self.total_load.update(trainer_state.read_load(folder, self.adapted))
            self.step, micro_batch, self.tokens = trainer_state.read_state(folder)
            self.micro_batch = micro_batch or self.micro_batch
        if not self.tokens:
            self.notices.say(
                "tokens",
                f"{folder.name} does not say how many tokens it was trained on, so train_tokens counts from there on",
            )

    def _restore_generators(self, folder: Path) -> None:
        with whole(str(folder)):
            trainer_state.read_generators(folder, self.ranks.data_index, self.device)


class Watcher:
    """Is told how a run goes: whoever knows what a run takes, or shows it to people, is given to it (`moetune/watch/`).
    By itself it does nothing.

    Attributes:
        pace: what a step computes, as far as that is known.
    """

    pace = Pace()

    def reading(self, folder: str | None) -> AbstractContextManager[Callable[[float], None] | None]:
        """Entered while weights are read from a folder; gives what to tell the share read so far."""
        return nullcontext()

    def begin(self, loop: Loop) -> None:
        """Called before the first step."""

    def step_begins(self) -> None:
        """Called before the micro-steps of each step; again where a step begins anew with smaller micro-batches."""

    def step_ends(self) -> None:
        """Called after each update."""

    def logged(self, line: Mapping[str, Any]) -> None:
        """Is given each line of metrics, of steps or of an evaluation."""

    def out_of_memory(self, run: ResolvedRun, loop: Loop | None) -> DoesNotFit | None:
        """Examines why memory ran out: of the loop, or before there was one. None if that is not known."""
        return None

    def end(self) -> None:
        """Called once, however training ends."""
