"""The peak before the first step: predicted as `build` takes it."""

from pathlib import Path
from typing import Any

import pytest

from moetune.adapt.build import build
from moetune.memory.predict import predict
from moetune.memory.report import LoadPeaks
from moetune.memory.tracker import Tracker
from tests.memory.models import toy_run, write_toy

EXPERTS: dict[str, Any] = {"experts": {"ids": [0, 1]}}
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}


def load(config: Any) -> LoadPeaks:
    report = predict(config, method="formula", gpu="44GiB")
    traced = predict(config, method="trace", gpu="44GiB")
    assert report.load.gpu == pytest.approx(traced.load.gpu, rel=1e-3)
    assert report.load.host == traced.load.host
    return report.load


@pytest.mark.parametrize(
    ("model_type", "adapt", "base", "dtype"),
    [
        ("mixtral", EXPERTS, "nf4", "fp32"),
        ("mixtral", LORA, "nf4", "bf16"),
        ("gpt_oss", LORA, "int8", "bf16"),  # stored the other way round, with biases
        ("deepseek_v2", EXPERTS, "int8", "bf16"),
        ("qwen3_moe", EXPERTS, "bf16", "bf16"),
        ("llama", {"also": ["norm"]}, "nf4", "bf16"),
    ],
)
def test_drawing_and_packing_take_what_is_predicted(
    tmp_path: Path, model_type: str, adapt: dict[str, Any], base: str, dtype: str
) -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 192,
        "vocab_size": 4096,
        "head_dim": 64,
    }
    folder = write_toy(tmp_path, model_type, **sizes)
    config = toy_run(folder, model_type, adapt, model={"base": base, "dtype": dtype})
    with Tracker({}) as tracker:
        build(config, "cpu")
    assert load(config).gpu == pytest.approx(tracker.peak_bytes, rel=0.01)


def test_a_checkpoint_is_on_the_host_before_it_is_packed() -> None:
    model = {"path": "mixtral-8x7b", "dtype": "bf16"}
    peaks = load(toy_run(Path("mixtral-8x7b"), "mixtral", {"router": "all"}, model={**model, "weights": "pretrained"}))
    drawn = load(toy_run(Path("mixtral-8x7b"), "mixtral", {"router": "all"}, model=model))
    assert peaks.host == 2 * 2 * 46_702_792_704  # read, and mapped
    assert peaks.gpu < drawn.gpu
    assert drawn.host == 0
