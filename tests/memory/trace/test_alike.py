"""Which layers are run, and what they stand for."""

from moetune.memory.trace.alike import Unit, groups


def test_of_alike_layers_the_first_the_second_and_the_last_are_run() -> None:
    kept, units = groups("aaaaaa")
    assert kept == [0, 1, 5]
    assert units == [Unit(((1,), (2,), (3,), (4,)))]


def test_three_alike_layers_are_all_run() -> None:
    assert groups("aaab") == ([0, 1, 2, 3], [Unit(((1,),))])
    assert groups("aab") == ([0, 1, 2], [])


def test_layers_that_take_turns_are_a_group() -> None:
    kept, units = groups("abababab")
    assert kept == [0, 1, 2, 3, 6, 7]
    assert units == [Unit(((2, 3), (4, 5)))]


def test_what_differs_at_the_ends_is_run() -> None:
    kept, units = groups("x" + "a" * 5 + "b" * 4)
    assert kept == [0, 1, 2, 5, 6, 7, 9]
    assert units == [Unit(((2,), (3,), (4,))), Unit(((7,), (8,)))]
