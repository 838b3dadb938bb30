"""`ClosedForm`: evaluates the memory of a run at any batch size and length from a step that was recorded once.

One closed form serves all runs of a kind: runs that differ only in sizes (rows and tokens of a micro-batch, their
division in the loss, tokens of each expert) and in settings that no tensor depends on (steps, learning rates, files).
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from moetune.adapt.documents import DOCUMENT_LENGTHS
from moetune.adapt.guard import as_known
from moetune.cache import file_of
from moetune.config.resolved import ResolvedConfig
from moetune.config.schema import OptimizerConfig
from moetune.errors import UserError
from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.closed_form import store
from moetune.memory.closed_form.record import NoClosedForm, Record, record
from moetune.memory.closed_form.sizes import ExpertRows, Shape, Sizes, alignment, exchanged, sizes_of
from moetune.memory.closed_form.store import KnownHead, Recorded
from moetune.memory.equal_ranks import by_kind
from moetune.memory.trace.alike import Stack, kinds_of
from moetune.memory.trace.loading import load_peaks
from moetune.memory.trace.steps import Steps, batches_of, evaluated_rows
from moetune.memory.trace.tracing import NotTraceable, can_be_shortened, faked
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.models.moe import MoeLayer
from moetune.models.stack import below_head
from moetune.parallel.coordinates import Coordinates, token_shares
from moetune.parallel.distribute import reshard
from moetune.run.keeps import recomputes_layers
from moetune.run.resolve import ResolvedRun
from moetune.training.step.batch import Batch
from moetune.training.step.lm_head import LMHead, split
from moetune.training.step.loss import Chunks


@dataclass(frozen=True)
class _Size:
    """Sizes of one run, at which a closed form is evaluated.

    Attributes:
        shape: the shape of the run's batches, under which its record is found.
        sizes: values of the named sizes (sizes.py), except tokens of experts.
        rows: decoder layer -> tokens of each of its experts.
        batch, held_out: division of the tokens of a micro-batch, and of an evaluation's batch, in the loss; None if the
            latter has no more rows than a micro-batch.
    """

    shape: Shape
    sizes: Sizes
    rows: dict[int, ExpertRows]
    batch: Chunks
    held_out: Chunks | None


@dataclass
class ClosedForm:
    """Formulas for the memory of one rank of a run, valid for all runs that differ from it only in sizes (its kind).

    The formulas come from a step of the trainer, recorded on fake tensors when `at` first needs it.

    Attributes:
        run: any run of the kind.
        rank: number of the rank.
        gpu: GPU whose attention kernels and workspaces are assumed; None for a CPU.
        recorded: records that were read from disk or made; None before the first evaluation.
    """

    run: ResolvedRun
    rank: int = 0
    gpu: Gpu | None = None
    recorded: Recorded | None = None

    @cached_property
    def kinds(self) -> list[Hashable]:
        """For each decoder layer, the properties that its memory depends on; equal for identical layers."""
        return kinds_of(self.run, self.ep)

    @cached_property
    def ep(self) -> int:
        """The rank's index on the `ep` axis, along which the experts are divided."""
        return Coordinates.of(self.run.config.parallel, self.rank).ep

    @cached_property
    def stack(self) -> Stack:
        """The decoder layers that are recorded, and those that they stand for."""
        if not can_be_shortened(self.run.config):
            return Stack.whole(self.run.structure.num_layers)
        return Stack.of(self.kinds)

    @cached_property
    def limits(self) -> set[int]:
        """Lengths in the model's configuration, such as a window, to which its code may compare a sequence's length."""
        return _limits(self.run.model.settings.to_dict())

    @cached_property
    def file(self) -> Path:
        """The records' file in the cache, named by a digest of what the recorded step depends on apart from sizes
        (settings, recorded layers, rank, compute capability, versions of libraries, source code). Runs with the same
        shortened model share it, such as two that train the experts of the first 6 and of the first 12 layers."""
        run, kind = self.run, kind_of(self.run) | {"gpu": self.gpu and self.gpu.capability}
        if can_be_shortened(run.config):
            lora = kind.pop("adapt")["lora"] or {}
            del kind["train"]["keeps"]  # contained in the layers' kinds
            outside = {part.name for part in run.structure.parameters if part.layer is None}
            linears = {path for path, linear in run.structure.linears().items() if linear.layer is None}
            kind["shortened"] = [
                {name: lora[name] for name in lora if name not in ("targets", "layers", "ids")},
                sorted(run.selection.full & outside),
                sorted(linears.intersection(run.selection.lora_linears)),
                [self.kinds[layer] for layer in self.stack.kept],
            ]
        else:
            kind["placement"] = dict(run.placement)  # depends on what is in the file `parallel.load`
        return file_of({"kind": kind, "rank": self.rank})

    @overload
    def at(
        self, config: ResolvedConfig, routing: AssumedRouting = ..., *, may_record: Literal[True] = ...
    ) -> Trace: ...

    @overload
    def at(self, config: ResolvedConfig, routing: AssumedRouting = ..., *, may_record: bool) -> Trace | None: ...

    def at(
        self, config: ResolvedConfig, routing: AssumedRouting = BALANCED, *, may_record: bool = True
    ) -> Trace | None:
        """Evaluate the closed form at the sizes of a run of this kind.

        Records are read from disk. If no step of the run's shape is recorded, it is recorded, which takes seconds, and
        written to disk; or None is returned if not `may_record`.

        Args:
            config: run of this kind, whose sizes are used.
            routing: assumed number of tokens that each expert receives.

        Returns:
            The trace of the run's last step on the whole model, with bytes by formula, without collectives and work.

        Raises:
            NoClosedForm: a storage's bytes are no product of sizes; the model's code reads the values of tensors; the
                engine is DeepSpeed; layers differ in which of their experts receive no token.
            UserError: a recorded load in `routing` does not match the model's layers or experts.
        """
        if not may_record and not self.knows(config, routing):
            return None
        known = self.with_records(config, routing)
        size = self._size(config, routing)
        recorded = known.records[size.shape]
        events, layers = known.events(size.shape, self.stack)
        of_layers = [(rows, tuple(self._received(layer, rows).items())) for layer, rows in size.rows.items()]
        unlike = list(dict.fromkeys(of_layers)) or [(ExpertRows((size.batch.tokens,)), ())]
        sizes = [size.sizes | dict(received) for _, received in unlike]
        table = np.stack(
            [
                recorded.bytes_at(of, rows, size.batch, size.held_out)
                for of, (rows, _) in zip(sizes, unlike, strict=True)
            ]
        )
        if ((table != table[0]).any(0) & (recorded.layers < 0)).any():
            raise NoClosedForm(
                "layers whose experts receive different numbers of tokens share a tensor; use --method trace"
            )
        of_layer = np.zeros(max([*size.rows, *layers.tolist()], default=0) + 2, dtype=np.int64)
        of_layer[list(size.rows)] = [unlike.index(one) for one in of_layers]
        values = table[of_layer[layers], events.like]
        found = Trace(recorded.log, events, values, formula=recorded.formula, sizes=sizes[0])
        return replace(found, load=load_peaks(self.run, found))

    def knows(self, config: ResolvedConfig, routing: AssumedRouting) -> bool:
        """Read the records from disk if none are loaded; return whether the step of a run's shape is among them."""
        self.recorded = self.recorded or store.read(self.file)
        return self.recorded is not None and self.shape(config, routing) in self.recorded.records

    def like(self, other: Record, shape: Shape) -> Record:
        """Record the run's step at one choice of probe sizes, to be compared with `other`, the record of the same step
        with another number of trained experts. Raises `NoClosedForm` as `at`."""
        with self._steps() as steps:
            return record(steps, shape, self.run.config.train.sequence_length, self.limits, other)

    def with_records(self, config: ResolvedConfig, routing: AssumedRouting = BALANCED) -> Recorded:
        """Return all records, among them that of a run's shape: read from disk, or recorded now and written to disk.
        Arguments and errors are those of `at`."""
        if not self.knows(config, routing):
            self._read_again()
        if not self.knows(config, routing):
            known = self.recorded
            with self._steps() as steps:
                if known is None:
                    known = self.recorded = Recorded(self._head(steps))
                shape = self.shape(config, routing)
                known.records[shape] = record(steps, shape, config.train.sequence_length, self.limits)
            self._read_again()
            store.write(self.file, known)
        assert self.recorded is not None
        return self.recorded

    def _read_again(self) -> None:
        """Add the records that other processes have written since `recorded` was read."""
        found = store.read(self.file)
        if found is not None and self.recorded is not None:
            for shape, one in found.records.items():
                self.recorded.records.setdefault(shape, one)

    def _head(self, steps: Steps) -> KnownHead:
        """Return the sizes of the LM head, which runs of a model share, however its weights are stored, unless they
        train it otherwise; else as `_head_of`."""
        run, structure = self.run, self.run.structure
        outside = {part.name for part in structure.parameters if part.layer is None}
        linears = {path for path, linear in structure.linears().items() if linear.layer is None}
        trained = run.selection.full & outside, frozenset(linears.intersection(run.selection.lora_linears))
        card = self.gpu and self.gpu.capability, run.config.hardware.without_kernels
        stored = run.config.model.model_copy(update={"base": "auto", "double_quant": True, "experts_on": "gpu"})
        drops = run.config.adapt.lora is not None and run.config.adapt.lora.dropout > 0
        known, key = _HEADS.setdefault(run.model.plain, {}), (stored, run.config.packs, *trained, drops, *card)
        if key not in known:
            known[key] = _head_of(steps)
        return known[key]

    def shape(self, config: ResolvedConfig, routing: AssumedRouting = BALANCED) -> Shape:
        """Return the shape of a run's batches, the key of its record. `recorded`, whose LM head it depends on, must be
        set."""
        return self._size(config, routing).shape

    def _size(self, config: ResolvedConfig, routing: AssumedRouting) -> _Size:
        """Return the sizes of a run. Raise `NoClosedForm` if layers differ in which experts receive no token, or if
        tensor-parallel ranks dispatch unequal shares of the tokens."""
        assert self.recorded is not None
        head, train, length = self.recorded.head, config.train, config.train.sequence_length
        if alignment(length) % token_shares(config.parallel):
            raise NoClosedForm(
                f"parallel.tp: {config.parallel.tp} ranks divide the tokens of a batch, and a closed form needs a "
                f"power of two that divides train.sequence_length, {length}; use --method trace"
            )
        memory = replace(self.run, config=config).loss_bytes()
        batch = Chunks.of(memory, head, train.micro_batch * length)
        more = evaluated_rows(config) if evaluated_rows(config) > train.micro_batch else 0
        without_gradients = replace(head, row_bytes=head.held_out_row_bytes)
        held_out = Chunks.of(memory, without_gradients, more * length) if more else None
        rows = self._rows(batch.tokens, held_out.tokens if held_out else 0, routing)
        idle = {one.idle for one in rows.values()} or {((), ())}
        if len(idle) > 1:
            raise NoClosedForm("layers differ in which experts receive no token; use --method trace")
        is_alone = head.trains and batch.size >= batch.tokens
        is_unlike = head.copies or self.gpu is None or config.model.attention == "eager"
        one_row = train.micro_batch == 1 and is_unlike
        longer = tuple(sorted(limit for limit in self.limits if limit > length))
        only: tuple[int, ...] = (train.micro_batch, length, batch.size, batch.block) if head.loops else ()
        if head.loops and held_out is not None:
            only += (more, length, held_out.size, held_out.block)
        shape = Shape(alignment(length), one_row, is_alone, held_out is not None, idle.pop(), longer, only)
        return _Size(shape, sizes_of(train.micro_batch, length, batch, more, held_out), rows, batch, held_out)

    def _rows(self, trained: int, held_out: int, routing: AssumedRouting) -> dict[int, ExpertRows]:
        """Return decoder layer -> tokens of each of its experts, from `trained`, the tokens of a micro-batch, and
        `held_out`, those of an evaluation's batch (0 without one)."""
        shares, known = token_shares(self.run.config.parallel), dict[Hashable, ExpertRows]()

        def of(layer: MoeLayer) -> ExpertRows:
            key = layer.top_k, layer.shape.num_experts, layer.index if routing.load else None
            if key not in known:
                counts = (
                    routing.rows(layer.index, tokens // shares, layer.top_k, layer.shape.num_experts) if tokens else ()
                    for tokens in (trained, held_out)
                )
                known[key] = ExpertRows(*map(tuple, counts))
            return known[key]

        return {layer.index: of(layer) for layer in self.run.structure.moe_layers}

    def _received(self, layer: int, rows: ExpertRows) -> Sizes:
        """Return the sizes r0, r1, … and q0, q1, … at which the storages of a layer are evaluated: all are the tokens
        sent to this rank's experts, because no storage has the rows of another rank's. The name in a record can be that
        of another rank, which was sent as many, or which holds the same experts in the first layer."""
        placed = self.run.placement.get(layer, ())
        return exchanged([placed[self.ep] for _ in placed], rows)

    @contextmanager
    def _steps(self) -> Iterator[Steps]:
        """Build the shortened model on fake tensors; yield its steps, with all optimizer states created. Raise
        `NoClosedForm` if the engine is DeepSpeed, or code within the context reads the values of tensors."""
        if self.run.config.parallel.engine == "deepspeed":
            raise NoClosedForm(
                "a DeepSpeed run has no closed form, because one flat tensor holds all trained weights; "
                "use --method trace"
            )
        try:
            with faked(self.run, self.rank, self.gpu, shortened=True) as (adapted, _, mode):
                adapted.model.train()
                steps = Steps(adapted, batches_of(adapted), gpu=self.gpu)
                with mode:
                    steps.make_states()
                    if not adapted.ranks.is_single:
                        with steps.counting(BALANCED):
                            steps.warm_up()
                    yield steps
        except NotTraceable as error:
            raise NoClosedForm(str(error)) from None


_LIMITS = ("topk", "window", "block", "chunk", "budget")
"""Parts of the names under which a model's configuration has lengths that a sequence's length is compared with."""


def _limits(settings: Any, name: str = "") -> set[int]:
    """Return all integers in nested settings whose innermost key contains a word of `_LIMITS`; `name` is the key of
    `settings` itself."""
    if isinstance(settings, Mapping):
        return set().union(*(_limits(value, str(key)) for key, value in settings.items()))
    if isinstance(settings, (list, tuple)):
        return set().union(*(_limits(value, name) for value in settings))
    is_one = isinstance(settings, int) and not isinstance(settings, bool)
    return {settings} if is_one and any(word in name for word in _LIMITS) else set()


def kind_of(run: ResolvedRun) -> dict[str, Any]:
    """Return all settings of a run that the storages of its step depend on, except sizes, as JSON values for `key`."""
    config = run.config
    kind = config.model_dump(mode="json", exclude={"hardware": True, "output": True, "adapt": {"start_from"}})
    # For these it only matters whether they are 0, that is off.
    numbers = (
        "max_grad_norm",
        "max_grad_value",
        "router_aux_loss",
        "router_z_loss",
        "router_bias_rate",
        "neftune_alpha",
    )
    kind["train"] = {key: bool(kind["train"][key]) for key in numbers}
    if (lora := config.adapt.lora) is not None:
        unlike = {"dropout": lora.dropout > 0, "lr_ratio": lora.lr_ratio != 1}
        kind["adapt"]["lora"] |= unlike | {"alpha": None, "rslora": None}
    kind["optimizer"] = {part: _of_optimizer(optimizer) for part, optimizer in run.optimizers.items()}
    kind["train"]["expert_memory"] = run.expert_memory
    kind["train"]["recomputes"] = recomputes_layers(config.train)
    kind["train"]["inputs_on_host"] = config.train.checkpointing == "offload"
    kind["train"]["router_aux_scope"] = config.train.router_aux_scope
    kind["train"]["keeps"] = {layer: sorted(kept) for layer, kept in run.keeps.items()}
    kind["train"]["dense_router_gradient"] = config.train.dense_router_gradient
    kind["train"]["accumulate"] = min(config.train.accumulate, 2 if config.parallel.ranks == 1 else 3)
    kind["data"] = {"packing": config.packs}
    published = run.model.source.quantization
    kind["published"] = [published.method, run.model.gate_up_apart, published.left_out]
    kind["without_kernels"] = sorted(config.hardware.without_kernels)
    kind["settings"] = run.model.settings.to_dict()
    return kind


def _of_optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return an optimizer's settings for `kind_of`, without `lr` and `eps`, on which no tensor depends; of `betas`,
    `weight_decay` and `momentum` only whether each is nonzero, since this alone decides which tensors there are."""
    settings = optimizer.model_dump(mode="json", exclude={"lr", "eps"})
    settings["betas"] = None if optimizer.betas is None else [bool(beta) for beta in optimizer.betas]
    return settings | {key: bool(settings[key]) for key in ("weight_decay", "momentum")}


_HEADS: WeakKeyDictionary[nn.Module, dict[Hashable, KnownHead]] = WeakKeyDictionary()
"""Plain model -> all that its LM head depends on -> the head's sizes."""
_PROBED = (256, 768)
"""Two lengths in tokens, equally aligned. A model whose forward pass allocates more tensors at the longer one loops
over the sequence."""


def _head_of(steps: Steps) -> KnownHead:
    """Return the sizes of the LM head, whether the model loops, from forward passes at the lengths `_PROBED`, and
    whether it copies for several rows, from one with two."""
    adapted, trains = steps.adapted, _head_trains(steps.adapted.model)

    def ran(rows: int, length: int) -> tuple[KnownHead, Counter[tuple[str, int]], Batch]:
        batch = batches_of(adapted, length)(rows)
        inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "is_token")}
        tracker = Tracker({})
        with torch.no_grad(), steps.counting(BALANCED), tracker, split(adapted.model, inputs) as (hidden, tail):
            with torch.enable_grad():  # LoRA then makes other tensors
                training = LMHead(tail, hidden[0, :0])
            known = KnownHead(tail.vocabulary, tail.width, training.row_bytes, tail.row_bytes, trains)
        reshard(adapted.model)  # so that the next pass starts in the same state
        return known, Counter((block.op, block.bytes) for block in tracker.log.blocks), batch

    known, one, batch = ran(1, _PROBED[0])
    if DOCUMENT_LENGTHS in batch:  # documents run one after the other; a record serves its own sizes only
        return replace(known, loops=True, copies=False)
    longer, two = (ran(rows, length)[1] for rows, length in ((1, _PROBED[1]), (2, _PROBED[0])))
    copied = two - one - Counter({(op, 2 * size): count for (op, size), count in one.items()})
    hidden = 2 * _PROBED[0] * adapted.model.config.get_text_config().hidden_size * adapted.run.dtype.itemsize
    loops = one.total() != longer.total()
    return replace(known, loops=loops, copies=any(size > hidden for _, size in copied))


def _head_trains(model: PreTrainedModel) -> bool:
    """Return whether any parameter of the head trains, tied LM heads included."""
    inside = f"{next(path for path, module in model.named_modules() if module is below_head(model))}."
    named = model.named_parameters(remove_duplicate=False)
    return any(parameter.requires_grad for name, parameter in named if not name.startswith(inside))


def record_ahead(run: ResolvedRun) -> None:
    """Record the steps of all kinds of ranks of a run and write them to disk, before the ranks start.

    A rank cannot record while it runs, because recording needs a fake process group. For a run without a closed form
    nothing is written or raised; its `memory.json` then has no prediction. On CUDA the ranks ask for the card that they
    run on, whatever `hardware.gpu` says: it is taken to be the first of this machine.
    """
    from moetune.memory.measurement.verify import catalog_name  # which imports this module

    card = None
    try:
        if run.device_type == "cuda":
            card = find_gpu(catalog_name(torch.device("cuda", 0)))
            run = as_known(run, card)
        by_kind(run, BALANCED, lambda rank: ClosedForm(run, rank, card).at(run.config))
    except UserError:
        return
