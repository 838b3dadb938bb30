"""The closed form is what a trace says, at sizes that were never recorded."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.cache import file_of
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.assumed_routing import PUBLISHED, AssumedRouting, parse_routing
from moetune.memory.closed_form import form as closed_forms
from moetune.memory.closed_form import store
from moetune.memory.closed_form.form import ClosedForm, record_ahead
from moetune.memory.closed_form.record import NoClosedForm
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import ResolvedRun, resolve
from tests.fuzz.damage import within
from tests.memory.models import LAYOUTS, toy_run, write_toy
from tests.toys import toy_config

ADAPT: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "experts": {"experts": {"ids": [1, 2]}, "also": ["norm"]},
    "lora": {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}},
    "everything": {"also": ["*"], "router": "all", "experts": {}},
}
ALL_EXPERTS: dict[str, Any] = {"experts": {}}
DENSE = {"router": {"also": ["norm"]}, "experts": {"also": ["embedding"]}, "everything": {"also": ["*"]}}
DENSE |= {"lora": {"lora": {"rank": 4, "alpha": 8, "targets": ["attention"]}}}
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "adamw"},
    {"name": "adamw", "master_weights": "fp32"},
    {"name": "adamw8bit", "fused_backward": True},
    {"name": "lomo"},
    {"name": "adalomo", "offload": True},
    {"name": "sgd", "momentum": 0.9},
]
ON_A_PUSH = (6, 93)
"""One whose loss has chunks of equal size at both probes, and one of Llama; others take long (test_depth.py too)."""
SIZES = [(1, 24), (2, 64), (3, 40), (2, 96), (1, 7), (4, 33)]


def drawn(number: int, folder: Path) -> tuple[ResolvedRun, list[RunConfig]]:
    """A run, and the same at other sizes."""
    draw = random.Random(number)
    model_type = sorted(LAYOUTS)[number % len(LAYOUTS)]
    optimizer = draw.choice(OPTIMIZERS)
    fused = optimizer["name"] == "lomo" or "fused_backward" in optimizer
    base = draw.choice(["nf4", "int8", "mxfp4", "fp32"])
    sections = {
        "model": {
            "base": base,
            "experts_on": draw.choice(["gpu", "host"]),
            "dtype": "fp32" if base == "fp32" else "bf16",
        },
        "optimizer": optimizer,
        "train": {
            "accumulate": 1 if fused else draw.choice([1, 2]),
            "checkpointing": draw.choice(["none", "experts_only", "full", "offload"]),
            "eval_micro_batch": draw.choice([None, 6]),
        },
        "data": {"packing": draw.choice([True, False]), "eval": "unread"},
    }
    sections["train"]["expert_memory"] = draw.choice(["0", "auto", "0.01MiB"])
    if sections["train"]["checkpointing"] != "none" and model_type != "llama":
        sections["train"]["keep_rows"] = number % 3
    if number % 4 == 3:
        rows = "none" if model_type == "llama" else "1,3"
        sections["train"] |= {"checkpointing": {"attention": "0-2", "rows": rows, "rest": "2-3"}, "keep_rows": "none"}
    adapt = (DENSE if model_type == "llama" else ADAPT)[draw.choice(sorted(ADAPT))]
    run = resolve(toy_run(write_toy(folder, model_type, num_hidden_layers=5), model_type, adapt, **sections), "cuda")
    return run, [sized(run.config, *draw.choice(SIZES)) for _ in range(2)]


def sized(config: RunConfig, rows: int, length: int) -> RunConfig:
    train = config.train.model_copy(update={"micro_batch": rows, "sequence_length": length})
    return config.model_copy(update={"train": train})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "number", [n if n in ON_A_PUSH else pytest.param(n, marks=pytest.mark.full) for n in range(100)]
)
def test_runs_of_every_kind(number: int, tmp_path: Path) -> None:
    run, sizes = drawn(number, tmp_path)
    form = ClosedForm(run)
    for config in sizes:
        traced = trace(resolve(config, "cuda", like=run))
        try:
            found = form.at(config)
        except NoClosedForm:  # below a model's window, a few tokens do not fill the chunks of the loss
            assert config.train.sequence_length == 7
            continue
        parts = traced.parts()
        assert found.parts().total == pytest.approx(parts.total, rel=1e-3), config.train
        assert found.host_peak == pytest.approx(traced.host_peak, rel=1e-3)
        assert found.load == traced.load


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 40))])
def test_any_routing_to_the_byte(number: int, tmp_path: Path) -> None:
    """Another load in each layer, experts without a token in all of them, all tokens on the same experts: what the
    trace says, or no closed form."""
    draw = random.Random(number)
    model_type = draw.choice(["mixtral", "olmoe", "qwen3_moe", "deepseek_v3"])
    adapt = ADAPT[draw.choice(sorted(ADAPT))]
    train = {"checkpointing": draw.choice(["none", "full"]), "expert_memory": draw.choice(["0", "auto"])}
    toy = write_toy(tmp_path, model_type, num_hidden_layers=6)
    run = resolve(
        toy_run(toy, model_type, adapt, train={**train, "sequence_length": draw.choice([32, 64, 48])}), "cuda"
    )
    idle = draw.choice([None, None, 0, 3])
    skew = draw.choice([1, 3])
    load = tuple(
        (layer.index, tuple(0.0 if expert == idle else 0.1 + draw.expovariate(1) ** skew for expert in range(4)))
        for layer in run.structure.moe_layers
    )
    for routing in (AssumedRouting("load", None, load), parse_routing(draw.choice(["worst", "skew:1.7"]))):
        traced = trace(run, routing)
        try:
            found = ClosedForm(run).at(run.config, routing)
        except NoClosedForm:
            assert number > 0  # not where no expert is idle
            continue
        assert found.parts().total == traced.parts().total, routing


def test_unlike_idle_experts_are_left_to_the_trace(tmp_path: Path) -> None:
    run = resolve(toy_run(write_toy(tmp_path, "mixtral", num_hidden_layers=2), "mixtral", ADAPT["router"]), "cuda")
    load = ((0, (1.0, 0.0, 1.0, 1.0)), (1, (1.0, 1.0, 1.0, 1.0)))
    with pytest.raises(NoClosedForm, match="which experts receive no token"):
        ClosedForm(run).at(run.config, AssumedRouting("load", None, load))


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", pytest.param("deepseek_v32", marks=pytest.mark.full)])
def test_a_length_below_a_limit_of_the_model_is_left_to_the_trace(model_type: str, tmp_path: Path) -> None:
    """An indexer chooses `index_topk` keys, or all if there are fewer; layers of one return them."""
    toy_config(model_type).save_pretrained(tmp_path)
    run = resolve(toy_run(tmp_path, model_type, ADAPT["router"]), "cuda")
    assert trace(run).peak
    with pytest.raises(NoClosedForm, match=r"\d bytes .*; use --method trace"):
        ClosedForm(run).at(run.config)


@pytest.mark.parametrize("model_type", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.full)])
@pytest.mark.parametrize("rows", [1, 2, pytest.param(8, marks=pytest.mark.full)])
def test_a_length_just_below_a_limit_has_a_record(model_type: str, rows: int, tmp_path: Path) -> None:
    """Where the limit has room for probe lengths; a single row has no copies of what is broadcast over the rows."""
    toy_config(model_type, index_topk=2048, index_n_heads=64, num_hidden_layers=4).save_pretrained(tmp_path)
    sections = {"train": {"sequence_length": 1024, "micro_batch": rows}, "hardware": {"gpu": "44GiB"}}
    run, card = resolve(toy_run(tmp_path, model_type, ADAPT["router"], **sections), "cuda"), find_gpu("44GiB")
    found, traced = ClosedForm(run, gpu=card).at(run.config), trace(run, gpu=card)
    assert found.parts() == traced.parts()


@pytest.mark.parametrize(
    ("model_type", "is_traced"),
    [
        ("glm_moe_dsa", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("hy_v4", True), ("zaya", True), ("jamba", True), ("qwen4_exp_text", False))
        ),
    ],
)
def test_layers_that_return_more_than_one_value(model_type: str, is_traced: bool, tmp_path: Path) -> None:
    """What the trace says, or a message, and within a minute."""
    toy_config(model_type, num_hidden_layers=6).save_pretrained(tmp_path)
    run = resolve(toy_run(tmp_path, model_type, ADAPT["router"], train={"sequence_length": 256}), "cuda")
    with within(60):
        if is_traced:
            assert ClosedForm(run).at(run.config).parts() == trace(run).parts()
        else:
            with pytest.raises(UserError, match="reads the values of tensors"):
                trace(run)


LOOPS = ("qwen3_next", "kimi_linear", "nemotron_h", "lfm2_moe", "granitemoehybrid", "jamba", "bailing_hybrid")


@pytest.mark.parametrize("adapt", ["lora", pytest.param("experts", marks=pytest.mark.full)])
@pytest.mark.parametrize("model_type", [LOOPS[0], *(pytest.param(one, marks=pytest.mark.full) for one in LOOPS[1:])])
def test_code_that_loops_over_a_sequence_has_a_record_of_each_length(
    model_type: str, adapt: str, tmp_path: Path
) -> None:
    toy_config(model_type).save_pretrained(tmp_path)
    sections = {"train": {"accumulate": 2, "eval_micro_batch": 3}, "data": {"eval": "unread"}}
    run = resolve(toy_run(tmp_path, model_type, ADAPT[adapt] if adapt == "lora" else ALL_EXPERTS, **sections), "cuda")
    form = ClosedForm(run)
    for rows, length in ((1, 64), (2, 64), (1, 160)):
        config = sized(run.config, rows, length)
        for routing in (parse_routing("balanced"), parse_routing("worst")):
            traced = trace(resolve(config, "cuda", like=run), routing)
            assert form.at(config, routing).parts().total == traced.parts().total, (rows, length, routing.name)


def test_several_ranks(tmp_path: Path) -> None:
    parallel = {"parallel": {"fsdp": 2, "ep": 2}, "hardware": {"count": 2}}
    toy = write_toy(tmp_path, "mixtral", experts=2, num_hidden_layers=5)
    run = resolve(toy_run(toy, "mixtral", ADAPT["lora"], **parallel), "cuda")
    config = sized(run.config, 3, 64)
    traced = trace(resolve(config, "cuda", like=run), rank=1)
    assert ClosedForm(run, rank=1).at(config).parts().total == pytest.approx(traced.parts().total, rel=1e-3)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (4, 2)])
def test_ranks_that_hold_other_experts_in_each_layer(ranks: int, rank: int, tmp_path: Path) -> None:
    """At uneven routing a rank receives the rows of the experts that it holds in this layer: not those of the first
    layer, nor as many as another rank that received as many in the recorded step."""
    toy = write_toy(tmp_path, "mixtral", experts=8, num_hidden_layers=2)
    layout = {"parallel": {"fsdp": ranks, "ep": ranks}, "hardware": {"count": ranks}, "train": {"micro_batch": 8}}
    run = resolve(toy_run(toy, "mixtral", {"experts": {"ids": {0: [0], 1: [7]}}}, **layout), "cuda")
    assert len(set(run.placement.values())) == 2
    form = ClosedForm(run, rank)
    for routing in (parse_routing("worst"), PUBLISHED):
        assert form.at(run.config, routing).parts() == trace(run, routing, rank=rank).parts()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("adapt", "parallel"),
    [
        ("experts", {"tp": 2}),  # each rank runs all experts on all tokens
        ("lora", {"tp": 2, "ep": 2}),  # each sends half of the tokens to their experts
        pytest.param("router", {"tp": 2}, marks=pytest.mark.full),
        pytest.param("lora", {"tp": 2}, marks=pytest.mark.full),
        pytest.param("experts", {"tp": 2, "ep": 2}, marks=pytest.mark.full),
    ],
)
def test_attention_divided_over_ranks(adapt: str, parallel: dict[str, int], tmp_path: Path) -> None:
    toy = write_toy(tmp_path, "mixtral", num_hidden_layers=2)
    sections = {"parallel": parallel, "hardware": {"count": 2}, "model": {"base": "fp32"}}
    run = resolve(toy_run(toy, "mixtral", ADAPT[adapt], **sections), "cuda")
    config = sized(run.config, 3, 48)
    traced = trace(resolve(config, "cuda", like=run), gpu=find_gpu("l40s"))
    assert ClosedForm(run, gpu=find_gpu("l40s")).at(config).parts() == traced.parts()


def test_uneven_shares_of_the_tokens_are_left_to_the_trace(tmp_path: Path) -> None:
    parallel = {"parallel": {"tp": 2, "ep": 2}, "hardware": {"count": 2}, "model": {"base": "fp32"}}
    toy = write_toy(tmp_path, "mixtral", num_hidden_layers=2)
    run = resolve(toy_run(toy, "mixtral", ADAPT["router"], **parallel), "cuda")
    with pytest.raises(NoClosedForm, match=r"parallel\.tp: 2 ranks.* 33; use --method trace"):
        ClosedForm(run).at(sized(run.config, 1, 33))


def test_lora_on_the_head(tmp_path: Path) -> None:
    """In training it makes one tensor of logits, but three with dropout and of held-out data: other chunks of the loss.
    Here each of these is the fullest moment of a run."""
    toy = write_toy(tmp_path, "mixtral", experts=2, num_hidden_layers=1, vocab_size=4096)
    card, run = find_gpu("l40s"), None
    for dropout, evaluated in ((0.0, None), (0.1, None), (0.0, 64)):
        lora = {"rank": 4, "alpha": 8, "targets": ["attention", "lm_head"], "dropout": dropout}
        train = {"micro_batch": 16, "loss_memory": "2MiB", "eval_micro_batch": evaluated}
        sections = {"train": train, "data": {"eval": None if evaluated is None else "unread"}}
        run = resolve(toy_run(toy, "mixtral", {"lora": lora}, **sections), "cuda", like=run)
        found, traced = ClosedForm(run, gpu=card).at(run.config), trace(run, gpu=card)
        assert found.parts().total == pytest.approx(traced.parts().total, rel=1e-4)  # each chunk has a loss of 4 bytes


def test_a_workspace_for_each_tile_of_a_single_head(tmp_path: Path) -> None:
    """16 · (1 + 64²/4) bytes for 64 tokens: a multiple of 64 only for every four heads."""
    toy = write_toy(tmp_path, "mixtral", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    run = resolve(toy_run(toy, "mixtral", ADAPT["router"], data={"packing": False}), "cuda")
    config = sized(run.config, 3, 64)
    traced = trace(resolve(config, "cuda", like=run), gpu=find_gpu("l40s"))
    assert ClosedForm(run, gpu=find_gpu("l40s")).at(config).parts() == traced.parts()


def test_records_are_kept_and_a_damaged_one_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path / "cache"))
    run = resolve(toy_run(write_toy(tmp_path / "toy", "mixtral"), "mixtral", ADAPT["router"]), "cuda")
    first = ClosedForm(run).at(run.config)
    (file,) = (tmp_path / "cache").iterdir()
    again = ClosedForm(run).at(run.config, may_record=False)
    assert again is not None
    assert again.parts() == first.parts()
    assert again.load == first.load
    other = file.with_name("other.json.gz")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert ClosedForm(run).at(run.config, may_record=False) is None
    assert ClosedForm(run).at(run.config).parts() == first.parts()
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.close(-1))  # a disk that refuses
    store.write(other, store.read(ClosedForm(run).file))
    assert list((tmp_path / "cache").iterdir()) == [file]


def test_processes_keep_each_others_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: list[Any]
) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path / "cache"))
    toy = write_toy(tmp_path / "toy", "mixtral", experts=2, num_hidden_layers=1)
    run = resolve(toy_run(toy, "mixtral", ADAPT["router"]), "cuda")
    shapes = [sized(run.config, 2, length) for length in (32, 48, 40)]
    one, other = ClosedForm(run), ClosedForm(run)
    one.at(shapes[0])
    other.at(shapes[0])
    one.at(shapes[1])
    other.at(shapes[2])  # which has not read the second
    assert len(recorded) == 3
    kept = store.read(one.file)
    assert kept is not None
    assert len(kept.records) == 3
    one.at(shapes[2])
    other.at(shapes[1])
    assert len(recorded) == 3


def test_the_step_of_ranks_is_recorded_for_the_card_that_they_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernels that failed there, whatever card the run file names."""
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path / "cache"))
    layout = {"parallel": {"fsdp": 2}, "hardware": {"count": 2, "gpu": "44GiB"}}
    toy, card = write_toy(tmp_path / "toy", "mixtral", experts=2, num_hidden_layers=1), find_gpu("h100")
    run = resolve(toy_run(toy, "mixtral", ADAPT["router"], **layout), "cuda")
    without = replace(run, config=run.config.but(hardware={"without_kernels": ("gated",)}))
    monkeypatch.setattr("moetune.memory.measurement.verify.catalog_name", lambda device: "h100")
    monkeypatch.setattr(closed_forms, "as_known", lambda run, there: without if there == card else run)
    record_ahead(run)
    assert ClosedForm(without, 0, card).at(without.config, may_record=False) is not None


def test_a_cache_that_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", "~nosuch/x")
    with pytest.raises(UserError, match=r"MOETUNE_CACHE: '~nosuch/x'.*no user 'nosuch'"):
        file_of({})


def test_what_changes_storages_changes_the_kind(tmp_path: Path) -> None:
    config = toy_run(write_toy(tmp_path, "mixtral"), "mixtral", ADAPT["router"])
    keys = {ClosedForm(resolve(config, "cuda")).file, ClosedForm(resolve(sized(config, 3, 50), "cuda")).file}
    assert len(keys) == 1
    for change in ({"checkpointing": "none"}, {"accumulate": 2}):
        other = config.model_copy(update={"train": config.train.model_copy(update=change)})
        keys.add(ClosedForm(resolve(other, "cuda")).file)
    keys.add(ClosedForm(resolve(config, "cuda"), rank=1).file)
    assert len(keys) == 4


def test_what_changes_the_step_of_all_layers_changes_the_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With router losses: the experts on each rank, of which the run file only names the file."""
    toy, load, keys = write_toy(tmp_path / "toy", "mixtral"), tmp_path / "load.json", set[str]()
    layout = {"parallel": {"fsdp": 2, "ep": 2, "load": str(load)}, "hardware": {"count": 2}}
    layers = range(resolve(toy_run(toy, "mixtral", ADAPT["router"]), "cuda").structure.num_layers)
    for tokens in ([9, 1, 1, 1], [1, 9, 1, 1]):
        load.write_text(json.dumps({"expert_load": dict.fromkeys(layers, tokens)}))
        for scope in ("model", "layer"):
            train = {"router_aux_loss": 0.1, "router_aux_scope": scope}
            run = resolve(toy_run(toy, "mixtral", ADAPT["router"], train=train, **layout), "cuda")
            keys.add(ClosedForm(run).file)
    assert len(keys) == 4
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    keys.add(ClosedForm(run).file)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert len(keys | {ClosedForm(run).file}) == 6


def test_router_losses(tmp_path: Path) -> None:
    """Computed of all layers' logits, so all layers are recorded."""
    run = resolve(
        toy_run(write_toy(tmp_path, "mixtral"), "mixtral", ADAPT["router"], train={"router_z_loss": 0.1}), "cuda"
    )
    config = sized(run.config, 3, 64)
    traced = trace(resolve(config, "cuda", like=run))
    assert ClosedForm(run).at(config).parts().total == pytest.approx(traced.parts().total, rel=1e-4)
