"""Whatever a run combines runs on CUDA, and takes what is predicted, to the byte, as torch's allocator counts.

A case is one of storage × dtype × optimizer × checkpointing × residence of the experts; what trains, and all settings
that go with these, are drawn with a fixed seed. A push takes a sample, `--all` takes all.
"""

import itertools
import random
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from moetune.config.schema import OptimizerName, RunConfig
from moetune.run.resolve import resolve
from tests.nullcuda import runs
from tests.published import write_fp8, write_nvfp4
from tests.toys import toy_config

SAMPLE = 60
REFUSED = {("bf16", "fp16"), ("fp32", "bf16"), ("fp32", "fp16")}
STORAGES = ("nf4", "int8", "fp8", "nvfp4", "mxfp4", "int4-g128", "bf16", "fp32")
DTYPES = ("bf16", "fp16", "fp32")
CHECKPOINTING, RESIDENCES = ("none", "experts_only", "full", "offload"), ("gpu", "host")
Case = tuple[str, str, str, str, str]


def combinations() -> list[Case]:
    every = itertools.product(STORAGES, DTYPES, get_args(OptimizerName), CHECKPOINTING, RESIDENCES)
    return [case for case in every if case[:2] not in REFUSED]


def drawn(model: Path, case: Case) -> RunConfig:
    """The case's run file. Settings that do not go together are drawn again."""
    storage, dtype, optimizer, checkpointing, residence = case
    draw = random.Random(" ".join(case))
    needs_masters = dtype == "fp16" and optimizer not in ("lomo", "adalomo", "adafactor")
    while True:
        sections: dict[str, dict[str, Any]] = {
            "model": {"base": storage, "dtype": dtype, "experts_on": residence, "double_quant": draw.random() < 0.5},
            "optimizer": {
                "name": optimizer,
                "master_weights": draw.choice(("fp32",) if needs_masters else ("none", "fp32", "stochastic")),
                "fused_backward": draw.random() < 0.4,
                "offload": draw.random() < 0.3,
            },
            "train": {
                "checkpointing": checkpointing,
                "accumulate": draw.choice((1, 2)),
                "micro_batch": draw.choice((1, 2)),
                "max_grad_norm": draw.choice((0.0, 1.0)),
                "layer_by_layer": draw.random() < 0.5,
            },
            "data": {"train": "unread", "packing": draw.random() < 0.5},
        }
        try:
            return runs.toy_run(model, draw.choice(list(runs.ADAPT)), **sections)
        except ValidationError:
            continue


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = combinations()
        if not metafunc.config.getoption("--all"):
            cases = random.Random(0).sample(cases, SAMPLE)
        metafunc.parametrize("case", cases, ids=["-".join(case) for case in cases])


def test_a_combination_takes_what_is_predicted(case: Case, toy_model: Path) -> None:
    compared = runs.compare(drawn(toy_model, case))
    assert compared.off == 0, compared
    assert compared.managed == compared.managed_predicted, compared


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("adapt", ["experts", "lora"])
def test_micro_batches_layer_by_layer_take_what_is_predicted(adapt: str, checkpointing: str, toy_model: Path) -> None:
    train = {"accumulate": 3, "layer_by_layer": True, "checkpointing": checkpointing}
    compared = runs.compare(runs.toy_run(toy_model, adapt, model={"experts_on": "host"}, train=train))
    assert compared.off == 0, compared


@pytest.mark.parametrize(("adapt", "experts_on"), [("router", "gpu"), ("lora", "host")])
def test_tables_on_the_host_take_what_is_predicted(adapt: str, experts_on: str, toy_model: Path) -> None:
    model = {"embeddings_on": "host", "experts_on": experts_on}
    config = runs.toy_run(toy_model, adapt, model=model, train={"accumulate": 2, "layer_by_layer": False})
    assert resolve(config, "cuda").tables_on_host == ["model.embed_tokens"]
    compared = runs.compare(config)
    assert compared.off == 0, compared


@pytest.mark.parametrize("adapt", ["router", "experts"])
def test_a_gradient_through_all_experts_takes_what_is_predicted(adapt: str, toy_model: Path) -> None:
    compared = runs.compare(runs.toy_run(toy_model, adapt, train={"dense_router_gradient": True}))
    assert compared.off == 0, compared


@pytest.mark.parametrize("adapt", ["experts", "lora"])
@pytest.mark.parametrize("base", ["fp8", "nvfp4"])
def test_a_published_base_takes_what_is_predicted(base: str, adapt: str, tmp_path: Path) -> None:
    """With gate and up quantized apart, blocks that are cut off, and a layer that is published in 16 bits."""
    write = {"fp8": write_fp8, "nvfp4": write_nvfp4}[base]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 192, "head_dim": 64, "vocab_size": 512}
    folder = write(tmp_path / base, "qwen3_moe", left_out=["self_attn.o_proj"], **sizes)
    config = runs.toy_run(folder, adapt, model={"weights": "pretrained"})
    assert resolve(config, "cuda").config.model.base == base
    compared = runs.compare(config)
    assert compared.off == 0, compared


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_scans_computed_once_more_take_what_is_predicted(model_type: str, checkpointing: str, tmp_path: Path) -> None:
    toy_config(model_type).save_pretrained(tmp_path)
    lora = {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}
    train = {"checkpointing": checkpointing, "sequence_length": 96}
    compared = runs.compare(runs.toy_run(tmp_path, "router", adapt={"router": "all", "lora": lora}, train=train))
    assert compared.off == 0, compared
