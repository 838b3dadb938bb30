"""Host memory while a checkpoint is loaded and packed.

    python scripts/bench/load.py --gigabytes 4 --json docs/benchmarks/load.json

transformers writes a Mixtral of random 16-bit weights in the hub's format (shards with an index, experts one by one),
for which it takes twice its size of memory. The model is loaded for training on an NF4 base on the CPU, in a process of
its own, whose memory is read every few milliseconds: `anonymous` is what it has allocated, `files` the pages of the
checkpoint that are mapped, which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from moetune.adapt.build import build
from moetune.config.schema import RunConfig
from moetune.run.resolve import resolve

MiB, GB = 2**20, 10**9
SIZES = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 8, "num_experts_per_tok": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
FIRST, LAYER = 2 * 32000 * 1024, 8 * 3 * 1024 * 3584 + int(2.5 * 1024 * 1024)
"""Parameters of the embeddings, and of a layer."""


def write_checkpoint(folder: Path, gigabytes: float) -> int:
    """Writes the model; returns the bytes of its weights."""
    config = MixtralConfig(**SIZES, num_hidden_layers=max(2, round((gigabytes * GB / 2 - FIRST) / LAYER)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")
    return 2 * model.num_parameters()


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
