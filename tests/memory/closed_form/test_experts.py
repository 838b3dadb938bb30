"""One record serves runs that differ in how many experts of a layer train: to the byte what their own records say."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetune.config.schema import RunConfig
from moetune.memory.assumed_routing import BALANCED, PUBLISHED
from moetune.memory.closed_form.banks import Bank, banks_of, probes_of
from moetune.memory.closed_form.depth import Depths
from moetune.memory.closed_form.experts import Choices, Unlike
from moetune.memory.closed_form.form import ClosedForm
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import ResolvedRun, resolve
from tests.memory.models import toy_run, write_toy
from tests.thinned import thinned

MODELS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "master_weights": "fp32"},
    "adamw8bit": {"name": "adamw8bit", "master_weights": "stochastic"},
    "lomo": {"name": "lomo"},
    "offload": {"name": "adamw", "offload": True},
}
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "lora": {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}},
    "attention": {"lora": {"rank": 8, "alpha": 8, "targets": ["attention"]}},
    "router": {"router": "all"},
}
LAYERS = 6
EXPERTS = 8


def toy(folder: Path, model: str) -> Path:
    sizes = {"decoder_sparse_step": 1} if model == "qwen3_moe" else {}
    return write_toy(folder, model, experts=EXPERTS, num_hidden_layers=LAYERS, **sizes)


def run_of(path: Path, model: str, layers: str, each: int, settings: dict[str, Any]) -> ResolvedRun:
    adapt = {"experts": {"layers": layers, "ids": list(range(each))}, **settings.pop("adapt", {})}
    return resolve(toy_run(path, model, adapt, **settings), "cuda")


def same(run: ResolvedRun, depths: Depths, recorded: list[Any], card: str = "l40s") -> int:
    """What a shared record says of a run is what its own says; on the host without the norm of each gradient. Return
    how many steps were recorded before its own."""
    gpu, before = find_gpu(card), len(recorded)
    found = depths.at(run, 0, gpu)
    made = len(recorded) - before
    own = ClosedForm(run, 0, gpu).at(run.config)
    assert found.parts() == own.parts()
    assert found.rounded_peak == own.rounded_peak
    assert (found.load, found.managed) == (own.load, own.managed)
    assert abs(own.host_peak - found.host_peak) <= 8 * len(run.parts) * (run.optimizers["experts"].offload is True)
    return made


@pytest.mark.full
@pytest.mark.parametrize("number", thinned(map(str, range(50)), 50))
def test_drawn_choices(number: str, tmp_path: Path, recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(int(number))
    model, optimizer = MODELS[int(number) % len(MODELS)], draw.choice(sorted(OPTIMIZERS))
    path, depths = toy(tmp_path, model), Depths()
    settings = {
        "model": {"weights": "pretrained", "dtype": "bf16", "base": draw.choice(("nf4", "int8", "bf16"))},
        "optimizer": OPTIMIZERS[optimizer],
        "train": {
            "accumulate": 1 if optimizer == "lomo" else draw.choice((1, 4)),
            "checkpointing": draw.choice(("full", "full", "none")),
            "max_grad_norm": draw.choice((0, 1.0)),
            "expert_memory": draw.choice(("auto", "auto", "0", f"{3 * 64 * 128 * 2}B")),
        },
    }
    beside = draw.choice(sorted(BESIDE))
    adapt = {"adapt": BESIDE[beside]} if model != "gpt_oss" or beside == "router" else {}
    if settings["model"]["base"] != "bf16" and draw.random() < 0.5:
        settings["model"]["experts_on"] = "host"
    layers = draw.choice(("1-5", "1-4", "2-5", "2,4"))
    card = draw.choice(("l40s", "h100", "a100-40gb"))
    how = model, optimizer, settings["train"]["checkpointing"]
    # with another number of experts, these may free in another order
    frees_otherwise = beside == "lora" or how == ("gpt_oss", "lomo", "none")
    shared = settings["train"]["expert_memory"] in ("auto", "0") and not frees_otherwise
    for each in draw.sample(range(2, EXPERTS - 1), 4):
        before = len(recorded)
        made = same(run_of(path, model, layers, each, {**settings, **adapt}), depths, recorded, card)
        assert not shared or made <= 2 * (before == 0)


@pytest.mark.parametrize("checkpointing", thinned(("full", "offload"), 2, always=("full",)))
@pytest.mark.parametrize("optimizer", thinned(OPTIMIZERS, 2, always=("adamw",)))
@pytest.mark.parametrize("model", thinned(MODELS, 2, always=("gpt_oss",)))
def test_experts_on_the_host(
    model: str, optimizer: str, checkpointing: str, tmp_path: Path, recorded: list[Any]
) -> None:
    """A layer's experts are copied to the GPU one layer ahead, by the first group that is computed."""
    path, depths = toy(tmp_path, model), Depths()
    settings = {
        "model": {"weights": "pretrained", "dtype": "bf16", "base": "nf4", "experts_on": "host"},
        "optimizer": OPTIMIZERS[optimizer],
        "train": {"checkpointing": checkpointing},
    }
    runs = [run_of(path, model, layers, each, settings) for layers, each in (("1-5", 5), ("1-5", 2), ("2-4", 4))]
    assert sum(same(run, depths, recorded) for run in runs) <= 2 * 2  # of two stacks of layers


RANKS: dict[str, tuple[int, int, tuple[str, ...], dict[str, Any]]] = {
    "experts": (2, 1, ("experts",), {"name": "adamw", "master_weights": "fp32"}),
    "experts beside LoRA": (2, 4, ("experts", "lora"), {"name": "adamw", "master_weights": "fp32"}),
    "four ranks": (4, 4, ("experts",), {"name": "adamw8bit", "master_weights": "none"}),
    "LoRA": (2, 4, ("lora",), {"name": "adamw8bit"}),
}
"""Number of ranks, micro-steps, what trains, and the optimizer."""


@pytest.mark.parametrize("case", thinned(RANKS, len(RANKS), always=("experts",)))
@pytest.mark.parametrize("model", thinned(MODELS, len(MODELS), always=("mixtral",)))
def test_ranks_that_store_other_experts(
    model: str, case: str, tmp_path: Path, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank of `ep` needs no record beside that of the first, which follows from the probes'."""
    ranks, accumulate, chosen, optimizer = RANKS[case]
    sizes = {"decoder_sparse_step": 1} if model == "qwen3_moe" else {}
    path = write_toy(tmp_path, model, experts=6 * ranks, num_hidden_layers=4, **sizes)
    lora = {"rank": 4, "alpha": 8, "targets": ["attention"] if model == "gpt_oss" else ["attention", "experts"]}
    adapt = {"experts": {"layers": "1-3", "ids": list(range(2 * ranks))}, "lora": lora}
    sections: dict[str, Any] = {
        "model": {"weights": "pretrained", "dtype": "bf16", "base": "nf4"},
        "optimizer": optimizer,
        "train": {"accumulate": accumulate},
        "hardware": {"count": ranks},
        "parallel": {"fsdp": ranks, "ep": ranks},
    }
    run = resolve(toy_run(path, model, {name: adapt[name] for name in chosen}, **sections), "cuda")
    depths, gpu, last = Depths(), find_gpu("l40s"), ranks - 1
    depths.at(run, 0, gpu)
    assert len(recorded) == (2 if "experts" in chosen else 1)
    found = [depths.at(run, last, gpu, routing) for routing in (BALANCED, PUBLISHED)]
    assert len(recorded) == (2 if "experts" in chosen else 1)
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path / "own"))
    own = [ClosedForm(run, last, gpu).at(run.config, routing) for routing in (BALANCED, PUBLISHED)]
    for one, other in zip(found, own, strict=True):
        assert (one.parts(), one.rounded_peak, one.load) == (other.parts(), other.rounded_peak, other.load)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("qwen3-30b-a3b", "adamw"), ("qwen3-30b-a3b", "lomo"), ("qwen3-30b-a3b", "offload"),
        ("olmoe-1b-7b", "adamw8bit"), ("mixtral-8x7b", "adamw"), ("gpt-oss-20b", "lomo"),
        ("deepseek-v2-lite", "adamw8bit"),
    ],
)  # fmt: skip
def test_a_full_size(model: str, optimizer: str, recorded: list[Any]) -> None:
    draw, depths = random.Random(model), Depths()
    attention = "eager" if model == "gpt-oss-20b" else "sdpa"
    for _ in range(2):
        raw = {
            "model": {"path": model, "attention": attention},
            "adapt": {"experts": {"layers": f"3-{draw.randrange(8, 16)}", "ids": list(range(draw.randrange(2, 7)))}},
            "optimizer": OPTIMIZERS[optimizer],
            "train": {"accumulate": 1, "sequence_length": 1024},
        }
        same(resolve(RunConfig.model_validate(raw), "cuda"), depths, recorded)


def test_a_single_expert_that_is_computed_alone_has_its_own_record(tmp_path: Path, recorded: list[Any]) -> None:
    """Two experts are multiplied together, one is not: no record of several serves it."""
    path, depths = toy(tmp_path, "mixtral"), Depths()
    model = {"weights": "pretrained", "dtype": "bf16"}
    one = run_of(path, "mixtral", "1-2", 1, {"model": model})
    assert probes_of(one) is None
    assert probes_of(run_of(path, "mixtral", "1-2", 2, {"model": model})) is not None
    depths.at(one)
    assert [steps.adapted.run.selection.experts[1] for steps, *_ in recorded] == [(0,)]


def test_a_single_expert_has_its_own_record_where_each_is_computed_alone(tmp_path: Path, recorded: list[Any]) -> None:
    """Its group is the first and the last at once: none follows that frees its gradient once it is on the host."""
    train = {"expert_memory": "0", "accumulate": 1}
    settings = {"model": {"weights": "pretrained", "dtype": "bf16"}, "optimizer": OPTIMIZERS["offload"], "train": train}
    same(run_of(toy(tmp_path, "mixtral"), "mixtral", "1-5", 1, settings), Depths(), recorded)


@pytest.mark.parametrize(
    "choice",
    [
        {"ids": {1: [0, 1], 2: [0, 1, 2]}},
        {"ids": [0, 1, 2], "lora": [4, 5]},
        {"ids": "all"},
        {"ids": [0, 1, 2], "count": 2},
    ],
    ids=["unequal layers", "LoRA on some of the others", "all", "experts on both GPUs"],
)
def test_choices_that_no_other_record_serves(choice: dict[str, Any], tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8, "targets": ["experts"], "ids": choice["lora"]} if "lora" in choice else None
    adapt = {"experts": {"ids": choice["ids"]}, "lora": lora}
    more = {"hardware": {"count": 2}, "parallel": {"fsdp": 2}} if "count" in choice else {}
    path = toy(tmp_path, "mixtral")
    assert probes_of(resolve(toy_run(path, "mixtral", adapt, model={"weights": "pretrained"}, **more), "cuda")) is None


def test_records_that_do_not_agree_are_not_shared(tmp_path: Path) -> None:
    run = run_of(toy(tmp_path, "mixtral"), "mixtral", "1-2", 4, {"model": {"weights": "pretrained", "dtype": "bf16"}})
    probes = probes_of(run)
    assert probes is not None
    (one, other), kept = (ClosedForm(probe) for probe in probes), range(LAYERS)
    banks: list[tuple[Bank | None, ...]] = [tuple(map(banks_of(probe).get, kept)) for probe in probes]
    (first,), (second,) = (known.with_records(known.run.config).records.values() for known in (one, other))
    Choices.of(first, banks[0], second, banks[1])
    broken = second.coefficients.copy()
    broken[np.argmax(broken)] += 8
    with pytest.raises(Unlike):
        Choices.of(first, banks[0], replace(second, coefficients=broken), banks[1])
    with pytest.raises(Unlike):
        Choices.of(first, banks[0], replace(second, log=first.log), banks[1])
