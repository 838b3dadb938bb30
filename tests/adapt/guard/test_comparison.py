"""The comparison of a run's kernels: what children find becomes a verdict, however they end."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.adapt.guard import comparison
from moetune.adapt.guard.comparison import Verdict
from moetune.kernels.registry import OPERATORS, KernelError, Operator, use_kernels, without_kernel
from moetune.kernels.routing import choose

CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(comparison, "on_gpu", lambda: object())
    yield
    use_kernels(but=())


# --- Children -----------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
left_out = pipe.recv()[2]
def say(name="", why=""): pipe.send((name, why))
def end(): pipe.send(None)
"""


def verdict_of(monkeypatch: pytest.MonkeyPatch, script: str, **limit: float) -> Verdict:
    monkeypatch.setattr(comparison, "_CHILD", CHILD + script)
    return comparison.compare(CARD, (), **limit)


def test_all_kernels_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict_of(monkeypatch, "say('gated'); say(); end()") == Verdict({})


@pytest.mark.full
def test_a_kernel_that_ends_its_process_and_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a child of its own; the third child compares the rest."""
    monkeypatch.setattr(comparison, "LIMIT", 2.0)
    script = """
say('gated')
if 'gated' not in left_out: print('illegal access', file=sys.stderr), os._exit(1)
say('low_rank')
if 'low_rank' not in left_out: time.sleep(60)
say('sum_rows_', 'differs')
end()
"""
    failed, stopped = verdict_of(monkeypatch, script)
    assert failed.keys() == {"gated", "low_rank", "sum_rows_"}
    assert "illegal access" in failed["gated"]
    assert "2 seconds" in failed["low_rank"]
    assert not stopped


@pytest.mark.full
def test_a_child_imports_nothing_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not the json of Python')")
    monkeypatch.chdir(tmp_path)
    stopped = comparison._child(99, (), ()).stopped
    assert "not the json" not in stopped
    assert "Error" in stopped  # what the child raised, not how the interpreter ended


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit('no such library')", "no such library"),
        ("say('gated'); say(); raise MemoryError('out of memory')", "out of memory"),
        ("say('gated'); os.kill(os.getpid(), signal.SIGKILL)", "code -9"),
    ],
)
def test_a_comparison_that_cannot_be_made_blames_no_kernel(
    script: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = verdict_of(monkeypatch, script)
    assert said in verdict.stopped
    assert verdict.failed == {}


def test_a_comparison_that_takes_longer_than_others_wait_blames_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has failed by then is known."""
    script = "say('gated'); say('gated', 'differs'); say('low_rank'); time.sleep(60)"
    verdict = verdict_of(monkeypatch, script, limit=1.0)
    assert verdict.failed == {"gated": "differs"}
    assert "wait" in verdict.stopped


def test_without_triton_no_kernel_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "on_gpu", lambda: None)
    assert verdict_of(monkeypatch, "raise SystemExit").failed.keys() == OPERATORS.keys() - {"grouped_mm"}


# --- One call -----------------------------------------------------------------------------------------------------


def compared(kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list[Any]]:
    """What the comparison of `add_rows_` says of a kernel, and what its target holds afterwards."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    known = OPERATORS["add_rows_"]
    operator, said = Operator(known.name, known.reference, lambda *args: kernel, known.scratch), list[Any]()
    out = torch.ones(3, 4)
    args = (out, torch.ones(2, 4), torch.tensor([0, 2]), 1, torch.tensor([2.0, 3.0, 4.0]))
    comparison.compare_call(operator, args, dtype=torch.float32, done=set(), say=said.append)
    return out, said


def right(out: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, top_k: int, weights: torch.Tensor) -> None:
    out.index_add_(0, order // top_k, rows * weights[order, None])


def wrong(out: torch.Tensor, *args: Any) -> None:
    right(out, *args)
    out[1] += 0.1


def refused(*args: Any) -> None:
    raise KernelError("OutOfResources: shared memory")


@pytest.mark.parametrize(
    ("kernel", "failed"),
    [(right, None), (wrong, "differs from torch's operations by 2"), (refused, "launched (OutOfResources: shared")],
)
def test_a_call_gives_the_references_result_whatever_the_kernel_does(
    kernel: Callable[..., Any], failed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that the reference uses up are not compared."""
    out, said = compared(kernel, monkeypatch)
    assert out[:, 0].tolist() == [3.0, 1.0, 5.0]
    assert said[0] == ("add_rows_", "")
    whys = [why for _, why in said if why]
    assert len(whys) == (failed is not None)
    assert all(str(failed) in why for why in whys)


def test_of_equal_logits_a_kernel_may_choose_either() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0]])
    for ids, is_alike in (([2, 0, 3], True), ([0, 1, 3], False)):
        kernel = partial(lambda ids, *args: (choose(*args)[0], torch.tensor([ids])), ids)
        (off,) = comparison.differences(OPERATORS["choose"], (logits, 3, True, torch.float32), kernel)
        assert (off == 0) == is_alike


@pytest.mark.parametrize(("tile", "is_wrong"), [(right, False), (wrong, True), (refused, False)])
def test_every_tile_is_compared(tile: Callable[..., Any], is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not compile is not chosen in a run."""

    def kernel(*args: Any, tile: Callable[..., Any] = right) -> None:
        tile(*args)

    vars(kernel)["tiles"] = (right, tile)
    out, said = compared(kernel, monkeypatch)
    assert out[:, 0].tolist() == [3.0, 1.0, 5.0]
    assert any(why for _, why in said) == is_wrong


@pytest.mark.parametrize("said", ["Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_full_card_is_no_fault_of_a_kernel(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said.split(maxsplit=1)[0]):
        compared(full, monkeypatch)


def test_a_kernel_that_does_not_compile_gives_way_before_anything_has_changed() -> None:
    known = OPERATORS["add_rows_"]
    operator = Operator(known.name, known.reference, lambda *args: refused, known.scratch)
    out = torch.zeros(2, 3)
    with pytest.warns(UserWarning, match="add_rows_.*OutOfResources.*torch's operations"):
        operator(out, torch.ones(2, 3), torch.tensor([0, 1]), 1, None)
    assert out.sum() == 6
    assert set(without_kernel()) == {"add_rows_"}
    operator(out, torch.ones(2, 3), torch.tensor([0, 1]), 1, None)  # said once
    assert out.sum() == 12
