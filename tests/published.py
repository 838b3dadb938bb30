"""Toy checkpoints in published quantized formats, from random bytes, so that moetune's own quantization has no part."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from moetune.models.text import auto_class
from tests.toys import toy_config


def write_mxfp4(folder: Path, *, shards: bool = False, **sizes: Any) -> Path:
    """Write a toy gpt-oss as openai/gpt-oss-20b is published: experts in MXFP4, all else in bfloat16.

    With `shards`, it is in two files. `sizes` are fields of the configuration.
    """
    config = toy_config("gpt_oss", **{"hidden_size": 64, "intermediate_size": 96, **sizes})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach() if name.endswith("norm.weight") else torch.randn_like(parameter) * 0.1
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, into, out = value.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(119, 124, (experts, out, into // 32), dtype=torch.uint8)
        else:
            tensors[name] = value.contiguous()
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _write(folder, config, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": skipped}, shards)
    return folder


def write_fp8(
    folder: Path, model_type: str = "deepseek_v3", block: int = 128, left_out: Sequence[str] = (), **sizes: Any
) -> Path:
    """Write a toy model as deepseek-ai/DeepSeek-V3 is published: linear layers and experts in FP8.

    Layers whose paths end with one of `left_out` are in bfloat16. Each block of `block` × `block` weights has a scale;
    the last blocks of a row or column may be smaller.
    """
    config = toy_config(model_type, **sizes)
    tensors: dict[str, Tensor] = {}
    for name, value in _checkpoint(config).items():
        plain = ("embed_tokens.weight", "lm_head.weight", "gate.weight", *(f"{one}.weight" for one in left_out))
        if value.ndim == 2 and not name.endswith(plain):
            tensors[name] = (value * 20).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand([-(-size // block) for size in value.shape]) / 10 + 0.01
        else:
            tensors[name] = value
    settings: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [block] * 2,
    }
    if left_out:
        settings["modules_to_not_convert"] = [
            "lm_head",
            *(f"model.layers.{n}.{one}" for n in range(9) for one in left_out),
        ]
    _write(folder, config, tensors, settings, shards=False)
    return folder


def write_floats(
    folder: Path, kind: str, model_type: str = "qwen3_moe", left_out: Sequence[str] = (), **sizes: Any
) -> Path:
    """Write a toy model in 8-bit floats: `tensor` as mistralai/Devstral-Small-2 with static scales, `modelopt` with a
    scale for each matrix, `row` as compressed-tensors' with a scale for each row, or `mxfp8`; or `deepseek_v4` as
    deepseek-ai/DeepSeek-V4-Flash, with experts in FP4 and its own names.

    Layers whose paths end with one of the regular expressions `left_out` are in bfloat16.
    """
    is_v4 = kind == "deepseek_v4"
    more = {} if is_v4 else {"hidden_size": 64}
    config = toy_config(kind if is_v4 else model_type, **{**more, "moe_intermediate_size": 64, **sizes})
    tensors: dict[str, Tensor] = {}
    plain = "|".join(
        ("embed_tokens", "lm_head", "gate", *(["embed", "head", "weights_proj"] if is_v4 else []), *left_out)
    )
    for name, value in _checkpoint(config).items():
        if value.ndim != 2 or not name.endswith(".weight") or re.search(rf"({plain})\.weight$", name):
            tensors[name] = value.clone()
            continue
        rows, columns = value.shape
        path, groups = name.removesuffix(".weight"), -(-columns // 32)
        tensors[name] = (value * 20).to(torch.float8_e4m3fn)
        powers = torch.randint(118, 122, (rows, groups), dtype=torch.uint8)
        if is_v4 and ".experts." in name:
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            tensors[f"{path}.scale"] = powers.view(torch.float8_e8m0fnu)
        elif is_v4:
            blocks = [-(-size // 128) for size in value.shape]
            tensors[f"{path}.scale"] = torch.randint(118, 122, blocks, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        elif kind == "mxfp8":
            tensors[f"{name}_scale"] = powers
        elif kind == "row":
            tensors[f"{name}_scale"] = (torch.rand(rows, 1) / 10 + 0.01).bfloat16()
        else:
            own = ("weight_scale", "input_scale") if kind == "modelopt" else ("weight_scale_inv", "activation_scale")
            tensors |= {f"{path}.{part}": torch.rand(()) / 10 + 0.01 for part in own}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    skipped = [f"re:.*{one}$" for one in left_out]
    settings: dict[str, Any] = {
        "tensor": {
            "quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static",
            "modules_to_not_convert": skipped,
        },
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": skipped},
        "row": {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": skipped,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
        "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": skipped},
        "deepseek_v4": {
            "quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
    }[kind]  # fmt: skip
    _write(folder, config, tensors, settings, shards=False)
    return folder


def write_nvfp4(
    folder: Path, model_type: str, producer: str = "modelopt", left_out: Sequence[str] = (), **sizes: Any
) -> Path:
    """Write a toy model as nvidia/Qwen3-30B-A3B-NVFP4 (`producer` `modelopt`) or RedHatAI/Qwen3-30B-A3B-NVFP4
    (`compressed-tensors`) is published.

    Linear layers and experts are in NVFP4, with scales of activations; layers whose paths end with one of `left_out` in
    bfloat16.
    """
    config = toy_config(model_type, **sizes)
    tensors: dict[str, Tensor] = {}
    for name, value in _checkpoint(config).items():
        plain = ("embed_tokens.weight", "lm_head.weight", "gate.weight", *(f"{one}.weight" for one in left_out))
        if value.ndim != 2 or name.endswith(plain):
            tensors[name] = value
            continue
        rows, columns = value.shape
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scale, path = 1e-4 * (1 + torch.rand(())), name.removesuffix(".weight")
        tensors[f"{name}_scale"] = (torch.rand(rows, columns // 16) * 400).to(torch.float8_e4m3fn)
        if producer == "modelopt":
            tensors |= {name: codes, f"{name}_scale_2": scale, f"{path}.input_scale": torch.rand(())}
            if name.endswith("k_proj.weight"):
                tensors[f"{path}.k_scale"] = torch.rand(())
        else:
            tensors |= {f"{name}_packed": codes, f"{name}_global_scale": 1 / scale.view(1)}
            tensors[f"{path}.input_global_scale"] = torch.rand(1)
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    group = {"weights": weights, "targets": ["Linear"]}
    settings: dict[str, Any] = {"quant_method": producer, "config_groups": {"group_0": group}}
    settings["ignore"] = ["lm_head", *(f"model.layers.*.{one}*" for one in left_out)]
    if producer == "modelopt":
        settings |= {"quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.47.0"}}
    else:
        settings["ignore"] = ["lm_head", *(f"re:.*{one}$" for one in left_out)]
        settings |= {"format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
    _write(folder, config, tensors, settings, shards=False)
    return folder


def write_int4(
    folder: Path,
    producer: str,
    model_type: str = "qwen3_moe",
    group: int = 32,
    left_out: Sequence[str] = (),
    **sizes: Any,
) -> Path:
    """Write a toy model in INT4 with zero points: `compressed-tensors` as moonshotai/Kimi-K2.5, `gptq` as
    Qwen/Qwen3-30B-A3B-GPTQ-Int4 in version 1 with act-order, `awq`, or `auto-round`.

    Linear layers and experts have 4 bits with a scale for each `group` columns; layers whose paths end with one of the
    regular expressions `left_out` are in bfloat16. A model that has a text section has the settings there.
    """
    config = toy_config(model_type, **{"hidden_size": 64, "moe_intermediate_size": 64, **sizes})
    tensors: dict[str, Tensor] = {}
    plain = "|".join(("embed_tokens", "lm_head", "gate", *left_out))
    for name, value in _checkpoint(config).items():
        if value.ndim != 2 or re.search(rf"({plain})\.weight$", name):
            tensors[name] = value.clone()
            continue
        rows, columns = value.shape
        path, groups = name.removesuffix(".weight"), columns // group

        def words(*shape: int) -> Tensor:
            return torch.randint(-(2**31), 2**31, shape).int()

        if producer == "compressed-tensors":
            tensors |= {f"{name}_packed": words(rows, columns // 8), f"{name}_shape": torch.tensor(value.shape)}
            tensors[f"{name}_scale"] = (torch.rand(rows, groups) / 100 + 1e-3).bfloat16()
            tensors[f"{name}_zero_point"] = words(-(-rows // 8), groups)
            continue
        tensors[f"{path}.qweight"] = words(columns, rows // 8) if producer == "awq" else words(columns // 8, rows)
        tensors |= {f"{path}.qzeros": words(groups, rows // 8)}
        tensors[f"{path}.scales"] = (torch.rand(groups, rows) / 100 + 1e-3).half()
        if producer == "gptq":
            tensors[f"{path}.g_idx"] = (torch.randperm(columns) // group).int()
    size: dict[str, Any] = {"bits": 4, "group_size": group}
    skipped = [f"re:.*{one}$" for one in left_out]
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": False}
    settings: dict[str, Any] = {
        "compressed-tensors": {
            "format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", *skipped],
        },
        "gptq": size | {"desc_act": True, "dynamic": {f"-:.*{one}$": {} for one in left_out}},
        "awq": size | {"version": "gemm", "zero_point": True, "modules_to_not_convert": [*left_out]},
        "auto-round": size | {
            "packing_format": "auto_round:auto_gptq", "extra_config": {f".*{one}": {"bits": 16} for one in left_out},
        },
    }[producer]  # fmt: skip
    _write(folder, config, tensors, {"quant_method": producer} | settings, shards=False)
    return folder


def write_4bit(
    folder: Path,
    model_type: str,
    *,
    double_quant: bool = True,
    quant_type: str = "nf4",
    blocksize: int = 64,
    apart: bool = False,
    **sizes: Any,
) -> Path:
    """Write a toy model as bitsandbytes and transformers 4 save it: each linear layer in 4 bits, of experts too; those
    of gpt-oss, with `apart`, under the names of unsloth/gpt-oss-20b-unsloth-bnb-4bit."""
    config = toy_config(model_type, **sizes)
    tensors: dict[str, Tensor] = {}
    plain = _checkpoint(config)
    for name in [name for name in plain if apart and ".mlp." in name]:
        whole, (stack, is_bias, _) = plain.pop(name), name.partition("_bias")
        if ".router." in name:
            plain[name.replace(".router.", ".router.linear.")] = whole
        else:
            part = "bias" if is_bias else "weight"
            plain |= {f"{stack}s.{expert}.{part}": matrix.t().contiguous() for expert, matrix in enumerate(whole)}
    for name, value in plain.items():
        if value.ndim == 2 and not re.search(r"embed|lm_head|gate\.weight|bias|router", name):
            packed, state = quantize_4bit(value, None, None, blocksize, double_quant, quant_type)
            tensors[name] = packed
            tensors |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        else:
            tensors[name] = value
    settings = {
        "quant_method": "bitsandbytes", "_load_in_4bit": True, "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": double_quant,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    }  # fmt: skip
    _write(folder, config, tensors, settings, shards=False)
    return folder


def _checkpoint(config: Any) -> dict[str, Tensor]:
    """Return the tensors of a random model in bfloat16, under the names of its published checkpoints."""
    torch.manual_seed(3)
    model = auto_class(config).from_config(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, std=0.5 if "gate.weight" in name else 0.1)
    return {name: value.contiguous() for name, value in revert_weight_conversion(model, model.state_dict()).items()}


def _write(folder: Path, config: Any, tensors: dict[str, Tensor], quantization: dict[str, Any], shards: bool) -> None:
    """Write tensors and `config.json` with the quantization settings; with `shards`, into two files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    config.dtype = torch.bfloat16
    written = config.to_dict() | {"architectures": None}
    written.get("text_config", written)["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    if not shards:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, chosen in files.items():  # parts of a weight are in different files
        save_file({name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, chosen in files.items() for name in chosen}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
