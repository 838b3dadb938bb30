"""Commands in processes of their own: what is predicted of their memory, and what they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests import small
from tests.toys import toy_config

_TAKEN = """
import sys
from moetune.compat.glibc import give_back_memory
from moetune.cli.main import app
give_back_memory()
app(sys.argv[1:], standalone_mode=False)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("peak", int(status["VmHWM"].split()[0]) * 1024, file=sys.stderr)
"""


WIDE = {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 2048, "intermediate_size": 2048}
MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 512, "head_dim": 64},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 64},
    "deepseek_v2": {"n_routed_experts": 16, "moe_intermediate_size": 512},
}


def write(folder: Path, model_type: str, *, zeros: bool = False, **sizes: Any) -> Path:
    """A toy of 100 to 250 MB in float32, with the tokenizer of `tests/small.py`; `zeros` saves the time of drawing its
    weights. `sizes` replace fields of its configuration."""
    small.write_model(folder, num_hidden_layers=1)
    for file in (folder / "model.safetensors", folder / "config.json", folder / "generation_config.json"):
        file.unlink(missing_ok=True)
    config = toy_config(model_type, **{**WIDE, **MODELS[model_type], **sizes})
    torch.manual_seed(0)
    with torch.device("meta" if zeros else "cpu"):
        model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):  # drawn at random, it sends all tokens to the same experts
            torch.nn.init.zeros_(parameter)
    if zeros:
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.zero_()
    model.save_pretrained(folder)
    return folder


def predicted(*command: object) -> dict[str, Any]:
    """The report of a command with `--predict`."""
    arguments = [sys.executable, "-m", "moetune", *map(str, command), "--predict", "--json"]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def taken(*command: object) -> int:
    """The most bytes of host memory that the process of a command had: its own pages, and those of its libraries."""
    arguments = [sys.executable, "-c", _TAKEN, *map(str, command)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stderr.rpartition("peak ")[2])


def off(here: Path, command: str, *more: object, out: bool = True) -> float:
    """How far what is predicted of a command's host memory lies from what it takes, as a share of the latter."""
    expected = predicted(*command.split(), *more)["host"]["required_bytes"]
    return expected / taken(*command.split(), *more, *(("--out", here / "out") if out else ())) - 1
