"""A run without the kernels that do not work on its machine, on one rank or on several."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moetune.adapt.guard import check
from moetune.adapt.guard.exercise import Sizes, sizes_of
from moetune.adapt.guard.verdicts import Key, Verdict
from moetune.kernels.registry import without_kernel
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import ResolvedRun, resolve
from tests.nullcuda import runs
from tests.parallel import world

CARD = torch.device("cuda", 0)
CARDS = ("H100", "H100", "A6000")
"""The card of each rank."""
FAILED = {"H100": {"gated": "differs"}, "A6000": {"low_rank": "hangs"}}


def run_of(folder: Path, ranks: int = 1) -> ResolvedRun:
    parallel = {"fsdp": ranks, "timeout": 50}
    return resolve(runs.toy_run(runs.write_toy(folder / "model"), "lora", parallel=parallel), "cpu")


def checked_on_a_rank(folder: Path) -> tuple[tuple[str, ...], list[str], list[tuple[str, float]]]:
    """The operators without kernel, what was said, and the comparisons of this rank, each with its limit."""
    rank, compared, said = torch.distributed.get_rank(), list[tuple[str, float]](), list[str]()
    os.environ["MOETUNE_CACHE"] = str(folder / "cache")

    def key_of(device: torch.device, sizes: Sizes) -> Key:
        return Key(CARDS[rank], "driver", {}, "digest", sizes)

    def compare(key: Key, device: torch.device, limit: float) -> Verdict:
        compared.append((key.card, limit))
        return Verdict(key, FAILED[key.card])

    run = run_of(folder / str(rank), len(CARDS))
    ranks = Ranks.join(run.config.parallel, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check.Key, "of", key_of)
        patch.setattr(check, "compare", compare)
        without = [check.checked(run, CARD, ranks, said.append).config.hardware.without_kernels for _ in range(2)]
    assert without[0] == without[1]  # the second time nothing is compared, although no verdict was kept on disk
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


def test_a_prediction_knows_what_this_process_found_and_did_not_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kernel that did not finish on a busy machine no file says so, and the run trains without it."""
    run = run_of(tmp_path)
    key = Key("H100", "driver", {}, "digest", sizes_of(run))
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(check.Key, "of", lambda device, sizes: replace(key, sizes=sizes))
    assert check.as_known(run, None) is run
    monkeypatch.setitem(check._not_kept, key.file, Verdict(key, {"gated": "did not finish"}))
    assert check.as_known(run, None).config.hardware.without_kernels == ("gated",)
