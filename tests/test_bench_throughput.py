"""The benchmark of tokens per second at toy size: all programs train the same, and one that failed has a row that says
why. No time is asserted."""

from types import ModuleType
from typing import Any

import pytest

BENCH = "throughput"


def asked(bench: ModuleType, *tokens: int) -> Any:
    """Return the options of the benchmark for batches of these many tokens."""
    few = {"repetitions": 1, "seconds": 60.0, "small": True}
    return bench.argparse.Namespace(tokens=list(tokens), models=["mixtral-8x7b"], **few)


@pytest.mark.full
def test_sides_train_the_same_and_begin_alike(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("throughput") / "model"
    bench.write_checkpoint("mixtral-8x7b", folder, True)
    about = {"model": "mixtral-8x7b", "layers": 4}
    sides = ("moetune", "peft")
    rows = [about | row for side in sides for row in bench.run_side(side, folder, asked(bench, 32, 64))]
    assert [(row["side"], row["tokens"]) for row in rows] == [(side, tokens) for side in sides for tokens in (32, 64)]
    ours, _, peft, _ = rows
    assert ours["trained"] == peft["trained"] > 0
    assert ours["loss"] == pytest.approx(peft["loss"], rel=0.01)  # the base is in 4 bits
    assert all(row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"]) for row in rows)
    table = "\n".join(bench.table(rows))
    assert table.count("| mixtral-8x7b | 4 | ") == 4
    assert f"{ours['seconds'] and peft['seconds'] / ours['seconds']:.2f}×" in table


def test_a_side_that_trains_something_else_has_failed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are compared with the first side that ran."""
    found = iter(({"failed": "no answer"}, {"trained": 100}, {"trained": 101}))
    monkeypatch.setattr(bench, "write_checkpoint", lambda model, folder, small: folder.mkdir())
    monkeypatch.setattr(bench, "in_own_process", lambda *_: [next(found)])
    rows = list(bench.run(asked(bench, 32)))
    assert [row.get("failed") for row in rows] == ["no answer", None, "trains 101 numbers, the side before 100"]
