"""Comparison of kernels with their references, in the calls that a layer of experts makes.

The calls are recorded, not written out: an exercise runs a small bank of experts forward and backward, and a dispatch
mode intercepts each operator with the arguments, layouts and aliases of a training step.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moetune.config.schema import QuantizedDtype, Storage
from moetune.experts.activation import SwiGLU
from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan
from moetune.experts.context import ExpertContext
from moetune.experts.mlp import expert_mlp
from moetune.experts.quantized import QuantizedExperts
from moetune.kernels.registry import OPERATORS, KernelError, Operator, using_kernels
from moetune.models.moe import ExpertShape
from moetune.run.dtypes import DTYPES

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1.5e-2}
"""Largest accepted difference relative to a result's largest value, by dtype; torch rounds more often in 16 bits."""
TOKENS = 100


# --- What is called -----------------------------------------------------------------------------------------------


class CallsSeen(TorchDispatchMode):
    """Dispatch mode in which a call of an operator that has a kernel returns `compute(operator, args)` instead."""

    def __init__(self, compute: Callable[[Operator, Sequence[Any]], Any]) -> None:
        TorchDispatchMode.__init__(self)
        self._compute = compute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = OPERATORS.get(func._opname) if func.namespace == "moetune" else None
        return func(*args, **(kwargs or {})) if operator is None else self._compute(operator, args)


@dataclass(frozen=True)
class BankSizes:
    """Properties of an expert layer that decide its calls of operators, apart from the number of token rows.

    Attributes:
        lora: ids of the experts with LoRA; `rank` and `split` are as in `LoraPlan`.
        trained: number of experts that train in full, the last ones; all others are frozen without LoRA.
        storage, double_quant: as in `ExpertBank`.
        dtype: dtype of token rows.
        top_k: experts per token.
        expert_memory, split_gate_up: as in `ExpertContext`.
        gate: (alpha, limit) of SwiGLU, limit 0 if it does not clamp; None for another activation, which has no kernel.
    """

    shape: ExpertShape
    lora: tuple[int, ...]
    trained: int
    rank: int
    split: bool
    storage: Storage
    double_quant: bool
    dtype: Literal["bf16", "fp16", "fp32"]
    top_k: int
    expert_memory: int
    split_gate_up: bool
    gate: tuple[float, float] | None

    def exercise(self, device: torch.device, tokens: int = TOKENS) -> Callable[[], None]:
        """Build a bank of these sizes with random weights; return a function that runs it forward and backward twice.

        The first time, routing weights are float32 and have a gradient. The second time, they are constants in the
        dtype of the rows, and the gate_up rows of forward are kept for backward. The first expert receives no token if
        there are enough others.
        """
        bank = self._bank(device)
        _draw(bank)
        dtype, count = DTYPES[self.dtype], self.shape.num_experts
        idle = int(count > self.top_k)
        ids = torch.rand(tokens, count - idle).topk(self.top_k).indices + idle  # on the host, which counts them
        counts = torch.bincount(ids.flatten(), minlength=count).tolist()

        def run() -> None:
            for weights_dtype, keep_rows in ((torch.float32, False), (dtype, True)):
                permutation = bank.permutation(ids.to(device), counts)
                x = torch.randn(tokens, self.shape.hidden, dtype=dtype, device=device).requires_grad_()
                weights = torch.rand(tokens, self.top_k, device=device).to(weights_dtype)
                weights.requires_grad_(not keep_rows)
                with torch.enable_grad():
                    y = expert_mlp(bank, x, weights, permutation, keep_rows=keep_rows)
                    y.backward(torch.randn_like(y))

        return run

    def _bank(self, device: torch.device) -> ExpertBank:
        shape, count, lora = self.shape, self.shape.num_experts, None
        if self.lora:
            lora = LoraPlan(self.lora, self.rank, alpha=self.rank / 2, split=self.split)
        plan = BankPlan(tuple(range(count - self.trained, count)), lora)
        context = ExpertContext(self.expert_memory, split_gate_up=self.split_gate_up)
        if device.type == "cuda":
            context = replace(context, capability=torch.cuda.get_device_capability(device))
        activation: Callable[[Tensor], Tensor] = partial(torch.narrow, dim=1, start=0, length=shape.intermediate)
        if self.gate is not None:
            activation = SwiGLU(not shape.is_concatenated, *self.gate).forward
        return ExpertBank(
            shape, plan, activation, storage=self.storage, double_quant=self.double_quant, dtype=DTYPES[self.dtype],
            device=device, context=context,
        )  # fmt: skip


def _draw(bank: nn.Module) -> None:
    """Fill a bank's parameters and buffers with random values of the magnitude of a model's weights."""
    for module in bank.modules():
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.normal_(0, 0.02)
            if isinstance(module, QuantizedExperts):
                weight = torch.randn(module.shape, dtype=torch.bfloat16, device=module.data.device) / 50
                for index in range(module.count):
                    module.quantize_(index, weight.roll(index + 1))
            else:
                for tensor in module.buffers(recurse=False):
                    tensor.normal_(0, 0.02)


def samples(dtype: torch.dtype, *, hidden: int = 192, intermediate: int = 144, rank: int = 12) -> Iterator[BankSizes]:
    """Yield sizes of banks in `dtype` that together call every operator of the experts in all its variants."""
    name: Any = next(name for name, one in DTYPES.items() if one == dtype)
    shape = ExpertShape(5, hidden, intermediate, True, False, False, True)
    apart = replace(shape, has_bias=True, is_concatenated=False)
    plain = BankSizes(shape, (0, 1, 2, 3, 4), 0, rank, True, "nf4", True, name, 3, 1 << 30, True, (1.0, 0.0))
    yield plain
    yield replace(plain, lora=(0, 1, 2), trained=2)
    yield replace(
        plain, double_quant=False, split=False, split_gate_up=False, expert_memory=0, lora=(0, 1, 2), trained=2
    )
    clamped = replace(plain, shape=apart, split_gate_up=False, gate=(1.702, 1.5))
    others = chain((replace(clamped, split=False, expert_memory=0), clamped), repeat(plain))
    for storage, sizes in zip(get_args(QuantizedDtype)[1:], others, strict=False):
        yield replace(sizes, storage=storage)


# --- Comparison ---------------------------------------------------------------------------------------------------


def differences(operator: Operator, args: Sequence[Any], kernel: Callable[..., Any]) -> Iterator[float]:
    """Yield how much an operator's `kernel` differs from its reference, once for each tile.

    The first is with the tile that the kernel chooses, then follow all tiles that it can choose from (tuning.py),
    because a run with more rows may choose another. A difference is the largest over all results and changed arguments,
    relative to the largest value of each; NaN if a value is NaN. Integers and dequantized weights must be equal: their
    difference is 0 or 1. Tiles that do not compile are skipped. Kernels run on copies of the arguments.
    """
    changed, used_up = _written(operator), _written(operator, scratch=True)
    copies = copied(args, [args[place] for place in (*changed, *used_up)])
    results = _each(referred(operator, copies))
    expected, before = [*results, *(copies[place] for place in changed)], [*[None] * len(results), *changed]

    def difference(launch: Callable[..., Any]) -> float:
        found = []
        for _ in range(2):  # the second launch takes the shorter way of launch.py
            copies = copied(args, [args[place] for place in changed])
            results = [*_each(launch(*copies)), *(copies[place] for place in changed)]
            for one, other, place in zip(results, expected, before, strict=True):
                if isinstance(other, Tensor) and other.numel():
                    if place is not None:  # what is left as it was may be uninitialized
                        one, other = _where_written(args[place], one, other)
                    found.append(_difference(one, other, is_exact=operator.name.startswith("dequantize")))
        return float(torch.stack(found).max()) if found else 0.0

    yield difference(kernel)
    for tile in getattr(kernel, "tiles", ()):
        with suppress(KernelError):
            yield difference(partial(kernel, tile=tile))


def referred(operator: Operator, args: Sequence[Any]) -> Any:
    """Return the result of an operator's reference, in which no other operator's kernel runs."""
    with using_kernels(but=OPERATORS):
        return operator.reference(*args)


def _each(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _written(operator: Operator, *, scratch: bool = False) -> list[int]:
    """Return which arguments an operator writes to, by position: its scratch memory with `scratch`, else all others."""
    schema = getattr(torch.ops.moetune, operator.name).default._schema
    return [
        place
        for place, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write and (one.name in operator.scratch) == scratch
    ]


def copied(args: Sequence[Any], which: Collection[Any]) -> list[Any]:
    """Return an operator's arguments, with copies of those that share a storage with a tensor in `which`.

    Strides stay, and arguments that shared a storage still do. Values in `which` that are no tensors are ignored.
    """
    copies = {one.untyped_storage()._cdata: None for one in which if isinstance(one, Tensor)}
    clones: dict[int, Any] = {}

    def copy(arg: Any) -> Any:
        if not isinstance(arg, Tensor) or (key := arg.untyped_storage()._cdata) not in copies:
            return arg
        if key not in clones:
            clones[key] = arg.untyped_storage().clone()
        made = torch.empty(0, dtype=arg.dtype, device=arg.device)
        return made.set_(clones[key], arg.storage_offset(), arg.shape, arg.stride())

    return list(map(copy, args))


def _where_written(before: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of two results that either has written to; those before are compared bit by bit."""
    bits = [tensor.contiguous().view(torch.uint8).view(*tensor.shape, -1) for tensor in (before, one, other)]
    is_written = ((bits[1] != bits[0]) | (bits[2] != bits[0])).any(-1)
    return torch.where(is_written, one, 0), torch.where(is_written, other, 0)


def _difference(one: Tensor, other: Tensor, *, is_exact: bool) -> Tensor:
    if is_exact or not other.is_floating_point():
        return (one != other).any().double()
    one, other = one.double(), other.double()
    return (one - other).abs().max() / other.abs().max().clamp_min(1e-30)


def is_alike(difference: float, dtype: torch.dtype) -> bool:
    """Return whether a kernel's relative difference is within `TOLERANCE` of a dtype; False for NaN."""
    return difference <= TOLERANCE[dtype]
