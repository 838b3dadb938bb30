"""Which of ep, fsdp and tp is fastest on how many GPUs, by arithmetic: nothing here was run on a GPU.

    python scripts/bench/scaling.py > tables.md

Bytes and peaks are those of a trace of the first rank, which holds the experts that train and no less than any other;
link speeds, utilisation and what overlaps are assumptions, listed in docs/benchmarks/scaling.md, whose tables this
prints. A layout takes ten seconds or twenty.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from moetune.config.schema import ParallelConfig, RunConfig
from moetune.memory.report import Collective
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.models.structure import ModelStructure
from moetune.parallel.coordinates import expert_shards
from moetune.run.resolve import resolve

GPUS = (2, 4, 8, 64)
NODE = 8
"""GPUs of a node."""
UTILISATION = 0.4
"""Of a card's dense bf16 rate."""
MICRO_BATCH, ACCUMULATE, LENGTH = 2, 2, 2048
ADAPT: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}},
    "experts": {"router": "0-5", "experts": {"layers": "0-5", "ids": [0, 1]}},
}
MODELS = ("mixtral-8x7b", "mixtral-8x22b")


@dataclass(frozen=True)
class Machine:
    """Nodes of eight cards. Rates are bytes/s in one direction: from card to card inside, and of a node's network."""

    name: str
    gpu: str
    inside: float
    network: float

    def seconds(self, sent: Collective, parallel: ParallelConfig) -> float:
        """What a rank's bytes take. Where each rank of a node has a ring of its own, they share its network."""
        size, stride = span(sent.axis, parallel)
        if size * stride <= NODE:
            return sent.bytes / self.inside
        return sent.bytes / min(self.inside, self.network / min(stride, NODE))


MACHINES = (
    Machine("H100, NVLink, 8 × 400 Gbit/s", "h100-sxm", 450e9, 8 * 50e9),
    Machine("L40S, PCIe 4, 1 × 200 Gbit/s", "l40s", 25e9, 25e9),
)


def span(axis: str, parallel: ParallelConfig) -> tuple[int, int]:
    """(ranks of an axis, how far apart they are)."""
    match axis:
        case "ep":
            return parallel.ep, 1
        case "efsdp":
            return expert_shards(parallel), parallel.ep
        case "tp":
            return parallel.tp, 1
        case "fsdp":
            return parallel.fsdp, parallel.tp
        case "replicate":
            return parallel.replicate, parallel.fsdp * parallel.tp
    return parallel.ranks, 1


def layouts(gpus: int) -> dict[str, tuple[dict[str, int], str]]:
    """Name -> `parallel:` and the precision of the base. Packed matrices cannot be split, so tp has a bf16 base."""
    inside = min(gpus, NODE)
    node = {"fsdp": inside, "replicate": gpus // inside}
    found: dict[str, tuple[dict[str, int], str]] = {"zero 3": ({"fsdp": gpus}, "nf4")}
    if gpus > NODE:
        found["zero 3, replicas"] = (node, "nf4")
    for ep in sorted({2, inside}):
        found[f"ep {ep}"] = (node | {"ep": ep}, "nf4")
    found[f"tp {inside}, ep {inside}"] = ({"tp": inside, "fsdp": gpus // inside, "ep": inside}, "bf16")
    return found


def config_of(model: str, adapt: str, parallel: dict[str, int], base: str, gpus: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model, "base": base, "dtype": "bf16"},
            "adapt": ADAPT[adapt],
            "optimizer": {"name": "adamw8bit"},
            "train": {
                "micro_batch": MICRO_BATCH,
                "accumulate": ACCUMULATE,
                "sequence_length": LENGTH,
                "checkpointing": "full",
            },
            "parallel": parallel,
            "hardware": {"count": gpus},
        }
    )


def flops(structure: ModelStructure, adapt: str, tp: int) -> float:
    """Of one token on each of `tp` ranks: 2 a weight that it meets forward, 2 in the recomputation, 2 backward for the
    activations, and 2 for each weight that trains. The head is whole on every rank, is not recomputed, and attention's
    products of queries and keys are left out."""
    outside = sum(part.numel for part in structure.parameters if part.component == "lm_head")
    attention = sum(part.numel for part in structure.parameters if part.component == "attention")
    experts = [layer.top_k * layer.shape.parameters_per_expert for layer in structure.moe_layers]
    active, trained = attention + sum(experts), 0
    if adapt == "experts":  # 2 of 8 experts, so a quarter of the rows, in 6 layers
        trained = sum(experts[:6]) // 4
    return (6 * active + 2 * trained) / tp + 4 * outside


@dataclass(frozen=True)
class Row:
    layout: str
    peak: int
    sent: dict[str, int]
    seconds: dict[str, float | None]
    rates: dict[str, float | None]
    """Tokens a second and card, by machine; None where it does not fit."""

    def merit(self, machine: str) -> tuple[float, int]:
        """Of equals, the one that sends less is better."""
        return self.rates[machine] or 0.0, -sum(self.sent.values())


def row_of(model: str, adapt: str, gpus: int, name: str) -> Row:
    """One layout, its first rank traced."""
    sizes, base = layouts(gpus)[name]
    run = resolve(config_of(model, adapt, sizes, base, gpus), "cuda")
    traced, parallel = trace(run, gpu=find_gpu(MACHINES[0].gpu)), run.config.parallel
    peak = traced.parts().total
    sent = dict.fromkeys(("gathers", "exchange", "sums"), 0)
    seconds, rates = dict[str, float | None](), dict[str, float | None]()
    for collective in traced.collectives:
        sent[kind_of(collective)] += collective.bytes
    for machine in MACHINES:
        card = find_gpu(machine.gpu)
        assert card.bf16 is not None
        tokens = MICRO_BATCH * ACCUMULATE * LENGTH
        compute = tokens * flops(run.structure, adapt, parallel.tp) / (UTILISATION * card.bf16.value)
        taken = dict.fromkeys(sent, 0.0)
        for collective in traced.collectives:
            taken[kind_of(collective)] += machine.seconds(collective, parallel)
        seconds[machine.name] = sum(taken.values())
        step = max(compute, taken["gathers"]) + taken["exchange"] + taken["sums"]
        fits = peak + card.context.value + 2 * card.cublas_workspace.value <= card.memory.value
        rates[machine.name] = tokens / parallel.tp / step if fits else None
    return Row(name, peak, sent, seconds, rates)


def kind_of(collective: Collective) -> str:
    """Gathers and reductions of weights and gradients, which compute hides; and what it waits for."""
    return {"ep": "exchange", "tp": "sums"}.get(collective.axis, "gathers")


def table(model: str, adapt: str) -> Iterator[str]:
    yield f"### {model}, {adapt}"
    yield ""
    machines = [machine.gpu.partition("-")[0].upper() for machine in MACHINES]
    yield (
        "| GPUs | layout | GB sent: gathers | dispatch, combine | sums | "
        + " | ".join(f"{name}: s on links" for name in machines)
        + " | peak GiB | "
        + " | ".join(f"{name}: tokens/s a GPU" for name in machines)
        + " |"
    )
    yield "|---:|---|" + "---:|" * (3 + 1 + 2 * len(machines))
    for gpus in GPUS:
        found = [row_of(model, adapt, gpus, name) for name in layouts(gpus)]
        best = {machine.name: max(found, key=lambda row, name=machine.name: row.merit(name)) for machine in MACHINES}
        for row in found:
            yield line(gpus, row, [name for name, fastest in best.items() if row is fastest])
    yield ""


def line(gpus: int, row: Row, fastest_on: Collection[str]) -> str:
    """A row of a table; bold where no layout is faster."""
    sent = " | ".join(f"{size / 1e9:.2f}" for size in row.sent.values())
    links = " | ".join(f"{row.seconds[machine.name]:.2f}" for machine in MACHINES)
    rates = []
    for name, rate in row.rates.items():
        text = "does not fit" if rate is None else f"{rate:,.0f}"
        rates.append(f"**{text}**" if rate is not None and name in fastest_on else text)
    return f"| {gpus} | {row.layout} | {sent} | {links} | {row.peak / 2**30:.1f} | {' | '.join(rates)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="catalog names")
    for model in parser.parse_args().models:
        for adapt in ADAPT:
            for text in table(model, adapt):
                print(text, flush=True)


if __name__ == "__main__":
    main()
