"""A causal language model as decoder stack and LM head.

The LM head is everything that the model's own forward pass does after the decoder stack: a linear map, a bias, a scale,
soft-capping, LoRA. It is run by calling the whole model with the stack replaced by a module that returns given hidden
states, so no architecture needs code of its own.

Shapes: B sequences of S tokens, H hidden size, V vocabulary size, n tokens of a chunk.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from moetune.models.stack import below_head


class LMHead:
    """Maps hidden states [n, H] to logits [n, V]; made by `split`, and to be called only inside its `with` block.

    Args:
        logits_of: computes logits [B, n, V] from hidden states [B, n, H].
        empty_BoH: hidden states of no tokens, [B, 0, H], from which the attributes are found.

    Attributes:
        trained: parameters that the logits are computed from and that require a gradient; empty if gradients are
            disabled.
        vocabulary: V, the number of logits per token.
        width: bytes of one logit.
        row_bytes: bytes per token of all tensors [n, V] that the head allocates: V·width for a linear map, more if it
            also scales, caps or casts the logits. Its backward pass never needs more.
    """

    def __init__(self, logits_of: Callable[[Tensor], Tensor], empty_BoH: Tensor) -> None:
        self._logits_of = logits_of
        with _EmptyTensors() as tensors:
            logits_BoV = logits_of(empty_BoH)
        self.vocabulary, self.width = logits_BoV.shape[-1], logits_BoV.element_size()
        self.row_bytes = self.vocabulary * sum(t.element_size() for t in tensors if t.shape[-1] == self.vocabulary)
        self.trained = _leaves(logits_BoV)

    def __call__(self, hidden_nH: Tensor) -> Tensor:
        """Return the logits [n, V] of hidden states [n, H]."""
        return self._logits_of(hidden_nH[None]).flatten(0, 1)


@contextmanager
def split(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Iterator[tuple[Tensor, LMHead]]:
    """Run the model `below_head` on `inputs`; yield its hidden states [B, S, H] and the `LMHead`.

    Inside the `with` block that stack is replaced, so the model must not be called directly, and calls of the
    `LMHead` run no module of the stack and none of its hooks. `inputs` are those of the model's forward pass, without
    `labels` and `use_cache`.
    """
    stack = below_head(model)
    path = next(path for path, module in model.named_modules() if module is stack)
    answering = _Answering(stack)
    seen: list[Tensor] = []
    output_of: Callable[[Tensor], Any]

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal output_of
        model.set_submodule(path, stack)  # whole again: other micro-batches may begin while this one is in the stack
        output = stack(*args, **kwargs)
        model.set_submodule(path, answering)
        seen.append(output[0])
        output_of = _output_like(output)
        return output_of(output[0][:, :0])  # no tokens, so that this call computes no logits

    def logits_of(hidden: Tensor) -> Tensor:
        answering.answer = lambda *args, **kwargs: output_of(hidden)
        return model(**inputs, use_cache=False).logits

    model.set_submodule(path, answering)
    try:
        answering.answer = run
        model(**inputs, use_cache=False)
        hidden_BSH = seen.pop()
        yield hidden_BSH, LMHead(logits_of, hidden_BSH[:, :0].detach())
    finally:
        model.set_submodule(path, stack)


class _Answering(nn.Module):
    """Stand-in for the decoder stack: calling it runs the function `answer`; all other attributes are the stack's."""

    answer: Callable[..., Any]

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_stack", stack)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stack"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(*args, **kwargs)


def _output_like(output: Any) -> Callable[[Tensor], Any]:
    """Return a function that puts hidden states into a tuple or ModelOutput like `output`; its other fields: None."""
    if isinstance(output, tuple):
        rest = (None,) * (len(output) - 1)
        return lambda hidden: (hidden, *rest)
    kind = type(output)
    return lambda hidden: kind(last_hidden_state=hidden)


class _EmptyTensors(TorchDispatchMode):
    """Dispatch mode whose `as` target is a list; collects there the tensors without elements that operations create
    inside the `with` block, one for each storage."""

    def __enter__(self) -> list[Tensor]:
        self.made: list[Tensor] = []
        super().__enter__()
        return self.made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() == 0:
            storage = out.untyped_storage()
            if all(storage is not tensor.untyped_storage() for tensor in self.made):
                self.made.append(out)
        return out


def _leaves(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the parameters with `requires_grad` that `tensor` was computed from, found in its autograd graph."""
    leaves: dict[int, Tensor] = {}
    nodes, seen = [tensor.grad_fn], set[Any]()
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        nodes += [following for following, _ in node.next_functions]
    return tuple(leaves.values())
