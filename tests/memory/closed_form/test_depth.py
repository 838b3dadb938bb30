"""One record serves runs that differ in how many layers are alike: to the byte what their own records say."""

from pathlib import Path
from typing import Any

import pytest

from moetune.memory.closed_form import form
from moetune.memory.closed_form.depth import Depths
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.trace import Trace, trace
from moetune.run.resolve import ResolvedRun, resolve
from tests.memory.models import toy_run, write_toy
from tests.thinned import thinned

PRETRAINED = {"weights": "pretrained", "dtype": "bf16"}
ADAPT: dict[str, dict[str, Any]] = {
    "lomo": {"model": PRETRAINED, "optimizer": {"name": "lomo"}, "train": {"accumulate": 1}},
    "adamw": {
        "model": PRETRAINED,
        "optimizer": {"name": "adamw", "master_weights": "fp32"},
        "train": {"accumulate": 2},
    },
    "host": {
        "model": {**PRETRAINED, "base": "nf4", "experts_on": "host"},
        "optimizer": {"name": "adamw", "offload": True},
        "train": {"accumulate": 1, "checkpointing": "offload"},
    },
    "two ranks": {
        "model": PRETRAINED,
        "optimizer": {"name": "adamw", "master_weights": "fp32"},
        "train": {"accumulate": 4},
        "hardware": {"count": 2},
        "parallel": {"fsdp": 2, "ep": 2},
    },
    "two shards": {
        "model": {**PRETRAINED, "base": "nf4"},
        "optimizer": {"name": "adamw8bit", "master_weights": "none"},
        "train": {"accumulate": 2},
        "hardware": {"count": 2},
        "parallel": {"fsdp": 2},
    },
    "four ranks": {
        "model": PRETRAINED,
        "optimizer": {"name": "adamw", "master_weights": "fp32"},
        "train": {"accumulate": 1},
        "hardware": {"count": 4},
        "parallel": {"fsdp": 2, "tp": 2, "ep": 2},
    },
    "uneven shards": {
        "model": PRETRAINED,
        "optimizer": {"name": "sgd", "momentum": 0.9, "master_weights": "none"},
        "train": {"accumulate": 3},
        "hardware": {"count": 6},
        "parallel": {"replicate": 2, "fsdp": 3},
    },
}


def own_of(run: ResolvedRun, rank: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """The run by a record of its own, in an empty cache: on disk, runs with the same shortened model share theirs."""
    with monkeypatch.context() as patch:
        patch.setenv("MOETUNE_CACHE", str(cache))
        return ClosedForm(run, rank).at(run.config)


@pytest.mark.parametrize("how", thinned(ADAPT, len(ADAPT)))
def test_other_numbers_of_layers(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = 0
    record = form.record

    def counted(*arguments: Any) -> Any:
        nonlocal recorded
        recorded += 1
        return record(*arguments)

    monkeypatch.setattr(form, "record", counted)
    ranks = ADAPT[how].get("hardware", {}).get("count", 1)
    toy = write_toy(tmp_path, "mixtral", experts=2 * ranks, num_hidden_layers=12)
    depths = Depths()
    for layers in (5, 7):
        adapt = {"router": "all", "experts": {"layers": f"0-{layers - 1}", "ids": list(range(1, 1 + ranks))}}
        run = resolve(toy_run(toy, "mixtral", adapt, **ADAPT[how]), "cuda")
        for rank in range(min(ranks, 3)):
            before = recorded
            found = depths.at(run, rank)
            assert recorded - before == (layers == 5)
            own = own_of(run, rank, tmp_path / f"{layers}", monkeypatch)
            assert (found.parts(), found.host_peak, found.load) == (own.parts(), own.host_peak, own.load)


@pytest.mark.full
def test_other_numbers_of_layers_that_keep_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = write_toy(tmp_path, "mixtral", experts=2, num_hidden_layers=12)
    lora = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
    depths = Depths()
    for kept in (5, 7):
        run = resolve(toy_run(toy, "mixtral", lora, train={"keep_rows": kept}), "cuda")
        found = depths.at(run)
        monkeypatch.setattr(form, "record", lambda *_: pytest.fail("the second run has a record"))
        traced = trace(run)
        assert (found.parts(), found.load) == (traced.parts(), traced.load)


@pytest.mark.full
def test_layers_of_two_ranks(tmp_path: Path) -> None:
    toy = write_toy(tmp_path, "mixtral", experts=2, num_hidden_layers=10)
    for border in (5, 6):
        rank = {"attention": 8, "experts": {f"0-{border - 1}": 4, f"{border}-9": 2}}
        lora = {"lora": {"rank": rank, "alpha": 8, "targets": ["attention", "experts"]}}
        run = resolve(toy_run(toy, "mixtral", lora), "cuda")
        assert Depths().at(run).parts() == trace(run).parts()


@pytest.mark.full
def test_numbers_that_do_not_tell_are_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers train and five do not: who is born with all of which group cannot be told."""
    toy = write_toy(tmp_path, "mixtral", experts=2, num_hidden_layers=10)
    depths = Depths()
    for layers in (5, 6):
        run = resolve(
            toy_run(toy, "mixtral", {"experts": {"layers": f"0-{layers - 1}", "ids": [1]}}, model=PRETRAINED), "cuda"
        )
        assert depths.at(run).parts() == own_of(run, 0, tmp_path / f"{layers}", monkeypatch).parts()


@pytest.mark.parametrize("more", [{}, {"train": {"accumulate": 4}}], ids=["layers", "more"])
def test_a_record_on_disk_is_that_of_the_shortened_model(more: dict[str, Any], tmp_path: Path) -> None:
    """Another process finds the record of another number of layers; other settings have another record."""
    toy = write_toy(tmp_path, "mixtral", experts=2, num_hidden_layers=12)
    keys = [
        ClosedForm(resolve(toy_run(toy, "mixtral", {"experts": {"layers": f"0-{n}", "ids": [1]}}, **of), "cuda")).file
        for n, of in ((4, {}), (6, more))
    ]
    assert (keys[0] == keys[1]) == (not more)
