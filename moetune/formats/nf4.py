"""NF4 (QLoRA, arXiv 2305.14314): 4 bits a weight, 64 share a scale, as bitsandbytes quantizes."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from moetune.compat.bitsandbytes import Linear4bit, Params4bit, prepare_4bit, unpack_tensor_to_dict
from moetune.compat.bitsandbytes import functional as bnb
from moetune.formats.base import Format, Parts, Quantized, Rows, Sizes, require
from moetune.formats.source_quantization import Settings, SourceQuantization
from moetune.kernels.operators import operator
from moetune.tensor_files import NAMES, refuse_value

BLOCK = 64  # weights that share one scale
NESTED_BLOCK = 256  # scales that share one second-level scale, under double quantization


@operator(lambda data, *more: data.new_empty((len(data), more[-2]), dtype=more[-1]))
def dequantize_nf4(
    data: Tensor, absmax: Tensor, nested: Tensor | None, code: Tensor | None, offset: Tensor | None, weights: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Dequantize NF4 matrices of `weights` elements each: [n, weights] in `dtype`.

    The result is bit for bit that of bitsandbytes for each matrix alone. torch's operations dequantize all matrices
    together if `weights` is a multiple of 64, and all scales together if their number per matrix is a multiple of 256.

    Args:
        data: [n, ⌈weights / 2⌉] uint8, two codes per byte.
        absmax: [n, B] scales of the B = ⌈weights / 64⌉ blocks: float32, or uint8 if they are quantized.
        nested: [n, ⌈B / 256⌉] float32 second-level scales. Like `code` and `offset`, None if scales are not quantized.
        code: [256] float32 values of the quantized scales.
        offset: [n] float32, added to the scales.
    """
    ops, count = torch.ops.bitsandbytes, len(data)
    if nested is not None and code is not None and offset is not None:
        together = 1 if absmax.shape[1] % NESTED_BLOCK == 0 else count
        absmax = _joined(
            ops.dequantize_blockwise(scales.flatten(), of_scales.flatten(), code, NESTED_BLOCK, torch.float32)
            for scales, of_scales in zip(absmax.chunk(together), nested.chunk(together), strict=True)
        ).view(absmax.shape)
        absmax.add_(offset[:, None])
    # A matrix that is not a whole number of blocks is dequantized alone (findings/bitsandbytes_dequantize_on_cpu.sh).
    together = 1 if weights % BLOCK == 0 else count
    return _joined(
        ops.dequantize_4bit(part.view(-1, 1), scales.flatten(), BLOCK, "nf4", (len(part), weights), dtype)
        for part, scales in zip(data.chunk(together), absmax.chunk(together), strict=True)
    )


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Return the parts concatenated along the first dimension; a single part as it is."""
    first, *others = parts
    return torch.cat([first, *others]) if others else first


@dataclass(frozen=True)
class BitsAndBytes(Quantized):
    """A matrix [out, in] that bitsandbytes quantized to 4 bits (NF4 or FP4).

    `state` is its `quant_state` from JSON: quantization type, block sizes, shape and dtype.
    """

    PATTERN = r"(.+\.weight)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"

    state: Settings = field(default_factory=dict, repr=False)

    @classmethod
    def opened(cls, parts: Parts) -> Self | None:
        of_state = [part for name, part in parts.items() if name.startswith("quant_state.")]
        if not of_state:
            return None
        weight, state = parts[""], unpack_tensor_to_dict(of_state[0].rows())
        if not math.isfinite(state.get("nested_offset", 0.0)):
            refuse_value(of_state[0].name, of_state[0].file)
        shape, nested = tuple(state["shape"]), ("nested_absmax", "nested_quant_map")
        needed = {"absmax", "quant_map", *(nested if "nested_blocksize" in state else ())}
        require(parts.keys() >= needed and weight.nbytes == -(-math.prod(shape) // 2), parts)
        # `bnb_4bit_quant_storage` may give its bytes another type, as which they may be NaN
        parts = {**parts, "": replace(weight, dtype="U8", shape=(weight.nbytes, 1))}
        return cls(weight.file, NAMES[getattr(torch, state["dtype"])], shape, 0, parts, state)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, row after the last) of a single block: all rows are dequantized together."""
        yield 0, self.num_rows

    def is_in(self, format: Format) -> bool:
        """Return whether the matrix is in QLoRA's layout: 64 weights share a scale, and scales are plain, or in 8 bits
        of which 256 share one."""
        scales = self.state["quant_type"], self.state["blocksize"], self.state.get("nested_blocksize")
        if not isinstance(format, Nf4) or scales != ("nf4", BLOCK, NESTED_BLOCK if format.double_quant else None):
            return False
        return not format.double_quant or self.parts["nested_quant_map"].rows().equal(bnb.create_dynamic_map())

    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = {"data": stored[""].flatten(), "absmax": stored["absmax"]}
        if "nested_absmax" in stored:
            rows |= {"nested_absmax": stored["nested_absmax"], "offset": torch.tensor(self.state["nested_offset"])}
        return rows

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        parts = {name: part.to(device) for name, part in self.stored().items()}
        data = parts.pop("")
        state = bnb.QuantState.from_dict(parts, torch.device(device))
        # The shape must be flat: only then is the result on a CPU exact.
        state.dtype, state.shape = self.torch_dtype, torch.Size([self.numel])
        return bnb.dequantize_4bit(data, state).view(self.shape)[start:stop]


def empty_linear(linear: nn.Linear, dtype: torch.dtype, double_quant: bool) -> Linear4bit:
    """Return bitsandbytes' layer with the sizes and the bias of `linear`, without a weight; it computes in `dtype`."""
    empty = Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=dtype,
        compress_statistics=double_quant, quant_type="nf4", device="meta",
    )  # fmt: skip
    empty.bias = linear.bias
    prepare_4bit(empty)
    return empty


@dataclass(frozen=True)
class Nf4(Format):
    """NF4; each matrix alone equals `bitsandbytes.functional.quantize_4bit` of it bit for bit.

    Attributes:
        double_quant: whether scales are stored in 8 bits.
    """

    double_quant: bool = True

    name, layouts, bits, has_own_linear = "nf4", (BitsAndBytes,), 4.5, True

    @property
    def label(self) -> str:
        return "nf4, double-quantized" if self.double_quant else "nf4"

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        weights = shape[0] * shape[1]
        blocks = -(-weights // BLOCK)
        data = torch.uint8, (count, -(-weights // 2))
        if not self.double_quant:
            return {"data": data, "absmax": (torch.float32, (count, blocks))}
        nested = torch.float32, (count, -(-blocks // NESTED_BLOCK))
        absmax, offset = (torch.uint8, (count, blocks)), (torch.float32, (count,))
        code = torch.float32, (256,)
        return {"data": data, "absmax": absmax, "nested_absmax": nested, "offset": offset, "nested_code": code}

    def tables(self) -> dict[str, Tensor]:
        return {"nested_code": bnb.create_dynamic_map()} if self.double_quant else {}

    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        for name, tensor in self.quantized(weight).items():
            row[name].copy_(tensor)

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a matrix quantized: buffer name -> row of the buffer."""
        data, state = bnb.quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=self.double_quant, quant_type="nf4"
        )
        nested = {"nested_absmax": state.state2.absmax, "offset": state.offset} if self.double_quant else {}
        return {"data": data.view(-1), "absmax": state.absmax, **nested}

    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        of_blocks = [stored.get(name) for name in ("absmax", "nested_absmax", "nested_code", "offset")]
        weights: Tensor = dequantize_nf4(stored["data"], *of_blocks, shape[0] * shape[1], dtype)
        return weights

    def linear(self, linear: nn.Linear, weight: Tensor, dtype: torch.dtype, device: torch.device) -> nn.Module:
        quantized: Any = empty_linear(linear, dtype, self.double_quant)
        options: Any = {"compress_statistics": self.double_quant, "quant_type": "nf4"}
        quantized.weight = Params4bit(weight.data, requires_grad=False, module=quantized, **options)
        if not weight.is_meta:
            quantized = quantized.to(device)
            quantized.weight.quant_state.dtype = dtype
        return cast(nn.Module, quantized)

    def fake_weight(self, weight: Tensor) -> nn.Parameter:
        """Return uninitialized data of a linear layer's weight as bitsandbytes has them: uint8 with a `quant_state`."""
        rows, columns = weight.shape
        sizes = self.buffers(1, (rows, columns)).items()
        made = {name: torch.empty(size[1:], dtype=dtype) for name, (dtype, size) in sizes}
        state = bnb.QuantState(
            absmax=made["absmax"], shape=weight.shape, code=torch.empty(16), blocksize=BLOCK, quant_type="nf4",
            dtype=weight.dtype,
        )  # fmt: skip
        if self.double_quant:
            state.offset, state.nested = made["offset"], True
            state.state2 = bnb.QuantState(
                absmax=made["nested_absmax"], code=torch.empty(256), blocksize=NESTED_BLOCK, dtype=torch.float32
            )
        fake = nn.Parameter(made["data"].view(-1, 1), requires_grad=False)
        fake.quant_state = state  # type: ignore[attr-defined]
        return fake

    def published(self, method: str, settings: Settings) -> SourceQuantization | None:
        if method != "bitsandbytes" or not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
            return None
        is_nf4 = settings.get("bnb_4bit_quant_type") == "nf4"
        double_quant = bool(settings.get("bnb_4bit_use_double_quant"))
        return SourceQuantization(method, "nf4" if is_nf4 else None, double_quant, gate_up_apart=is_nf4)
