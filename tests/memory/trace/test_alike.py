"""Which layers are run, and what they stand for."""

from itertools import product

import pytest

from moetune.memory.trace.alike import Stack


def kept(kinds: str) -> str:
    return "".join(kinds[layer] for layer in Stack.of(kinds).kept)


def test_of_alike_layers_the_first_the_second_and_the_last_are_run() -> None:
    assert Stack.of("aaaaaa") == Stack((0, 1, 5), (0, 1, 1, 1, 1, 2))


def test_three_alike_layers_are_all_run() -> None:
    assert Stack.of("aaab") == Stack.whole(4)
    assert Stack.of("aab") == Stack.whole(3)


def test_layers_that_take_turns_are_run_once_between_the_ends() -> None:
    assert Stack.of("abababab") == Stack((0, 1, 2, 7), (0, 1, 2, 1, 2, 1, 2, 3))
    assert kept("aaaaab" * 5) == "aaabaab"


def test_what_differs_at_the_ends_is_run() -> None:
    assert Stack.of("x" + "a" * 5 + "b" * 4).kept == (0, 1, 2, 5, 6, 7, 9)


def test_a_number_of_layers_and_a_period_more_are_the_same_layers_that_are_run() -> None:
    whole = "aaaaab" * 7
    for number in range(8, 25):
        one, other = (kept(whole[:n].upper() + whole[n:]) for n in (number, number + 6))
        assert one == other


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_layer_has_a_stand_in_with_the_same_neighbours(size: int) -> None:
    for kinds in map("".join, product("ab", repeat=size)):
        for whole in (kinds, kinds * 3, "c" + kinds * 4 + "c"):
            stack = Stack.of(whole)
            short = [whole[layer] for layer in stack.kept]
            for layer, index in enumerate(stack.like):
                around = [
                    (kinds[at - 1] if at else "", *kinds[at : at + 2])
                    for kinds, at in ((short, index), (list(whole), layer))
                ]
                assert around[0] == around[1]
            assert [stack.like[layer] for layer in stack.kept] == [*range(len(stack.kept))]
