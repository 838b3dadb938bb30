"""Fake steps take what real ones take, a shortened model what the whole one takes; and the table of the design."""

import math
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.formats.table import FORMATS
from moetune.json_files import read_json
from moetune.memory.assumed_routing import AssumedRouting, parse_routing
from moetune.memory.report import PART_NAMES
from moetune.memory.trace import Trace, trace
from moetune.run.resolve import resolve
from tests.adapt.test_merged import BASES as ROUNDED
from tests.memory.models import LAYOUTS, blocks_of, toy_run, write_toy
from tests.published import write_4bit, write_fp8, write_mxfp4
from tests.reference import small_linears_are_quantized
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("model_type", "checkpointing", "kept", "experts_on"),
    [
        pytest.param("mixtral", "none", 0, "gpu", marks=pytest.mark.full),
        ("mixtral", "offload", 1, "host"),
        pytest.param("mixtral", "experts_only", 1, "gpu", marks=pytest.mark.full),
        ("deepseek_v3", "full", 1, "gpu"),
        pytest.param("llama4_text", "full", 1, "host", marks=pytest.mark.full),
        pytest.param("llama4_text", "none", 0, "gpu", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "none", 0, "host", marks=pytest.mark.full),
        pytest.param("llama", "offload", 0, "gpu", marks=pytest.mark.full),
        ("llama", "none", 0, "gpu"),
        ("deepseek_v3", {"attention": "all", "rows": 1, "rest": 1}, 0, "host"),
        pytest.param("mixtral", {"attention": 0, "rows": "all", "rest": 1}, 0, "gpu", marks=pytest.mark.full),
        ("mixtral", {"host": 0, "rows": 1}, 0, "gpu"),
        pytest.param("deepseek_v3", {"host": 1, "attention": 1}, 0, "host", marks=pytest.mark.full),
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
@pytest.mark.one_in(2)
@pytest.mark.parametrize("experts_on", ["gpu", "host"])
@small_linears_are_quantized()
def test_so_they_do_on_a_base_in_several_precisions(experts_on: str, tmp_path: Path) -> None:
    folder = write_toy(tmp_path, "deepseek_v3", num_hidden_layers=3)
    base = {"default": "nf4", "parts": {"attention": "int8"}, "layers": {1: {"experts": "fp32"}}}
    model = {"base": base, "experts_on": experts_on}
    config = toy_run(folder, "deepseek_v3", MIXED, model=model, train={"accumulate": 2})
    assert_alike(config)
    run = resolve(config, "cpu")
    stored = [(one, (linear.out_features, linear.in_features), 1) for path, linear in run.structure.linears().items()
              if (one := run.quantized_linears.get(path))]  # fmt: skip
    for layer in run.structure.moe_layers:
        shape, one = layer.shape, run.config.model.storage_of("experts", layer.index)
        stored += [(one, (shape.gate_up_rows, shape.hidden), shape.num_experts)]
        stored += [(one, (shape.hidden, shape.intermediate), shape.num_experts)]
    assert {one for one, _, _ in stored} == {"nf4", "int8", "fp32"}
    sizes = (kind for one, shape, count in stored for kind in FORMATS[one].buffers(count, shape).values())
    expected = sum(dtype.itemsize * math.prod(size) for dtype, size in sizes)
    expected += 4 * 16 * [*run.quantized_linears.values()].count("nf4")  # bitsandbytes' table of codes
    blocks = [b for b in blocks_of(trace(config, micro_steps=2)) if b.part == "frozen_weights" and ", " in b.op]
    assert sum(b.bytes for b in blocks) == expected
    assert {b.op for b in blocks} == {
        *("experts, nf4, double-quantized", "experts, fp32", "attention, int8"),
        *("dense_mlp, nf4, double-quantized", "shared_experts, nf4, double-quantized"),
    }


@pytest.mark.parametrize(
    "checkpointing", ["offload", *(pytest.param(c, marks=pytest.mark.full) for c in ("full", "none", {"host": "0-1"}))]
)
def test_so_they_do_layer_by_layer(toys: dict[str, Path], checkpointing: Any) -> None:
    train = {"accumulate": 3, "checkpointing": checkpointing, "layer_by_layer": True}
    config = toy_run(toys["mixtral"], "mixtral", MIXED, model={"experts_on": "host"}, train=train)
    assert_alike(config)


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


@pytest.mark.parametrize(
    ("model_type", "sizes"), [("hrm_text", {"num_hidden_layers": 3}), ("mamba2", {"head_dim": 16}), ("git", {})]
)
def test_so_they_do_of_types_that_raised(model_type: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """HRM's layers run several times, none stands for others; Mamba-2's scans take a list of config.json; GIT has two
    stacks of layers."""
    folder = write_toy(tmp_path, model_type, **sizes)
    config = toy_run(folder, model_type, DENSE["everything"], train={"checkpointing": "full"})
    measured = measure(config, "cpu", steps=2)
    assert measured.trace is not None
    assert trace(config).parts() == measured.trace.parts()


@pytest.mark.full
def test_so_they_do_where_a_mask_chooses_groups_of_keys(tmp_path: Path) -> None:
    """GLM-5.3's leaves out what no row has; the trace takes it that a full row has all."""
    assert_alike(toy_run(write_toy(tmp_path, "glm5_next"), "glm5_next", MIXED))


@pytest.mark.full
@pytest.mark.parametrize("embeddings_on", ["gpu", "host"])
def test_so_they_do_with_embeddings_of_n_grams(embeddings_on: str, tmp_path: Path) -> None:
    """Qwen3.8's, and its choice of keys."""
    folder = write_toy(tmp_path, "qwen4_exp_text", ple_layer_ids=[2], eos_token_id=1, indexer_budget=64)
    assert_alike(toy_run(folder, "qwen4_exp_text", MIXED, model={"embeddings_on": embeddings_on}))


@pytest.mark.full
@pytest.mark.parametrize("kind", ROUNDED)
def test_so_they_do_where_merged_weights_are_rounded(kind: str, tmp_path: Path) -> None:
    into, write, adapt = ROUNDED[kind]
    folder = write(tmp_path / "base")
    model_type = read_json(folder / "config.json", dict[str, Any])["model_type"]
    model = {"weights": "pretrained", "base": "fp32" if kind.startswith("16 bits") else "auto"}
    train = {"checkpointing": "full", "merge_into": into}
    assert_alike(toy_run(folder, model_type, adapt, model=model, train=train))


def assert_alike(config: RunConfig) -> None:
    """Byte for byte, what stays on the host included."""
    measured = measure(config, "cpu", steps=2)
    answers = iter(measured.counts)
    fake = trace(config, lambda *_: next(answers), micro_steps=config.train.accumulate)
    assert measured.trace is not None
    assert fake.parts() == measured.trace.parts()
    assert fake.host_peak == measured.trace.host_peak
    assert next(answers, None) is None


LORA = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}}


@pytest.mark.parametrize(
    ("path", "adapt", "optimizer", "tokens", "at_most"),
    [
        ("mixtral-8x7b", EXPERTS, {"name": "adamw"}, (1, 1024), 38.44),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("mixtral-8x7b", {"router": "all"}, {"name": "adamw"}, (1, 2048), 24.16),
                ("mixtral-8x7b", {"router": "all"}, {"name": "adamw"}, (8, 2048), 30.12),
                ("mixtral-8x7b", LORA, {"name": "adamw"}, (1, 2048), 27.10),
                ("mixtral-8x7b", LORA, {"name": "adamw8bit"}, (2, 2048), 26.8),
                ("mixtral-8x7b", EXPERTS, {"name": "lomo"}, (1, 1024), 26.7),
                ("mixtral-8x7b", EXPERTS, {"name": "adamw8bit", "fused_backward": True}, (1, 1024), 31.0),
                ("llama-7b", {"also": ["*"]}, {"name": "lomo"}, (8, 512), 14.6),
            )
        ),
    ],
)
def test_what_44_gib_hold(
    path: str, adapt: dict[str, Any], optimizer: dict[str, Any], tokens: tuple[int, int], at_most: float
) -> None:
    train = {"micro_batch": tokens[0], "sequence_length": tokens[1], "accumulate": 1}
    model = {"path": path, "base": "bf16" if path == "llama-7b" else "nf4"}
    config = RunConfig.model_validate({"model": model, "adapt": adapt, "optimizer": optimizer, "train": train})
    assert peak(trace(config)) / GiB <= at_most


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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("routing", ["skew:2", "worst"])
def test_uneven_routing_takes_more(toys: dict[str, Path], routing: str) -> None:
    """Of experts that are worked on one at a time: a group's rows are as many, however they are spread over it."""
    train = {"sequence_length": 256, "expert_memory": 0}
    config = toy_run(toys["mixtral"], "mixtral", ADAPT["router"], train=train)
    assert peak(trace(config, parse_routing(routing))) > peak(trace(config))


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
    config = toy_run(toys["mixtral"], "mixtral", ADAPT["router"], parallel={"offload": "optimizer"})
    with pytest.raises(UserError, match=r"parallel\.offload: "):
        trace(config)


def test_recorded_routing_must_be_of_this_model(toys: dict[str, Path]) -> None:
    config = toy_run(toys["mixtral"], "mixtral", ADAPT["router"])
    with pytest.raises(UserError, match="has 2 experts for layer 0, which has 4 experts"):
        trace(config, AssumedRouting("load.json", None, ((0, (1.0, 1.0)),)))
