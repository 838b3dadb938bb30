"""Runs over the stages of a pipeline, for tests: whole runs by `moetune train`'s own code, on ranks that gloo joins."""

from pathlib import Path
from typing import Any

from moetune.config.schema import RunConfig
from moetune.parallel.ranks import Ranks
from tests import small
from tests.parallel import world
from tests.resolved import train


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


def on_a_rank(configs: list[tuple[RunConfig, str]]) -> list[dict[str, Any]]:
    """Train one run after the other on this rank."""
    ranks = Ranks.join(configs[0][0].parallel, "cpu")
    return [train(config, resume=resume, device="cpu", ranks=ranks).to_json() for config, resume in configs]


def run(*configs: RunConfig, resume: str = "never") -> list[dict[str, Any]]:
    """Train runs of one layout; return the results of the first rank."""
    return world.run(configs[0].parallel.ranks, on_a_rank, [(config, resume) for config in configs])[0]
