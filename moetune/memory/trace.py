"""The training step on fake tensors, every storage of it recorded.

The model comes from the same `build`, the step is the trainer's own, the optimizer too. What is injected is the one
value that shapes depend on: how many tokens each expert receives (`routing`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor import DTensor

from moetune.adapt.build import Adapted
from moetune.adapt.fake import build_fake, tensors_of
from moetune.anatomy.moe import MoeLayer
from moetune.anatomy.stack import decoder_layers
from moetune.config import RunConfig, refuse_untraceable
from moetune.errors import UserError
from moetune.experts.host import stays_on_host
from moetune.experts.mlp import Counting, counting_by
from moetune.memory.loading import load_peaks
from moetune.memory.replay import Recording, Shown, find_alike, recording
from moetune.memory.report import PART_NAMES, Allocation, Collective, LoadPeaks, Moment, PartName, Parts, Phase, Sample
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.tracker import Block, Mark, Tracker
from moetune.parallel.exchange import Arriving, arriving_by, as_they_leave
from moetune.parallel.messages import Message
from moetune.parallel.pretend import pretending
from moetune.parallel.ranks import ALONE, here
from moetune.step.loss import IGNORED
from moetune.step.optimizers import make_optimizer
from moetune.step.router_losses import RouterWatch
from moetune.step.step import Batch, count_loss_tokens, held_out_loss
from moetune.step.stepper import Stepper

STEPS = 2
"""Optimizer states appear in the first step, for which one micro-step is enough; the second is like all that follow."""


class NotTraceable(UserError):
    """The model's own code looks at values, which fake tensors do not have."""


@dataclass(frozen=True)
class Trace:
    """Every storage of the first steps, in order of birth, and what happened when; see `Tracker`.

    What is on the host is among the blocks, and counts in `host_peak` only.

    Attributes:
        peak: place in the log after which the most is alive on the device.
        host_peak: the most bytes that are on the host at once.
        load: the peaks before the first step; None for a trace of real steps.
        collectives: what leaves this rank in the last step, by the phase in which it does.
    """

    blocks: list[Block]
    log: list[int]
    marks: list[Mark]
    peak: int
    host_peak: int = 0
    load: LoadPeaks | None = None
    collectives: tuple[Collective, ...] = ()

    @classmethod
    def of(
        cls, tracker: Tracker, begin: int = 0, axis_of: Callable[[Message], str] = ALONE.axis_of, left_out: int = 0
    ) -> Trace:
        """What the tracker saw, its peak looked for from place `begin` of the log on.

        Args:
            axis_of: the axis along which a message goes.
            left_out: micro-steps of a step like its second one, which were not run.
        """
        alive = most = peak = on_host = host_peak = 0
        for at, entry in enumerate(tracker.log):
            block = tracker.blocks[entry if entry >= 0 else ~entry]
            change = block.bytes if entry >= 0 else -block.bytes
            if block.on_host:
                on_host += change
                host_peak = max(host_peak, on_host)
                continue
            alive += change
            if alive > most and at >= begin:
                most, peak = alive, at
        collectives: dict[tuple[str, str, str], list[int]] = {}
        for step, micro_step, phase, sent in tracker.messages:
            if step == tracker.step and sent.ranks > 1:
                key = (sent.kind, axis_of(sent), f"in {phase}")
                times = 1 + left_out if micro_step == 1 else 1
                collectives.setdefault(key, []).extend([sent.bytes] * times)
        return cls(
            tracker.blocks,
            tracker.log,
            tracker.marks,
            peak,
            host_peak,
            collectives=tuple(Collective(*key, len(sizes), sum(sizes)) for key, sizes in collectives.items()),
        )

    def alive(self, at: int) -> Iterator[Block]:
        """What is alive on the device after this place of the log."""
        return (
            block
            for block in self.blocks
            if block.born <= at and (block.died is None or block.died > at) and not block.on_host
        )

    def parts(self, at: int) -> Parts:
        """The bytes alive after this place of the log, by part."""
        return _parts(self.alive(at))

    def most(self, part: PartName) -> int:
        """The most bytes of a part that are alive at once on the device."""
        alive = most = 0
        for entry in self.log:
            block = self.blocks[entry if entry >= 0 else ~entry]
            if block.part == part and not block.on_host:
                alive += block.bytes if entry >= 0 else -block.bytes
                most = max(most, alive)
        return most

    def moment(self, largest: int = 20) -> Moment:
        """When the peak is, and the largest allocations then, those of one module, phase and operation together."""
        mark = self.marks[bisect_right(self.marks, self.peak, key=lambda mark: mark.at) - 1]
        groups: dict[tuple[PartName, str, Phase, str], list[int]] = {}
        for block in self.alive(self.peak):
            groups.setdefault((block.part, block.module, block.phase, block.op), []).append(block.bytes)
        allocations = [
            Allocation(part, module, phase, op, len(sizes), sum(sizes))
            for (part, module, phase, op), sizes in groups.items()
        ]
        allocations.sort(key=lambda allocation: -allocation.bytes)
        return Moment(mark.step, mark.micro_step, mark.phase, mark.module, tuple(allocations[:largest]))

    def timeline(self, points: int = 600) -> tuple[Sample, ...]:
        """The last step in about so many samples, each the fullest moment of its stretch; phases are labelled."""
        begin = next(mark.at for mark in self.marks if mark.step == self.marks[-1].step)
        labels: dict[int, str] = {}
        label = ""
        for mark in (mark for mark in self.marks if mark.at >= begin):
            phase = "backward" if mark.phase == "recompute" else mark.phase
            now = phase if phase in ("optimizer", "evaluation") else f"{phase} {mark.micro_step}"
            if now != label:
                label = labels[mark.at] = now
        stretch = max(1, (len(self.log) - begin) // points)
        alive = dict.fromkeys(PART_NAMES, 0)
        for block in self.alive(begin - 1):
            alive[block.part] += block.bytes
        samples, fullest, label = [], dict(alive), ""
        for at in range(begin, len(self.log)):
            entry = self.log[at]
            block = self.blocks[entry if entry >= 0 else ~entry]
            if not block.on_host:
                alive[block.part] += block.bytes if entry >= 0 else -block.bytes
            label = labels.get(at, label)
            if sum(alive.values()) > sum(fullest.values()):
                fullest = dict(alive)
            if (at - begin) % stretch == 0 or at + 1 in labels or at + 1 == len(self.log):
                samples.append(Sample(label, Parts(**fullest)))
                fullest, label = dict(alive), ""
        return tuple(samples)

    def events(self) -> Iterator[tuple[int, int]]:
        """Births (block, bytes) and deaths (block, -1) on the device, in order, as the allocator simulation takes
        them."""
        for entry in self.log:
            number = entry if entry >= 0 else ~entry
            if not self.blocks[number].on_host:
                yield number, self.blocks[number].bytes if entry >= 0 else -1


def trace(
    config: RunConfig,
    routing: Routing | Counting = BALANCED,
    *,
    compose: bool = True,
    micro_steps: int | None = None,
    rank: int = 0,
    arriving: Arriving = as_they_leave,
) -> Trace:
    """Traces the first steps of a run, without weights, data or a GPU.

    Args:
        routing: what the experts receive: an assumption, or whatever answers `tokens_per_expert`.
        compose: replay layers that are alike instead of running each (docs/concepts/trace.md); about the same result,
            sooner. Runs with a load that differs from layer to layer are traced in full.
        micro_steps: of each step; by default two at most, because all further ones are like the second.
        rank: which one of `parallel:` it is.
        arriving: what its experts receive of other ranks; by default as if these sent what it sends.

    Raises:
        UserError: as `build`; or the run file asks for what training does not do yet.
        NotTraceable: the model's own code looks at values.
    """
    refuse_untraceable(config)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    uniform = not (isinstance(routing, Routing) and routing.load)
    with pretending(config.parallel, rank) as ranks:
        adapted = build_fake(config, mode, ranks)
        adapted.model.train()
        makes_its_own = config.parallel.engine == "deepspeed"  # tensors; torch's and bitsandbytes' optimizers read some
        with mode if makes_its_own else nullcontext():
            steps = Steps(adapted, config, partial(make_batch, config, vocabulary_of(adapted)))
        load = peaks_of_loading(adapted, config)
        try:
            with mode:
                if compose and uniform and micro_steps is None and ranks.alone:
                    return replace(steps.compose(routing), load=load)
                tracker = Tracker(steps.named)
                with steps.counting(routing, tracker), arriving_by(arriving):
                    if micro_steps is not None or ranks.alone:
                        traced = steps.run(tracker, micro_steps or min(2, config.train.accumulate))
                    else:  # the first and the last send other things than those between
                        traced = steps.run(tracker, min(3, config.train.accumulate), first=1)
                    return replace(traced, load=load)
        except DataDependentOutputException as error:
            raise NotTraceable(
                f"{config.model.path!r} cannot be traced: the code of model type {adapted.anatomy.model_type!r} looks "
                f"at values ({error.func}); use --method formula"
            ) from None


def peaks_of_loading(adapted: Adapted, config: RunConfig) -> LoadPeaks:
    """The peaks before the first step, from the storages of a model that is built."""

    def size(model: nn.Module, *, on_host: bool = False) -> int:
        storages = [t.untyped_storage() for t in tensors_of(model) if stays_on_host(t) == on_host]
        return sum({id(storage): storage.nbytes() for storage in storages}.values())

    banks = {layer.index: size(adapted.model.get_submodule(layer.experts)) for layer in adapted.anatomy.moe_layers}
    there = size(adapted.model, on_host=True)
    return load_peaks(adapted.anatomy, config, banks, size(adapted.model), there)


def vocabulary_of(adapted: Adapted) -> int:
    """How many tokens the model knows."""
    return adapted.model.get_input_embeddings().num_embeddings


def evaluated_rows(config: RunConfig) -> int:
    """Rows of a batch of held-out data; 0 if there are none."""
    if config.data is None or config.data.eval is None:
        return 0
    return config.train.eval_micro_batch or config.train.micro_batch


def make_batch(config: RunConfig, vocabulary: int, rows: int) -> Batch:
    """A batch as the run's collator gives it, `[rows, sequence_length]`: two documents a row if packed, else one row a
    token shorter than the others, so that attention needs a mask as it does on real data."""
    shape = (rows, config.train.sequence_length)
    ids = torch.randint(vocabulary, shape)
    if config.data is None or config.data.packing:
        half = shape[1] // 2
        positions = torch.cat([torch.arange(half), torch.arange(shape[1] - half)]).repeat(shape[0], 1)
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "is_token": torch.ones_like(ids)}
    is_token = torch.ones_like(ids)
    is_token[0, -1] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(is_token == 0, IGNORED), "attention_mask": is_token}


class Steps:
    """A run's first steps under a tracker: the same code for fake tensors and for real ones."""

    def __init__(self, adapted: Adapted, config: RunConfig, batch_of: Callable[[int], Batch]) -> None:
        self.adapted, self.config, self.batch_of = adapted, config, batch_of
        self.trained = list(adapted.trainable().values())
        self.optimizer = make_optimizer(adapted, config)
        self.watch = RouterWatch(adapted)
        self.stepper = Stepper(adapted, config, self.optimizer, self.watch)
        engine = self.stepper.engine
        shards = {} if engine is None else dict(engine.weights())
        self.held = [*tensors_of(adapted.model), *shards.values()]
        self.trained_storages = {id(here(shards.get(p, p)).untyped_storage()) for p in self.trained}
        self.named = named_modules(adapted)
        self.layer_of = {layer.experts: layer.index for layer in adapted.anatomy.moe_layers}

    def run(
        self, tracker: Tracker, micro_steps: int, *, first: int | None = None, steps: int = STEPS, tracking: bool = True
    ) -> Trace:
        """Takes the steps, each of so many micro-steps, or the `first` one of fewer. Without `tracking` only phases and
        modules are noted."""
        with self._following(tracker, tracking):
            for step in range(steps):
                tracker.step = step
                self._step(tracker, first if first and step == 0 else micro_steps)
            self._evaluate(tracker)
        self.watch.remove()
        left_out = self.config.train.accumulate - micro_steps if micro_steps > 2 else 0
        return Trace.of(tracker, axis_of=self.adapted.ranks.axis_of, left_out=left_out)

    def compose(self, routing: Routing | Counting) -> Trace:
        """The same for fake tensors, where layers that are alike are replayed.

        A pass that is not part of the trace records one layer of each kind. The first step, which is there for the
        optimizer's states to appear, replays them all; the second runs the first and the last of a kind for real.
        """
        model, before, tracker = self.adapted.model, Tracker(self.named), Tracker(self.named)
        embedding = any(p.requires_grad for p in model.get_input_embeddings().parameters())
        kinds = find_alike(model, embedding, before)
        for alike in kinds:
            alike.replace(model, ends=False)
        last = [alike.layers[-1] for alike in kinds]
        shown: dict[int, Shown] = {}
        routers = [[self._router_of(stand_in.path) for stand_in in alike.stand_ins] for alike in kinds]

        for alike, kind in zip(kinds, routers, strict=True):
            for stand_in, router in zip(alike.stand_ins, kind, strict=True):
                stand_in.show = None if router is None else partial(self._show, router)
                stand_in.fused = self.stepper.fused

        def saw(layer: int, logits: Tensor) -> None:
            shown[layer] = Shown(before.block_of(logits), logits.shape, logits.dtype)
            for alike, kind in zip(kinds, routers, strict=True):
                if any(router is not None and router.index == layer for router in kind):
                    for stand_in in alike.stand_ins:
                        stand_in.recording.logits = logits.shape, logits.dtype

        self.watch.on_logits = saw
        of_last: list[Shown | None] = []
        with (
            self.counting(routing, before),
            self._following(before),
            recording(last, before, of_last) as recordings,
        ):
            batch = self.batch_of(self.config.train.micro_batch)
            with self.stepper.nothing_fused():
                self._micro_step(batch, count_loss_tokens(batch), before)
            self.optimizer.zero_grad()
            of_last += [None if kind[-1] is None else shown.get(kind[-1].index) for kind in routers]
        self.watch.on_logits = None
        for alike, recorded in zip(kinds, recordings, strict=True):
            alike.play(recorded, tracker)
            alike.replace(model, ends=True)
        with self.counting(routing, tracker), self._following(tracker):
            self._step(tracker, 1)
            for alike in kinds:
                alike.replace(model, ends=False)
            tracker.step, begin = 1, len(tracker.log)
            self._step(tracker, min(2, self.config.train.accumulate))
            for alike in kinds:
                alike.play(Recording(), tracker)  # a layer of an evaluation keeps nothing
            self._evaluate(tracker)
        return Trace.of(tracker, begin)  # the first step takes no more than the second, which has states beside it

    def _router_of(self, path: str) -> MoeLayer | None:
        return next((r for r in self.adapted.anatomy.moe_layers if r.experts.startswith(f"{path}.")), None)

    def _show(self, router: MoeLayer, logits: Tensor) -> None:
        """Choices [T, K] take 8 bytes: the real ones are among what is replayed."""
        choices = torch.empty(1, dtype=torch.int64).expand(logits.shape[0], router.top_k)
        self.watch.show(router.index, logits, choices)

    @contextmanager
    def counting(self, routing: Routing | Counting, tracker: Tracker) -> Iterator[None]:
        """Answers `tokens_per_expert` inside by an assumption, which asks for the layer, or in another way."""
        if isinstance(routing, Routing):
            routing = routing.counting(lambda: self.layer_of[tracker.module])
        with counting_by(routing):
            yield

    @contextmanager
    def _following(self, tracker: Tracker, tracking: bool = True) -> Iterator[None]:
        for tensor in self.held:
            trains = id(tensor.untyped_storage()) in self.trained_storages
            tracker.add(tensor, "trainable_weights" if trains else "frozen_weights")
        for tensor in self.optimizer.masters():
            tracker.add(tensor, "master_weights")
        if self.stepper.fused is not None:
            self.stepper.fused.on_gradient = lambda gradient: tracker.tag([gradient], "gradients")
        with tracker.following(self.trained), tracker if tracking else nullcontext():
            yield

    def _step(self, tracker: Tracker, micro_steps: int) -> None:
        for number in range(micro_steps):
            tracker.micro_step = number
            tracker.enter("forward")
            batch = self.batch_of(self.config.train.micro_batch)
            tracker.tag(batch.values(), "saved_activations")
            self._micro_step(batch, count_loss_tokens(batch) * micro_steps, tracker, last=number == micro_steps - 1)
            del batch
        tracker.enter("optimizer")
        self.stepper.update()
        tracker.tag(self.optimizer.states(), "optimizer_states")

    def _evaluate(self, tracker: Tracker) -> None:
        """One batch of an evaluation, if it has more rows than those that train; it takes less otherwise."""
        rows = evaluated_rows(self.config)
        if rows <= self.config.train.micro_batch:
            return
        tracker.enter("evaluation")
        batch = self.batch_of(rows)
        tracker.tag(batch.values(), "saved_activations")
        self.adapted.model.eval()
        held_out_loss(self.adapted.model, batch, self.config.train.loss_bytes)
        self.adapted.model.train()

    def _micro_step(self, batch: Batch, tokens: Tensor, tracker: Tracker, *, last: bool = True) -> None:
        tracker.enter("forward")
        began, passed = len(tracker.log), list[bool]()

        @contextmanager
        def backward() -> Iterator[None]:
            nonlocal began
            tracker.saved_since(began)
            tracker.enter("backward")
            yield
            if self.stepper.measures_first and not passed:
                passed.append(True)
                tracker.enter("forward")  # of the second pass: the first one only measured
                began = len(tracker.log)

        self.stepper.around_backward = backward
        self.stepper.micro_step(batch, tokens, last=last)
        tracker.tag((here(p.grad) for p in self.trained if isinstance(p, DTensor) and p.grad is not None), "gradients")
        if self.stepper.engine is not None:
            tracker.tag(self.stepper.engine.gradients(), "gradients")


def named_modules(adapted: Adapted) -> dict[nn.Module, str]:
    """The modules that a report names: decoder layers, what they are made of, and what stands outside of them."""
    layers = tuple(f"{path}." for path in decoder_layers(adapted.model))
    experts = tuple(f"{layer.experts}." for layer in adapted.anatomy.moe_layers)
    named = {}
    for path, module in adapted.model.named_modules():
        layer = next((prefix for prefix in layers if path.startswith(prefix)), "")
        if path and not path.startswith(experts) and path[len(layer) :].count(".") <= 1:
            named[module] = path
    return named


def _parts(blocks: Iterator[Block]) -> Parts:
    sums = dict.fromkeys(PART_NAMES, 0)
    for block in blocks:
        sums[block.part] += block.bytes
    return Parts(**sums)
