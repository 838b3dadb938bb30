"""What layers keep for backward takes what memory is left, and never makes a run not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.memory.report import MemoryReport
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.planning.fit import surely_left
from moetune.planning.predict import predict
from moetune.planning.predictor import Predictor
from moetune.planning.settle import _choices, settled, settled_on
from moetune.run.keeps import Keepable, Kept
from moetune.run.resolve import ResolvedRun, resolve
from moetune.run.resolved import LEAST_EXPERT_MEMORY
from tests.memory.models import toy_run, write_toy

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
BF16 = {"dtype": "bf16", "base": "bf16"}


def auto(folder: Path, model_type: str, layers: int, **train: Any) -> ResolvedRun:
    """On a card, in sizes at which what is kept is most of what a layer takes."""
    toy = write_toy(folder, model_type, experts=2, num_hidden_layers=layers)
    sizes = {"sequence_length": 512, "micro_batch": 2, "loss_memory": "1MiB", "checkpointing": "auto", **train}
    adapt = {"lora": {**LORA["lora"], "targets": ["attention"]}} if model_type == "llama" else LORA
    return resolve(toy_run(toy, model_type, adapt, train=sizes, model=BF16), "cuda")


@pytest.mark.parametrize(
    ("model_type", "train"),
    [
        ("mixtral", {}),
        pytest.param("mixtral", {"checkpointing": "full", "keep_rows": "auto"}, marks=pytest.mark.full),
        pytest.param("llama", {}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.full),
    ],
)
def test_each_choice_takes_more_and_the_last_that_fits_is_made(
    model_type: str, train: dict[str, Any], tmp_path: Path
) -> None:
    run = auto(tmp_path, model_type, 2, **train)
    choices = _choices(run)
    assert choices[0].keeps == {}
    needs = [Predictor("24GiB", end="high").quick(choice).span.high for choice in choices]
    # the allocator's rounding may take a few KiB less for a choice that keeps more
    assert needs == pytest.approx(sorted(needs), rel=1e-4)
    assert needs[0] < needs[-1]
    for size in (needs[0] - 1, needs[0], (needs[0] + needs[-1]) // 2, needs[-1] - 1, needs[-1]):
        found = settled(run, f"{size}B")
        made = [choice.config.train for choice in choices].index(found.config.train)
        assert found.keeps == choices[made].keeps
        assert made == 0 or needs[made] <= size
        assert made == len(choices) - 1 or needs[made + 1] > size
        assert settled(found, f"{size}B").config == found.config


@pytest.mark.full
@pytest.mark.parametrize("keep_rows", [False, True])
def test_the_verdict_is_that_of_full(keep_rows: bool, tmp_path: Path) -> None:
    train = {"checkpointing": "full", "keep_rows": "auto"} if keep_rows else {}
    run = auto(tmp_path, "mixtral", 3, accumulate=2, **train)
    base = run.keeping({})

    def at(one: ResolvedRun, gpu: str | None) -> MemoryReport:
        return predict(one, gpu=gpu, advise=False)

    full = at(base, "24GiB")
    assert full.gpu is not None
    for size in (full.span.low - 1, full.required, full.span.high + (8 << 20)):
        found, without = at(run, f"{size}B"), replace(full, gpu=replace(full.gpu, usable_bytes=size))
        assert found.verdict == without.verdict
        assert (found.required > without.required) == (size > full.span.high)
    assert "kept of 3 layers" in dict(found.about)["batch"] or keep_rows
    assert at(run, None).required == full.required
    assert Predictor("24GiB").report(run.config).required == full.required  # plans compare the least


@pytest.mark.full
def test_a_step_repeats_less_and_its_run_file_says_it_all(tmp_path: Path) -> None:
    run, card = auto(tmp_path, "mixtral", 8), find_gpu("l40s")
    keeps: dict[int, Kept] = {
        2: frozenset(("attention",)), 4: frozenset(("attention", "rows")), 5: frozenset(("rest",)),
    }  # fmt: skip
    some = run.keeping(keeps)
    again = resolve(type(run.config).model_validate(some.config.model_dump(mode="json")), "cuda", like=run)
    assert again.keeps == some.keeps == keeps

    def flops(keeps: dict[int, Kept], part: str) -> float:
        return trace(run.keeping(keeps), gpu=card).work[part].flops

    def of_all(*kept: Keepable) -> dict[int, Kept]:
        return dict.fromkeys(range(8), frozenset(kept))

    forward = flops({}, "attention") - flops(of_all("attention"), "attention")
    linears = flops(of_all("attention"), "attention") - flops(of_all("rest", "rows"), "attention")
    assert flops({}, "attention") - flops(keeps, "attention") == pytest.approx(forward * 3 / 8 + linears / 8)
    rows = flops({}, "experts") - flops(of_all("rest", "rows"), "experts")
    assert flops({}, "experts") - flops(keeps, "experts") == pytest.approx(rows / 8)
    assert forward > 0 < rows


def test_before_an_interruption(tmp_path: Path) -> None:
    """What was kept is kept again where it surely fits, and on a CPU always."""
    run = auto(tmp_path, "mixtral", 3)
    keeps: dict[int, Kept] = {2: frozenset(("rows",))}
    before = run.keeping(keeps).config.train
    assert settled_on(run, torch.device("cpu"), before).keeps == keeps
    assert settled_on(run, torch.device("cpu")).keeps == {}
    full = Predictor("24GiB", end="high").quick(run.keeping({}))
    assert surely_left(full) > 0
    wide = run.but(hardware={"gpu": "24GiB"})
    assert settled_on(wide, torch.device("cuda"), before).keeps == keeps
    narrow = run.but(hardware={"gpu": f"{full.required}B"})
    assert settled_on(narrow, torch.device("cuda"), before).keeps == {}


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["full", "auto"])
def test_groups_of_experts_grow_first_and_never_make_a_run_not_fit(
    checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEAST_EXPERT_MEMORY, "cuda", "1MiB")
    toy = write_toy(tmp_path, "mixtral", experts=8, num_hidden_layers=2, intermediate_size=4096)
    sizes = {"sequence_length": 64, "loss_memory": "1MiB", "checkpointing": checkpointing}
    run = resolve(toy_run(toy, "mixtral", LORA, train=sizes, model={"dtype": "bf16", "base": "nf4"}), "cuda")
    choices = _choices(run)
    memories = [choice.config.train.expert_memory for choice in choices]
    assert memories[:2] == ["1MiB", "2MiB"]
    assert len({*memories}) > 2
    assert memories == sorted(memories, key=lambda size: int(size.removesuffix("MiB")))
    assert all(choice.keeps == {} for choice in choices if choice.config.train.expert_memory != memories[-1])
    needs = [Predictor("24GiB", end="high").quick(choice).span.high for choice in choices]
    for size in (needs[0] - 1, needs[1], needs[-1]):
        found = settled(run, f"{size}B")
        made = choices[[choice.config.train for choice in choices].index(found.config.train)]
        assert needs[choices.index(made)] <= max(size, needs[0])
        report = predict(run, gpu=f"{size}B", advise=False)
        assert report.verdict == predict(choices[0], gpu=f"{size}B", advise=False).verdict
        assert f"experts in groups of {made.config.train.expert_memory}" in dict(report.about)["batch"]
    assert settled(run, "24GiB").config.train == choices[-1].config.train
    before = choices[1].config.train
    assert settled_on(run, torch.device("cpu"), before).config.train == before
    assert settled_on(run.but(train={"expert_memory": "0"}), torch.device("cpu"), before).expert_memory == 0


@pytest.mark.full
def test_inputs_wait_on_the_host_in_as_few_layers_as_the_card_needs(tmp_path: Path) -> None:
    """The last layers' stay first; all micro-batches' are there at once."""
    toy = write_toy(tmp_path, "mixtral", experts=2, num_hidden_layers=3)
    train = {"sequence_length": 512, "micro_batch": 2, "loss_memory": "1MiB", "accumulate": 12, "layer_by_layer": True}
    kept = {"checkpointing": {"host": "auto", "attention": "2"}}
    run = resolve(toy_run(toy, "mixtral", LORA, model={**BF16, "experts_on": "host"}, train=train | kept), "cuda")
    choices = _choices(run)
    on_host = [[layer for layer, kept in one.keeps.items() if "host" in kept] for one in choices]
    assert on_host == [[0, 1, 2], [0, 1], [0], []]
    assert all("attention" in one.keeps[2] for one in choices)
    needs = [Predictor("24GiB", end="high").quick(one).span.high for one in choices]
    assert needs[0] < needs[2]
    for size, number in ((needs[0] - 1, 0), (needs[2] - 1, 1), (needs[3], 3)):
        assert settled(run, f"{size}B").keeps == choices[number].keeps
    said = dict(predict(run, gpu=f"{needs[2] - 1}B", advise=False).about)["batch"]
    assert "kept of 3 layers: attention's output of 1, inputs of 2 on the host" in said


@pytest.mark.parametrize("on", ["host", "gpu"])
def test_inputs_return_to_the_card_before_groups_grow_only_where_experts_use_the_link(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEAST_EXPERT_MEMORY, "cuda", "1MiB")
    toy = write_toy(tmp_path, "mixtral", experts=8, num_hidden_layers=2, intermediate_size=4096)
    model = {"dtype": "bf16", "base": "nf4", "experts_on": on}
    run = resolve(toy_run(toy, "mixtral", LORA, model=model, train={"checkpointing": {"host": "auto"}}), "cuda")
    taken = [(choice.config.train.expert_memory, len(choice.keeps)) for choice in _choices(run)]
    (least, _), (most, _) = taken[0], taken[-1]
    assert taken[0] == (least, 2)
    assert taken[-1] == (most, 0)
    sizes = list(dict.fromkeys(size for size, _ in taken))
    assert len(sizes) > 2
    first, second = [(least, 1), (least, 0)], [(size, 0) for size in sizes[1:]]
    if on == "gpu":
        first, second = [(size, 2) for size in sizes[1:]], [(most, 1), (most, 0)]
    assert taken[1:] == [*first, *second]


def test_experts_on_the_host_are_copied_once_a_step_where_it_fits(tmp_path: Path) -> None:
    """Before anything else is kept: what all micro-batches hold at once takes more than what one does."""
    toy = write_toy(tmp_path, "mixtral", experts=2, num_hidden_layers=2)
    train = {"sequence_length": 512, "micro_batch": 2, "loss_memory": "1MiB", "accumulate": 2, "checkpointing": "auto"}
    raw = toy_run(toy, "mixtral", LORA, model={**BF16, "experts_on": "host"}, train=train)
    run = resolve(raw, "cuda")
    choices = _choices(run)
    assert [choice.layer_by_layer for choice in choices] == [False, *[True] * (len(choices) - 1)]
    assert choices[1].keeps == {} != choices[2].keeps
    plain, together = (Predictor("24GiB", end="high").quick(one).span.high for one in choices[:2])
    assert plain < together
    one_by_one = predict(choices[0], gpu="24GiB", advise=False)
    assert one_by_one.gpu is not None
    for size, runs in ((together - 1, False), (together, True)):
        report = predict(run, gpu=f"{size}B", advise=False)
        assert ("layer by layer" in dict(report.about)["batch"]) is runs
        assert report.verdict == replace(one_by_one, gpu=replace(one_by_one.gpu, usable_bytes=size)).verdict
    narrow = run.but(hardware={"gpu": f"{plain}B"})
    before = choices[1].config.train
    assert not settled_on(narrow, torch.device("cuda"), before).layer_by_layer
    assert settled_on(run, torch.device("cpu"), before).layer_by_layer
    assert settled_on(run, torch.device("cpu")).config.train.layer_by_layer is False
    for other in ({"accumulate": 1}, {"layer_by_layer": False}, {"neftune_alpha": 5.0}):
        assert not any(one.layer_by_layer for one in _choices(run.but(train=other)))
    assert not any(one.layer_by_layer for one in _choices(run.but(model={"experts_on": "gpu"})))
