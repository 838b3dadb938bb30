"""The benchmark of tokens per second at toy size: all programs train the same, and one that failed has a row that says
why. No time is asserted."""

from types import ModuleType
from typing import Any

import pytest

BENCH = "throughput"


@pytest.fixture(scope="module")
def rows(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("throughput") / "model"
    ours, peft = bench.PARTS["small"]
    bench.write_checkpoint(ours, folder, True)
    options = asked(bench, 32, 64)
    return [row for case in (ours, peft) for row in bench.run_case(case, folder, options)]


def asked(bench: ModuleType, *tokens: int, seconds: float = 60) -> Any:
    """Return the options of the benchmark for batches of these many tokens, with a limit in seconds."""
    return bench.argparse.Namespace(tokens=list(tokens), repetitions=1, seconds=seconds, small=True, models=None)


@pytest.mark.full
def test_sides_train_the_same_and_begin_alike(bench: ModuleType, rows: list[dict[str, Any]]) -> None:
    assert [(row["side"], row["tokens"]) for row in rows] == [
        (side, tokens) for side in ("moetune", "peft") for tokens in (32, 64)
    ]
    ours, _, peft, _ = rows
    assert ours["trained"] == peft["trained"] > 0
    assert ours["loss"] == pytest.approx(peft["loss"], rel=0.01)  # the base is in 4 bits
    assert all(row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"]) for row in rows)
    table = bench.table(rows)
    assert table.count("| mixtral-8x7b | 2 | lora |") == 4
    assert f"{ours['seconds'] and peft['seconds'] / ours['seconds']:.2f}×" in table


def test_a_side_that_trains_something_else_has_failed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are compared with the first side that ran."""
    found = iter(({"failed": "no answer"}, {"trained": 100}, {"trained": 101}))
    monkeypatch.setitem(bench.PARTS, "small", bench.PARTS["small"][:1] * 3)
    monkeypatch.setattr(bench, "write_checkpoint", lambda case, folder, small: folder.mkdir())
    monkeypatch.setattr(bench, "in_own_process", lambda *_: [next(found)])
    rows = list(bench.run(["small"], bench.argparse.Namespace(small=True, models=None)))
    assert [row.get("failed") for row in rows] == ["no answer", None, "trains 101 numbers, the side before 100"]
