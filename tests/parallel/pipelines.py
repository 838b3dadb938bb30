"""Runs over the stages of a pipeline, for tests: whole runs by `moetune train`'s own code, on ranks that gloo joins."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.pipelining import schedules

from moetune.config.schema import RunConfig
from moetune.models.structure import meta_model, read_structure
from moetune.parallel.ranks import Ranks
from tests import small
from tests.parallel import predicted, world
from tests.resolved import train
from tests.toys import toy_model


def config_of(
    model: Path, data: Path, output: Path, adapt: str, parallel: dict[str, Any], steps: int = 10, /, **sections: Any
) -> RunConfig:
    """Four micro-batches of two rows in each step, over all ranks together."""
    copies = parallel.get("replicate", 1)
    train_ = {"accumulate": 4 // copies, "steps": steps, "save_every": 5, "eval_every": 5, "sequence_length": 48}
    return small.run_config(
        model, data, output, adapt,
        **{
            "model": {"path": str(model), "base": "fp32", "dtype": "fp32"},
            "optimizer": {"lr": 1.0e-3},
            "data": {"train": str(data), "eval": str(data), "packing": False},
            "parallel": parallel,
            "hardware": {"count": parallel.get("pp", 1) * copies},
        }
        | sections
        | {"train": train_ | sections.get("train", {})},
    )  # fmt: skip


def write_toy(folder: Path, model_type: str, layers: int = 4) -> Path:
    """Write a toy in hub format, with routers so wide that rounding never changes their choice."""
    of_granite = {"layers_block_type": ["linear_attention", "full_attention"] * (layers // 2)}
    kinds = of_granite if model_type == "granitemoehybrid" else {}
    model = toy_model(
        model_type, vocab_size=small.write_tokenizer(folder)["vocab_size"], num_hidden_layers=layers, **kinds
    )
    for layer in read_structure(meta_model(model.config)).moe_layers:
        for name, parameter in model.get_submodule(layer.router).named_parameters():
            if name == "weight":
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def on_a_rank(configs: list[tuple[RunConfig, str]]) -> list[dict[str, Any]]:
    """Train one run after the other on this rank, each in a layout of its own."""
    return [
        train(config, resume=resume, device="cpu", ranks=Ranks.join(config.parallel, "cpu")).to_json()
        for config, resume in configs
    ]


def run(*configs: RunConfig, resume: str = "never") -> list[dict[str, Any]]:
    """Train runs of equally many ranks; return the results of the first rank."""
    return world.run(configs[0].parallel.ranks, on_a_rank, [(config, resume) for config in configs])[0]


class _Waited:
    """Messages whose handles are dropped when they are waited for: NCCL then lets go of the tensors, gloo only so."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    def wait(self) -> None:
        for message in self._messages:
            message.wait()
        self._messages = []


def measured(config: RunConfig) -> tuple[predicted.Solution, predicted.Counts]:
    ranks, send = Ranks.join(config.parallel, "cpu"), schedules._batch_p2p
    with patch.object(schedules, "_batch_p2p", lambda ops, desc=None: [_Waited(send(ops))] if ops else []):
        return predicted.measured(config, ranks)
