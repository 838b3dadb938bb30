"""Fake steps take what real ones take, a shortened model what the whole one takes; and the table of the design."""

import resource
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moetune.config.schema import OptimizerName, QuantizedDtype, RunConfig
from moetune.errors import UserError
from moetune.memory.assumed_routing import AssumedRouting, parse_routing
from moetune.memory.report import PART_NAMES
from moetune.memory.trace import Trace, trace
from moetune.models.source import find_model_source
from tests.memory.models import LAYOUTS, blocks_of, toy_run, write_toy
from tests.published import write_4bit, write_fp8, write_mxfp4
from tests.resolved import measure

GiB = 2**30
EXPERTS = {"router": "0-5", "experts": {"layers": "0-5", "ids": [0, 1]}}
MIXED = {"router": "all", "lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"], "ids": [0, 3]}}
ADAPT: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "experts": {"experts": {"ids": [1, 2]}, "also": ["norm"]},
    "lora": {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}},
    "mixed": MIXED,
    "everything": {"also": ["*"], "router": "all", "experts": {}},
}
DENSE = {"router": {"also": ["norm"]}, "experts": {"also": ["embedding"]}, "everything": {"also": ["*"]}}
DENSE |= {name: {"lora": {"rank": 4, "alpha": 8, "targets": ["attention"]}} for name in ("lora", "mixed")}


def peak(traced: Trace) -> int:
    return traced.parts().total


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Path]:
    """Of two layers; with `--all` of four, one of which another stands for in a trace (test_repeat.py)."""
    sizes = {"num_hidden_layers": 4 if pytestconfig.getoption("--all") else 2}
    return {name: write_toy(tmp_path_factory.mktemp("toys") / name, name, **sizes) for name in LAYOUTS}


@st.composite
def optimizers(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(get_args(OptimizerName)))
    if name != "lomo" and draw(st.integers(0, 3)) == 0:
        return {"name": name, "offload": True}
    masters = draw(st.sampled_from(["none", "fp32", "stochastic"]))
    fused = draw(st.sampled_from([{}, {"fused_backward": True}, {"fused_backward": False}]))
    return {"name": name, "master_weights": masters, **fused}


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(architecture, adapt:, other sections)."""
    model_type = draw(st.sampled_from(sorted(LAYOUTS)))
    adapt = draw(st.sampled_from(sorted(ADAPT)))
    base, optimizer = draw(st.sampled_from([*get_args(QuantizedDtype), "bf16", "fp32"])), draw(optimizers())
    fused = optimizer.get("fused_backward", optimizer["name"] in ("lomo", "adalomo") and "offload" not in optimizer)
    sections = {
        "model": {
            "base": base,
            "double_quant": draw(st.booleans()),
            "experts_on": draw(st.sampled_from(["gpu", "host"])),
            "dtype": draw(st.sampled_from(["fp32", "fp32", "bf16"])) if base != "fp32" else "fp32",
        },
        "optimizer": optimizer,
        "train": {
            "micro_batch": draw(st.integers(1, 3)),
            "sequence_length": draw(st.integers(3, 96)),
            "accumulate": 1 if fused else draw(st.integers(1, 3)),
            "checkpointing": draw(st.sampled_from(["none", "experts_only", "full", "offload"])),
            "max_grad_norm": draw(st.sampled_from([0.0, 1.0])),
        },
        "data": {"packing": draw(st.booleans())},
    }
    return model_type, (DENSE if model_type == "llama" else ADAPT)[adapt], sections


@pytest.mark.slow
@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.reuse, Phase.generate],
)
@given(run=runs())
def test_a_prediction_is_what_is_measured(
    toys: dict[str, Path], run: tuple[str, dict[str, Any], dict[str, Any]]
) -> None:
    """The real steps' routing given, the peak is the same to 1 %."""
    model_type, adapt, sections = run
    config = toy_run(toys[model_type], model_type, adapt, **sections)
    measured = measure(config, "cpu", steps=2)
    answers = iter(measured.counts)
    predicted = trace(config, lambda *_: next(answers), micro_steps=config.train.accumulate)
    assert peak(predicted) == pytest.approx(measured.peak_allocated, rel=0.01)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("model_type", "checkpointing", "kept", "experts_on"),
    [
        pytest.param("mixtral", "none", 0, "gpu", marks=pytest.mark.full),
        ("mixtral", "offload", 1, "host"),
        pytest.param("mixtral", "experts_only", 1, "gpu", marks=pytest.mark.full),
        ("deepseek_v3", "full", 1, "gpu"),
        pytest.param("deepseek_v3", "none", 0, "host", marks=pytest.mark.full),
        pytest.param("llama", "offload", 0, "gpu", marks=pytest.mark.full),
        ("llama", "none", 0, "gpu"),
        ("deepseek_v3", {"attention": "all", "rows": 1, "rest": 1}, 0, "host"),
        pytest.param("mixtral", {"attention": 0, "rows": "all", "rest": 1}, 0, "gpu", marks=pytest.mark.full),
    ],
)
def test_fake_steps_take_byte_for_byte_what_real_ones_take(
    toys: dict[str, Path], model_type: str, checkpointing: Any, kept: int, experts_on: str
) -> None:
    adapt = DENSE["everything"] if model_type == "llama" else MIXED
    sections = {
        "model": {"experts_on": experts_on},
        "train": {"accumulate": 2, "checkpointing": checkpointing, "keep_rows": kept},
    }
    assert_alike(toy_run(toys[model_type], model_type, adapt, **sections))


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_so_they_do_on_a_base_as_it_is_published(model_type: str, tmp_path: Path) -> None:
    """In MXFP4; in NF4 and in FP8 with gate and up apart."""
    sizes = {"vocab_size": 256, "num_hidden_layers": 2, "num_local_experts": 4}
    if model_type == "gpt_oss":
        folder = write_mxfp4(tmp_path, **sizes)
    elif model_type == "qwen3_moe":
        left_out = ["self_attn.o_proj"]
        folder = write_fp8(tmp_path, model_type, left_out=left_out, hidden_size=192, moe_intermediate_size=64, **sizes)
    else:
        folder = write_4bit(tmp_path, model_type, hidden_size=64, head_dim=16, **sizes)
    config = toy_run(folder, model_type, MIXED, model={"weights": "pretrained"}, train={"checkpointing": "full"})
    assert_alike(config)


def assert_alike(config: RunConfig) -> None:
    """Byte for byte, what stays on the host included."""
    measured = measure(config, "cpu", steps=2)
    answers = iter(measured.counts)
    fake = trace(config, lambda *_: next(answers), micro_steps=config.train.accumulate)
    assert measured.trace is not None
    assert fake.parts() == measured.trace.parts()
    assert fake.host_peak == measured.trace.host_peak
    assert next(answers, None) is None


@pytest.mark.full
def test_a_shortened_mixtral_takes_what_the_whole_one_takes(tmp_path: Path) -> None:
    """Of its size but for its depth: twelve layers of 32, half of which train."""
    shallow = find_model_source("mixtral-8x7b").config
    shallow.num_hidden_layers = 12
    shallow.save_pretrained(tmp_path)
    config = mixtral(EXPERTS, 1, 1024, path=str(tmp_path))
    short, full = trace(config), trace(config, shortened=False)
    assert peak(short) == peak(full)
    for name, taken in short.parts().items():
        assert taken == getattr(full.parts(), name), name
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 * GiB


def mixtral(adapt: dict[str, Any], micro_batch: int, sequence: int, path: str = "mixtral-8x7b") -> RunConfig:
    train = {"micro_batch": micro_batch, "sequence_length": sequence, "accumulate": 1}
    return RunConfig.model_validate(
        {"model": {"path": path}, "adapt": adapt, "optimizer": {"name": "adamw"}, "train": train}
    )


LORA = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}}


@pytest.mark.parametrize(
    ("adapt", "micro_batch", "sequence", "static", "most"),
    [
        pytest.param({"router": "all"}, 1, 2048, 22.80, 24.16, marks=pytest.mark.full),
        pytest.param({"router": "all"}, 8, 2048, 22.80, 30.12, marks=pytest.mark.full),
        (EXPERTS, 1, 1024, 25.72, 38.44),
        pytest.param(LORA, 1, 2048, 23.63, 27.10, marks=pytest.mark.full),
        pytest.param(LORA, 2, 2048, 23.63, 27.35, marks=pytest.mark.full),
    ],
)
def test_mixtral_takes_no_more_than_the_prototype(
    adapt: dict[str, Any], micro_batch: int, sequence: int, static: float, most: float
) -> None:
    traced = trace(mixtral(adapt, micro_batch, sequence))
    parts = traced.parts()
    assert (parts.frozen_weights + parts.trainable_weights) / GiB == pytest.approx(static, abs=0.02)
    assert parts.total / GiB <= most


@pytest.mark.full
@pytest.mark.parametrize(
    ("adapt", "optimizer", "tokens", "at_most"),
    [
        (EXPERTS, {"name": "lomo"}, (1, 1024), 26.7),
        (EXPERTS, {"name": "adamw8bit", "fused_backward": True}, (1, 1024), 31.0),
        (LORA, {"name": "adamw8bit"}, (2, 2048), 26.8),
        ({"also": ["*"]}, {"name": "lomo"}, (8, 512), 14.6),
    ],
    ids=["lomo", "fused adamw8bit", "lora", "llama-7b lomo"],
)
def test_what_makes_44_gib_enough(
    adapt: dict[str, Any], optimizer: dict[str, Any], tokens: tuple[int, int], at_most: float
) -> None:
    """Six layers × two experts, LoRA on everything, and all of LLaMA-7B; the formula is within 0.1 % of each trace."""
    train = {"micro_batch": tokens[0], "sequence_length": tokens[1], "accumulate": 1}
    path, base = ("llama-7b", "bf16") if "also" in adapt else ("mixtral-8x7b", "nf4")
    model = {"path": path, "base": base}
    config = RunConfig.model_validate({"model": model, "adapt": adapt, "optimizer": optimizer, "train": train})
    traced = peak(trace(config))
    assert traced / GiB <= at_most


@pytest.mark.full
def test_mixtral_8x22b_fits_with_its_experts_on_the_host() -> None:
    model = {"path": "mixtral-8x22b", "experts_on": "host"}
    train = {"micro_batch": 1, "sequence_length": 1024, "accumulate": 2, "checkpointing": "offload"}
    config = RunConfig.model_validate({"model": model, "adapt": LORA, "train": train})
    traced = trace(config)
    assert peak(traced) / GiB < 12
    assert traced.host_peak / GiB == pytest.approx(65.6, abs=0.7)


def test_inputs_on_the_host_leave_the_device_but_for_two(tmp_path: Path) -> None:
    """After forward a frozen embedding's output is left, which autograd holds; in backward one input and the next."""
    train = {"checkpointing": "offload", "accumulate": 2}
    config = toy_run(write_toy(tmp_path, "mixtral"), "mixtral", ADAPT["router"], train=train)
    measured = measure(config, "cpu", steps=1).trace
    assert measured is not None
    hidden = 2 * 32 * 64 * 4
    begins = next(at for at, mark, *_ in measured.events.marks if mark.phase == "backward") - 1
    blocks = blocks_of(measured)
    left = [blocks[n] for n in measured.alive(begins) if blocks[n].phase == "forward" and blocks[n].bytes == hidden]
    assert {b.module for b in left if b.op in ("add.Tensor", "embedding.default")} == {"model.embed_tokens", "model"}
    inputs = [b for b in blocks if b.fetched]
    assert {b.bytes for b in inputs} == {hidden}
    for at in range(measured.end + 1):
        assert sum(b.born <= at and (b.died is None or b.died > at) for b in inputs) <= 2


def test_parts_sum_to_the_peak_and_the_timeline_reaches_it(toys: dict[str, Path]) -> None:
    traced = trace(toy_run(toys["mixtral"], "mixtral", MIXED, train={"accumulate": 2}))
    parts = traced.parts()
    assert parts.total == sum(getattr(parts, name) for name in PART_NAMES)
    timeline = traced.timeline()
    assert max(sample.parts.total for sample in timeline) == parts.total
    labels = [sample.label for sample in timeline if sample.label]
    assert labels == ["forward 0", "backward 0", "forward 1", "backward 1", "optimizer"]
    moment = traced.moment()
    assert (moment.step, moment.phase) == (1, "backward")
    assert sum(allocation.bytes for allocation in traced.moment(10_000).largest) == parts.total


@pytest.mark.parametrize("routing", ["skew:2", "worst"])
def test_uneven_routing_takes_more(toys: dict[str, Path], routing: str) -> None:
    """Of experts that are worked on one at a time: a group's rows are as many, however they are spread over it."""
    train = {"sequence_length": 256, "expert_memory": 0}
    config = toy_run(toys["mixtral"], "mixtral", ADAPT["router"], train=train)
    assert peak(trace(config, parse_routing(routing))) > peak(trace(config))


SMALL = {"num_hidden_layers": 1, "num_local_experts": 4}
GROWING: dict[str, list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "batch": [(MIXED, {"train": {"micro_batch": n}}, {}) for n in (1, 3)],
    "length": [(MIXED, {"train": {"sequence_length": n}}, {}) for n in (16, 96)],
    "rank": [({"lora": {**ADAPT["lora"]["lora"], "rank": n}}, {}, {}) for n in (1, 16)],
    "trained experts": [({"experts": {"ids": f"0-{last}"}}, {}, {}) for last in (0, 3)],
    "layers": [(ADAPT["router"], {}, {**SMALL, "num_hidden_layers": n}) for n in (1, 6)],
    "experts": [(ADAPT["router"], {}, {**SMALL, "num_local_experts": n}) for n in (4, 16)],
    "router losses": [(ADAPT["router"], {"train": {"router_z_loss": z}}, SMALL) for z in (0.0, 0.1)],
}
"""(adapt:, other sections, sizes of the model), the second of each taking more."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", GROWING)
def test_memory_grows_with(what: str, tmp_path: Path) -> None:
    less, more = (
        peak(
            trace(toy_run(write_toy(tmp_path / str(n), "mixtral", **{**SMALL, **sizes}), "mixtral", adapt, **sections))
        )
        for n, (adapt, sections, sizes) in enumerate(GROWING[what])
    )
    assert less < more


def test_accumulation_takes_no_less(toys: dict[str, Path]) -> None:
    peaks = [peak(trace(toy_run(toys["mixtral"], "mixtral", MIXED, train={"accumulate": n}))) for n in (1, 3)]
    assert peaks == sorted(peaks)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_larger_batch_of_held_out_data_is_the_peak(tmp_path: Path, dtype: str) -> None:
    toy = write_toy(tmp_path, "mixtral", vocab_size=4096, num_hidden_layers=2)
    sections = {"model": {"dtype": dtype}, "data": {"eval": "unread"}, "train": {"eval_micro_batch": 8}}
    config = toy_run(toy, "mixtral", ADAPT["router"], **sections)
    measured, traced = measure(config, "cpu", steps=2), trace(config)
    assert traced.moment().phase == "evaluation"
    assert peak(traced) == measured.peak_allocated
    smaller = toy_run(toy, "mixtral", ADAPT["router"], model={"dtype": dtype})
    assert peak(trace(smaller)) < peak(traced)


def test_what_training_does_not_do_is_not_traced(toys: dict[str, Path]) -> None:
    stages = {"parallel": {"pp": 2}, "hardware": {"count": 2}}
    config = toy_run(toys["mixtral"], "mixtral", ADAPT["router"], **stages)
    with pytest.raises(UserError, match=r"parallel\.pp: "):
        trace(config)


def test_recorded_routing_must_be_of_this_model(toys: dict[str, Path]) -> None:
    config = toy_run(toys["mixtral"], "mixtral", ADAPT["router"])
    with pytest.raises(UserError, match="has 2 experts for layer 0, which has 4 experts"):
        trace(config, AssumedRouting("load.json", None, ((0, (1.0, 1.0)),)))
