"""Which of ep, fsdp and tp is fastest on how many GPUs, by arithmetic: nothing here was run on a GPU.

    python scripts/bench/scaling.py --json docs/benchmarks/scaling.json

Bytes and peaks are those of a trace of the first rank, which holds the experts that train and no less than any other;
link speeds, utilisation and what overlaps are assumptions, listed in docs/benchmarks/scaling.md, whose table this
writes. A layout takes ten seconds or twenty.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from _common import commit, write_json, write_table

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


def row_of(model: str, adapt: str, gpus: int, name: str) -> dict[str, Any]:
    """One layout, its first rank traced; by card, tokens a second of each, None where it does not fit."""
    sizes, base = layouts(gpus)[name]
    run = resolve(config_of(model, adapt, sizes, base, gpus), "cuda")
    traced, parallel = trace(run, gpu=find_gpu(MACHINES[0].gpu)), run.config.parallel
    peak = traced.parts().total
    sent = dict.fromkeys(("gathers", "exchange", "sums"), 0)
    seconds, rates = dict[str, float](), dict[str, int | None]()
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
        seconds[machine.gpu] = round(sum(taken.values()), 2)
        step = max(compute, taken["gathers"]) + taken["exchange"] + taken["sums"]
        fits = peak + card.context.value + 2 * card.cublas_workspace.value <= card.memory.value
        rates[machine.gpu] = round(tokens / parallel.tp / step) if fits else None
    return {
        "model": model,
        "adapt": adapt,
        "gpus": gpus,
        "layout": name,
        "peak_gib": round(peak / 2**30, 1),
        "gb_sent": {kind: round(size / 1e9, 2) for kind, size in sent.items()},
        "seconds_on_links": seconds,
        "tokens_per_second": rates,
    }


def kind_of(collective: Collective) -> str:
    """Gathers and reductions of weights and gradients, which compute hides; and what it waits for."""
    return {"ep": "exchange", "tp": "sums"}.get(collective.axis, "gathers")


def fastest(rows: list[dict[str, Any]], gpu: str) -> str:
    """Of the layouts that fit, the one with most tokens a second; of equals, the one that sends least."""
    fitting = [row for row in rows if row["tokens_per_second"][gpu] is not None]
    if not fitting:
        return "none fits"
    best = max(fitting, key=lambda row: (row["tokens_per_second"][gpu], -sum(row["gb_sent"].values())))
    return f"{best['layout']}: {best['tokens_per_second'][gpu]:,}, {best['peak_gib']} GiB"


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table: the fastest layout, its tokens a second of a card, and its peak."""
    heads = [machine.gpu.partition("-")[0].upper() for machine in MACHINES]
    yield f"| trains | GPUs | {' | '.join(heads)} | least memory |"
    yield f"|---|---:|{'---|' * (len(heads) + 1)}"
    for model, adapt, gpus in dict.fromkeys((row["model"], row["adapt"], row["gpus"]) for row in report["rows"]):
        rows = [row for row in report["rows"] if (row["model"], row["adapt"], row["gpus"]) == (model, adapt, gpus)]
        least = min(rows, key=lambda row: row["peak_gib"])
        cells = [fastest(rows, machine.gpu) for machine in MACHINES]
        yield f"| {model}, {adapt} | {gpus} | {' | '.join(cells)} | {least['layout']}: {least['peak_gib']} GiB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here, and the page beside it")
    options = parser.parse_args()
    report: dict[str, Any] = {"schema": 1, "benchmark": "scaling", "commit": commit(), "rows": []}
    for model, adapt, gpus in product(MODELS, ADAPT, GPUS):
        for name in layouts(gpus):
            report["rows"].append(row_of(model, adapt, gpus, name))
            print(report["rows"][-1], flush=True)
    if options.json is not None:
        write_json(report, options.json)
        write_table(table(report), options.json.with_suffix(".md"))


if __name__ == "__main__":
    main()
