"""A shortened model's log, repeated, is the whole model's: every storage of a step and all its work, on one rank and on
several. So is the log of some micro-batches of those that go layer by layer."""

from collections import Counter
from collections.abc import Iterator
from itertools import cycle, groupby, product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.allocator import simulate
from moetune.memory.trace import Trace, trace
from moetune.memory.trace.log import Block
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve
from tests.memory.models import blocks_of, toy_run, write_toy

CARD = find_gpu("h100")
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
EXPERTS: dict[str, Any] = {"experts": {"layers": "0-4", "ids": [0, 1]}, "router": "0-4"}
EVERYTHING: dict[str, Any] = {"also": ["*"]}
ON_HOST = {"model": {"experts_on": "host"}, "train": {"checkpointing": "offload"}}
FULL_ON_HOST = {"model": {"experts_on": "host"}, "train": {"accumulate": 2, "checkpointing": "full"}}
APART = {
    "layers_block_type": ["linear_attention", "moe"] * 4 + ["full_attention", "moe"] + ["linear_attention", "moe"] * 5
}
RANKS = {"lora": {**LORA["lora"], "rank": {"attention": 8, "experts": {"0-4": 4, "5-9": 2}}}}
OFFLOAD = {"optimizer": {"name": "adamw", "offload": True}}
TOGETHER = {"model": {"experts_on": "host"}, "train": {"accumulate": 3, "layer_by_layer": True}}
TOGETHER_OFFLOAD = {**TOGETHER, "train": {**TOGETHER["train"], "checkpointing": "offload"}}
EVALUATED = {"train": {"eval_micro_batch": 6}, "data": {"eval": "unread"}}
KEEPS_ROWS = {"train": {"keep_rows": 5, "accumulate": 2}}
TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 4}
THREES = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4}
LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 4}
SOME = {"experts": {"layers": "0-6", "ids": [0, 1]}}
LOMO = {"optimizer": {"name": "lomo"}, "model": {"experts_on": "host"}, "train": {"checkpointing": "offload"}}
BY_LAYER = {"default": "nf4", "parts": {"attention": "int8"}, "layers": {"0": {"experts": "bf16"}, "4-9": "bf16"}}
ROUNDED = {"model": {"base": "bf16"}, "train": {"merge_into": "int4"}}
CASES = {
    "lora": ("mixtral", LORA, {}, {"num_hidden_layers": 6}),
    "experts": ("mixtral", EXPERTS, {"train": {"accumulate": 3}}, {"num_hidden_layers": 9}),
    "turns": ("gpt_oss", LORA, {}, {"num_hidden_layers": 8, **TURNS}),
    "part of a period": ("gpt_oss", SOME, {"train": {"accumulate": 2}}, {"num_hidden_layers": 12, **THREES}),
    "part of a period, on the host": ("gpt_oss", SOME, LOMO, {"num_hidden_layers": 12, **THREES}),
    "linear attention": ("qwen3_next", SOME, {"train": {"checkpointing": "none"}}, {"num_hidden_layers": 12, **LINEAR}),
    "unchecked": ("deepseek_v2", LORA, {"train": {"checkpointing": "none"}}, {"num_hidden_layers": 6}),
    "a rank for each": ("mixtral", RANKS, {}, {"num_hidden_layers": 10}),
    "rows kept of some": ("mixtral", LORA, KEEPS_ROWS, {"num_hidden_layers": 10}),
    "a base in three precisions": ("mixtral", LORA, {"model": {"base": BY_LAYER}}, {"num_hidden_layers": 10}),
    "merged weights rounded": ("mixtral", LORA, ROUNDED, {"num_hidden_layers": 10, "intermediate_size": 64}),
    "lomo": ("mixtral", EXPERTS, {"optimizer": {"name": "lomo"}}, {"num_hidden_layers": 6}),
    "two passes": ("llama", EVERYTHING, {"optimizer": {"name": "lomo"}}, {"num_hidden_layers": 6}),
    "updates on the host": ("mixtral", EXPERTS, OFFLOAD, {"num_hidden_layers": 6}),
    "experts on the host": ("mixtral", LORA, ON_HOST, {"num_hidden_layers": 7}),
    "experts of other layers than the neighbours, on the host": ("nemotron_h", LORA, FULL_ON_HOST, APART),
    "some of those": ("nemotron_h", {"experts": {"layers": "1,3,5,7,9,11", "ids": [0]}}, FULL_ON_HOST, APART),
    "layer by layer": ("mixtral", LORA, TOGETHER, {"num_hidden_layers": 7}),
    "layer by layer, inputs on the host": ("mixtral", LORA, TOGETHER_OFFLOAD, {"num_hidden_layers": 7}),
    "layer by layer, other layers": ("nemotron_h", LORA, TOGETHER_OFFLOAD, APART),
    "evaluation": ("llama", EVERYTHING, EVALUATED, {"num_hidden_layers": 6}),
}
NF4, FP32 = {"base": "nf4"}, {"base": "fp32"}
NF4_ON_HOST = {"base": "nf4", "double_quant": False, "experts_on": "host"}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    "fsdp": (EXPERTS, {"fsdp": 2}, 2, NF4),
    "zero 2": (EVERYTHING, {"fsdp": 2, "zero": 2}, 2, NF4),
    "zero 1": (EXPERTS, {"fsdp": 2, "zero": 1}, 3, NF4),
    "gathered": (EXPERTS, {"fsdp": 2, "reshard": False}, 2, NF4),
    "fsdp, ep": (LORA, {"fsdp": 2, "ep": 2}, 1, NF4),
    # scales of a rank's experts, copied from the host, have as many bytes as a gathered router
    "fsdp, ep, on the host": ({"router": "all"}, {"fsdp": 2, "ep": 2}, 2, NF4_ON_HOST),
    "replicas, ep": (EXPERTS, {"ep": 2, "replicate": 2}, 1, NF4),
    "tp, ep": (LORA, {"tp": 2, "ep": 2}, 1, FP32),
    "stages": (SOME, {"pp": 2}, 4, NF4),
    "three stages": (LORA, {"pp": 3}, 6, NF4),
    "several stages each": (LORA, {"pp": 2, "schedule": "interleaved1f1b"}, 2, NF4),
}
ON_A_PUSH = (
    "turns",
    "part of a period",
    "a rank for each",
    "rows kept of some",
    "a base in three precisions",
    "experts on the host",
    "layer by layer, inputs on the host",
    "fsdp, ep",
    "fsdp, ep, on the host",
    "several stages each",
    "experts of other layers than the neighbours, on the host",
)


def storages(traced: Trace) -> Counter[tuple]:
    return Counter(
        (b.bytes, b.part, b.phase, b.op, b.on_host, b.died is None) for b in blocks_of(traced) if is_alike(b)
    )


def is_alike(block: Block) -> bool:
    """Whether it is no norm of gradients, of which an optimizer stacks one a parameter, and not added up of them."""
    return block.op not in ("linalg_vector_norm.default", "stack.default", "zeros_like.default")


def order(traced: Trace) -> list[tuple[int, int]]:
    """Births and deaths of all forward and backward passes on the device, in order; deaths between two births by size,
    because memory is the same in whatever order they come."""
    counts = {at: mark.phase not in ("load", "optimizer") for at, mark, *_ in traced.events.marks}
    counting, events, blocks = False, [], blocks_of(traced)
    for at, (storage, sign) in enumerate(zip(traced.events.storages, traced.events.signs, strict=True)):
        counting = counts.get(at, counting)
        if counting and not blocks[storage].on_host and is_alike(blocks[storage]):
            events.append((int(sign), blocks[storage].bytes))
    runs = (list(run) for _, run in groupby(events, key=lambda event: event[0]))
    return [event for run in runs for event in (run if run[0][0] > 0 else sorted(run))]


def same(short: Trace, whole: Trace) -> None:
    assert order(short) == order(whole)
    assert short.parts() == whole.parts()
    assert short.host_peak == pytest.approx(whole.host_peak, abs=4 * 64)  # norms of gradients that are there
    assert storages(short) == storages(whole)
    assert short.load == whole.load
    assert short.work.keys() == whole.work.keys()
    for part, work in whole.work.items():
        off = 5e-3 if part in ("optimizer", "host", "head_and_loss") else 1e-12  # those norms, which are stacked
        assert vars(short.work[part]) == pytest.approx(vars(work), rel=off), part


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "case", [name if name in ON_A_PUSH else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_one_rank(case: str, tmp_path: Path) -> None:
    model_type, adapt, sections, sizes = CASES[case]
    config = toy_run(write_toy(tmp_path, model_type, experts=2, **sizes), model_type, adapt, **sections)
    same(trace(config, gpu=CARD), trace(config, shortened=False, gpu=CARD))


_TYPES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 7},
    "qwen3_moe": {"num_hidden_layers": 6},
    "gpt_oss": {"num_hidden_layers": 8, **TURNS},
    "deepseek_v2": {"num_hidden_layers": 6},
    "deepseek_v3": {"num_hidden_layers": 7},
    "nemotron_h": APART,
    "qwen3_next": {"num_hidden_layers": 12, **LINEAR},
}
_ADAPT = {"lora": LORA, "experts": {"experts": {"layers": "1-4", "ids": [0, 1]}, "router": "1-4"}, "all": EVERYTHING}
_ON_A_PUSH = "mixtral-experts-full-packed-4"


def _together() -> Iterator[str]:
    """All types with LoRA under each checkpointing, packed and padded, and three of them with what else may train, over
    2 to 8 micro-batches."""
    counts = cycle(range(2, 9))
    for model_type, checkpointing, rows in product(_TYPES, ("none", "full", "offload"), ("packed", "padded")):
        yield f"{model_type}-lora-{checkpointing}-{rows}-{next(counts)}"
    for model_type, adapt, checkpointing in product(
        ("mixtral", "gpt_oss", "deepseek_v3"), ("experts", "all"), ("none", "full", "offload")
    ):
        yield f"{model_type}-{adapt}-{checkpointing}-packed-{next(counts)}"
    yield from ("mixtral-experts-offload-packed-8", "gpt_oss-lora-full-padded-5", "deepseek_v3-all-none-packed-4")


@pytest.mark.parametrize(
    "case", [_ON_A_PUSH, *(pytest.param(name, marks=pytest.mark.full) for name in dict.fromkeys(_together()))]
)
def test_micro_batches_layer_by_layer(case: str, tmp_path: Path) -> None:
    model_type, adapt, checkpointing, rows, count = case.split("-")
    train = {"layer_by_layer": True, "accumulate": int(count), "checkpointing": checkpointing}
    sections = {
        "model": {"experts_on": "host"}, "train": train, "data": {"train": "unread", "packing": rows == "packed"}
    }  # fmt: skip
    model = write_toy(tmp_path, model_type, experts=2, **_TYPES[model_type])
    config = toy_run(model, model_type, _ADAPT[adapt], **sections)
    short, whole = (trace(config, gpu=CARD, shortened=shortened) for shortened in (True, False))
    same(short, whole)
    assert short.host_peak == whole.host_peak
    reserved = (simulate(traced.allocations(), expandable=True) for traced in (short, whole))
    assert next(reserved) == next(reserved)


@pytest.mark.full
@pytest.mark.one_in(20)
@pytest.mark.parametrize("case", CASES)
def test_first_step_that_only_creates_states(case: str, tmp_path: Path) -> None:
    model_type, adapt, sections, sizes = CASES[case]
    config = toy_run(write_toy(tmp_path, model_type, experts=2, **sizes), model_type, adapt, **sections)
    _only_reserved_differs(config, *(trace(config, gpu=CARD, simulated=whole, timed=whole) for whole in (False, True)))


def _only_reserved_differs(config: RunConfig, quick: Trace, both_steps: Trace) -> None:
    """A trace of one step is shorter, unless its work counts and experts stay on the card until the next one."""
    assert quick.workspaces(CARD) == both_steps.workspaces(CARD)
    for name in ("host_peak", "rounded_peak", "managed", "collectives", "load"):
        assert getattr(quick, name) == getattr(both_steps, name), name
    for part, work in quick.work.items():  # of which two micro-steps add to gradients, not one
        assert vars(both_steps.work[part]) == pytest.approx(vars(work), rel=0.1), part
    assert quick.parts() == both_steps.parts()
    assert quick.phases() == both_steps.phases()
    assert quick.by_layer() == both_steps.by_layer()
    assert (len(quick.log.entries) < len(both_steps.log.entries)) == (
        not (quick.work and resolve(config, "cuda").carried_layers)
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "layout", [name if name in ON_A_PUSH else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_several_ranks(layout: str, tmp_path: Path) -> None:
    adapt, parallel, accumulate, stored = LAYOUTS[layout]
    count = prod(parallel.get(axis, 1) for axis in ("fsdp", "tp", "replicate", "pp"))
    sections = {"parallel": parallel, "hardware": {"count": count}, "train": {"accumulate": accumulate}}
    sizes = {"num_hidden_layers": 12 if "pp" in parallel else 9 if adapt is EXPERTS else 6, "intermediate_size": 64}
    model = write_toy(tmp_path, "mixtral", experts=2, **sizes)
    config = toy_run(model, "mixtral", adapt, **sections, model=stored)
    for rank in range(parallel.get("pp", 1)):
        short, whole = (trace(config, gpu=CARD, rank=rank, shortened=shortened) for shortened in (True, False))
        same(short, whole)
        assert short.collectives == whole.collectives
        quick = trace(config, gpu=CARD, rank=rank, simulated=False, timed=False)
        assert quick.work.keys() == short.work.keys()
        _only_reserved_differs(config, quick, short)


@pytest.mark.full
def test_router_losses_are_computed_of_all_layers(tmp_path: Path) -> None:
    model = write_toy(tmp_path, "deepseek_v2", num_hidden_layers=5)  # whose first layer has no router
    train = {"router_aux_loss": 0.1, "router_z_loss": 0.1, "accumulate": 2}
    config = toy_run(model, "deepseek_v2", {"router": "all"}, train=train)
    same(trace(config, gpu=CARD), trace(config, shortened=False, gpu=CARD))
