"""The catalog's models are predicted; their closed form is what the trace says, of larger siblings for one."""

import json
from pathlib import Path
from typing import Any

import pytest

import moetune.models.catalog
from moetune.config.schema import RunConfig
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.predict import predict
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.planning.from_options import config_of
from moetune.run.resolve import resolve

MODELS = Path(moetune.models.catalog.__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
EXPERTS = 8
"""A trace runs expert by expert: of a layer with more, this many are traced. Nothing else of a model is cut."""
IN_GROUPS = {"deepseek-v3": 16, "deepseek-v3.2": 16}
"""Their routers look at the best two experts of each of eight groups."""
SETTINGS = {"router": ("full", 2048), "lora": ("none", 256)}
ELSEWHERE = ("llama-7b", "mixtral-8x7b")
"""In trace/test_tracing.py."""
LARGER_SIBLINGS = (
    "glm-4.6", "gpt-oss-120b", "kimi-k2", "llama-13b", "llama-30b", "llama-65b", "mixtral-8x22b", "qwen3-235b-a22b",
    "qwen3-coder-30b-a3b",
)  # fmt: skip
HYBRID = (
    "kimi-linear-48b-a3b", "lfm2-8b-a1b", "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-122b-a10b",
    "qwen3.5-35b-a3b", "qwen3.6-35b-a3b",
)  # fmt: skip
"""Each length has a record of its own."""
QUICK = ("tiny-mixtral",)
CASES = [
    pytest.param(name, tuple(SETTINGS)[number % 2], marks=() if name in QUICK else pytest.mark.full)
    for number, name in enumerate(NAMES)
    if name not in LARGER_SIBLINGS + HYBRID + ELSEWHERE
]
WITH_EXPERTS = [name for name in NAMES if not name.startswith(("llama", "tiny"))]


def with_fewer_experts(name: str, folder: Path) -> str:
    """The model itself, or a folder with its configuration and no more than so many experts."""
    model = json.loads((MODELS / f"{name}.json").read_text()).get("config", {})
    most = IN_GROUPS.get(name, EXPERTS)
    text = model.get("text_config", model)
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    keys = [key for key in names if text.get(key, 0) > most]
    if not keys:
        return name
    text.update(dict.fromkeys(keys, most))
    (folder / "config.json").write_text(json.dumps(model))
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


@pytest.mark.parametrize(
    "name",
    [
        name if name == "gpt-oss-20b" else pytest.param(name, marks=pytest.mark.full)
        for name in WITH_EXPERTS
        if name not in HYBRID
    ],
)
def test_one_row_on_a_card_takes_what_the_record_of_several_says(name: str, tmp_path: Path) -> None:
    """Recomputed, so that what attention saves counts beside the experts' peak: no copies that only one row has."""
    run = catalog_run(name, with_fewer_experts(name, tmp_path), "lora")
    train = run.train.model_copy(update={"checkpointing": "full"})
    resolved, card = resolve(run.model_copy(update={"train": train}), "cuda"), find_gpu("44GiB")
    assert ClosedForm(resolved, gpu=card).at(resolved.config).parts() == trace(resolved, gpu=card).parts()


@pytest.mark.full
@pytest.mark.parametrize(("name", "what"), CASES)
def test_the_formula_is_what_the_trace_says(name: str, what: str, tmp_path: Path) -> None:
    run = resolve(catalog_run(name, with_fewer_experts(name, tmp_path), what), "cuda")
    traced = trace(run)
    found = ClosedForm(run).at(run.config)
    assert found.parts().total == pytest.approx(traced.parts().total, rel=1e-4)
    assert found.load == traced.load


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, option, marks=() if (name, option) == ("granite-3.1-3b-a800m", "lora") else pytest.mark.full)
        for name in WITH_EXPERTS
        for option in ("router", "lora")
    ],
)
def test_what_a_model_needs_is_predicted(name: str, option: str) -> None:
    """On one card, whether it fits or not: all of the model is there, in 4 bits or somewhat more."""
    what: dict[str, Any] = {"router": "all"} if option == "router" else {"lora": 16}
    config, _ = config_of(name, ["model.base=mxfp4" if name.startswith("gpt-oss") else "model.base=nf4"], **what)
    report = predict(config, method="formula", gpu="h100-80gb")
    parts = report.fullest.parts
    numbers = sum(one.numel for one in resolve(config, "cuda").structure.parameters)
    assert 4 * numbers < 8 * parts.frozen_weights < 5.5 * numbers
    assert parts.trainable_weights > 0
    if not 120e9 < numbers < 200e9:
        assert report.verdict == ("yes" if numbers < 120e9 else "no")
