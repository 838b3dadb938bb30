"""`transformers.Trainer` with this project's step, its losses by token, and its run folder."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from moetune.adapt.attention import wants_borders
from moetune.adapt.build import Adapted
from moetune.config import RunConfig
from moetune.data.load import Datasets
from moetune.errors import UserError
from moetune.memory.live import Where
from moetune.optim.optimizers import CombinedOptimizer, make_optimizer
from moetune.optim.values import generator_states, set_generator_states
from moetune.patches.transformers import one_device
from moetune.report.console import terminal
from moetune.run.resolve import ResolvedRun
from moetune.step.batch import Row, collate
from moetune.step.loss import IGNORED
from moetune.step.router_losses import RouterWatch
from moetune.step.step import count_loss_tokens, held_out_loss
from moetune.step.stepper import Reduced, Stepper
from moetune.training import checkpoint
from moetune.training.memory_record import MemoryRecord
from moetune.training.notices import Notices, refuse_broken_weights
from moetune.training.pace import Pace
from moetune.training.routing import load_by_layer, load_summary, on_host
from moetune.training.run_folder import RunFolder
from moetune.training.trainer_state import read_generators, read_load, whole, write_generators, write_state

_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


@dataclass(frozen=True)
class _Begun:
    """A step under way: the rows of its micro-batches so far, and what was summed and drawn before it."""

    load: dict[int, Tensor]
    router_loss: Tensor | None
    tokens: int
    generators: list[Tensor]
    batches: list[list[Row]] = field(default_factory=list)


class MoeTrainer(Trainer):
    """Trains an adapted model. What is logged goes to the run folder, and through Trainer to whatever reports."""

    def __init__(
        self,
        adapted: Adapted,
        data: Datasets,
        folder: RunFolder,
        pad_token_id: int,
        callbacks: list[TrainerCallback] | None = None,
        notices: Notices | None = None,
        memory: MemoryRecord | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.pace = pace or Pace()
        self.notices = notices or Notices(adapted, 1, terminal(quiet=True))
        self.memory, self.where = memory, Where()
        config = adapted.run.config
        self.adapted, self.config, self.folder, self.ranks = adapted, config, folder, adapted.ranks
        self.watch = RouterWatch(adapted)
        self._load: dict[int, Tensor] = {}
        self.total_load: dict[int, Tensor] = {}
        """Tokens that each expert has received since the run began, of all ranks, up to the last logged step."""
        self._router_loss: Tensor | None = None
        self._reduced: Reduced | None = None  # between Trainer's question for the norm and its update
        self._begun: _Begun | None = None
        self._losses = list[Tensor]()
        self._updates, self._tokens, self._since = 0, 0, time.perf_counter()
        borders = wants_borders(adapted.model)
        self.collate = partial(collate, pad_token_id=pad_token_id, documents_by_border=borders)
        super().__init__(
            model=adapted.model,
            args=training_arguments(config, folder, adapted.model.device, data.eval is not None),
            train_dataset=data.train,
            eval_dataset=data.eval,
            data_collator=self.collate,
            callbacks=[ResumableFlow(), *(callbacks or ())],
        )
        for noisy in (PrinterCallback, ProgressCallback):
            self.remove_callback(noisy)
        if not self.ranks.is_single:  # dropout differs between ranks that see different data, and there only
            torch.manual_seed(config.train.seed + self.ranks.data_index)

    def get_train_dataloader(self) -> DataLoader:
        """The rows of this rank's micro-batches: of those that one process would take, every so many-th."""
        rows: Any = self.train_dataset
        loader = DataLoader(
            rows,
            batch_size=self.args.train_batch_size,
            sampler=self._get_train_sampler(),
            collate_fn=list,
        )
        return prepare_data_loader(
            loader,
            num_processes=self.ranks.data_size,
            process_index=self.ranks.data_index,
            use_seedable_sampler=True,
            data_seed=self.args.data_seed,
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            optimizer = make_optimizer(self.adapted)
            self.stepper = Stepper(self.adapted, optimizer, self.watch, self.where)
            # States are where they belong already; accelerate would move those of the host to the GPU.
            held = _Stepped(optimizer, self._update)
            self.optimizer = self.accelerator.prepare(held, device_placement=[False])
        return self.optimizer

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        self._updates += 1
        self._begun = None
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counts = [count_loss_tokens(self.collate(rows)) for rows in batches]
        total = torch.stack(counts).sum() if batches else torch.zeros(())
        return batches, self.ranks.total_over_data(total.to(device))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One micro-batch, of these rows; in pieces of `state.train_batch_size` rows once memory has run out
        (`train.on_oom`), which a checkpoint keeps."""
        model.train()
        assert num_items_in_batch is not None
        if self._begun is None:
            drawn = generator_states(self.args.device)
            self._begun = _Begun(dict(self._load), self._router_loss, self._tokens, drawn)
        begun, batches = self._begun, [inputs]
        begun.batches.append(inputs)
        while True:
            try:
                with self._at_this_step():
                    return self._micro_steps(batches, len(begun.batches) - len(batches), num_items_in_batch)
            except torch.OutOfMemoryError as error:
                self._halve(error)
            # out of the handler, so that what failed holds nothing any more
            batches = begun.batches
            self._load, self._router_loss, self._tokens = dict(begun.load), begun.router_loss, begun.tokens
            self.stepper.forget()
            gc.collect()
            if self.args.device.type == "cuda":
                torch.cuda.empty_cache()
            if self.memory is not None:
                self.memory.begin_again(self.smaller_run(), self.optimizer)
            set_generator_states(begun.generators, self.args.device)

    def _micro_steps(self, batches: list[list[Row]], first: int, tokens: Tensor | int) -> Tensor:
        """Forward and backward of micro-batches, the `first` of which has that number in its step."""
        size, sum_of_losses = self.micro_batch, torch.zeros((), device=self.args.device)
        pieces = [rows[at : at + size] for rows in batches for at in range(0, len(rows), size)]
        before = first * -(-self.config.train.micro_batch // size)
        for number, rows in enumerate(pieces):
            self.where.step, self.where.micro_step = self.state.global_step + 1, before + number
            self.where.phase = "forward"
            batch = self._prepare_inputs(self.collate(rows))
            last = self.accelerator.sync_gradients and number == len(pieces) - 1
            done = self.stepper.micro_step(batch, tokens, self.accelerator.backward, last=last)
            _add(self._load, done.load)
            if done.router_loss is not None:
                so_far = self._router_loss
                self._router_loss = done.router_loss if so_far is None else so_far + done.router_loss
            self._tokens += batch["input_ids"].numel()
            sum_of_losses += done.loss
        return sum_of_losses.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # Trainer would add it to all later ones

    @property
    def micro_batch(self) -> int:
        """Rows of a forward pass: `train.micro_batch`, or what is left of it since memory ran out."""
        return self.state.train_batch_size or self.config.train.micro_batch

    def smaller_run(self) -> ResolvedRun:
        """The run with the micro-batches that are taken now; its steps are the same."""
        train, size = self.config.train, self.micro_batch
        smaller = {"micro_batch": size, "accumulate": train.accumulate * train.micro_batch // size}
        config = self.config.model_copy(update={"train": train.model_copy(update=smaller)})
        return replace(self.adapted.run, config=config)

    def _halve(self, error: torch.OutOfMemoryError) -> None:
        """Halves the micro-batch, as `train.on_oom` says; one of an odd number of rows is divided by the next number
        that divides it."""
        size = self.micro_batch
        if self.config.train.on_oom == "error" or size == 1:
            raise error
        self.state.train_batch_size = size // next(n for n in range(2, size + 1) if size % n == 0)
        train = self.smaller_run().config.train
        self.folder.append_metrics(
            {
                "step": self.where.step,
                "out_of_memory": {"phase": self.where.phase, "micro_step": self.where.micro_step},
                "micro_batch": train.micro_batch,
                "accumulate": train.accumulate,
            }
        )
        where = self.where
        self.notices.console.print(
            f"step {where.step}: out of memory in {where.phase}, micro-step {where.micro_step}; the same steps go on "
            f"in smaller pieces: train.micro_batch {train.micro_batch}, train.accumulate {train.accumulate}",
            highlight=False,
            soft_wrap=True,
        )

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        """Trainer asks before each update, and clips then; here the update does."""
        if grad_norm is not None:
            return grad_norm
        self.where.phase = "optimizer"
        with self._at_this_step():
            self._reduced = self.stepper.reduce_and_clip()
        if self._reduced.scale is not None:
            self._losses.append(self._reduced.loss)
        return self._reduced.norm

    def _update(self) -> None:
        assert self._reduced is not None, "Trainer asks for the norm before it updates"
        self.stepper.update(self._reduced)
        self._reduced = None

    @contextmanager
    def _at_this_step(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if self.state.global_step == 0:
                refuse_broken_weights(self.adapted.model)
            raise UserError(f"step {self.state.global_step + 1}: {error}") from None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Held-out loss: the mean over every predicted token of the set, whatever the batches and ranks."""
        self.where.step, self.where.phase = self.state.global_step, "evaluation"
        model = self.adapted.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for batch in self._held_out_batches():
            loss, predicted = held_out_loss(model, self._prepare_inputs(batch), self.config.train.loss_bytes)
            sums += torch.stack([loss.double(), predicted.double()])
        model.train()
        total, tokens = self.ranks.total_over_data(sums).tolist()
        metrics = {"eval_loss": total / tokens, "eval_tokens": int(tokens)}
        self._since, self._tokens = time.perf_counter(), 0
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _held_out_batches(self) -> Iterator[dict[str, Tensor]]:
        """This rank's share. All ranks have equally many, because they run each together: those that would have one
        less run one whose tokens do not count."""
        size, mine = self.ranks.data_size, self.ranks.data_index
        row: list[dict[str, Tensor]] = []
        for batch in self.get_eval_dataloader():
            row.append(batch)
            if len(row) == size:
                yield row[mine]
                row = []
        if row:
            labels = torch.full_like(row[0]["labels"], IGNORED)
            yield row[mine] if mine < len(row) else row[0] | {"labels": labels}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One line of `metrics.jsonl`, and the same numbers to every reporter."""
        step = self.state.global_step
        if "loss" in logs:
            del logs["loss"]  # Trainer's, which counts steps that were skipped
            if self._losses:
                logs["loss"] = torch.stack(self._losses).mean().item()
            if skipped := self._updates - len(self._losses):
                logs["skipped_steps"] = skipped
            seconds = time.perf_counter() - self._since
            logs["tokens_per_second"] = round(self._tokens * self.ranks.data_size / seconds, 1)
            pace = self.pace.metrics(self._updates, seconds, self.state.max_steps - step)
            logs |= {key: value for key, value in pace.items() if value is not None}
            self._load = {layer: self.ranks.total_over_data(load) for layer, load in self._load.items()}
            _add(self.total_load, self._load)
            if self._router_loss is not None:
                self._router_loss = self.ranks.total_over_data(self._router_loss)
            if self.args.device.type == "cuda":
                logs["peak_allocated"] = torch.cuda.max_memory_allocated(self.args.device)
            if self._router_loss is not None:
                logs["router_loss"] = self._router_loss.item() / self._updates
            load = on_host(self._load)
            summary = load_summary(load)
            moves = logs["learning_rate"] > 0 and step > self.config.train.warmup
            updated = bool(self._losses) and moves and (logs.get("grad_norm") or 0) > 0
            noted = self.notices.about_step(logs.get("loss"), updated, load, on_host(self.total_load))
            self.folder.append_metrics(
                {
                    "step": step,
                    "loss": logs.get("loss"),
                    "router_loss": logs.get("router_loss"),
                    "lr": logs["learning_rate"],
                    "grad_norm": _or_none(logs.get("grad_norm")),
                    "skipped_steps": skipped,
                    "tokens_per_second": logs["tokens_per_second"],
                    **pace,
                    "peak_allocated": logs.get("peak_allocated"),
                    "expert_load": summary,
                    "routing": load_by_layer(load),
                    **noted,
                }
            )
            logs |= {f"expert_load_{key}": value for key, value in summary.items()}
            self._load, self._router_loss, self._losses = {}, None, []
            self._updates, self._tokens, self._since = 0, 0, time.perf_counter()
        elif "eval_loss" in logs:
            self.folder.append_metrics({"step": step, **logs})
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Tensor | Any]) -> int:
        """Not estimated: Trainer's estimate walks every parameter at every micro-step and miscounts packed ones."""
        return 0

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        keep, needed = self.config.train.keep_checkpoints, self._checkpoint_bytes()
        with self.folder.new_checkpoint(self.state.global_step, keep, needed) as aside:
            checkpoint.write(aside, self.adapted, self.stepper.optimizer, self.lr_scheduler)
            if self.ranks.coordinates.tp == 0:  # ranks that see the same data draw the same numbers
                write_generators(aside, self.ranks.data_index, self.args.device)
            if self.ranks.is_first:
                write_state(aside, self.state, self.total_load)

    def _checkpoint_bytes(self) -> int:
        """What trains, its master weights, the optimizer's states, and a mebibyte for all else."""
        optimizer = self.stepper.optimizer
        held = (*self.adapted.trainable().values(), *optimizer.states(), *optimizer.masters())
        return 2**20 + sum(tensor.nbytes for tensor in held)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with whole(resume_from_checkpoint):
            checkpoint.read_trained(Path(resume_from_checkpoint), self.adapted)
            self.notices.begin()
            self.total_load.update(read_load(Path(resume_from_checkpoint), self.adapted))

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        with whole(checkpoint_folder):
            folder = Path(checkpoint_folder)
            checkpoint.read_optimizer(folder, self.adapted, self.stepper.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        """Random generators as they were; where more ranks see different data than did then, those begin anew."""
        if checkpoint_folder is None:
            return
        with whole(checkpoint_folder):
            read_generators(Path(checkpoint_folder), self.ranks.data_index, self.args.device)


class _Stepped(CombinedOptimizer):
    """A run's optimizer as Trainer holds it, whose step is the Stepper's update."""

    def __init__(self, optimizer: CombinedOptimizer, update: Callable[[], None]) -> None:
        super().__init__(optimizer.updaters, optimizer.loss_scale)
        self._update = update

    def step(self, closure: None = None, *, scale: float = 1.0) -> None:  # type: ignore[override]
        self._update()


class ResumableFlow(TrainerCallback):
    """Trainer's flow, changed where a resumed run would differ from one that was never interrupted."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save:
            control.should_log = True  # what was summed since the last line is not in a checkpoint


def training_arguments(
    config: RunConfig, folder: RunFolder, device: torch.device, evaluates: bool
) -> TrainingArguments:
    """Our run file in Trainer's words. Precision is the model's own: no autocast."""
    train = config.train
    arguments = TrainingArguments(
        output_dir=str(folder.path),
        max_steps=train.steps,
        per_device_train_batch_size=train.micro_batch,
        per_device_eval_batch_size=train.eval_micro_batch or train.micro_batch,
        gradient_accumulation_steps=train.accumulate,
        learning_rate=next(iter(config.optimizers.values())).lr,  # Trainer wants one; the optimizers have their own
        lr_scheduler_type=_SCHEDULES[train.schedule],
        warmup_steps=train.warmup,
        max_grad_norm=train.max_grad_norm,
        seed=train.seed,
        data_seed=train.seed,
        logging_strategy="steps",
        logging_steps=train.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=train.eval_every,
        eval_on_start=evaluates,
        save_strategy="steps",
        save_steps=train.save_every,
        report_to=list(train.report_to) if train.report_to and folder.ranks.is_first else "none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
        bf16=False,
    )
    one_device(arguments)
    return arguments


def _add(sums: dict[int, Tensor], more: dict[int, Tensor]) -> None:
    """Adds by layer; what is added stays as it is."""
    for layer, tensor in more.items():
        sums[layer] = sums[layer] + tensor if layer in sums else tensor.clone()


def _or_none(number: float | None) -> float | None:
    """JSON has no NaN."""
    return number if number is not None and math.isfinite(number) else None
