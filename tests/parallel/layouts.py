"""The layouts that are tested, and what each of them can do; docs/reference/parallel.md has the table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.predict import kinds_of_ranks
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import resolve
from tests import small
from tests.parallel import predicted, steps

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "parallel.md"
STEPS, MICRO_BATCHES = 2, 4
"""Micro-batches of all ranks together in a step: one process takes four, two ranks that see different data two each."""

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
    "replicate 2 × fsdp 2, ep 2": {"replicate": 2, "fsdp": 2, "ep": 2},
    "tp 2 × ep 2": {"tp": 2, "ep": 2},
    "tp 2 × fsdp 2, ep 4": {"tp": 2, "fsdp": 2, "ep": 4},
}
"""Name -> `parallel:` of a run file."""
DEEPSPEED: dict[str, dict[str, Any]] = {
    f"deepspeed, zero {stage}": {"engine": "deepspeed", "fsdp": 2, "zero": stage} for stage in (1, 2, 3)
}
BASES = ("fp32", "nf4")

Case = tuple[str, str]
"""What trains (`tests.small.ADAPT`), and the precision of the base."""
CASES: list[Case] = [(adapt, base) for base in BASES for adapt in small.ADAPT]
TOLERANCE = 1e-5
"""Of losses and norms relative, of weights absolute (they move by up to 1e-3)."""
_COLUMNS = " | ".join(f"{adapt}, {base}" for adapt, base in CASES)
HEADER = f"| layout | `parallel:` | {_COLUMNS} |\n|" + "---|" * (len(CASES) + 2)


@dataclass
class Outcome:
    """Of one case on one rank."""

    refused: str = ""
    taken: steps.Taken = field(default_factory=steps.Taken)
    found: predicted.Solution | None = None
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
        optimizer={"lr": 5.0e-4},
        train={"max_grad_norm": 0.15, "router_aux_loss": 0.01, "sequence_length": 24},
        parallel=parallel,
        hardware={"count": ranks},
    )


def every_case(parallel: dict[str, Any], model: Path) -> list[Outcome]:
    """On one of the layout's ranks: steps on the batches of one process, then measured ones with one of the bases."""
    outcomes = []
    ranks = Ranks.join(config_of(parallel, CASES[0], model).parallel, "cpu")
    packs = parallel.get("tp", 1) == 1 and (parallel.get("engine"), parallel.get("zero")) != ("deepspeed", 3)
    for case in CASES:
        config = config_of(parallel, case, model)
        outcome = Outcome()
        try:
            outcome.taken = steps.take(config, ranks, STEPS, MICRO_BATCHES)
            if config.parallel.ranks > 1 and case[1] == ("nf4" if packs else "fp32"):
                outcome.found, outcome.counts = predicted.measured(config, ranks)
        except UserError as error:
            outcome.refused = str(error)
        outcomes.append(outcome)
    return outcomes


def every_prediction(
    parallel: dict[str, Any], model: Path, counts: list[list[predicted.Counts | None]]
) -> list[dict[int, predicted.Solution]]:
    """The memory and messages of ranks in each case, predicted in one process: of the last, and where experts train of
    the last of each kind.

    Args:
        counts: what the experts received, by case and rank.
    """
    found = []
    for case, of_case in zip(CASES, counts, strict=True):
        if of_case[-1] is None:
            found.append({})
            continue
        config = config_of(parallel, case, model)
        trains_experts = case[0] == "experts"
        kinds = kinds_of_ranks(resolve(config, "cuda"), by_expert=False) if trains_experts else [()] * len(of_case)
        of_ranks = {rank: of_case[rank] for rank in {kind: rank for rank, kind in enumerate(kinds)}.values()}
        found.append({r: predicted.predicted(config, r, one) for r, one in of_ranks.items() if one is not None})
    return found


def measured_again(parallel: dict[str, Any], case: Case, model: Path) -> int:
    """The peak of one case, once more."""
    config = config_of(parallel, case, model)
    return predicted.measured(config, Ranks.join(config.parallel, "cpu"))[0].peak


def difference(taken: steps.Taken, alone: steps.Taken) -> float:
    """The worst of all: of losses and norms relative, of weights absolute."""
    assert taken.weights.keys() == alone.weights.keys()
    numbers = zip([*taken.losses, *taken.norms], [*alone.losses, *alone.norms], strict=True)
    weights = [float((taken.weights[name] - alone.weights[name]).abs().max()) for name in alone.weights]
    return max(*(abs(mine / its - 1) for mine, its in numbers), *weights)


def row(name: str, found: list[list[Outcome]], alone: list[Outcome]) -> str:
    """A layout's line of the table."""
    cells = []
    for number in range(len(CASES)):
        of_ranks = [outcomes[number] for outcomes in found]
        if any(outcome.refused for outcome in of_ranks):
            cells.append("–")
        else:
            worst = max(difference(outcome.taken, alone[number].taken) for outcome in of_ranks)
            cells.append("✓" if worst < TOLERANCE else f"{worst:.0e}")
    settings = ", ".join(f"{key}: {value}" for key, value in (LAYOUTS | DEEPSPEED)[name].items())
    return f"| {name} | `{{{settings}}}` | {' | '.join(cells)} |"


def few_steps(parallel: dict[str, Any], case: Case, model: Path, train: Any = None) -> steps.Taken:
    """Steps of one case, with other settings of `train`."""
    config = config_of(parallel, case, model)
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    return steps.take(config, Ranks.join(config.parallel, "cpu"), STEPS, MICRO_BATCHES)
