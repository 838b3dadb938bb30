"""The sizes at which a run calls kernels (`sizes_of`), and exercises of them.

An exercise runs a part of the model, forward and backward, on a few random tokens; the guard compares each operator
that it calls with its reference. So a part of the model that calls a new operator needs a class here with the method
`exercise`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moetune.adapt.layers.low_rank import adapted
from moetune.compat.transformers import activation_of, calls_rotary, norms_heads, softmax_router
from moetune.config.schema import Storage
from moetune.experts.activation import SwiGLU, recognize
from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan
from moetune.experts.context import ExpertContext
from moetune.experts.mlp import expert_mlp
from moetune.experts.quantized import QuantizedExperts, QuantizedLinear
from moetune.formats.table import FORMATS, format_of
from moetune.kernels import rotary, routing
from moetune.models.moe import ExpertShape, MoeLayer
from moetune.run.dtypes import DTYPES
from moetune.run.resolved import ResolvedRun

TOKENS = 100
_MOST_KINDS = 4
"""Most kinds of expert layers that are compared, the most frequent first; others differ in the number of experts."""


@dataclass(frozen=True)
class BankSizes:
    """Properties of an expert layer that decide its calls of operators, apart from the number of token rows.

    Attributes:
        lora: LoRA of the layer; None without.
        trained: number of experts that train in full, the last ones; all others are frozen without LoRA.
        storage, double_quant: as in `ExpertBank`.
        dtype: dtype of token rows.
        top_k: experts per token.
        expert_memory, split_gate_up: as in `ExpertContext`.
        gate: (alpha, limit) of SwiGLU, limit 0 if it does not clamp; None for another activation, which has no kernel.
    """

    shape: ExpertShape
    lora: LoraPlan | None
    trained: int
    storage: Storage
    double_quant: bool
    dtype: str
    top_k: int
    expert_memory: int
    split_gate_up: bool
    gate: tuple[float, float] | None

    def exercise(self, device: torch.device, tokens: int = TOKENS, bank: ExpertBank | None = None) -> None:
        """Give a bank of these sizes, a new one if none is given, random weights; run it forward and backward twice.

        The first time, routing weights are float32 and have a gradient. The second time, they are constants in the
        dtype of the rows, and the gate_up rows of forward are kept for backward. The first expert receives no token if
        there are enough others.
        """
        bank = self.bank(device) if bank is None else bank
        _draw(bank)
        dtype, count = DTYPES[self.dtype], self.shape.num_experts
        idle = int(count > self.top_k)
        ids = torch.rand(tokens, count - idle).topk(self.top_k).indices + idle  # on the host, which counts them
        counts = torch.bincount(ids.flatten(), minlength=count).tolist()
        for weights_dtype, keep_rows in ((torch.float32, False), (dtype, True)):
            permutation = bank.permutation(ids.to(device), counts)
            x = torch.randn(tokens, self.shape.hidden, dtype=dtype, device=device).requires_grad_()
            weights = torch.rand(tokens, self.top_k, device=device).to(weights_dtype).requires_grad_(not keep_rows)
            with torch.enable_grad():
                y = expert_mlp(bank, x, weights, permutation, keep_rows=keep_rows)
                y.backward(torch.randn_like(y))

    def bank(self, device: torch.device) -> ExpertBank:
        """Return a bank of these sizes, whose weights have no values yet."""
        shape, count = self.shape, self.shape.num_experts
        plan = BankPlan(tuple(range(count - self.trained, count)), self.lora)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        context = ExpertContext(self.expert_memory, split_gate_up=self.split_gate_up, capability=capability)
        activation: Callable[[Tensor], Tensor] = partial(torch.narrow, dim=1, start=0, length=shape.intermediate)
        if self.gate is not None:
            activation = SwiGLU(not shape.is_concatenated, *self.gate).forward
        return ExpertBank(
            shape, plan, activation, storage=self.storage, double_quant=self.double_quant, dtype=DTYPES[self.dtype],
            device=device, context=context,
        )  # fmt: skip


@torch.no_grad()
def _draw(bank: nn.Module) -> None:
    """Fill a bank's parameters and buffers with random values of the magnitude of a model's weights."""
    for module in bank.modules():
        if isinstance(module, QuantizedExperts):
            weight = torch.randn(module.shape, dtype=torch.bfloat16, device=module.data.device) / 50
            for index in range(module.count):
                module.quantize_(index, weight.roll(index + 1))
        else:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.normal_(0, 0.02)


@dataclass(frozen=True)
class LinearSizes:
    """Properties of a linear layer that decide its calls of operators, apart from the number of token rows.

    Attributes:
        inputs, outputs: numbers of features.
        storage: precision of the frozen weight.
        double_quant: whether NF4's scales are quantized.
        dtype: dtype of token rows.
        rank: rank of LoRA's factors, of `lora_dtype`; 0 without LoRA.
    """

    inputs: int
    outputs: int
    storage: Storage | Literal["fp16"]
    double_quant: bool
    dtype: str
    rank: int
    lora_dtype: str = "fp32"

    def exercise(self, device: torch.device, tokens: int = TOKENS) -> None:
        """Build a layer of these sizes with random weights, and run it forward and backward.

        With LoRA it also runs without a gradient of the input, as below the first layer that trains.
        """
        base = self._base(device)
        if self.rank:
            A, B = (
                nn.Linear(into, out, False, device, DTYPES[self.lora_dtype])
                for into, out in ((self.inputs, self.rank), (self.rank, self.outputs))
            )
        for needs_gradient in (True, False) if self.rank else (True,):
            x = torch.randn(tokens, self.inputs, dtype=DTYPES[self.dtype], device=device)
            with torch.enable_grad():
                x.requires_grad_(needs_gradient)
                y = adapted(base, x, A, B, 0.5) if self.rank else base(x)
                assert y is not None
                y.backward(torch.randn_like(y))

    def _base(self, device: torch.device) -> nn.Module:
        dtype = DTYPES[self.dtype]
        plain = nn.Linear(self.inputs, self.outputs, bias=False, dtype=dtype, device=device)
        if self.storage == "fp16" or not (format := format_of(self.storage, self.double_quant)).quantizes_linears:
            return plain.requires_grad_(False)
        own = format.linear(plain, plain.weight.data, dtype, device)
        return own or QuantizedLinear(plain.weight.data, None, self.storage)


@dataclass(frozen=True)
class HeadSizes:
    """Properties of attention that decide how queries and keys are rotated (`adapt/layers/rotary.py`).

    Attributes:
        heads, kv_heads: numbers of heads of queries and of keys, of `size` elements each.
        has_norms: whether the kernel also computes an RMS norm of each head.
        dtype: dtype of heads and angles.
    """

    heads: int
    kv_heads: int
    size: int
    has_norms: bool
    dtype: str

    def exercise(self, device: torch.device, tokens: int = TOKENS) -> None:
        """Rotate random queries and keys, and gradients of them: first by angles that all rows share, then by angles of
        each row."""
        drawn = partial(torch.randn, dtype=DTYPES[self.dtype], device=device)
        length = tokens // 2
        for rows in (1, 2):
            q, k = (drawn(2, length, count, self.size).transpose(1, 2) for count in (self.heads, self.kv_heads))
            angles = drawn(rows, length, self.size), drawn(rows, length, self.size)
            given: Any = (q, k) if self.has_norms else (None, None)
            norms: Any = (drawn(self.size), drawn(self.size), 1e-6) if self.has_norms else (None, None, 0.0)
            dq, dk = map(torch.randn_like, rotary.rotate(q, k, *angles, *norms))
            rotary.rotate_backward(dq, dk, *given, *angles, *norms)


@dataclass(frozen=True)
class RouterSizes:
    """Properties of a router that decide how experts are chosen (`adapt/layers/routers.py`).

    Attributes:
        normalized: whether a token's weights are divided by their sum.
        keeps_float32: whether weights stay in float32.
        dtype: dtype of logits.
    """

    experts: int
    top_k: int
    normalized: bool
    keeps_float32: bool
    dtype: str

    def exercise(self, device: torch.device, tokens: int = TOKENS) -> None:
        """Choose experts by random logits, and compute their weights again, forward and back.

        No two logits of a token are equal in 16 bits, for up to 512 experts: of equal logits a kernel may choose
        either.
        """
        dtype = DTYPES[self.dtype]
        logits = (torch.rand(tokens, self.experts).argsort(-1).to(device) / 64 - 4).to(dtype)
        of_weights = torch.float32 if self.keeps_float32 else dtype
        weights, ids = routing.choose(logits, self.top_k, self.normalized, of_weights)
        routing.weigh(logits, ids, self.normalized, of_weights)
        routing.weigh_backward(torch.randn_like(weights), logits, ids, self.normalized)


Sizes = tuple[BankSizes | LinearSizes | HeadSizes | RouterSizes, ...]
"""The sizes of all parts of a model whose operators have kernels."""


def bank_samples(dtype: str, *, hidden: int = 192, intermediate: int = 144, rank: int = 12) -> tuple[BankSizes, ...]:
    """Return sizes of banks, with token rows of `dtype`, that together call every operator of the experts in all its
    variants."""
    shape = ExpertShape(5, hidden, intermediate, True, False, False, True)
    apart = replace(shape, has_bias=True, is_concatenated=False)
    split = LoraPlan((0, 1, 2, 3, 4), rank, rank / 2, split=True)
    some, fused = replace(split, ids=(0, 1, 2)), replace(split, split=False)
    plain = BankSizes(shape, split, 0, "nf4", True, dtype, 3, 1 << 30, True, (1.0, 0.0))
    mixed = replace(plain, lora=some, trained=2)
    clamped = replace(plain, shape=apart, split_gate_up=False, gate=(1.702, 1.5))
    return (
        plain,
        mixed,
        replace(mixed, double_quant=False, lora=replace(some, split=False), split_gate_up=False, expert_memory=0),
        replace(clamped, lora=fused, expert_memory=0, storage="int8"),
        replace(clamped, storage="fp8"),
        replace(plain, storage="nvfp4"),
        replace(plain, storage="mxfp4"),
        replace(plain, storage="int4-g32"),
        replace(mixed, lora=replace(some, dtype=torch.bfloat16, shared=True)),
        replace(clamped, lora=replace(fused, shared=True)),
    )


def samples(dtype: str) -> Sizes:
    """Return sizes, with token rows of `dtype`, that together call every operator in all its variants."""
    return (
        *bank_samples(dtype),
        LinearSizes(192, 160, "nf4", True, dtype, 12),
        LinearSizes(192, 160, "int8", False, dtype, 0),
        HeadSizes(4, 2, 64, True, dtype),
        HeadSizes(4, 2, 64, False, dtype),
        RouterSizes(8, 2, True, True, dtype),
        RouterSizes(128, 8, False, False, dtype),
    )


def sizes_of(run: ResolvedRun) -> Sizes:
    """Return the sizes at which a run calls operators.

    Under expert parallelism these are those of a rank with an even share of the experts.
    """
    first = {layer.shape: layer for layer in reversed(run.structure.moe_layers)}
    gates = {shape: _gate_of(run, layer) for shape, layer in first.items()}
    kinds = Counter(_bank_of(run, layer, gates[layer.shape]) for layer in run.structure.moe_layers)
    banks = (kind for kind, _ in kinds.most_common(_MOST_KINDS))
    return tuple(dict.fromkeys((*banks, *_linears_of(run), *_heads_of(run), *_routers_of(run))))


def _bank_of(run: ResolvedRun, layer: MoeLayer, gate: tuple[float, float] | None) -> BankSizes:
    """Return the sizes of an expert bank that calls operators as one layer's does, with as few experts as possible
    (`_few`): a layer may be larger than the card. On one rank, if the experts with LoRA are not consecutive, it has all
    of the layer's experts, because their positions matter. `gate` is the result of `_gate_of` for the layer."""
    config, selection, ep = run.config, run.selection, run.config.parallel.ep
    trained = selection.experts.get(layer.index, ())
    frozen = [expert for expert in range(layer.shape.num_experts) if expert not in trained]
    lora = LoraPlan.of(selection, layer)
    with_lora = [] if lora is None else [frozen.index(expert) for expert in lora.ids]
    top_k = 1 if ep > 1 else layer.top_k  # each row that another rank sends has one expert
    counts, ids = [len(with_lora), len(trained), len(frozen) - len(with_lora)], tuple(with_lora)
    if ep > 1 or not with_lora or with_lora[-1] - with_lora[0] < len(with_lora):
        most = max(1, run.expert_memory // (layer.shape.hidden * layer.shape.gate_up_rows * run.dtype.itemsize))
        counts = [_few(count // ep, most, top_k) for count in counts]
        ids = tuple(range(counts[0]))
    return BankSizes(
        shape=replace(layer.shape, num_experts=sum(counts), is_transposed=False),
        lora=replace(lora, ids=ids, alpha=lora.rank / 2) if lora is not None and ids else None,
        trained=counts[1],
        storage=config.model.storage_of("experts", layer.index),
        double_quant=config.model.double_quant,
        dtype=config.model.dtype,
        top_k=top_k,
        expert_memory=run.expert_memory,
        split_gate_up=run.model.gate_up_apart,
        gate=gate,
    )


def _few(count: int, most: int, top_k: int) -> int:
    """Return the least number of experts whose groups have the same sizes as those of `count` experts, if a group has
    at most `most`. The result is at least `top_k` + 1, or `count` if that is less, so that an expert can be idle."""
    groups = -(-count // most)
    alike = count if groups < 2 else count // groups + (-(-count // groups) if count % groups else 0)
    return min(count, max(alike, top_k + 1))


def _gate_of(run: ResolvedRun, layer: MoeLayer) -> tuple[float, float] | None:
    """Return (alpha, limit) of the experts' SwiGLU, limit 0 if it does not clamp; None for another activation."""
    experts = run.model.plain.get_submodule(layer.experts)
    gate = recognize(activation_of(experts, has_gate=layer.shape.has_gate), layer.shape)
    return (gate.alpha, gate.limit) if isinstance(gate, SwiGLU) else None


def _linears_of(run: ResolvedRun) -> Iterator[LinearSizes]:
    """Yield the sizes of the linear layers with LoRA, and of others that moetune's own operators dequantize."""
    model, selection = run.config.model, run.selection
    with_lora = set(selection.lora_linears)
    if run.config.parallel.tp > 1:
        with_lora = set()  # base and factors run as layers of their own
    for path, linear in run.structure.linears().items():
        format = FORMATS[run.quantized_linears.get(path, "bf16")]  # which quantizes none
        is_quantized = format.quantizes_linears
        if path in with_lora or (is_quantized and not format.has_own_linear):
            storage = format.name if is_quantized else model.dtype
            rank = selection.ranks[path] if path in with_lora else 0
            sizes = linear.in_features, linear.out_features
            lora_dtype = "fp32" if selection.lora is None else selection.lora.dtype
            yield LinearSizes(*sizes, storage, model.double_quant, model.dtype, rank, lora_dtype)


def _heads_of(run: ResolvedRun) -> Iterator[HeadSizes]:
    """Yield the sizes of the attention layers whose queries and keys one kernel rotates."""
    for module in run.model.plain.modules():
        if calls_rotary(module):
            attention: Any = module
            if hasattr(attention, "k_proj"):
                size = attention.head_dim
                counts = attention.q_proj.out_features // size, attention.k_proj.out_features // size
            else:  # multi-head latent attention: all heads share the rotated part of their keys
                size, counts = attention.qk_rope_head_dim, (attention.num_heads, 1)
            yield HeadSizes(*counts, size, norms_heads(module), run.config.model.dtype)


def _routers_of(run: ResolvedRun) -> Iterator[RouterSizes]:
    """Yield the sizes of the routers whose experts one kernel chooses."""
    for module in run.model.plain.modules():
        if (kind := softmax_router(module)) is not None:
            router: Any = module
            yield RouterSizes(
                len(router.weight), kind.top_k, kind.normalized, kind.keeps_float32, run.config.model.dtype
            )
