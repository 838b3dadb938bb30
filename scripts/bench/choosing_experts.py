"""Does it matter which experts train? Experts chosen from data against random and least used ones, on tiny-mixtral.

    python scripts/bench/choosing_experts.py --json docs/benchmarks/choosing_experts.json

**Domains.** The model has learned prose and code, both from the running Python (scripts/make_tiny_mixtral.py). Each is
divided into two samples without a document in common, and scored. What is stable has a rank correlation (Spearman's,
of an expert's share, mean over layers) near 1 between the samples of a domain.

**Training.** On Unicode names, which it has not learned: two experts of each layer, 786,432 parameters whole, or LoRA
of rank 16 on them; the same number for each rule. Held-out loss, of 40 documents, after as many steps, over
seeds, which draw the order of the data, LoRA's factors, and the random choice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import numpy as np
from _common import ROOT, commit, cpu_name, versions, write_json
from rich.console import Console

from moetune.config.schema import RunConfig
from moetune.routing.score import score, to_score
from moetune.run.resolve import resolve
from moetune.run.scores import Scores
from moetune.training.data.sources import open_sources
from moetune.watch import memory_record
from moetune.watch.train import train

sys.path.append(str(ROOT / "scripts"))
from make_tiny_mixtral import domains

RULES = ("tokens", "random", "least")
K = 2
HELD_OUT, DOCUMENTS = "unicode-names:heldout", 40
QUIET = Console(quiet=True)


def config_of(adapt: dict[str, Any], seed: int, steps: int, output: Path, held_out: str) -> RunConfig:
    """As the recipe tiny-experts, with routers as they are, on a base in float32, which is faster on a CPU."""
    settings = {"micro_batch": 4, "accumulate": 1, "sequence_length": 256, "steps": steps}
    return RunConfig.model_validate(
        {
            "model": {"path": "tiny-mixtral", "base": "fp32", "dtype": "fp32"},
            "adapt": adapt,
            "optimizer": {"name": "adamw", "lr": 3.0e-3},
            "train": {**settings, "eval_every": steps, "save_every": steps, "seed": seed},
            "data": {"train": "unicode-names", "eval": held_out},
            "output": str(output),
        }
    )


def scored(data: str, tokens: int, out: Path | None = None) -> Scores:
    config = to_score(config_of({"router": "all"}, 0, 1, Path("unused"), HELD_OUT))
    return score(resolve(config, "cpu"), [data], tokens, out, device="cpu", console=QUIET, overwrite=True)


# --- Domains ------------------------------------------------------------------------------------------------------


def of_domains(folder: Path, tokens: int) -> dict[str, Any]:
    samples = {}
    for name, domain in zip(("prose", "code"), domains(), strict=True):
        documents = [*domain.train, *domain.held_out]
        for half in (0, 1):
            file = folder / f"{name}{half}.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[half::2] if text.strip()))
            samples[name, half] = scored(str(file), tokens)
    first = {name: chosen(samples[name, 0]) for name in ("prose", "code")}
    return {
        "tokens": {f"{name}{half}": scores.tokens for (name, half), scores in samples.items()},
        "rank_correlation": {
            "prose, two samples": correlation(samples["prose", 0], samples["prose", 1]),
            "code, two samples": correlation(samples["code", 0], samples["code", 1]),
            "prose and code": correlation(samples["prose", 0], samples["code", 0]),
        },
        "chosen": {name: {str(layer): sorted(ids) for layer, ids in found.items()} for name, found in first.items()},
        "in_common": {
            "prose, two samples": common(first["prose"], chosen(samples["prose", 1])),
            "code, two samples": common(first["code"], chosen(samples["code", 1])),
            "prose and code": common(first["prose"], first["code"]),
        },
    }


def chosen(scores: Scores) -> dict[int, set[int]]:
    return {layer: set(np.argsort(one.loss.tokens)[::-1][:K].tolist()) for layer, one in scores.layers.items()}


def common(one: dict[int, set[int]], other: dict[int, set[int]]) -> int:
    return sum(len(one[layer] & other[layer]) for layer in one)


def correlation(one: Scores, other: Scores) -> float:
    """Spearman's, mean over layers."""

    def ranks(values: list[float]) -> np.ndarray:
        return np.argsort(np.argsort(values))

    pairs = [(one.layers[layer].loss.share, other.layers[layer].loss.share) for layer in one.layers]
    return mean(float(np.corrcoef(ranks(a), ranks(b))[0, 1]) for a, b in pairs)


def held_out_file(folder: Path) -> Path:
    """Write the documents of which the held-out loss is taken."""
    lines = [str(row.value["text"]) for row, _ in zip(open_sources(HELD_OUT)[0].rows, range(DOCUMENTS), strict=False)]
    (folder / "heldout.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return folder / "heldout.jsonl"


# --- Training -----------------------------------------------------------------------------------------------------


def trained(part: str, rule: str, seed: int, steps: int, scores: Path, folder: Path) -> dict[str, Any]:
    choice = {"from": str(scores), "rule": rule, "k": K, "seed": seed}
    lora = {"rank": 16, "alpha": 32, "targets": ["experts"], "ids": choice}
    adapt = {"experts": choice} if part == "experts" else {"lora": lora}
    config = config_of(adapt, seed, steps, folder / "run", str(folder / "heldout.jsonl"))
    with patch.object(
        memory_record, "predicted", lambda *_: memory_record.Predicted()
    ):  # which takes longer than the training
        result = train(resolve(config, "cpu"), overwrite=True, device="cpu", console=QUIET)
    return {
        "part": part,
        "rule": rule,
        "seed": seed,
        "parameters": result.trainable["total"],
        "before": result.eval_loss_before,
        "after": result.eval_loss_after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"versions": versions("torch", "transformers", "moetune"), "cpu": cpu_name()}
    report |= {"commit": commit(), "steps": arguments.steps, "k": K, "held_out_documents": DOCUMENTS, "runs": []}
    if arguments.json is not None and arguments.json.exists():  # what was begun with the same steps goes on
        begun = json.loads(arguments.json.read_text(encoding="utf-8"))
        report = begun if begun["steps"] == arguments.steps else report
    runs = report["runs"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if "domains" not in report:
            report["domains"] = of_domains(folder, arguments.tokens)
        scored("unicode-names", arguments.tokens, scores := folder / "scores.json")
        held_out_file(folder)
        for part, seed, rule in product(("experts", "lora"), range(arguments.seeds), RULES):
            if any((run["part"], run["seed"], run["rule"]) == (part, seed, rule) for run in runs):
                continue
            runs.append(trained(part, rule, seed, arguments.steps, scores, folder))
            print(runs[-1], flush=True)
            if arguments.json is not None:
                write_json(report, arguments.json)
    for part in ("experts", "lora"):
        for rule in RULES:
            losses = [run["after"] for run in runs if (run["part"], run["rule"]) == (part, rule)]
            spread = stdev(losses) if len(losses) > 1 else 0.0
            print(f"| {part} | {rule} | {mean(losses):.3f} | {spread:.3f} | {min(losses):.3f} to {max(losses):.3f} |")


if __name__ == "__main__":
    main()
