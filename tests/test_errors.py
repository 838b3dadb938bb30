"""Text helpers for messages: plurals, and suggestions for misspelt names."""

from moetune.errors import counted, suggest


def test_one_thing_is_no_plural() -> None:
    assert [counted(n, "expert") for n in (0, 1, 2, 2000)] == ["0 experts", "1 expert", "2 experts", "2,000 experts"]


def test_suggest() -> None:
    assert suggest("Mixtral-8x7", ["mixtral-8x7b", "olmoe"]) == " Did you mean 'mixtral-8x7b'?"
    assert suggest("zzz", ["mixtral-8x7b"]) == ""
