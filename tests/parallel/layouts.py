"""The layouts that are tested, and what each of them can do; docs/reference/parallel.md has the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetune.config import RunConfig
from moetune.errors import UserError
from moetune.parallel.ranks import Ranks
from tests import small
from tests.parallel import predicted, steps

STEPS, MICRO_BATCHES = 2, 8
"""Micro-batches of all ranks together in a step: one process takes eight, four ranks two each."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp 2": {"replicate": 2},
    "fsdp 2": {"fsdp": 2},
    "fsdp 4": {"fsdp": 4},
    "zero 1": {"fsdp": 2, "zero": 1},
    "zero 2": {"fsdp": 2, "zero": 2},
    "replicate 2 × fsdp 2": {"replicate": 2, "fsdp": 2},
    "ep 2": {"fsdp": 2, "ep": 2},
    "ep 4": {"fsdp": 4, "ep": 4},
    "ep 2 × fsdp 2": {"fsdp": 4, "ep": 2},
    "replicate 2, ep 2": {"replicate": 2, "ep": 2},
    "replicate 2 × fsdp 2, ep 2": {"replicate": 2, "fsdp": 2, "ep": 2},
    "tp 2 × ep 2": {"tp": 2, "ep": 2},
    "tp 2 × fsdp 2, ep 2": {"tp": 2, "fsdp": 2, "ep": 2},
    "tp 2 × fsdp 2, ep 4": {"tp": 2, "fsdp": 2, "ep": 4},
}
"""Name -> `parallel:` of a run file."""
BASES = ("fp32", "nf4")

Case = tuple[str, str]
"""What trains (`tests.small.ADAPT`), and the precision of the base."""
CASES: list[Case] = [(adapt, base) for base in BASES for adapt in small.ADAPT]


@dataclass
class Outcome:
    """Of one case on one rank."""

    refused: str = ""
    taken: steps.Taken = field(default_factory=steps.Taken)
    found: predicted.Found | None = None
    counts: predicted.Counts | None = None


def config_of(parallel: dict[str, Any], case: Case, model: Path) -> RunConfig:
    """With accumulation, clipping, a balance loss, and rows of unlike lengths."""
    adapt, base = case
    ranks = parallel.get("replicate", 1) * parallel.get("fsdp", 1) * parallel.get("tp", 1)
    return small.run_config(
        model,
        model / "no-data",
        model / "no-output",
        adapt,
        model={"base": base, "dtype": "fp32"},
        optimizer={"lr": 1.0e-3},
        train={"max_grad_norm": 0.15, "router_aux_loss": 0.01, "sequence_length": 24},
        parallel=parallel,
        hardware={"count": ranks},
    )


def every_case(parallel: dict[str, Any], model: Path) -> list[Outcome]:
    """On one of the layout's ranks: steps on the batches of one process, then measured ones with one of the bases."""
    outcomes = []
    ranks = Ranks.join(config_of(parallel, CASES[0], model).parallel, "cpu")
    for case in CASES:
        config = config_of(parallel, case, model)
        outcome = Outcome()
        try:
            outcome.taken = steps.take(config, ranks, STEPS, MICRO_BATCHES)
            if config.parallel.engine == "fsdp2" and case[1] == ("fp32" if config.parallel.tp > 1 else "nf4"):
                outcome.found, outcome.counts = predicted.measured(config, ranks)
        except UserError as error:
            outcome.refused = str(error)
        outcomes.append(outcome)
    return outcomes


def every_prediction(
    parallel: dict[str, Any], model: Path, counts: list[list[predicted.Counts | None]]
) -> list[list[predicted.Found]]:
    """The memory and messages of each rank in each case, predicted in one process.

    Args:
        counts: what the experts received, by case and rank.
    """
    return [
        [
            predicted.predicted(config_of(parallel, case, model), rank, of_rank)
            for rank, of_rank in enumerate(of_case)
            if of_rank is not None
        ]
        for case, of_case in zip(CASES, counts, strict=True)
    ]
