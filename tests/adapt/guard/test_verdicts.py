"""Verdicts are read back whole or not at all, under all that they depend on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moetune
from moetune.adapt.guard import exercise
from moetune.adapt.guard.exercise import samples
from moetune.adapt.guard.verdicts import KERNELS, Key, Verdict, failed_at_any_sizes, keep, kept
from moetune.adapt.layers import low_rank
from moetune.experts import mlp
from moetune.files import source_digest
from moetune.formats import nf4
from moetune.kernels import triton_rotary


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))


def key_of(**changes: Any) -> Key:
    key = Key("a card, 9.0", "driver", {"torch": "2.12"}, "digest", samples(torch.bfloat16))
    return replace(key, **changes)


def test_a_key_has_the_source_of_all_that_an_exercise_runs() -> None:
    root = Path(str(moetune.__file__)).parent
    sources = {path for pattern in KERNELS for path in root.glob(pattern)}
    assert {Path(str(module.__file__)) for module in (low_rank, mlp, exercise, nf4, triton_rotary)} <= sources
    assert source_digest(*KERNELS) != source_digest(*KERNELS[1:])


def test_a_verdict_is_kept_under_all_it_depends_on() -> None:
    verdict = Verdict(key_of(), {"gated": "differs"})
    assert kept(verdict.key) is None
    keep(verdict)
    assert kept(key_of()) == verdict
    others = [{"card": "a card, 8.6"}, {"driver": "newer"}, {"versions": {"torch": "2.13"}}, {"kernels": "other"}]
    others.append({"sizes": samples(torch.float32)})
    assert [kept(key_of(**other)) for other in others] == [None] * len(others)


def test_a_verdict_under_another_name_or_not_complete_is_not_used(tmp_path: Path) -> None:
    verdict = Verdict(key_of(), {})
    keep(verdict)
    other = key_of(card="another")
    verdict.key.file.rename(other.file)
    assert kept(other) is None
    keep(Verdict(key_of(), {}, "out of memory"))
    assert kept(key_of()) is None


def test_what_fails_at_other_sizes_is_known() -> None:
    """Of the same card and software, by verdicts that are whole."""
    assert failed_at_any_sizes(key_of()) == set()
    keep(Verdict(key_of(), {"gated": "differs"}))
    keep(Verdict(key_of(sizes=samples(torch.float32)), {"low_rank": "hangs"}))
    keep(Verdict(key_of(driver="newer"), {"choose": "differs"}))
    assert failed_at_any_sizes(key_of(sizes=samples(torch.float16))) == {"gated", "low_rank"}
    keep(Verdict(key_of(), {}))
    assert failed_at_any_sizes(key_of()) == {"low_rank"}
