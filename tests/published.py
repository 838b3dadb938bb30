"""Checkpoints as they are published quantized, made from random bytes: nothing of ours has packed them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.toys import toy_config


def write_mxfp4(folder: Path, *, shards: bool = False, **sizes: Any) -> Path:
    """A gpt-oss as openai/gpt-oss-20b is published: experts in MXFP4, all else in bfloat16."""
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


def _write(folder: Path, config: Any, tensors: dict[str, Tensor], quantization: dict[str, Any], shards: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config.dtype = torch.bfloat16
    written = config.to_dict() | {"quantization_config": quantization, "architectures": None}
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
