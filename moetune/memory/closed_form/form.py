"""What runs of one kind take, at any size: records made once, kept on disk, and evaluated.

Runs are of one kind if they differ in sizes alone: rows and tokens of a micro-batch, how the loss divides them, how
many tokens each expert receives, and what no tensor depends on (steps, learning rates, files).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np
import torch
from transformers import PreTrainedModel

from moetune.adapt.build import Adapted
from moetune.anatomy.stack import decoder_layers, decoder_stack, leave_out
from moetune.catalog.gpus import Gpu, find_gpu
from moetune.config import OptimizerConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.closed_form import store
from moetune.memory.closed_form.formula import Peak, evaluate, parts_of
from moetune.memory.closed_form.record import NoClosedForm, Record, Rows, exchanged, record
from moetune.memory.closed_form.sizes import (
    CHUNK_NAMES,
    HELD_OUT_NAMES,
    Shape,
    Sizes,
    alignment,
    lengths,
    rows_and_borders,
    sizes_of_chunks,
)
from moetune.memory.closed_form.store import KnownTail, Recorded
from moetune.memory.ranks import by_kind
from moetune.memory.report import LoadPeaks, Parts
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.trace.alike import Shortened, unshortened
from moetune.memory.trace.steps import Steps, batches_of, evaluated_rows
from moetune.memory.trace.tracing import NotTraceable, faked, peaks_of_loading
from moetune.run.resolve import ResolvedRun
from moetune.step.loss import Chunks
from moetune.step.tail import split


@dataclass(frozen=True)
class Evaluated:
    """A run at its peak, by closed form.

    Attributes:
        sizes: what was put in.
    """

    record: Record
    peak: Peak
    parts: Parts
    sizes: Sizes
    load: LoadPeaks

    @property
    def managed(self) -> int:
        """The bytes of memory that the driver may have on either side."""
        is_managed = np.array([kind.managed for kind in self.record.named])[self.record.kinds]
        return int((self.peak.alive * self.peak.values)[is_managed].sum())


@dataclass(frozen=True)
class _Size:
    """What a run of a kind is evaluated at.

    Attributes:
        batch, held_out: how the loss divides the tokens of a batch, and of a held-out one that counts.
    """

    shape: Shape
    sizes: Sizes
    rows: Rows
    batch: Chunks
    held_out: Chunks | None


@dataclass
class ClosedForm:
    """One rank of one kind of run.

    Attributes:
        gpu: the card whose kernels run; None for the CPU's.
        recorded: None until something has been.
    """

    run: ResolvedRun
    rank: int = 0
    gpu: Gpu | None = None
    recorded: Recorded | None = None

    @cached_property
    def key(self) -> str:
        """Names the kind of run, and the versions that made its records."""
        return store.key_of(kind_of(self.run) | {"gpu": self.gpu and self.gpu.capability}, self.rank)

    @overload
    def at(self, config: RunConfig, routing: Routing = ..., *, may_record: Literal[True] = ...) -> Evaluated: ...

    @overload
    def at(self, config: RunConfig, routing: Routing = ..., *, may_record: bool) -> Evaluated | None: ...

    def at(self, config: RunConfig, routing: Routing = BALANCED, *, may_record: bool = True) -> Evaluated | None:
        """Evaluates a run of this kind.

        Args:
            may_record: whether to record a step that was not recorded before; else there may be no answer.

        Raises:
            NoClosedForm: a storage of its step is no product of sizes, or the model's code looks at values.
        """
        known = self.recorded = self.recorded or store.read(self.key)
        if known is None or self._size(config, routing).shape not in known.records:
            if not may_record:
                return None
            with self._steps() as (steps, short):
                if known is None:
                    load = peaks_of_loading(steps.adapted, self.run, short)
                    known = self.recorded = Recorded(_tail_of(steps.adapted), load)
                shape = self._size(config, routing).shape
                known.records[shape] = record(steps, short, shape)
            store.write(self.key, known)
        size = self._size(config, routing)
        of_shape = known.records[size.shape]
        peak = evaluate(of_shape, size.sizes, size.rows, size.batch, size.held_out)
        return Evaluated(of_shape, peak, parts_of(of_shape, peak), size.sizes, known.load)

    def _size(self, config: RunConfig, routing: Routing) -> _Size:
        assert self.recorded is not None
        tail, train, length = self.recorded.tail, config.train, config.train.sequence_length
        batch = Chunks.of(train.loss_bytes, tail, train.micro_batch * length)
        more = evaluated_rows(config) if evaluated_rows(config) > train.micro_batch else 0
        held_out = Chunks.of(train.loss_bytes, tail, more * length) if more else None
        rows = Rows(self._rows(batch.tokens, routing), self._rows(held_out.tokens, routing) if held_out else ())
        idle = tuple(
            tuple(expert for expert, count in enumerate(counts) if not count)
            for counts in (rows.trained, rows.held_out)
        )
        is_alone = tail.trains and batch.size >= batch.tokens
        one_row = train.micro_batch == 1 and (self.gpu is None or config.model.attention == "eager")
        shape = Shape(alignment(length), one_row, is_alone, held_out is not None, idle)  # type: ignore[arg-type]
        sizes = {**rows_and_borders(train.micro_batch, "B"), **lengths(length), **sizes_of_chunks(batch, CHUNK_NAMES)}
        if held_out is not None:
            sizes |= {**rows_and_borders(more, "E"), **sizes_of_chunks(held_out, HELD_OUT_NAMES)}
        return _Size(shape, sizes | exchanged(self.run, rows), rows, batch, held_out)

    def _rows(self, tokens: int, routing: Routing) -> list[int]:
        """Rows of each expert of a layer; of recorded load the fullest of all layers, expert by expert."""
        moe, tp = self.run.anatomy.moe_layers, self.run.config.parallel.tp
        if not moe:
            return [tokens]
        layers = moe if routing.load else moe[:1]
        counts = [routing.rows(one.index, tokens // tp, one.top_k, one.shape.num_experts) for one in layers]
        return [max(of_expert) for of_expert in zip(*counts, strict=True)]

    @contextmanager
    def _steps(self) -> Iterator[tuple[Steps, Shortened]]:
        """A shortened model on fake tensors, its optimizer's states made."""
        if self.run.config.parallel.engine == "deepspeed":
            raise NoClosedForm("DeepSpeed has no closed form: it joins all that trains; use --method trace")
        try:
            with faked(self.run, self.rank, self.gpu, shortened=True) as (adapted, shortened, mode):
                adapted.model.train()
                short = shortened or unshortened(self.run)
                steps = Steps(adapted, batches_of(adapted), short.kept, self.gpu)
                with mode:
                    steps.make_states()
                    yield steps, short
        except NotTraceable as error:
            raise NoClosedForm(str(error)) from None


def kind_of(run: ResolvedRun) -> dict[str, Any]:
    """Everything that the storages of a step depend on, but sizes."""
    config = run.config
    kind = config.model_dump(mode="json", exclude={"hardware": True, "output": True, "adapt": {"start_from"}})
    # Those that are 0 do nothing.
    numbers = (
        "max_grad_norm",
        "max_grad_value",
        "router_aux_loss",
        "router_z_loss",
        "router_bias_rate",
        "neftune_alpha",
    )
    kind["train"] = {"checkpointing": config.train.checkpointing} | {key: bool(kind["train"][key]) for key in numbers}
    if (lora := config.adapt.lora) is not None:
        unlike = {"dropout": lora.dropout > 0, "lr_ratio": lora.lr_ratio != 1}
        kind["adapt"]["lora"] |= unlike | {"alpha": None, "rslora": None}
    kind["optimizer"] = {part: _of_optimizer(optimizer) for part, optimizer in run.optimizers.items()}
    kind["train"]["expert_memory"] = run.expert_memory
    kind["train"]["dense_router_gradient"] = config.train.dense_router_gradient
    kind["train"]["accumulate"] = min(config.train.accumulate, 2 if config.parallel.ranks == 1 else 3)
    kind["data"] = {"packing": config.data is None or config.data.packing}
    kind["published"] = run.model.published.method
    kind["settings"] = run.model.settings.to_dict()
    return kind


def _of_optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Without what only scales an update; of the rest, numbers count by whether they are 0."""
    settings = optimizer.model_dump(mode="json", exclude={"lr", "eps"})
    settings["betas"] = None if optimizer.betas is None else [bool(beta) for beta in optimizer.betas]
    return settings | {key: bool(settings[key]) for key in ("weight_decay", "momentum")}


def _tail_of(adapted: Adapted) -> KnownTail:
    """One forward pass tells; without layers, except where FSDP2 learns in its first one what there is to gather."""
    layers = decoder_layers(adapted.model) if adapted.ranks.is_single else {}
    if layers:
        leave_out(adapted.model, range(len(layers)))
    batch = batches_of(adapted, 64)(1)
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "is_token")}
    count, trains = BALANCED.count_rows, _tail_trains(adapted.model)
    try:
        with torch.no_grad(), adapted.links.counting_by(count), split(adapted.model, inputs) as (_, tail):
            return KnownTail(tail.vocabulary, tail.width, tail.row_bytes, trains)
    finally:
        for path, layer in layers.items():
            adapted.model.set_submodule(path, layer)


def _tail_trains(model: PreTrainedModel) -> bool:
    """Whether anything outside of the decoder stack trains, or a head that is tied to what is inside."""
    inside = f"{next(path for path, module in model.named_modules() if module is decoder_stack(model))}."
    named = model.named_parameters(remove_duplicate=False)
    return any(parameter.requires_grad for name, parameter in named if not name.startswith(inside))


def record_ahead(run: ResolvedRun) -> None:
    """Records what the ranks of a run will ask for; they cannot while they run."""
    card = find_gpu(run.config.hardware.gpu or "l40s") if run.device_type == "cuda" else None
    try:
        by_kind(run, BALANCED, lambda rank: ClosedForm(run, rank, card).at(run.config))
    except UserError:
        return  # without a closed form, memory.json has no prediction
