"""What goes into a message."""

from moetune.errors import counted


def test_one_thing_is_no_plural() -> None:
    assert [counted(n, "expert") for n in (0, 1, 2, 2000)] == ["0 experts", "1 expert", "2 experts", "2,000 experts"]
