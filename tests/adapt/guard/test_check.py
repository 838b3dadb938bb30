"""A run without the kernels that do not work on its machine, on one rank or on several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import moetune
from moetune.adapt import exercise
from moetune.adapt.guard import check
from moetune.adapt.guard.check import KERNELS
from moetune.adapt.guard.comparison import Verdict
from moetune.adapt.layers import low_rank
from moetune.config.schema import RunConfig
from moetune.experts import mlp
from moetune.formats import nf4
from moetune.kernels import triton_rotary
from moetune.kernels.registry import without_kernel
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import ResolvedRun, resolve
from tests.nullcuda import runs
from tests.parallel import world

CARD = torch.device("cuda", 0)
CARDS = ("H100", "H100", "A6000")
"""The card of each rank."""
FAILED = {"H100": {"gated": "differs"}, "A6000": {"low_rank": "hangs"}}


def run_of(folder: Path, ranks: int = 1, adapt: str = "lora") -> ResolvedRun:
    parallel = {"fsdp": ranks, "timeout": 50}
    return resolve(runs.toy_run(runs.write_toy(folder / "model"), adapt, parallel=parallel), "cpu")


def checked_on_a_rank(folder: Path) -> tuple[tuple[str, ...], list[str], list[tuple[str, float]]]:
    """The operators without kernel, what was said, and the comparisons of this rank, each with its limit."""
    rank, compared, said = torch.distributed.get_rank(), list[tuple[str, float]](), list[str]()

    def compare(device: torch.device, runs: Sequence[RunConfig], limit: float) -> Verdict:
        compared.append((CARDS[rank], limit))
        return Verdict(FAILED[CARDS[rank]])

    run = run_of(folder / str(rank), len(CARDS))
    ranks = Ranks.join(run.config.parallel, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_file", lambda device: folder / f"{CARDS[rank]}.json.gz")
        patch.setattr(check, "compare", compare)
        patch.setattr(check, "on_gpu", lambda: object())
        without = [check.checked(run, CARD, ranks, said.append).config.hardware.without_kernels for _ in range(2)]
    assert without[0] == without[1]  # the second time nothing is compared
    return without[0], said, compared


@pytest.mark.full
def test_one_rank_of_each_kind_of_card_compares_and_all_use_what_works_on_all(tmp_path: Path) -> None:
    found = world.run(len(CARDS), checked_on_a_rank, tmp_path)
    assert [without for without, _, _ in found] == [("gated", "low_rank")] * len(CARDS)
    assert [compared for _, _, compared in found] == [[("H100", 25.0)], [], [("A6000", 25.0)]]
    about = [[name for name in ("comparing", "gated", "low_rank") if name in text] for text in found[0][1]]
    assert about == [["comparing"], ["gated"], ["low_rank"], ["gated"], ["low_rank"]]
    assert [said for _, said, _ in found[1:]] == [[], []]


def test_nothing_is_known_of_a_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = run_of(tmp_path)
    assert check.as_known(run, None) is run
    assert check.checked(run, torch.device("cpu")) is run
    assert not without_kernel()


def test_a_prediction_knows_what_was_found_at_its_sizes_or_else_at_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of comparisons that were complete, with Triton, on this card."""
    run, other = run_of(tmp_path / "lora"), run_of(tmp_path / "router", adapt="router")
    verdicts = iter((Verdict({"gated": "differs"}, "out of memory"), Verdict({"gated": "differs"}), Verdict({})))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(check, "_file", lambda device: tmp_path / "card.json.gz")
    monkeypatch.setattr(check, "compare", lambda *_: next(verdicts))
    monkeypatch.setattr(check, "on_gpu", lambda: object())
    check.compared(CARD, (check.compared_as(run),))
    assert check.as_known(run, None) is run
    check.compared(CARD, (check.compared_as(run),))
    for known in (run, other):
        assert check.as_known(known, None).config.hardware.without_kernels == ("gated",)
    check.compared(CARD, (check.compared_as(other),))
    assert check.as_known(other, None).config.hardware.without_kernels == ()
    assert check.as_known(run, None).config.hardware.without_kernels == ("gated",)
    config = tmp_path / "router" / "model" / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert check.as_known(other, None).config.hardware.without_kernels == ("gated",)  # another model at this path
    monkeypatch.setattr(check, "_file", lambda device: tmp_path / "another card.json.gz")
    assert check.as_known(run, None) is run


def test_the_file_is_named_by_the_source_of_all_that_an_exercise_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(str(moetune.__file__)).parent
    sources = {path for pattern in KERNELS for path in root.glob(pattern)}
    assert {Path(str(module.__file__)) for module in (low_rank, mlp, exercise, nf4, triton_rotary)} <= sources
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    file = check._file(CARD)
    monkeypatch.setattr(check, "KERNELS", KERNELS[1:])
    assert check._file(CARD) != file


def test_a_run_is_compared_anew_if_its_calls_differ(tmp_path: Path) -> None:
    """Not for another scale of LoRA, other rows that are kept, or another length."""
    model = runs.write_toy(tmp_path / "model")

    def compared_as(**sections: Any) -> RunConfig:
        return check.compared_as(resolve(runs.toy_run(model, "lora", **sections), "cpu"))

    run, lora = compared_as(), runs.ADAPT["lora"]["lora"]
    train = {"keep_rows": 1, "steps": 9, "sequence_length": 64}
    assert compared_as(adapt={"lora": lora | {"alpha": 9}}, train=train, parallel={"fsdp": 2}) == run
    for sections in ({"model": {"base": "int8"}}, {"train": {"expert_memory": "0"}}, {"adapt": {"router": "all"}}):
        assert compared_as(**sections) != run
