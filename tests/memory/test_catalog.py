"""The closed form is what the trace says for the catalog's models, of larger siblings for one (all: scripts/bench)."""

import json
from pathlib import Path
from typing import Any

import pytest

import moetune.models.catalog
from moetune.config.schema import RunConfig
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.trace import trace
from moetune.run.resolve import resolve

MODELS = Path(moetune.models.catalog.__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
EXPERTS = 8
"""A trace runs expert by expert: of a layer with more, this many are traced. Nothing else of a model is cut."""
IN_GROUPS = {"deepseek-v3": 16}
"""Its router looks at the best two experts of each of eight groups."""
SETTINGS = {"router": ("full", 2048), "lora": ("none", 256)}
ELSEWHERE = ("llama-7b", "mixtral-8x7b")
"""In trace/test_tracing.py."""
LARGER_SIBLINGS = ("gpt-oss-120b", "llama-13b", "llama-30b", "llama-65b", "mixtral-8x22b", "qwen3-235b-a22b")
QUICK = ("tiny-mixtral",)
CASES = [
    pytest.param(name, tuple(SETTINGS)[number % 2], marks=() if name in QUICK else pytest.mark.full)
    for number, name in enumerate(NAMES)
    if name not in LARGER_SIBLINGS + ELSEWHERE
]


def with_fewer_experts(name: str, folder: Path) -> str:
    """The model itself, or a folder with its configuration and no more than so many experts."""
    model = json.loads((MODELS / f"{name}.json").read_text()).get("config", {})
    most = IN_GROUPS.get(name, EXPERTS)
    keys = [key for key in ("num_local_experts", "num_experts", "n_routed_experts") if model.get(key, 0) > most]
    if not keys:
        return name
    (folder / "config.json").write_text(json.dumps(model | dict.fromkeys(keys, most)))
    return str(folder)


def catalog_run(name: str, path: str, what: str) -> RunConfig:
    checkpointing, length = SETTINGS[what]
    dense = name.startswith("llama")
    targets = ["attention"] if dense else ["attention", "experts"]
    adapt: dict[str, Any] = {"lora": {"rank": 16, "alpha": 32, "targets": targets}}
    if what == "router":
        adapt = {"also": ["norm"]} if dense else {"router": "all"}
    model = {"path": path, "base": "nf4", "dtype": "bf16", "weights": "random"}
    return RunConfig.model_validate(
        {
            "model": model,
            "adapt": adapt,
            "optimizer": {"name": "adamw"},
            "train": {"micro_batch": 1, "sequence_length": length, "accumulate": 1, "checkpointing": checkpointing},
            "data": {"train": "unread", "packing": True},
        }
    )


@pytest.mark.full
@pytest.mark.parametrize(("name", "what"), CASES)
def test_the_formula_is_what_the_trace_says(name: str, what: str, tmp_path: Path) -> None:
    run = resolve(catalog_run(name, with_fewer_experts(name, tmp_path), what), "cuda")
    traced = trace(run)
    found = ClosedForm(run).at(run.config)
    assert found.parts().total == pytest.approx(traced.parts().total, rel=1e-4)
    assert found.load == traced.load
