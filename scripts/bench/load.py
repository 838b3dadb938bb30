"""Host memory while a checkpoint is loaded and packed.

    python scripts/bench/load.py --gigabytes 4 --json docs/benchmarks/load.json

Writes a Mixtral of random 16-bit weights in the hub's format (shards with an index, experts one by one), loads it for
training on an NF4 base on the CPU, in a process of its own, and reads that process's memory every few milliseconds:
`anonymous` is what it has allocated, `files` the pages of the checkpoint that are mapped, which the system takes back
when it needs them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moetune.adapt.build import build
from moetune.config.schema import RunConfig
from moetune.run.resolve import resolve

MiB, GB = 2**20, 10**9
HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY = 1024, 3584, 8, 32000
EXPERT = (("w1", INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE), ("w3", INTERMEDIATE, HIDDEN))
PER_LAYER = EXPERTS * 3 * HIDDEN * INTERMEDIATE + int(2.5 * HIDDEN * HIDDEN)


def write_checkpoint(folder: Path, gigabytes: float, shard: int = 10**9) -> int:
    """Writes the model, shard by shard; returns its bytes."""
    layers = max(2, round((gigabytes * GB / 2 - 2 * VOCABULARY * HIDDEN) / PER_LAYER))
    settings = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "num_hidden_layers": layers,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    shards: list[dict[str, torch.Tensor]] = [{}]
    index: dict[str, str] = {}
    total = size = 0
    for name, shape in tensors(layers):
        tensor = torch.randn(shape).mul_(0.02).to(torch.bfloat16)
        if size + tensor.nbytes > shard:
            _write(folder, shards, index)
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    _write(folder, shards, index)
    body = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    return total


def _write(folder: Path, shards: list[dict[str, torch.Tensor]], index: dict[str, str]) -> None:
    name = f"model-{len(shards):05d}.safetensors"
    save_file(shards[-1], folder / name, metadata={"format": "pt"})
    index.update(dict.fromkeys(shards[-1], name))
    shards[-1] = {}
    shards.append({})


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in a checkpoint's order."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", HIDDEN // 4), ("v", HIDDEN // 4), ("o", HIDDEN)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, HIDDEN)
        yield f"{prefix}.block_sparse_moe.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, rows, columns in EXPERT:
                yield f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight", (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def resident() -> dict[str, int]:
    """Bytes of this process in memory: anonymous, and mapped from files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(lines[name].split()[0]) * 1024 for key, name in (("anonymous", "RssAnon"), ("files", "RssFile"))}


def load(folder: Path) -> dict[str, Any]:
    """Loads the checkpoint and returns what it took above what the process had before."""
    config = RunConfig.model_validate(
        {"model": {"path": str(folder), "base": "nf4", "dtype": "bf16"}, "adapt": {"router": "all"}}
    )
    before, most, done = resident(), {"anonymous": 0, "files": 0}, threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            for key, value in resident().items():
                most[key] = max(most[key], value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    adapted = build(resolve(config, "cpu"), "cpu")
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    after = resident()
    assert sum(p.numel() for p in adapted.model.parameters())
    return {
        "seconds": round(seconds, 1),
        "finished": after["anonymous"] - before["anonymous"],
        "peak": most["anonymous"] - before["anonymous"],
        "peak_files": most["files"] - before["files"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the checkpoint, in 10^9 bytes")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(load(options.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        size = write_checkpoint(Path(name), options.gigabytes)
        command = [sys.executable, __file__, "--folder", name]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    found["checkpoint"] = size
    found["above_finished"] = (found["peak"] - found["finished"]) / size
    print(f"checkpoint {size / GB:.2f} GB, loaded and packed in {found['seconds']} s")
    print(f"finished model {found['finished'] / MiB:,.0f} MiB, peak {found['peak'] / MiB:,.0f} MiB: ", end="")
    print(f"{100 * found['above_finished']:.1f} % of the checkpoint above the finished model")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
