"""Two adapters compared by what they do: layouts, ranks and scales do not count, mistakes are named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moetune.adapters.difference import difference
from moetune.adapters.factors import Adapter, Factors
from moetune.adapters.read import read
from tests.adapters.made import base_of_toy, make_adapter, write
from tests.adapters.test_check import WRONG

NAMES = ("a", "b")


@pytest.mark.parametrize("layout", ["megatron", "per-expert"])
def test_another_layout_rank_and_scale_is_the_same(layout: str, tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    adapter = make_adapter(base, split=layout == "per-expert")
    other = read(write(tmp_path, adapter, base, layout), base, layout).adapter
    wider = replace(other, linears={path: one.padded(5).scaled(0.7) for path, one in other.linears.items()})
    found = difference(base, adapter, wider, NAMES)
    assert (found.equal, found.compared, found.differing) == (True, 4 + 2 * 4, [])


@pytest.mark.parametrize(("how", "said"), [("slowest", "order"), ("exchanged", "gate and up"), ("unscaled", "2.5")])
def test_a_known_mistake_is_named(how: str, said: str, tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    adapter = make_adapter(base)
    spoiled = read(write(tmp_path, adapter, base, "peft", WRONG[how]), base).adapter
    found = difference(base, adapter, spoiled, NAMES)
    assert not found.equal
    assert {said in (one.because or "") for one in found.differing} == {True}
    names = {one.name.rpartition(".")[2] for one in found.differing}
    assert names >= {"slowest": {"gate_up", "down"}, "exchanged": {"gate_up"}, "unscaled": {"q_proj", "down"}}[how]


def test_one_expert_of_one_layer_that_differs(tmp_path: Path) -> None:
    """The relative difference is the one of the weights themselves."""
    base = base_of_toy("mixtral")
    one, other = make_adapter(base), make_adapter(base)
    path = list(other.experts)[1]
    down = other.experts[path]["down"]
    down.B[6] += 0.5
    found = difference(base, one, other, NAMES)
    (differing,) = found.differing
    assert (differing.name, differing.experts, differing.because) == (f"{path}.down", [6], None)
    expected = (one.experts[path]["down"].delta() - down.delta()).norm() / down.delta().norm()
    torch.testing.assert_close(differing.relative, float(expected), rtol=0.02, atol=0)


@pytest.mark.parametrize(("rank", "into", "out"), [(30, 16, 24), (2, 300, 300)])
def test_the_relative_difference_is_that_of_the_updates(rank: int, into: int, out: int) -> None:
    base = base_of_toy("mixtral")
    generator = torch.Generator().manual_seed(0)
    one, other = (
        Factors(torch.randn(rank, into, generator=generator), torch.randn(out, rank, generator=generator), 0.5)
        for _ in range(2)
    )
    (differing,) = difference(base, Adapter({"lm_head": one}, {}), Adapter({"lm_head": other}, {}), NAMES).differing
    first, second = one.delta().double(), other.delta().double()
    expected = (first - second).norm() / torch.maximum(first.norm(), second.norm())
    torch.testing.assert_close(differing.relative, float(expected), rtol=1e-5, atol=0)


def test_what_only_one_of_them_has() -> None:
    base = base_of_toy("mixtral")
    one = make_adapter(base)
    path = next(iter(one.linears))
    less = Adapter(
        {p: f for p, f in one.linears.items() if p != path}, one.experts, saved={"lm_head.weight": torch.ones(2)}
    )
    found = difference(base, one, less, NAMES)
    assert (found.only_a, found.only_b, found.equal) == ([path], ["lm_head.weight"], False)
