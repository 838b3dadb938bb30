"""Asks one public memory estimator for one model; run by estimators.py in an environment that has the estimators.

    HF_ENDPOINT=http://127.0.0.1:PORT python estimators_asked.py TOOL HUB_ID PARAMETERS ROWS LENGTH TARGETS

Each is asked for what comes nearest to LoRA of rank 16 on a base in 4 bits with activation checkpointing and 8-bit
AdamW. Prints {"gib": the answer, "count": its number of parameters where it says one, "note": …}; no moetune here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
GB, GiB = 1e9, 2**30


def command(*words: str) -> str:
    """Return what a tool printed: its report, also where that says no; or raise what it says is wrong."""
    done = subprocess.run([str(BIN / words[0]), *words[1:]], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) and not done.stdout.startswith("{"):
        said = " ".join(done.stderr.split())  # wrapped as for a terminal, and behind warnings of what it imports
        raise RuntimeError(re.split(r"(?:error|vramcalc): ", said)[-1])
    return done.stdout


def from_brace(text: str) -> Any:
    return json.JSONDecoder().raw_decode(text[text.index("{") :])[0]


def accelerate(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    """`accelerate estimate-memory`: its own functions give the row that its table prints, in bytes."""
    from accelerate.commands.estimate import estimate_command_parser, gather_data

    words = [model, "--library_name", "transformers", "--dtypes", "int4", "float16"]
    with contextlib.redirect_stdout(io.StringIO()):
        rows_ = gather_data(estimate_command_parser().parse_args(words))
    (_, _, int4, _), (_, _, half, training) = rows_
    return {
        "gib": int4 / GiB,
        "count": round(half / 2),
        "note": f"weights in int4; “Training using Adam” in float16 is {max(training.values()) / GiB:,.0f} GiB",
    }


def deepspeed(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    """ZeRO-3 of one GPU without offloading, from a model on the meta device."""
    import torch
    from deepspeed.runtime.zero.stage3 import (
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_live,
        model_to_params,
    )
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        estimate_zero3_model_states_mem_needs_all_live(meta, num_gpus_per_node=1, num_nodes=1)
    last = [line for line in printed.getvalue().splitlines() if "offload_optimizer=none" in line][-1]
    counted, largest = model_to_params(meta)
    whole = sum(parameter.numel() for parameter in meta.parameters())
    _, own, _ = estimate_zero3_model_states_mem_needs(
        total_params=whole, largest_layer_params=largest, cpu_offload=False, cpu_offload_params=False
    )
    answer = float(re.findall(r"([\d.]+)GB", last)[1])
    note = f"full training; of all parameters its formula gives {own / GiB:,.0f} GiB"
    return {"gib": answer, "count": counted, "note": note}


def hf_vram_calc(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command(
            "hf-vram-calc", "--model", model, "--dtype", "int4", "--max_batch_size", str(rows), "--max_seq_len",
            str(length), "--lora_rank", "16", "--output_json", out.name,
        )  # fmt: skip
        report = json.loads(Path(out.name).read_text(encoding="utf-8"))
    return {"gib": report["memory_requirements"][0]["lora_size_gib"], "count": report["model"]["parameters"]}


def qmemcalc(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    from qmemcalc import memory

    answer = memory.estimate_memory(
        model, rows, length, lora_r=16, precision="bf16", quantization="4bit", optimizer="adamw",
        gradient_checkpointing=True,
    )  # fmt: skip
    return {"gib": answer["total_GB"], "count": round((answer["base_weights_MB"] - 5) * 1e6 / 0.5)}


def canifinetune(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    report = from_brace(
        command(
            "canifinetune", "estimate", "--model", model, "--gpu-vram-gb", "44", "--seq-len", str(length),
            "--micro-batch-size", str(rows), "--lora-rank", "16", "--target-scope", targets, "--optimizer",
            "adamw_8bit", "--json",
        )
    )  # fmt: skip
    memory = report["memory"]
    return {
        "gib": memory["total_estimated_gb"],
        "count": report["metadata"]["total_params"],
        "note": f"margin of {memory['safety_margin_gb']:.1f} and {memory['cuda_overhead_gb']:.1f} for CUDA in it",
    }


def ftuneai(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    import ftuneai.hub
    from ftuneai.cli.app import app
    from typer.testing import CliRunner

    ftuneai.hub.HF_API_BASE = os.environ["HF_ENDPOINT"]  # a constant there; as it is, only the hub itself can be asked
    words = [
        "estimate", "-m", model, "-b", str(rows), "-s", str(length), "-r", "16", "--lora-target", targets,
        "--optimizer", "adam_8bit", "-o", "json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    memory = from_brace(result.output)["memory"]
    return {
        "gib": memory["total_gb"],
        "count": round(memory["trainable_params"] / memory["trainable_percentage"] * 100),
    }


def vramcalc(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    folder = Path(hf_hub_download(model, "config.json")).parent
    out = command(
        "vramcalc", str(folder), "--train", "--lora", "16", "--dtype", "bf16", "--batch", str(rows), "--seq",
        str(length), "--grad-checkpoint", "--precision", "pure", "--json",
    )  # fmt: skip
    report = from_brace(out)["estimate"]
    return {"gib": report["total"] / GiB, "note": "the base in bf16: it knows no 4 bits"}


def tinyforge(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    """The number behind `tinyforge ft plan`, which needs a GPU to print it."""
    from tinyforge import finetune

    settings = finetune.FTConfig(base_model=model, max_len=length, batch_size=rows, quant="4bit", lora_r=16)
    shape = finetune.model_shape(model)
    return {"gib": finetune.estimate_vram_gb(shape, settings, "4bit", True, rows), "count": int(shape["params"])}


def alloc(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    """`alloc ghost` with the published number of parameters: it cannot take a Mixtral from a script that makes one."""
    report = from_brace(
        command(
            "alloc", "ghost", "train.py", "--param-count-b", str(parameters / 1e9), "--dtype", "bf16", "--batch-size",
            str(rows), "--seq-length", str(length), "--no-config", "--json",
        )
    )  # fmt: skip
    return {"gib": report["total_gb"], "note": "full training: it knows neither LoRA nor 4 bits"}


def loggetta(model: str, parameters: int, rows: int, length: int, targets: str) -> dict[str, Any]:
    """`loggetta plan` for a saved hardware profile: an L40S with 46 GiB."""
    from huggingface_hub import hf_hub_download

    def fact(value: Any) -> dict[str, Any]:
        return {"value": value, "source": "reported", "note": ""}

    card = {"index": 0, "vendor": "nvidia", "name": "NVIDIA L40S", "uuid": None, "compute_capability": fact([8, 9])}
    card |= {key: fact(46 * GiB) for key in ("memory_total", "memory_free")} | {"driver": fact("580.65.06")}
    card |= {f"pcie_{kind}": fact(4 if "gen" in kind else 16) for kind in
             ("gen_max", "width_max", "gen_current", "width_current")}  # fmt: skip
    host = {"cpu_model": fact("x86"), "cpus": fact(16), "memory_limit": fact(None)}
    host |= {key: fact(256 * GiB) for key in ("memory_total", "memory_available")}
    folder = Path(hf_hub_download(model, "config.json")).parent
    with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
        json.dump({"gpus": [card], "host": host, "platform": "Linux x86_64", "notes": []}, profile)
        profile.flush()
        report = from_brace(
            command(
                "loggetta", "plan", str(folder), "--seq", str(length), "--micro-batch", str(rows), "--optimizer",
                "adamw_8bit", "--hardware", profile.name, "--fix", "r=16", "--json",
            )
        )  # fmt: skip
    setup = report["alternatives"][0]
    if setup["rejected"]:
        raise RuntimeError("; ".join(setup["rejected"]))
    outside = {"allocator reserve (cached, unallocated blocks)", "CUDA context + library workspaces"}
    lines = [line for line in setup["lines"] if line["where"] == "device" and line["name"] not in outside]
    return {"gib": sum(line["bytes"] for line in lines) / GiB, "note": f"allocated; {setup['label_text']}"}


if __name__ == "__main__":
    name, hub_id, *numbers, scope = sys.argv[1:]
    print("\n" + json.dumps(globals()[name](hub_id, *map(int, numbers), scope)))
