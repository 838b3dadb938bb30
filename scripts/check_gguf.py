"""Compare exports with what llama.cpp's converters make of them: `python scripts/check_gguf.py LLAMA_CPP [TYPE …]`.

LLAMA_CPP is a checkout of llama.cpp, or the folder `vendor/llama.cpp` in the sources of llama-cpp-python. A toy of each
model type is trained with LoRA on experts and attention, and exported as a merged checkpoint and as an adapter with
factors for each expert (`--format vllm`). `convert_hf_to_gguf.py` and `convert_lora_to_gguf.py` convert these, and
every expert's weights and updates in the GGUF files, as llama.cpp's reader gives them, are compared with the export.

Exit code 1: a converter failed, or an expert differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

import moetune
from moetune.adapters.base import AdapterBase, base_of
from moetune.adapters.factors import DOWN, GATE_UP, parted
from moetune.adapters.files import open_adapter
from moetune.adapters.read import read
from moetune.models.catalog import find_model
from moetune.run.resolve import resolve_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.toys import toy_model

TYPES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v2", "glm4_moe", "glm4_moe_lite", "gpt_oss")
GLM = ("[gMASK]", "<|user|>", "<|endoftext|>", "<|observation|>")
"""Tokens that the converter looks for in the tokenizer of a GLM."""
NO_ATTENTION = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Types of whose attention convert_lora_to_gguf.py converts no LoRA: it splits `kv_b_proj`."""
NO_EXPERTS = ("gpt_oss",)
"""Types of whose experts it converts no LoRA: `Can not map tensor 'model.layers.0.mlp.experts.base_layer.weight'`."""
ROLES = ("gate", "up", "down")

Weights = dict[tuple[int, str], Tensor]
"""Layer and role (`gate`, `up` or `down`) -> weights or updates of all experts [E, out, in]."""


def convert(llama: Path, script: str, *arguments: str) -> str | None:
    """Run a converter; return the last line of its error, None if it succeeds.

    The toys' tokenizer is not among those that llama.cpp recognizes by the hash of some tokens, so this check is
    replaced; weights do not depend on it.
    """
    argv = [str(llama / script), *arguments]
    code = (
        f"import sys, runpy; sys.path.insert(0, {str(llama)!r}); import conversion.base as base\n"
        "base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'default'\n"
        f"sys.argv = {argv!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def train_and_export(folder: Path, model_type: str) -> None:
    """Write a toy to `base`, train LoRA on it for three steps, and export it to `merged` and `adapter`."""
    base = folder / "base"
    entry = find_model("tiny-mixtral")
    assert entry is not None
    assert entry.folder is not None
    tokenizer = AutoTokenizer.from_pretrained(str(entry.folder))
    tokenizer.add_tokens([*GLM])
    tokenizer.save_pretrained(base)
    toy_model(model_type, vocab_size=len(tokenizer)).save_pretrained(base)
    (folder / "data.jsonl").write_text('{"text": "a router sends every token to two of the experts"}\n' * 8)
    targets = ["experts"] if model_type in NO_ATTENTION else ["attention", "experts"]
    run: dict[str, Any] = {
        "model": {"path": str(base), "base": "fp32", "dtype": "fp32"},
        "adapt": {"lora": {"rank": 4, "alpha": 8, "targets": targets}},
        "optimizer": {"name": "adamw", "lr": 0.02},
        "train": {"steps": 3, "sequence_length": 16, "accumulate": 1, "checkpointing": "none"},
        "data": {"train": str(folder / "data.jsonl"), "packing": False},
        "output": str(folder / "run"),
    }
    moetune.train(moetune.RunConfig.model_validate(run))
    moetune.export(folder / "run", "merged", folder / "merged")
    moetune.export(folder / "run", "vllm", folder / "adapter")


def merged_weights(folder: Path, base: AdapterBase) -> Weights:
    """Return the experts of a merged checkpoint, from its own tensors."""
    files = {name: file for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118

    def tensor(name: str) -> Tensor:
        found: Tensor = safe_open(files[name], "pt").get_tensor(name)
        return found

    found = {}
    for path, layer in base.layers.items():
        names, shape = base.expert_names[path], layer.shape
        if names.roles:
            of = {role: [tensor(names.of(id, role) + ".weight") for id in range(shape.num_experts)] for role in ROLES}
            weights = [torch.stack(one) for one in of.values()]
        else:  # stacked, and transposed in gpt-oss
            gate_up, down = (tensor(f"{names.prefix}.{one}_proj") for one in ("gate_up", "down"))
            if shape.is_transposed:
                gate_up, down = gate_up.mT, down.mT
            weights = [*(gate_up[:, rows] for rows in shape.gate_and_up), down]
        found |= {(layer.index, role): one for role, one in zip(ROLES, weights, strict=True)}
    return found


def adapter_updates(folder: Path, base: AdapterBase) -> Weights:
    """Return the updates of the experts in an adapter's folder."""
    found: Weights = {}
    for path, factors in read(open_adapter(folder), base).adapter.experts.items():
        layer = base.layers[path]
        roles = dict(zip(ROLES, (*parted(layer.shape, factors[GATE_UP]), factors[DOWN]), strict=True))
        found |= {(layer.index, role): one.delta() for role, one in roles.items()}
    return found


def in_gguf(file: Path, reader: Any, like: Weights) -> Weights:
    """Return the weights of the experts in a GGUF file, or their updates if it is an adapter."""
    opened = reader.GGUFReader(str(file))
    tensors = {one.name: torch.from_numpy(one.data.copy()).float() for one in opened.tensors}
    if (alpha := opened.get_field("adapter.lora.alpha")) is None:
        return {(layer, role): tensors[f"blk.{layer}.ffn_{role}_exps.weight"] for layer, role in like}
    found = {}
    for layer, role in like:
        A, B = (tensors[f"blk.{layer}.ffn_{role}_exps.weight.lora_{factor}"] for factor in "ab")
        found[layer, role] = float(alpha.contents()) / A.shape[1] * (B @ A)
    return found


def check(llama: Path, reader: Any, model_type: str) -> bool:
    """Print how the experts of both exports of a toy compare; return whether they are equal."""
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_and_export(folder, model_type)
        model = resolve_model(moetune.load_run_config(folder / "run" / "run.yaml").model)
        base = base_of(model.source, model.plain, model.structure, "base")
        both = {
            "merged": ("convert_hf_to_gguf.py", [], merged_weights(folder / "merged", base)),
            "adapter": (
                "convert_lora_to_gguf.py",
                ["--base", str(folder / "base")],
                adapter_updates(folder / "adapter", base),
            ),
        }
        for export, (script, more, wanted) in both.items():
            if export == "adapter" and model_type in NO_EXPERTS:
                continue
            file = folder / f"{export}.gguf"
            problem = convert(llama, script, str(folder / export), *more, "--outtype", "f32", "--outfile", str(file))
            if problem is not None:
                print(f"{model_type:12} {export:8} {script} failed: {problem}")
                good = False
                continue
            found = in_gguf(file, reader, wanted)
            worst = max(float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted)
            print(
                f"{model_type:12} {export:8} {len(wanted)} stacks of experts, largest relative difference {worst:.1e}"
            )
            good &= worst < 1e-6
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama", type=Path)
    parser.add_argument("types", nargs="*", default=TYPES)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.llama / "gguf-py"))
    from gguf import gguf_reader  # of that checkout

    results = [check(arguments.llama.resolve(), gguf_reader, name) for name in arguments.types]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
