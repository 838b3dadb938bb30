"""How many rows each expert receives under an assumption."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.errors import UserError
from moetune.memory.assumed_routing import BALANCED, PUBLISHED, UNKNOWN, AssumedRouting, parse_routing


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(tokens, top_k, experts)."""
    experts = draw(st.integers(1, 128))
    return draw(st.integers(1, 20_000)), draw(st.integers(1, experts)), experts


@given(size=sizes(), skew=st.floats(1, 200))
def test_rows_sum_to_all_and_none_exceeds_the_tokens(size: tuple[int, int, int], skew: float) -> None:
    tokens, top_k, experts = size
    for text in ("balanced", f"skew:{skew}", "worst"):
        rows = parse_routing(text).rows(0, tokens, top_k, experts)
        assert len(rows) == experts
        assert sum(rows) == tokens * top_k
        assert min(rows) >= 0
        assert max(rows) <= tokens
        assert rows[-1] == max(rows)


@given(size=sizes())
def test_published_scores_are_as_uneven_for_any_number_of_experts(size: tuple[int, int, int]) -> None:
    tokens, top_k, experts = size
    rows = PUBLISHED.rows(0, *size)
    assert sum(rows) == tokens * top_k
    assert max(rows) <= tokens
    assert rows == sorted(rows)
    assert min(rows) >= (tokens * top_k >= experts)
    assert max(BALANCED.rows(0, *size)) <= max(rows) <= max(parse_routing("worst").rows(0, *size))


def test_published_scores_are_those_of_their_source() -> None:
    rows = PUBLISHED.rows(0, 100_000, 6, 64)
    assert rows[-1] / 600_000 == pytest.approx(0.088, abs=1e-3)
    assert sum(rows[-8:]) / 600_000 == pytest.approx(0.454, abs=1e-3)


@given(size=sizes())
def test_balanced_rows_differ_by_one_at_most(size: tuple[int, int, int]) -> None:
    rows = BALANCED.rows(0, *size)
    assert max(rows) - min(rows) <= 1


@given(size=sizes(), skews=st.tuples(st.floats(1, 50), st.floats(1, 50)))
def test_more_skew_is_never_less_full(size: tuple[int, int, int], skews: tuple[float, float]) -> None:
    less, more = (max(parse_routing(f"skew:{skew}").rows(0, *size)) for skew in sorted(skews))
    assert max(BALANCED.rows(0, *size)) <= less <= more <= max(parse_routing("worst").rows(0, *size))


@given(
    tokens=st.integers(1, 5000), top_k=st.integers(1, 4), load=st.lists(st.integers(0, 10_000), min_size=4, max_size=64)
)
def test_a_recorded_load_loses_no_row_and_gives_none_twice(tokens: int, top_k: int, load: list[int]) -> None:
    """It says little of shorter sequences: with few experts that have any, the others take the rest."""
    load[0] += 1
    rows = AssumedRouting("file", None, ((3, tuple(map(float, load))),)).rows(3, tokens, top_k, len(load))
    assert sum(rows) == tokens * top_k
    assert 0 <= min(rows) <= max(rows) <= tokens
    for count, share in zip(rows, load, strict=True):
        assert top_k > 1 or abs(count - tokens * share / sum(load)) < 1 + 1e-6


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("balanced", [4, 4, 4, 4]),
        ("skew:1", [4, 4, 4, 4]),
        ("skew:1.5", [4, 3, 3, 6]),
        ("skew:9", [3, 3, 2, 8]),
        ("worst", [1, 1, 6, 8]),
    ],
)
def test_values(text: str, rows: list[int]) -> None:
    routing = parse_routing(text)
    assert routing.name == text
    assert routing.rows(5, 8, 2, 4) == rows


@pytest.mark.parametrize("text", ["skew:0.5", "skew:0", "skew:-2", "skew:x", "skew:nan", "skew:inf", "skew:1e308"])
def test_a_skew_is_a_number_from_1_up(text: str) -> None:
    with pytest.raises(UserError, match=rf"--routing '{text}': .* from 1 to 1,000,000; .* worst"):
        parse_routing(text)


def test_what_is_not_given_is_not_known(tmp_path: Path) -> None:
    assert parse_routing(None) is UNKNOWN
    assert parse_routing("balanced").highest is None
    (tmp_path / "load.json").write_text('{"expert_load": {"0": [1, 3]}}')
    found = parse_routing(str(tmp_path / "load.json"))
    assert (found.lowest, found.highest) == (BALANCED, None)


def test_neither_a_name_nor_a_file() -> None:
    with pytest.raises(UserError, match=r"--routing 'nope': .*balanced, skew:S, worst, .*file"):
        parse_routing("nope")


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "not json",
        "[]",
        '{"expert_load": {}}',
        '{"expert_load": [1, 2]}',
        '{"expert_load": {"0": []}}',
        '{"expert_load": {"0": [0, 0]}}',
        '{"expert_load": {"0": [3, -1]}}',
        '{"expert_load": {"0": [3, NaN]}}',
        '{"expert_load": {"0": [3, Infinity]}}',
        '{"expert_load": {"a": [1, 2]}}',
        '{"expert_load": {"0": ["x"]}}',
    ],
)
def test_a_file_without_a_load(tmp_path: Path, content: str) -> None:
    file = tmp_path / "memory.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"it holds \{'expert_load'"):
        parse_routing(str(file))


def test_a_file_read_back(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    load = {"0": [10, 20, 30, 20], "2": [0, 0, 7, 7]}
    file.write_text(json.dumps({"expert_load": load, "other": 1}))
    routing = parse_routing(str(file))
    assert dict(routing.load) == {int(layer): tuple(map(float, counts)) for layer, counts in load.items()}
    assert routing.rows(0, 40, 2, 4) == load["0"]
    assert routing.rows(2, 7, 2, 4) == load["2"]
    with pytest.raises(UserError, match="has nothing for layer 1, which has 4 experts"):
        routing.rows(1, 40, 2, 4)
    with pytest.raises(UserError, match="has 4 experts for layer 0, which has 8 experts"):
        routing.rows(0, 40, 2, 8)
