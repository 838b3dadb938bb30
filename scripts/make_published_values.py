"""Write tests/formats/published: matrices as the libraries that publish checkpoints pack them, and their own values.

    python scripts/make_published_values.py [--only WORD]

A file for each library: tensors `<case>.<part>`, which are those of a checkpoint, and `<case>.expected`, what the
library itself dequantizes them to. The metadata have the library's version and the settings of each case. Needs, beside
what moetune needs: compressed-tensors 0.20.0, gptqmodel 7.7.0, auto-round 0.16.1, nvidia-modelopt 0.47.0.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUT = Path(__file__).parents[1] / "tests/formats/published"
Case = tuple[str, dict[str, Any], dict[str, Tensor]]
"""Name, `quantization_config`, and tensors: parts by their names in a checkpoint, and `expected`."""
Packed = tuple[dict[str, Any], dict[str, Tensor]]
"""The last two of a case."""


def weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(rows, columns) * torch.logspace(-2, 0, rows)[:, None]).to(dtype)


def linear(of: Tensor) -> nn.Linear:
    layer = nn.Linear(of.shape[1], of.shape[0], bias=False)
    layer.weight.data = of.float()
    return layer


def pack_compressed_tensors(of: Tensor, format: str = "pack-quantized", **weights: Any) -> Packed:
    """By default in INT4 with zero points."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = weights or {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    group = {"targets": ["Linear"], "weights": weights, "format": format}
    scheme = QuantizationScheme.model_validate(group)
    args = scheme.weights
    assert args is not None
    size = args.group_size or of.shape[1]
    blocks = of.unflatten(1, (-1, size)) if args.strategy != "tensor" else of.reshape(1, 1, -1)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    compressor = BaseCompressor.get_value_from_registry(format)
    parts = compressor.compress({"weight": of, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    expected = compressor.decompress(dict(parts), scheme)["weight"]
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return settings, {**parts, "expected": expected}


def compressed_tensors() -> Iterator[Case]:
    def case(name: str, format: str, of: Tensor, **weights: Any) -> Case:
        return name, *pack_compressed_tensors(of, format, **weights)

    packed = partial(case, format="pack-quantized", num_bits=4, type="int")
    for rows, columns, size in ((16, 96, 32), (16, 128, 64), (17, 256, 128)):
        for symmetric in (True, False):
            kind = f"g{size}_{'symmetric' if symmetric else 'zeros'}"
            yield packed(kind, of=weight(rows, columns), strategy="group", group_size=size, symmetric=symmetric)
    yield packed("odd_rows", of=weight(13, 64), strategy="group", group_size=32, symmetric=False)
    yield packed("row", of=weight(11, 45), strategy="channel", symmetric=True)
    yield packed("row_zeros", of=weight(11, 45), strategy="channel", symmetric=False)
    yield packed("float16", of=weight(16, 64, torch.float16), strategy="group", group_size=32, symmetric=False)
    yield packed("all_zero", of=torch.zeros(8, 64).bfloat16(), strategy="group", group_size=32, symmetric=True)
    floats = partial(case, num_bits=8, type="float", symmetric=True)
    for kind, of in (("", weight(9, 45)), ("_float32", weight(9, 45, torch.float32)), ("_zero", torch.zeros(8, 32))):
        yield floats(f"fp8_tensor{kind}", "float-quantized", of, strategy="tensor")
        yield floats(f"fp8_channel{kind}", "float-quantized", of, strategy="channel")
    powers: dict[str, Any] = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    yield floats("mxfp8", "mxfp8-quantized", weight(9, 96), **powers)
    yield floats("mxfp8_zero", "mxfp8-quantized", torch.zeros(8, 64).bfloat16(), **powers)
    fours = partial(case, format="mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, **powers)
    yield fours("mxfp4", of=weight(9, 96))


def _grid(of: Tensor, g_idx: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points [R, G], as GPTQ's, AWQ's and AutoRound's quantizers choose them."""
    groups = int(g_idx.max()) + 1
    scales, zeros = torch.zeros(2, len(of), groups)
    for group in range(groups):
        low, high = of[:, g_idx == group].float().aminmax(dim=1)
        low, high = low.clamp(max=0), high.clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        is_zero = (low == 0) & (high == 0)
        low, high = low.where(~is_zero, -1.0), high.where(~is_zero, 1.0)
        scales[:, group] = (high - low) / 15
        zeros[:, group] = 8 if symmetric else (-low / scales[:, group]).round()
    return scales.half().float(), zeros


def pack_gptq(
    of: Tensor, size: int = 32, act_order: bool = True, symmetric: bool = False, checkpoint_format: str = "gptq"
) -> Packed:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    rows, columns = of.shape
    g_idx = torch.arange(columns, dtype=torch.int32) // (columns if size == -1 else size)
    g_idx = g_idx[torch.randperm(columns)] if act_order else g_idx
    layer = TorchLinear(
        bits=4, group_size=size, sym=symmetric, desc_act=act_order, in_features=columns, out_features=rows, bias=False,
        pack_dtype=torch.int32,
    )  # fmt: skip
    layer.pack_original(linear(of), *_grid(of, g_idx, symmetric), g_idx)
    layer.post_init()
    layer.eval()
    expected = TorchLinear.__mro__[1].dequantize_weight(layer).T.contiguous()
    if checkpoint_format == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, SimpleNamespace(bits=4, pack_dtype=torch.int32))  # type: ignore[arg-type]
    parts = {part: getattr(layer, part).clone() for part in ("qweight", "qzeros", "scales", "g_idx")}
    settings = {
        "quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": act_order, "sym": symmetric,
        "checkpoint_format": checkpoint_format,
    }  # fmt: skip
    return settings, {**parts, "expected": expected}


def gptqmodel() -> Iterator[Case]:
    for name, rows, columns, size, act_order, symmetric, version_ in (
        ("v1_g32", 16, 96, 32, False, True, "gptq"), ("v1_g128", 8, 256, 128, False, True, "gptq"),
        ("v1_zeros", 16, 128, 64, False, False, "gptq"), ("v2_zeros", 16, 128, 64, False, False, "gptq_v2"),
        ("act_order", 16, 128, 32, True, True, "gptq"), ("act_order_zeros", 16, 96, 32, True, False, "gptq_v2"),
        ("row", 8, 64, -1, False, True, "gptq"), ("cut_group", 8, 80, 64, False, True, "gptq"),
        ("all_zero", 8, 64, 32, False, True, "gptq"),
    ):  # fmt: skip
        of = weight(rows, columns, torch.float16) * (name != "all_zero")
        if name == "v1_zeros":
            of[:3] = of[:3].abs()  # zero points of 0, which borrow from their neighbours in version 1
        yield name, *pack_gptq(of, size, act_order, symmetric, version_)


def pack_awq(of: Tensor, size: int = 32, symmetric: bool = False) -> Packed:
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    columns = of.shape[1]
    group = columns if size == -1 else size
    layer = SimpleNamespace(group_size=group, in_features=columns, bits=4, bias=None)
    layer.register_buffer = partial(setattr, layer)
    AwqTorchLinear.pack(layer, linear(of), *_grid(of, torch.arange(columns) // group, symmetric))  # type: ignore[arg-type]
    parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
    expected = dequantize_gemm(**parts, bits=4, group_size=group).T.contiguous()
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return settings, {**parts, "expected": expected}


def awq() -> Iterator[Case]:
    for name, rows, columns, size, symmetric in (
        ("g32", 16, 96, 32, False), ("g128", 8, 256, 128, False), ("symmetric", 16, 128, 64, True),
        ("all_zero", 8, 64, 32, False), ("odd", 24, 45, -1, False),
    ):  # fmt: skip
        yield name, *pack_awq(weight(rows, columns, torch.float16) * (name != "all_zero"), size, symmetric)


def pack_auto_round(of: Tensor, symmetric: bool = True) -> Packed:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    rows, columns = of.shape
    module, packing = (qlinear_torch_zp, "auto_round:auto_gptq") if symmetric else (qlinear_torch, "auto_round")
    layer = module.QuantLinear(4, 32, columns, rows, False)
    layer.device = "cpu"
    scales, zeros = _grid(of, torch.arange(columns) // 32, symmetric)
    layer.pack(linear(of), scales.half(), zeros, None, device="cpu")
    layer.post_init()
    expected = layer(torch.eye(columns, dtype=torch.float16)).T.contiguous()  # the weight with which it multiplies
    parts = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": packing}, {
        **parts, "expected": expected,
    }  # fmt: skip


def auto_round() -> Iterator[Case]:
    for name, symmetric in (("auto_gptq", True), ("zeros", False)):
        yield name, *pack_auto_round(weight(32, 128, torch.float16), symmetric)


def pack_modelopt(of: Tensor, algorithm: str = "FP8") -> Packed:
    from modelopt.torch.quantization.qtensor import FP8QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    kind = MXFP8QTensor if algorithm == "MXFP8" else FP8QTensor
    blocks: dict[str, Any] = {"block_sizes": {-1: 128, -2: 128}} if algorithm.startswith("fp8_pb") else {}
    packed, scale = kind.quantize(of, **({"axis": 0} if algorithm.startswith("FP8_") else blocks))
    expected = packed.dequantize(dtype=of.dtype, scale=scale, **blocks)
    scale = scale.squeeze(-1) if algorithm.startswith("FP8_") else scale
    scale = scale[:, None, :, None] if algorithm == "fp8_pb_wo" else scale  # as its calibration has the amax
    parts = {"weight": packed._quantized_data, "weight_scale": scale}
    return {"quant_method": "modelopt", "quant_algo": algorithm}, {**parts, "expected": expected}


def modelopt() -> Iterator[Case]:
    yield "fp8", *pack_modelopt(weight(9, 45, torch.float32))
    yield "fp8_channel", *pack_modelopt(weight(9, 45, torch.float32), "FP8_PER_CHANNEL_PER_TOKEN")
    yield "mxfp8", *pack_modelopt(weight(9, 96), "MXFP8")
    yield "mxfp8_zero", *pack_modelopt(torch.zeros(8, 64).bfloat16(), "MXFP8")
    yield "fp8_blocks", *pack_modelopt(weight(140, 45, torch.float32), "fp8_pb_wo")


def transformers() -> Iterator[Case]:
    """As DeepSeek-V4, Devstral and others are published, from random bytes, and read by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def floats(*shape: int) -> Tensor:
        return (torch.randn(shape) * 50).to(torch.float8_e4m3fn)

    def exponents(*shape: int) -> Tensor:
        return torch.randint(110, 130, shape, dtype=torch.uint8)

    e8m0, v4 = torch.float8_e8m0fnu, {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    codes = torch.randint(-128, 128, (9, 48), dtype=torch.int8)
    for name, settings, matrix, scale, kind in (
        ("tensor", {"weight_block_size": None, "activation_scheme": "static"}, floats(9, 45), torch.rand(()), "_inv"),
        ("blocks", v4, floats(128, 128), exponents(1, 1).view(e8m0), ""),
        ("experts", v4 | {"expert_dtype": "fp4"}, codes, exponents(9, 3).view(e8m0), ""),
        ("mxfp8", {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, floats(9, 96), exponents(9, 3), "_inv"),
    ):
        expected = Fp8Dequantize(None)._dequantize_one(matrix, scale, torch.bfloat16)
        parts = {"weight": matrix, f"weight_scale{kind}" if kind else "scale": scale}
        yield name, {"quant_method": "fp8", **settings}, {**parts, "expected": expected}


WRITERS = {
    "compressed-tensors": compressed_tensors, "gptqmodel": gptqmodel, "awq": awq, "auto-round": auto_round,
    "modelopt": modelopt, "transformers": transformers,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose name contains this word")
    only = parser.parse_args().only
    OUT.mkdir(exist_ok=True)
    for name, cases in WRITERS.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        tensors: dict[str, Tensor] = {}
        settings: dict[str, Any] = {}
        for case, how, parts in cases():
            tensors |= {f"{case}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            settings[case] = how
        library = {"awq": "gptqmodel", "modelopt": "nvidia-modelopt"}.get(name, name)
        about = {"library": f"{library} {version(library)}", "settings": json.dumps(settings)}
        save_file(tensors, OUT / f"{name}.safetensors", metadata=about)
        print(name, len(settings), (OUT / f"{name}.safetensors").stat().st_size)


if __name__ == "__main__":
    main()
