"""Toy models in folders, and run files for them, for what predicts and measures memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from moetune.config.schema import RunConfig
from moetune.memory.trace import Trace
from moetune.memory.trace.log import Block
from tests.toys import toy_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 2},  # dense and sparse layers in turn
    "qwen2_moe": {},  # a gated shared expert
    "olmoe": {},
    "granitemoe": {},
    "phimoe": {},
    "deepseek_v2": {},  # latent attention, shared experts, a dense first layer
    "deepseek_v3": {},
    "glm4_moe": {},
    "gpt_oss": {},  # attention with sinks and windows, interleaved experts with biases
    "llama4_text": {"interleave_moe_layer_step": 2},  # dense and sparse layers in turn, weights stored [in, out]
    "llama": {"tie_word_embeddings": True},
}
"""Model type -> what its toy needs besides the common sizes."""


def write_toy(folder: Path, model_type: str, experts: int = 4, **sizes: Any) -> Path:
    """Writes the configuration of a toy, 64 wide with a vocabulary of 256. A step takes time for each expert."""
    names = toy_config(model_type).to_dict().keys() & {"num_experts", "num_local_experts", "n_routed_experts"}
    common = {"hidden_size": 64, "vocab_size": 256, **dict.fromkeys(names, experts)}
    toy_config(model_type, **{**common, **LAYOUTS.get(model_type, {}), **sizes}).save_pretrained(folder)
    return folder


def toy_run(folder: Path, model_type: str, adapt: dict[str, Any], /, **sections: Any) -> RunConfig:
    """A run file with random float32 weights; `sections` are merged into it."""
    run: dict[str, Any] = {
        "model": {"path": str(folder), "weights": "random", "dtype": "fp32"},
        "adapt": adapt,
        "optimizer": {"name": "adamw"},
        "train": {"micro_batch": 2, "sequence_length": 32, "accumulate": 1},
        "data": {"train": "unread", "packing": True},
    }
    for name, section in sections.items():
        run[name] = run.get(name, {}) | section
    return RunConfig.model_validate(run)


def blocks_of(traced: Trace) -> list[Block]:
    """Every storage of the whole model; `born` and `died` are events, None for what outlives the trace."""
    times = zip(traced.events.like, traced.bytes.tolist(), traced.events.born, traced.events.died, strict=True)
    return [
        replace(traced.log.blocks[like], bytes=size, born=int(born), died=int(died) if died <= traced.end else None)
        for like, size, born, died in times
    ]
