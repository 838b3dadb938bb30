"""The calls that a layer of experts makes, recorded, to compare kernels with their references."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moetune.adapt.guard.comparison import CallsSeen, copied, kind_of
from moetune.config.schema import Storage
from moetune.experts.activation import SwiGLU
from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan
from moetune.experts.context import ExpertContext
from moetune.experts.mlp import expert_mlp
from moetune.experts.quantized import QuantizedExperts
from moetune.kernels.registry import Operator
from moetune.models.moe import ExpertShape


def calls(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    *,
    hidden: int = 192,
    intermediate: int = 144,
    rank: int = 12,
) -> list[tuple[str, list[Any]]]:
    """Return (operator name, arguments) for each kind of call that `bank_samples` make; the same on every call.

    Calls that differ only in their number of rows are one kind.
    """
    found: dict[Hashable, tuple[str, list[Any]]] = {}

    def compute(operator: Operator, args: Sequence[Any]) -> Any:
        kind = operator.name, *map(kind_of, args)
        if kind not in found:
            found[kind] = operator.name, copied(args)
        return operator.reference(*args)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        for sizes in bank_samples(hidden, intermediate, rank):
            bank = sizes.bank(device, dtype)  # an activation is recognized by calls with values over all of float32
            with CallsSeen(compute):
                exercise(bank, sizes.shape, device, dtype, tokens)
    return list(found.values())


@dataclass(frozen=True)
class BankSizes:
    """Properties of a bank that decide its calls: its LoRA, how many of its experts, the last ones, train in full, and
    settings of `ExpertBank`, `ExpertContext` and `SwiGLU` (alpha, limit)."""

    shape: ExpertShape
    lora: LoraPlan
    trained: int = 0
    storage: Storage = "nf4"
    double_quant: bool = True
    expert_memory: int = 1 << 30
    split_gate_up: bool = True
    gate: tuple[float, float] = (1.0, 0.0)

    def bank(self, device: torch.device, dtype: torch.dtype) -> ExpertBank:
        """Return a bank of these sizes, with random weights of the magnitude of a model's."""
        count = self.shape.num_experts
        plan = BankPlan(tuple(range(count - self.trained, count)), self.lora)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        bank = ExpertBank(
            self.shape,
            plan,
            SwiGLU(not self.shape.is_concatenated, *self.gate).forward,
            storage=self.storage,
            double_quant=self.double_quant,
            dtype=dtype,
            device=device,
            context=ExpertContext(self.expert_memory, split_gate_up=self.split_gate_up, capability=capability),
        )
        with torch.no_grad():
            for module in bank.modules():
                if isinstance(module, QuantizedExperts):
                    weight = torch.randn(module.shape, dtype=torch.bfloat16, device=device) / 50
                    for index in range(module.count):
                        module.quantize_(index, weight.roll(index + 1))
                else:
                    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                        tensor.normal_(0, 0.02)
        return bank


def exercise(bank: ExpertBank, shape: ExpertShape, device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """Run a bank forward and backward twice, without a token for its first expert.

    The first time, routing weights are float32 and have a gradient. The second time, they are constants in the dtype of
    the rows, and the gate_up rows of forward are kept for backward.
    """
    count, hidden = shape.num_experts, shape.hidden
    ids = torch.rand(tokens, count - 1).topk(3).indices + 1
    counts = torch.bincount(ids.flatten(), minlength=count).tolist()
    for weights_dtype, keep_rows in ((torch.float32, False), (dtype, True)):
        permutation = bank.permutation(ids.to(device), counts)
        x = torch.randn(tokens, hidden, dtype=dtype, device=device).requires_grad_()
        weights = torch.rand(tokens, 3, device=device).to(weights_dtype).requires_grad_(not keep_rows)
        with torch.enable_grad():
            y = expert_mlp(bank, x, weights, permutation, keep_rows=keep_rows)
            y.backward(torch.randn_like(y))


def bank_samples(hidden: int, intermediate: int, rank: int) -> Iterator[BankSizes]:
    """Yield sizes of banks that together call every operator of the experts in all its variants."""
    shape = ExpertShape(5, hidden, intermediate, True, False, False, True)
    apart = replace(shape, has_bias=True, is_concatenated=False)
    split = LoraPlan((0, 1, 2, 3, 4), rank, rank / 2, split=True)
    some, fused = replace(split, ids=(0, 1, 2)), replace(split, split=False)
    mixed = BankSizes(shape, some, trained=2)
    clamped = BankSizes(apart, split, split_gate_up=False, gate=(1.702, 1.5))
    yield BankSizes(shape, split)
    yield mixed
    some_fused = replace(some, split=False)
    yield replace(mixed, double_quant=False, lora=some_fused, split_gate_up=False, expert_memory=0)
    yield replace(clamped, lora=fused, expert_memory=0, storage="int8")
    yield replace(clamped, storage="fp8")
    yield BankSizes(shape, split, storage="nvfp4")
    yield BankSizes(shape, split, storage="mxfp4")
    yield BankSizes(shape, split, storage="int4-g32")
    yield replace(mixed, lora=replace(some, dtype=torch.bfloat16, shared=True))
    yield replace(clamped, lora=replace(fused, shared=True))
