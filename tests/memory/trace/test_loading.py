"""The peak before the first step: predicted as `build` takes it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moetune.adapt.build import build as build_resolved
from moetune.memory.report import LoadPeaks
from moetune.memory.trace import trace
from moetune.memory.trace.tracker import Tracker
from moetune.models.source import find_model_source
from moetune.planning.predict import predict
from moetune.run.resolve import resolve
from tests.memory.models import toy_run, write_toy
from tests.resolved import build

EXPERTS: dict[str, Any] = {"experts": {"ids": [0, 1]}}
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}

SIZES: dict[str, Any] = {
    "experts": 8,  # so that what is unpacked of one is little beside all
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "vocab_size": 4096,
    "head_dim": 64,
}


def load(config: Any) -> LoadPeaks:
    found = trace(config).load
    assert found is not None
    return found


@pytest.mark.full
def test_a_report_has_them(tmp_path: Path) -> None:
    """Of a model that is shortened for it."""
    sections = {"model": {"dtype": "bf16", "experts_on": "host"}}
    config = toy_run(write_toy(tmp_path, "mixtral", num_hidden_layers=4), "mixtral", LORA, **sections)
    assert predict(config, gpu="44GiB").load == load(config)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model_type", "adapt", "base", "dtype"),
    [
        ("mixtral", EXPERTS, "nf4", "fp32"),
        pytest.param("mixtral", LORA, "nf4", "bf16", marks=pytest.mark.full),
        pytest.param("gpt_oss", LORA, "int8", "bf16", marks=pytest.mark.full),
        ("deepseek_v2", EXPERTS, "int8", "bf16"),
        ("gpt_oss", LORA, "mxfp4", "bf16"),  # stored the other way round, with biases
        ("qwen3_moe", EXPERTS, "bf16", "bf16"),
        ("llama", {"also": ["norm"]}, "nf4", "bf16"),
    ],
)
def test_drawing_and_packing_take_what_is_predicted(
    tmp_path: Path, model_type: str, adapt: dict[str, Any], base: str, dtype: str
) -> None:
    folder = write_toy(tmp_path, model_type, **SIZES)
    config = toy_run(folder, model_type, adapt, model={"base": base, "dtype": dtype})
    run = resolve(config, "cpu")  # which runs a few layers without values
    with Tracker({}) as tracker:
        build_resolved(run, "cpu")
    assert load(config).gpu == pytest.approx(tracker.peak_bytes, rel=0.01)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("model_type", "stored", "dtype"),
    [
        ("mixtral", torch.bfloat16, "bf16"),
        ("mixtral", torch.float32, "bf16"),
        pytest.param("mixtral", torch.bfloat16, "fp32", marks=pytest.mark.full),
        ("gpt_oss", torch.bfloat16, "bf16"),
        pytest.param("deepseek_v2", torch.bfloat16, "bf16", marks=pytest.mark.full),
        ("llama", torch.bfloat16, "bf16"),
    ],
)
def test_reading_takes_what_is_predicted(tmp_path: Path, model_type: str, stored: torch.dtype, dtype: str) -> None:
    """Mixtral and DeepSeek hold experts one by one on disk, gpt-oss in stacks, Llama none."""
    folder = write_toy(tmp_path, model_type, **SIZES)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(stored).save_pretrained(folder)
    config = toy_run(folder, model_type, {"also": ["norm"]}, model={"weights": "pretrained", "dtype": dtype})
    run = resolve(config, "cpu")  # which runs a few layers without values
    with Tracker({}) as tracker:
        build_resolved(run, "cpu")
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert tracker.peak_bytes < sum(sizes)
    assert load(config).gpu == pytest.approx(tracker.peak_bytes, rel=0.06)  # of toys, where a piece is 10 % of all


def test_the_host_never_holds_a_checkpoint(tmp_path: Path) -> None:
    """Of a Mixtral with two layers of four experts, as wide as they are."""
    config = find_model_source("mixtral-8x7b").config
    config.num_hidden_layers, config.num_local_experts = 2, 4
    config.save_pretrained(tmp_path)
    read, drawn = (
        load(toy_run(tmp_path, "mixtral", {"router": "all"}, model={"dtype": "bf16", "weights": weights}))
        for weights in ("pretrained", "random")
    )
    assert read.host == 32000 * 4096 * 2
    assert read.gpu < drawn.gpu
    assert drawn.host == 0


@pytest.mark.full
def test_experts_that_stay_on_the_host_are_never_all_on_the_gpu(tmp_path: Path) -> None:
    folder = write_toy(tmp_path, "mixtral", **SIZES)
    on_gpu = toy_run(folder, "mixtral", LORA, model={"dtype": "bf16"})
    config = toy_run(folder, "mixtral", LORA, model={"dtype": "bf16", "experts_on": "host"})
    with Tracker({}) as tracker:
        build(config, "cpu")
    peaks = load(config)
    assert peaks.gpu == pytest.approx(tracker.peak_bytes, rel=0.01)
    assert peaks.host == predict(config, gpu="44GiB").fullest.host_bytes
    all_on_gpu = load(on_gpu).gpu
    assert peaks.gpu + peaks.host == pytest.approx(all_on_gpu, rel=0.6)
    assert peaks.gpu < all_on_gpu
