"""`TrlSteps`: run steps of a TRL trainer under a tracker, on fake tensors."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moetune.adapt.build import Adapted
from moetune.adapt.reference import Reference
from moetune.compat.trl import (
    Answers,
    Computing,
    SelfReferencing,
    batches_of,
    cache_of,
    kernels_of_cuda,
    make_trainer,
    precompute_references,
    quiet,
    run_steps,
)
from moetune.errors import UserError
from moetune.memory.report import Phase
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.generating import generate_ends
from moetune.memory.trace.log import OUTSIDE
from moetune.memory.trace.steps import STEPS
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.views import Trace
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import Gpu
from moetune.training.trl import TrlTrainer, prompt_length, trl_arguments


class TrlSteps(Watched):
    """Steps of one of TRL's trainers on an adapted model: the trainer's own code, on batches of the run's sizes.

    A reference that TRL computes before training (`precompute_ref_log_probs`) is run for one batch before the steps.
    GRPO generates completions of full length; of their tokens the first two and the last two are computed.

    Args:
        adapted: model to train, of fake tensors.
        trainer: the trainer.
        more: arguments of TRL's configuration that replace those of `trl_arguments`.
        micro_steps: micro-steps of each step that run.
        mode: the mode of fake tensors.
        kept: numbers, in the whole model, of the decoder layers that run; None to number the layers from 0.
        gpu: GPU whose attention kernels and workspaces are assumed; None for a CPU.

    Raises:
        UserError: TRL refuses the arguments.
    """

    def __init__(
        self,
        adapted: Adapted,
        trainer: TrlTrainer,
        more: Mapping[str, Any],
        micro_steps: int,
        mode: FakeTensorMode,
        kept: Sequence[int] | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        super().__init__(adapted, kept, gpu)
        self.micro_steps, self.mode = micro_steps, mode
        silent = {"use_cpu": True, "report_to": "none", "logging_strategy": "no", "disable_tqdm": True}
        arguments = trl_arguments(adapted.run, trainer) | silent | dict(more)
        # GRPO generates for all micro-steps of a step at once, so that their number counts.
        accumulate = adapted.run.config.train.accumulate if trainer == "grpo" else micro_steps
        arguments |= {"gradient_accumulation_steps": accumulate, "max_steps": STEPS}
        self.precomputes = arguments.pop("precompute_ref_log_probs", False)
        self.completion, prompt, rollouts = None, 1, 0
        if trainer == "grpo":
            self.completion = arguments["max_completion_length"]
            rollouts = arguments.pop("use_vllm", False) * arguments["max_completion_length"]  # TRL would start vLLM
            prompt = prompt_length(adapted.run.config, arguments["max_completion_length"])
        has_reference = bool(arguments.get("beta")) if trainer == "grpo" else trainer in ("dpo", "kto")
        with mode, Answers():
            self.reference = Reference(adapted) if has_reference and not self.precomputes else None
        self._folder = TemporaryDirectory()
        arguments["output_dir"] = self._folder.name
        rows = arguments["per_device_train_batch_size"] * accumulate * STEPS
        model = (_Generating if trainer == "grpo" else SelfReferencing)(adapted.model, self._referencing)
        with quiet(), self._refusing(TypeError, ValueError, ImportError):
            self.trainer = make_trainer(trainer, model, arguments, rows, prompt, rollouts)
        if isinstance(model, _Generating):
            model.steps = self
            with self._refusing(ValueError, said="no prediction"):
                self.cache = cache_of(self.trainer)
        self.batches = batches_of(self.trainer, STEPS, accumulate)

    def run(self, tracker: Tracker, short: Shortened | None = None) -> Trace:
        """Run two steps and return their trace, of the whole model if `short` says which layers ran; can be called
        once."""
        self._tracker = tracker
        with self._folder, quiet(), self._refusing(ValueError), ExitStack() as stack:
            self._register()
            stack.enter_context(tracker.following([*self.adapted.trainable().values()]))
            stack.enter_context(Answers(self.completion))
            if self.gpu is not None:
                stack.enter_context(kernels_of_cuda())
            stack.enter_context(self.watching(tracker))
            if self.precomputes:
                with self.mode:
                    precompute_references(self.trainer, self.batches[0][0][0], self._given)
            run_steps(self.trainer, self.batches, self._given, self._computing, self.micro_steps)
        tracker.stop()
        left_out = self.adapted.run.config.train.accumulate - self.micro_steps
        return Trace.of(tracker.log, self.adapted.ranks.axis_of, short=short, left_out=left_out)

    @contextmanager
    def _refusing(self, *errors: type[Exception], said: str = "TRL's trainer refuses this run") -> Iterator[None]:
        """Turn `errors` within the `with` block, by which TRL refuses an argument, into `UserError`, after `said`."""
        try:
            yield
        except errors as error:
            raise UserError(f"{said}: {error}") from error

    def _given(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a batch as a fake tensor, and record it."""
        fake = self.mode.from_tensor(tensor)
        self._tracker.add(fake, "saved_activations", "batch")
        return fake

    @contextmanager
    def _referencing(self) -> Iterator[None]:
        """Run the model as the reference within the `with` block: with the trained weights as they were at first."""
        with self.entering("reference"), nullcontext() if self.reference is None else self.reference.active():
            yield

    @property
    def is_referencing(self) -> bool:
        """Whether the model runs as the reference."""
        return self._tracker.phase == "reference"

    @contextmanager
    def entering(self, phase: Phase) -> Iterator[None]:
        """Record what is computed within the `with` block under `phase`; then return to the phase before."""
        tracker, before = self._tracker, self._tracker.phase
        tracker.enter(phase)
        yield
        tracker.enter(before)

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **given: Any) -> Tensor:
        """Run the passes of `generate_ends` where TRL calls the model's `generate`, with its arguments; return token
        ids of full length, all 1: [rows, tokens of prompt and completion]."""
        assert self.completion is not None
        model: Any = self.adapted.model

        def generate(ids: Tensor, **more: Any) -> None:
            mask = attention_mask if ids is input_ids else torch.ones_like(ids)
            model.generate(input_ids=ids, attention_mask=mask, use_cache=self.cache != "none", **given, **more)

        with self.entering("generation"):
            generate_ends(self, self._tracker, generate, input_ids, self.completion, self.cache)
        return input_ids.new_ones((len(input_ids), input_ids.shape[1] + self.completion))

    @contextmanager
    def _computing(self, what: Computing) -> Iterator[None]:
        """Record what TRL's trainer computes within the `with` block: a micro-step (`step`), the backward pass in it,
        or the update (`optimizer`)."""
        tracker = self._tracker
        match what:
            case "step":
                tracker.step, tracker.micro_step = divmod(self._done, self.micro_steps)
                self._done += 1
                tracker.enter("forward")
                self._began = tracker.place()
                with self.mode:
                    yield
                tracker.enter("optimizer")  # gradients are clipped
            case "backward":
                tracker.saved_since(self._began)
                tracker.enter("backward")
                yield
                tracker.cut(OUTSIDE, backward=True)
            case "optimizer":
                with self.mode:
                    yield
                self._note_states()

    def _register(self) -> None:
        """Add the weights, and the copies of the reference, to the tracker."""
        self._done = 0
        self.add_to(self._tracker)
        for parameter, copy in () if self.reference is None else self.reference.copies:
            self._tracker.add(copy, "trainable_weights", "copy for the reference")
            self._tracker.belongs(copy, self.layer_of.get(parameter))

    def _note_states(self) -> None:
        """Record optimizer states as such, with their decoder layers."""
        parts = {parameter: self.adapted.part_of(name) for name, parameter in self.adapted.trainable().items()}
        for parameter, states in self.trainer.optimizer.state.items():
            for state in states.values():
                if isinstance(state, Tensor):
                    self._tracker.add(state)
                    self._tracker.tag([state], "optimizer_states")
                    self._tracker.belongs(state, self.layer_of.get(parameter), parts[parameter])


class _Generating(SelfReferencing):
    """The model of GRPO: `generate` runs only the first and last tokens; passes without gradients, except those of the
    reference, are the phase `old_logprobs`. `steps` must be set before it is called."""

    steps: TrlSteps

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.generate(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_loss = torch.is_grad_enabled() or self.steps.is_referencing
        with nullcontext() if is_loss else self.steps.entering("old_logprobs"):
            return super().forward(*args, **kwargs)
