"""Writes the table of docs/guides/which-models.md: the smallest card on which each model of the catalog trains.

    python scripts/which_models.py              # what which-models.json lacks; then the table
    python scripts/which_models.py olmoe-1b-7b  # this model, again

Memory and time are predicted by traces: half a
minute for each model, minutes for hybrids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from moetune.config.schema import RunConfig  # noqa: E402
from moetune.formats.source_quantization import sections_with_settings  # noqa: E402
from moetune.memory.predict import predict_memory  # noqa: E402
from moetune.memory.report import MemoryReport  # noqa: E402
from moetune.models.catalog import find_model, model_names  # noqa: E402
from moetune.models.catalog.gpus import find_gpu  # noqa: E402
from moetune.models.parameter_count import count_parameters  # noqa: E402
from moetune.planning.from_options import config_of  # noqa: E402
from moetune.planning.predictor import Predictor  # noqa: E402
from moetune.run.resolve import resolve  # noqa: E402
from scripts.bench._common import write_table  # noqa: E402

PAGE = ROOT / "docs/guides/which-models.md"
DATA = PAGE.with_suffix(".json")
HEADER = "| model | parameters, active | published in | routers | LoRA | experts | LoRA, 10 M tokens |"
CARDS = {"24 GB": "rtx-4090", "48 GB": "l40s", "80 GB": "h100-80gb", "141 GB": "h200", "180 GB": "b200"}
"""Memory of a card as it is sold -> the card that is predicted for."""
WAYS = ("lora", "router", "experts")
TOKENS = 10_000_000
ALIKE = {
    "nemotron-3.5-lightning-30b-a3b": "nemotron-3-nano-30b-a3b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
}
"""Models of the same shapes as another one, whose row they share."""
N_GRAMS = ("qwen3.8-flash-next",)
"""Models whose embeddings of n-grams, larger than a card, go to host memory with the experts."""
DENSE = ("llama-7b", "llama-13b", "llama-30b", "llama-65b", "llama-3-8b")
MODELS = [name for name in model_names() if name not in (*DENSE, "tiny-mixtral", *ALIKE)]


def published_in(name: str) -> str:
    """The format of the weights on the hub, as the configuration says at whatever depth."""
    entry = find_model(name)
    assert entry is not None
    section = next(sections_with_settings(entry.config), {})
    settings = section.get("quantization_config", {"quant_method": "bf16"})
    return {"pack-quantized": "INT4"}.get(settings.get("format", ""), settings["quant_method"].upper())


def config_for(name: str, way: str, *, host: bool = False) -> RunConfig:
    """The run that a cell of the table is predicted for; `host`: with the experts in host memory, and
    embeddings of n-grams."""
    settings = ["model.base=mxfp4" if published_in(name) == "MXFP4" else "model.base=nf4"]
    settings += ["model.experts_on=host"] * host + ["model.embeddings_on=host"] * (host and name in N_GRAMS)
    if way != "experts":
        return config_of(name, settings, **{"router": {"router": "all"}, "lora": {"lora": 16}}[way])[0]
    structure = resolve(config_of(name, settings, router="all")[0], "cuda").structure
    layers = ",".join(str(layer.index) for layer in structure.moe_layers[:6])
    return config_of(name, settings, experts=f"{layers}:0,1")[0]


def cell(name: str, way: str) -> dict[str, Any]:
    """The smallest card that a run fits, the most bytes that it needs of it, those of the host, and seconds a step."""
    for host in (False, True):
        config = config_for(name, way, host=host)
        found = smallest_card(config)
        if found is not None:
            label, report = found
            figures = {"card": label, "bytes": report.span.high, "host_bytes": report.fullest.host_bytes if host else 0}
            if way == "lora":
                assert report.time is not None
                figures["hours"] = [round(hours, 3) for hours in vars(report.time.hours(TOKENS)).values()]
            return figures
    return {"card": None}


def traced(config: RunConfig, card: str) -> MemoryReport:
    highest = Predictor().routing.highest
    assert highest is not None
    return predict_memory(resolve(config, "cuda"), gpu=card, routing=highest)


def smallest_card(config: RunConfig) -> tuple[str, MemoryReport] | None:
    """The smallest card that a run fits by traces, few of them: the first is for a card that holds the weights."""
    numbers = sum(one.numel for one in resolve(config, "cuda").structure.parameters)
    room = {label: find_gpu(card).memory.value for label, card in CARDS.items()}
    label = next((label for label in CARDS if room[label] > 0.75 * numbers), "180 GB")
    for _ in range(3):
        report = traced(config, CARDS[label])
        fits = next((other for other in CARDS if room[other] >= report.span.high), None)
        if fits == label:
            return label, report
        if fits is None:
            return None
        label = fits
    return None


def figures(name: str) -> dict[str, Any]:
    """Everything that the row of a model says."""
    counts = count_parameters(resolve(config_for(name, "router"), "cuda").structure)
    return {"total": counts.total, "active": counts.active_per_token, "published": published_in(name)} | {
        way: cell(name, way) for way in WAYS
    }


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""

    def memory(way: str) -> str:
        one = found[way]
        if one["card"] is None:
            return "—"
        host = f" + {one['host_bytes'] / 2**30:.0f} of the host" if one["host_bytes"] else ""
        return f"{one['card']} ({one['bytes'] / 2**30:.1f} GiB{host})"

    names = ", ".join(f"`{one}`" for one in (name, *(other for other, like in ALIKE.items() if like == name)))
    hours = found["lora"].get("hours")
    time = "—" if hours is None else f"{hours[0]:.2g} to {hours[1]:.2g} h"
    size = f"{found['total'] / 1e9:.1f} B, {found['active'] / 1e9:.1f} B"
    cells = [names, size, found["published"], *map(memory, ("router", "lora", "experts")), time]
    return f"| {' | '.join(cells)} |"


def table(data: dict[str, Any]) -> list[str]:
    """The lines of the table, the models that need least for LoRA first."""

    def order(name: str) -> tuple[int, int]:
        lora = data[name]["lora"]
        return (len(CARDS) if lora.get("host_bytes", 1) else list(CARDS).index(lora["card"]), lora.get("bytes", 0))

    return [HEADER, "|---|---|---|---|---|---|---|", *(row(name, data[name]) for name in sorted(data, key=order))]


def main() -> None:
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for name in sys.argv[1:] or [name for name in MODELS if name not in data]:
        data[name] = figures(name)
        print(row(name, data[name]), flush=True)
        DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    write_table(table(data), PAGE)


if __name__ == "__main__":
    main()
