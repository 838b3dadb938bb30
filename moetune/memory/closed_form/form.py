"""Memory of runs of one kind at any size: records made once, kept on disk, and evaluated.

Runs are of one kind if they differ in sizes alone: rows and tokens of a micro-batch, how the loss divides them, how
many tokens each expert receives, and what no tensor depends on (steps, learning rates, files).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np
import torch
from transformers import PreTrainedModel

from moetune.config.schema import OptimizerConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.closed_form import store
from moetune.memory.closed_form.record import NoClosedForm, record
from moetune.memory.closed_form.sizes import ExpertRows, Shape, Sizes, alignment, exchanged, sizes_of
from moetune.memory.closed_form.store import KnownHead, Recorded
from moetune.memory.ranks import by_kind
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.trace.alike import Shortened, groups, kinds_of
from moetune.memory.trace.loading import load_peaks
from moetune.memory.trace.steps import Steps, batches_of, evaluated_rows
from moetune.memory.trace.tracing import NotTraceable, can_be_shortened, faked
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.models.moe import MoeLayer
from moetune.models.stack import decoder_stack
from moetune.parallel.coordinates import Coordinates
from moetune.run.resolve import ResolvedRun
from moetune.training.step.lm_head import split
from moetune.training.step.loss import Chunks


@dataclass(frozen=True)
class _Size:
    """Arguments of an evaluation.

    Attributes:
        rows: of each expert, by decoder layer.
        batch, held_out: how the loss divides the tokens of a batch, and of a held-out one that counts.
    """

    shape: Shape
    sizes: Sizes
    rows: dict[int, ExpertRows]
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
    def kinds(self) -> list[Hashable]:
        """Properties of each decoder layer that its memory depends on."""
        return kinds_of(self.run, Coordinates.of(self.run.config.parallel, self.rank).ep)

    @cached_property
    def short(self) -> Shortened:
        """The layers that are run, and what they stand for."""
        if not can_be_shortened(self.run.config):
            return Shortened(self.run, tuple(range(self.run.structure.num_layers)), ())
        kept, units = groups(self.kinds)
        return Shortened(self.run, tuple(kept), tuple(units))

    @cached_property
    def limits(self) -> set[int]:
        """Numbers of the model's configuration that a sequence's length is compared with, as with a window, a block, or
        how many keys are chosen."""
        return _limits(self.run.model.settings.to_dict())

    @cached_property
    def key(self) -> str:
        """Digest of the kind of run and of the versions that made its records."""
        return store.key_of(kind_of(self.run) | {"gpu": self.gpu and self.gpu.capability}, self.rank)

    @overload
    def at(self, config: RunConfig, routing: Routing = ..., *, may_record: Literal[True] = ...) -> Trace: ...

    @overload
    def at(self, config: RunConfig, routing: Routing = ..., *, may_record: bool) -> Trace | None: ...

    def at(self, config: RunConfig, routing: Routing = BALANCED, *, may_record: bool = True) -> Trace | None:
        """Evaluate a run of this kind: its last step, in which only bytes are by formula.

        Args:
            may_record: whether to record a step that was not recorded before; else there may be no answer.

        Raises:
            NoClosedForm: a storage of its step is no product of sizes, the model's code looks at values, or layers
                differ in which of their experts receive no token.
        """
        known = self.recorded = self.recorded or store.read(self.key)
        if known is None or self._size(config, routing).shape not in known.records:
            if not may_record:
                return None
            with self._steps() as steps:
                if known is None:
                    known = self.recorded = Recorded(_head_of(steps))
                shape = self._size(config, routing).shape
                known.records[shape] = record(steps, shape, config.train.sequence_length, self.limits)
            store.write(self.key, known)
        size = self._size(config, routing)
        recorded = known.records[size.shape]
        events, layers = known.events(size.shape, self.short)
        unlike = list(dict.fromkeys(size.rows.values())) or [ExpertRows((size.batch.tokens,))]
        sizes = [size.sizes | exchanged(self.run, rows) for rows in unlike]
        table = np.stack(
            [recorded.bytes_at(*both, size.batch, size.held_out) for both in zip(sizes, unlike, strict=True)]
        )
        if ((table != table[0]).any(0) & (recorded.layers < 0)).any():
            raise NoClosedForm("layers whose experts receive unlike numbers of tokens have a tensor together")
        of_layer = np.zeros(max([*size.rows, *layers.tolist()], default=0) + 2, dtype=np.int64)
        of_layer[list(size.rows)] = [unlike.index(rows) for rows in size.rows.values()]
        values = table[of_layer[layers], events.like]
        found = Trace(recorded.log, events, values, formula=recorded.formula, sizes=sizes[0])
        return replace(found, load=load_peaks(self.run, found))

    def _size(self, config: RunConfig, routing: Routing) -> _Size:
        assert self.recorded is not None
        head, train, length = self.recorded.head, config.train, config.train.sequence_length
        batch = Chunks.of(train.loss_bytes, head, train.micro_batch * length)
        more = evaluated_rows(config) if evaluated_rows(config) > train.micro_batch else 0
        held_out = Chunks.of(train.loss_bytes, head, more * length) if more else None
        rows = self._rows(batch.tokens, held_out.tokens if held_out else 0, routing)
        idle = {one.idle for one in rows.values()} or {((), ())}
        if len(idle) > 1:
            raise NoClosedForm("layers differ in which experts receive no token; use --method trace")
        is_alone = head.trains and batch.size >= batch.tokens
        one_row = train.micro_batch == 1 and (self.gpu is None or config.model.attention == "eager")
        longer = tuple(sorted(limit for limit in self.limits if limit > length))
        shape = Shape(alignment(length), one_row, is_alone, held_out is not None, idle.pop(), longer)
        return _Size(shape, sizes_of(train.micro_batch, length, batch, more, held_out), rows, batch, held_out)

    def _rows(self, trained: int, held_out: int, routing: Routing) -> dict[int, ExpertRows]:
        """Rows of each expert, by layer, for these numbers of tokens."""
        tp, known = self.run.config.parallel.tp, dict[Hashable, ExpertRows]()

        def of(layer: MoeLayer) -> ExpertRows:
            key = layer.top_k, layer.shape.num_experts, layer.index if routing.load else None
            if key not in known:
                counts = (
                    routing.rows(layer.index, tokens // tp, layer.top_k, layer.shape.num_experts) if tokens else ()
                    for tokens in (trained, held_out)
                )
                known[key] = ExpertRows(*map(tuple, counts))
            return known[key]

        return {layer.index: of(layer) for layer in self.run.structure.moe_layers}

    @contextmanager
    def _steps(self) -> Iterator[Steps]:
        """A shortened model on fake tensors, its optimizer's states made."""
        if self.run.config.parallel.engine == "deepspeed":
            raise NoClosedForm("DeepSpeed has no closed form: it joins all that trains; use --method trace")
        try:
            with faked(self.run, self.rank, self.gpu, shortened=True) as (adapted, _, mode):
                adapted.model.train()
                steps = Steps(adapted, batches_of(adapted), gpu=self.gpu)
                with mode:
                    steps.make_states()
                    yield steps
        except NotTraceable as error:
            raise NoClosedForm(str(error)) from None


_LIMITS = ("topk", "window", "block", "chunk", "budget")
"""In their names."""


def _limits(settings: Any, name: str = "") -> set[int]:
    if isinstance(settings, Mapping):
        return set().union(*(_limits(value, str(key)) for key, value in settings.items()))
    if isinstance(settings, (list, tuple)):
        return set().union(*(_limits(value, name) for value in settings))
    is_one = isinstance(settings, int) and not isinstance(settings, bool)
    return {settings} if is_one and any(word in name for word in _LIMITS) else set()


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
    kind["data"] = {"packing": config.packs}
    kind["published"] = run.model.source.quantization.method
    kind["settings"] = run.model.settings.to_dict()
    return kind


def _of_optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Without what only scales an update; of the rest, numbers count by whether they are 0."""
    settings = optimizer.model_dump(mode="json", exclude={"lr", "eps"})
    settings["betas"] = None if optimizer.betas is None else [bool(beta) for beta in optimizer.betas]
    return settings | {key: bool(settings[key]) for key in ("weight_decay", "momentum")}


_PROBED = (256, 768)
"""Tokens, with the same alignment and no probe size among them."""


def _head_of(steps: Steps) -> KnownHead:
    """Run a forward pass; and a longer one, to see whether the model's code is as long.

    Raises:
        NoClosedForm: it loops over the sequence.
    """
    adapted, lengths = steps.adapted, []
    trains = _head_trains(adapted.model)
    for length in _PROBED if adapted.ranks.is_single else (_PROBED[0], *_PROBED):  # FSDP2's first pass makes what stays
        batch = batches_of(adapted, length)(1)
        inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "is_token")}
        tracker = Tracker({})
        with torch.no_grad(), steps.counting(BALANCED), tracker, split(adapted.model, inputs) as (_, tail):
            known = KnownHead(tail.vocabulary, tail.width, tail.row_bytes, trains)
        lengths.append(sum(entry >= 0 for entry in tracker.log.entries))
    if lengths[-2] != lengths[-1]:
        raise NoClosedForm(
            f"model type {adapted.structure.model_type!r} makes {lengths[-2]:,} tensors of {_PROBED[0]} tokens and "
            f"{lengths[-1]:,} of {_PROBED[1]}: a step has no closed form; use --method trace"
        )
    return known


def _head_trains(model: PreTrainedModel) -> bool:
    """Whether anything outside of the decoder stack trains, or a head that is tied to what is inside."""
    inside = f"{next(path for path, module in model.named_modules() if module is decoder_stack(model))}."
    named = model.named_parameters(remove_duplicate=False)
    return any(parameter.requires_grad for name, parameter in named if not name.startswith(inside))


def record_ahead(run: ResolvedRun) -> None:
    """Record the steps of all ranks of a run ahead: a rank cannot record while it runs."""
    card = find_gpu(run.config.hardware.gpu or "l40s") if run.device_type == "cuda" else None
    try:
        by_kind(run, BALANCED, lambda rank: ClosedForm(run, rank, card).at(run.config))
    except UserError:
        return  # without a closed form, memory.json has no prediction
