"""TRL: a model that is its own reference, by hooks for PEFT models; trainers to trace."""

import dataclasses
import functools
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
from peft import PeftConfig, PeftModel, PeftType
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME

Computing = Literal["step", "backward", "optimizer"]
"""What a trainer computes: a micro-step, its backward pass within it, an update."""
Batches = list[tuple[list[Any], Any]]
"""For each step (micro-batches, number of tokens in the loss, or None if the trainer does not count them).

A micro-batch is a dictionary of tensors; GRPO's are the prompts of all completions that are generated at once.
"""

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
_NONZERO = torch.ops.aten.nonzero.default
_INDEX = torch.ops.aten.index.Tensor


class SelfReferencing(PeftModel):
    """A model for TRL's trainers that computes its own reference, so that they load no second model.

    TRL recognizes a `PeftModel`, and runs its reference passes within `disable_adapter()` of the model that trains.
    Only public methods of `PeftModel` are replaced: no adapter is added, and the calls go to `model`.

    Args:
        model: the model that trains.
        reference: returns a context within which `model` computes the reference.
    """

    active_adapter = "default"
    base_model: Any

    def __init__(self, model: PreTrainedModel, reference: Callable[[], AbstractContextManager[None]]) -> None:
        nn.Module.__init__(self)
        self.base_model = model
        self.reference = reference

    @property
    def peft_config(self) -> dict[str, PeftConfig]:
        return {self.active_adapter: PeftConfig(peft_type=PeftType.LORA, task_type="CAUSAL_LM")}

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        with self.reference():
            yield

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> "SelfReferencing":
        """Return the model, which stays on the device and in the dtypes in which it was built."""
        return self

    def add_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add nothing. TRL adds a copy of the adapter as reference, under the name "ref", if it can."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter `target`. If it is of the adapter "ref", which does not exist, return a new parameter of
        the same shape, so that what TRL copies there is lost."""
        parameter = super().get_parameter(target.replace(".ref.", ".default."))
        if ".ref." not in target:
            return parameter
        return nn.Parameter(torch.empty_like(parameter), requires_grad=False)

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write what trains, under the names of `base_model`, to the file where Trainer looks for an adapter."""
        self.base_model.save_pretrained(save_directory, *args, **kwargs)
        if (file := Path(save_directory, SAFE_WEIGHTS_NAME)).is_file():
            file.rename(file.with_name(ADAPTER_SAFE_WEIGHTS_NAME))

    def load_adapter(self, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Read what `save_pretrained` wrote, when Trainer resumes or takes the best checkpoint at the end."""
        self.base_model.load_state_dict(load_file(Path(model_id, ADAPTER_SAFE_WEIGHTS_NAME)), strict=False)


# --- Steps that are traced ----------------------------------------------------------------------------------------


class Answers(TorchDispatchMode):
    """Dispatch mode that answers when TRL's code reads values, which fake tensors lack, so that it can be traced.

    A number read from a fake tensor is 1, a truth value False; a mask selects everything, and no element is zero.

    Args:
        scored: tokens at the end of each row that a mask [rows, tokens] selects; None for all.
    """

    def __init__(self, scored: int | None = None) -> None:
        super().__init__()
        self.scored = scored

    def selected(self, mask: Tensor) -> int:
        """Return how many elements a mask is taken to select."""
        return mask.numel() if self.scored is None or mask.dim() < 2 else mask[:, -self.scored :].numel()

    def lacks_values(self, tensor: Tensor) -> bool:
        """Return whether a tensor has no values to read, so that the mode answers for it."""
        return isinstance(tensor, FakeTensor)

    def __enter__(self) -> "Answers":
        self._lists = patch.object(FakeTensor, "tolist", _ones)  # FakeTensor's own reads number by number
        self._lists.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._lists.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and self.lacks_values(args[0]):
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _NONZERO and self.lacks_values(args[0]):
            return args[0].new_empty((self.selected(args[0]), args[0].dim()), dtype=torch.long)
        if func is _INDEX and self.lacks_values(args[0]) and _is_mask(args[1]):
            values, mask = args[0], args[1][0]
            where = mask.new_empty((mask.dim(), self.selected(mask)), dtype=torch.long)  # the mask is set
            return values.new_empty((where.shape[1], *values.shape[mask.dim() :]))
        return func(*args, **(kwargs or {}))


def _ones(tensor: Tensor) -> Any:
    """Return what `tolist` returns for a tensor of ones."""
    return functools.reduce(lambda inner, size: [inner] * size, reversed(tensor.shape), cast(Any, 1))


def _is_mask(indices: Sequence[Tensor | None]) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Make TRL take, for fake tensors on the CPU, the code paths that it takes on a GPU, within the `with` block.

    Its Triton kernels, and its matrix products that add to a float32 tensor, do nothing and allocate nothing.
    """
    from trl.kernels import chunked_logprob, logprob_entropy
    from trl.trainer import utils

    nothing = defaultdict[Any, Callable[..., None]](lambda: lambda *args, **kwargs: None)
    with ExitStack() as stack:
        for module, name, replacement in [
            (chunked_logprob, "_use_triton", lambda device: True),
            (utils, "_use_triton", lambda device: True),
            (chunked_logprob, "_forward_kernel", nothing),
            (chunked_logprob, "_backward_kernel", nothing),
            (chunked_logprob, "_addmm_fp32", lambda total, a, b: None),
            (logprob_entropy, "_forward_kernel", nothing),
            (logprob_entropy, "_backward_kernel", nothing),
            (utils, "_supports_trl_loss_kernel", lambda logits, *_: logits.stride(-1) == 1),
        ]:
            stack.enter_context(patch.object(module, name, replacement))
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Python's warnings, log messages up to WARNING and data sets' progress bars within the `with` block.

    A trainer that is made for a prediction alone would print them, about its made-up tokenizer for example.
    """
    import datasets

    before, bars_were_on = logging.root.manager.disable, not datasets.are_progress_bars_disabled()
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if bars_were_on:
            datasets.enable_progress_bars()


def make_trainer(
    kind: str, model: nn.Module, arguments: Mapping[str, Any], rows: int, prompt: int = 1, rollouts: int = 0
) -> Any:
    """Return a trainer of TRL on rows of made-up words, each row as long as `max_length` cuts it.

    Args:
        kind: `sft`, `dpo`, `kto`, `orpo` or `grpo`.
        arguments: of the trainer's configuration.
        rows: number of rows of the data set; for `dpo` and `orpo`, of pairs. Two are tokenized, and repeated.
        prompt: tokens of a prompt: for `grpo` those before generation, else 1, so that all others count in the loss.
        rollouts: for `grpo`, tokens of completions that come from a `rollout_func`; 0: the model generates.

    Raises:
        ValueError: TRL refuses the arguments.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    trl, name = import_module("trl.experimental.orpo" if kind == "orpo" else "trl"), kind.upper()
    config = getattr(trl, f"{name}Config")
    for field in dataclasses.fields(config):
        if isinstance(value := arguments.get(field.name), str) and isinstance(field.default, int | float):
            try:
                number = float(value)  # YAML takes 1e-4 for text
                arguments = {**arguments, field.name: int(number) if number.is_integer() else number}
            except ValueError:
                raise ValueError(f"{field.name}={value}: give a number, or true or false") from None
    words = " a" * arguments.get("max_length", 0)
    data: dict[str, list[Any]] = {"prompt": ["a" + " a" * (prompt - 1)] * 2}
    given: dict[str, Any] = {}
    if kind == "grpo":
        given["reward_funcs"] = _no_reward
        if rollouts:
            given["rollout_func"] = lambda prompts, _: {
                "prompt_ids": [[2] * prompt for _ in prompts],
                "completion_ids": [[2] * rollouts for _ in prompts],
                "logprobs": [[0.0] * rollouts for _ in prompts],
            }
    elif kind in ("dpo", "orpo"):
        data |= {"chosen": [words] * 2, "rejected": [words] * 2}
    else:
        data["completion"] = [words] * 2
    if kind == "kto":
        data["label"] = [True, False]
    words_only = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    words_only.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_only, eos_token="<eos>", pad_token="<pad>")
    trainer = getattr(trl, f"{name}Trainer")(
        model,
        args=config(**arguments),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        **given,
    )
    trainer.train_dataset = trainer.train_dataset.select([row % 2 for row in range(rows)])
    trainer.remove_callback(PrinterCallback)
    return trainer


def _no_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def batches_of(trainer: Any, steps: int, micro_steps: int) -> Batches:
    """Return the batches of the first `steps` steps, as the trainer loads them.

    For each step: (its `micro_steps` micro-batches, number of tokens in the loss or None).
    """
    loader = iter(trainer.get_train_dataloader())
    return [trainer.get_batch_samples(loader, micro_steps, torch.device("cpu")) for _ in range(steps)]


def precompute_references(trainer: Any, batch: dict[str, Tensor], given: Callable[[Tensor], Tensor]) -> None:
    """Compute the reference's log-probabilities of a batch, as trainers of DPO and KTO can do before training.

    Afterwards `run_steps` puts such results, as zeros, into each batch. The trainer gets `given(tensor)` in place of
    each tensor of `batch`.
    """
    trainer.compute_ref_log_probs(trainer.model, {name: _given(value, given) for name, value in batch.items()})
    trainer.precompute_ref_logps = True


_PRECOMPUTED = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps")


def run_steps(
    trainer: Any,
    batches: Batches,
    given: Callable[[Tensor], Tensor],
    computing: Callable[[Computing], AbstractContextManager[None]],
    most: int,
) -> None:
    """Run `trainer.train()` on `batches`, which is emptied.

    Args:
        given: called with each tensor of a step's batches when the step begins; the trainer gets what it returns.
        computing: returns the context within which the trainer computes a part of a step: a micro-step ("step"), the
            backward pass in it ("backward") or the update ("optimizer").
        most: number of micro-steps of a step that run; those after them, which are alike, do not.
    """
    step, backward = trainer.training_step, trainer.accelerator.backward
    generates, done = hasattr(trainer.args, "steps_per_generation"), 0
    result: Any = None

    def get_batch_samples(*_: Any) -> tuple[list[Any], Any]:
        nonlocal done
        done = 0
        samples, items = batches.pop(0)
        if getattr(trainer, "precompute_ref_logps", False):
            known = torch.zeros(trainer.args.per_device_train_batch_size)
            samples = [sample | dict.fromkeys(_PRECOMPUTED, known) for sample in samples]
        if not generates:
            samples = [{name: _given(value, given) for name, value in sample.items()} for sample in samples]
        return samples, _given(items, given)

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal done, result
        if done < most:
            if generates:  # by the number of the micro-step TRL decides whether it generates anew
                trainer._step = 0 if done == 0 or _generates_beside_gradients(trainer.args) else 1
            with computing("step"):
                result = step(*args, **kwargs)
        done += 1
        return result

    def counted_backward(loss: Tensor, **kwargs: Any) -> None:
        with computing("backward"):
            backward(loss, **kwargs)

    optimizer, updating = trainer.create_optimizer(), ExitStack()
    optimizer.register_step_pre_hook(lambda *_: updating.enter_context(computing("optimizer")) and None)
    optimizer.register_step_post_hook(lambda *_: updating.close())
    trainer.get_batch_samples, trainer.training_step = get_batch_samples, training_step
    trainer.accelerator.backward = counted_backward
    trainer.train()


def _generates_beside_gradients(arguments: Any) -> bool:
    """Return whether GRPO, by its arguments, generates in a later micro-step than a step's first, beside gradients."""
    every = arguments.steps_per_generation * arguments.num_iterations
    return every % arguments.gradient_accumulation_steps != 0


def cache_of(trainer: Any) -> Literal["grows", "static", "none"]:
    """Return how GRPO's trainer keeps keys and values while it generates.

    In a cache that "grows" with the text, in a "static" one of full length, or not at all ("none").

    Raises:
        ValueError: it generates outside of the model's own `generate`, or in a way that is not known.
    """
    arguments, settings = trainer.args, trainer.generation_config
    if arguments.use_transformers_continuous_batching:
        raise ValueError("use_transformers_continuous_batching has memory of its own, which is not predicted")
    if (settings.num_beams or 1) > 1:
        raise ValueError("generation_kwargs: num_beams above 1 is not predicted")
    if settings.use_cache is False:
        return "none"
    if settings.cache_implementation not in (None, "dynamic", "static"):
        raise ValueError(f"cache_implementation={settings.cache_implementation!r} is not predicted; static is")
    return "static" if settings.cache_implementation == "static" else "grows"


def _given(value: Any, given: Callable[[Tensor], Tensor]) -> Any:
    return given(value) if isinstance(value, Tensor) else value
