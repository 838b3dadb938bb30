"""Cases of quantized bases, for cases.py: a base in each published format, an adapter trained on it, and what
`export --format merged --into FORMAT` writes. What is expected is computed by transformers and PEFT on the values in
the files, dequantized to float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moetune.exporting.export import export
from moetune.exporting.writers.merged import complete_config
from moetune.exporting.writers.rounded import _open_exactly
from tests.exporting.runs import write_base, write_run
from tests.published import write_int4

SIZES: dict[str, Any] = {
    "qwen3_moe": {"moe_intermediate_size": 128, "norm_topk_prob": True, "num_hidden_layers": 2, "head_dim": 32},
    "gpt_oss": {"intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64},
}
"""Matrices whose sides are multiples of the blocks of FP8, 128."""
INTO = {"int4": "qwen3_moe", "fp8": "qwen3_moe", "mxfp8": "qwen3_moe", "nvfp4": "qwen3_moe", "mxfp4": "gpt_oss"}
PRODUCERS = ("gptq", "awq")
LORA: dict[str, Any] = {"rank": 8, "alpha": 20, "targets": ["attention", "experts"]}


def dequantized(folder: Path, out: Path) -> Path:
    """Write a checkpoint with the values of another one in float32."""
    out.mkdir()
    save_file({name: one.rows().float() for name, one in _open_exactly(folder).items()}, out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return out


def _as_published(folder: Path) -> None:
    """Give a toy of tests/published.py what vLLM, llama.cpp and mlx-lm ask for: the architecture's name, settings by
    the keys of before transformers 5, and of GPTQ groups in order and zero points in the middle."""
    config = json.loads((folder / "config.json").read_text())
    name = AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(folder))].__name__
    is_gptq = config["quantization_config"]["quant_method"] == "gptq"
    if is_gptq:
        config["quantization_config"] |= {"sym": True, "desc_act": False}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    complete_config(folder)
    tensors = load_file(folder / "model.safetensors")
    for key, values in tensors.items() if is_gptq else ():
        if key.endswith(".g_idx"):
            tensors[key] = values.sort().values
        elif key.endswith(".qzeros"):
            tensors[key] = values.fill_(0x77777777)  # version 1 of the format stores 7 for 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_formats(folder: Path, model: Any, log_probabilities: Any, write_tokenizer: Any) -> list[dict[str, Any]]:
    """Write all cases to `folder`/TYPE-FORMAT/ and return them as entries of cases.json.

    `model` gives the model of a folder, `log_probabilities` what a model computes; both as in cases.py.
    """
    entries = []
    for format in (*INTO, *PRODUCERS):
        model_type = INTO.get(format, "qwen3_moe")
        row = f"{model_type}-{format}"
        print(row, file=sys.stderr)
        (own := folder / row).mkdir()
        if format in INTO:
            plain = write_base(own / "plain", model_type, hidden_size=128, vocab_size=288, **SIZES[model_type])
            write_tokenizer(plain)
            run = write_run(own / "run", plain, {"lora": LORA})
            export(run.path, "merged", base := own / "into", into=format)
        else:
            base = write_int4(own / "base", format, hidden_size=128, vocab_size=288, **SIZES[model_type])
            write_tokenizer(base)
            _as_published(base)
        values = dequantized(base, own / "values")
        of_base = log_probabilities(model(values))
        np.save(folder / "expected" / f"{row}-base.npy", of_base)
        entry = {"type": row, "kind": "all experts", "base": str(base), "fault": None, "check": {}}
        entries.append({**entry, "export": "quantized", "path": str(base), "expected": f"{row}-base.npy"})
        of_run = write_run(own / "run-on-it", base, {"lora": LORA}, storage="auto")
        for name in ("vllm", "peft"):
            export(of_run.path, name, own / name)
        entries.append({**entry, "export": "vllm", "path": str(own / "vllm"), "expected": f"{row}-lora.npy"})
        lora = PeftModel.from_pretrained(model(values), str(own / "peft")).eval()
        np.save(folder / "expected" / f"{row}-lora.npy", log_probabilities(lora))
    return entries
