"""Text helpers for messages: plurals, and suggestions for misspelt names; limits of time."""

import itertools

import pytest

from moetune.errors import UserError, counted, suggest, time_limit


def test_one_thing_is_no_plural() -> None:
    assert [counted(n, "expert") for n in (0, 1, 2, 2000)] == ["0 experts", "1 expert", "2 experts", "2,000 experts"]


def test_suggest() -> None:
    assert suggest("Mixtral-8x7", ["mixtral-8x7b", "olmoe"]) == " Did you mean 'mixtral-8x7b'?"
    assert suggest("zzz", ["mixtral-8x7b"]) == ""


def test_a_limit_of_time_goes_on_after_one_within_it() -> None:
    def wait() -> None:
        with time_limit("outer", 0.1):
            with time_limit("inner", 5):
                pass
            for _ in itertools.count():
                pass

    with pytest.raises(UserError, match=r"^outer: no end after 0\.1 s"):
        wait()
