"""The choice saves as much as the best of all choices, found by trying each."""

from itertools import product
from random import Random

import pytest

from moetune.memory.keep.knapsack import Option, best, fits


@pytest.mark.parametrize("number", range(60))
def test_no_choice_saves_more(number: int) -> None:
    draw = Random(number)
    kinds = [[draw.randint(1, 4) for _ in range(3)] for _ in range(draw.choice([1, 1, 2]))]
    layers = []
    for _ in range(draw.randint(1, 5)):
        kind = draw.choice(kinds)
        options = [Option(0, draw.randint(5, 8), 0)]
        options += [Option(own * 3, draw.randint(0, 8), own * draw.randint(1, 3)) for own in kind]
        layers.append(options)
    end, limit = draw.randint(0, 6), draw.randint(4, 40)

    def saved(chosen: tuple[int, ...] | list[int]) -> int:
        return sum(options[index].saves for options, index in zip(layers, chosen, strict=True))

    fitting = [one for one in product(*map(range, map(len, layers))) if fits(layers, one, limit, end)]
    found = best(layers, limit, end)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert fits(layers, found, limit, end)
    assert saved(found) == max(map(saved, fitting))


def test_a_deep_stack_is_chosen_at_once() -> None:
    """94 layers of six options: of what they keep and save, not of their order, there are few sums."""
    options = [Option(0, 100, 0), Option(65, 99, 5), Option(896, 80, 281), Option(354, 70, 74), Option(1250, 60, 355)]
    found = best([options] * 94, 41_000, 90)
    assert found is not None
    assert fits([options] * 94, found, 41_000, 90)
    assert sum(options[index].saves for index in found) >= 281 * 41_000 // 896 - 355
