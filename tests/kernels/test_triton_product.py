"""Grouped products in Triton's interpreter give what a loop over the experts gives, in float32 to 1e-5, and each tile
compiles for the cards that moetune is for. Not measured on a GPU."""

from itertools import accumulate
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moetune.kernels import operators as kernels
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    return interpreted_module("triton_product")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_expert(a: Tensor, b: Tensor, counts: list[int]) -> Tensor:
    """The products one after the other."""
    if b.dim() == 3:
        return torch.cat([rows @ matrix for rows, matrix in zip(a.split(counts), b, strict=True)])
    return torch.stack([one @ other for one, other in zip(a.split(counts, 1), b.split(counts), strict=True)])


COUNTS = {
    "uneven": [17, 40, 3],
    "without rows": [0, 5, 0, 0, 34, 1, 0],
    "whole tiles": [32, 16, 48],
    "one row": [0, 1],
    "many": [number % 3 for number in range(40)],
}


ON_A_PUSH = [("without rows", 37, 29), ("one row", 64, 48)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "deep", "wide"),
    [
        case if case in ON_A_PUSH else pytest.param(*case, marks=pytest.mark.full)
        for case in ((name, *sizes) for name in COUNTS for sizes in ((64, 48), (37, 29)))
    ],
)
def test_products_are_those_of_each_expert(interpreted: ModuleType, name: str, deep: int, wide: int) -> None:
    counts = COUNTS[name]
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32)
    x, dout, W = random(sum(counts), deep), random(sum(counts), wide, seed=1), random(len(counts), wide, deep, seed=2)
    for a, b in ((x, W.mT), (dout, W), (dout.T, x), (x.T, dout)):
        expected = by_expert(a, b, counts)
        found = [interpreted.grouped_mm(a, b, ends, counts)]
        for rows, columns in ((16, 32), (32, 16)):
            found.append(torch.full_like(expected, torch.nan))
            tile = interpreted.Tile(rows, columns, 16, num_warps=4, num_stages=2)
            if b.dim() == 3:
                interpreted._launch_rows(a, b, ends, None, found[-1], tile)
            else:
                interpreted._launch_outer(a, b, ends, found[-1], tile)
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["grouped_mm", "low_rank_product_"])
def test_a_tile_that_is_asked_for_is_launched(
    interpreted: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that these few rows would not admit; that of the products for each expert has 64 rows or more."""
    launched = list[object]()
    for launch in ("_launch_rows", "_launch_outer"):
        monkeypatch.setattr(interpreted, launch, lambda *args: launched.append(args[-1]))
    x, W, ends = random(5, 16), random(2, 16, 16), torch.tensor([2, 5], dtype=torch.int32)
    kernel = getattr(interpreted, name)
    assert kernel.tiles == interpreted.TILES
    for tile in kernel.tiles:
        if name == "grouped_mm":
            kernel(x, W, ends, [2, 3], tile=tile)
            kernel(x.T, x, ends, [2, 3], tile=tile)
        else:
            kernel(torch.empty(5, 16), x, W, random(5, 1, 4), random(2, 1, 16, 4), ends, [2, 3], 1, False, tile=tile)
    assert [*dict.fromkeys(launched)] == [*interpreted.TILES]


def test_without_any_row(interpreted: ModuleType) -> None:
    none, ends = torch.zeros(0, 24), torch.zeros(3, dtype=torch.int32)
    assert interpreted.grouped_mm(none, random(3, 24, 16), ends, [0] * 3).shape == (0, 16)
    assert torch.equal(interpreted.grouped_mm(none.T, none, ends, [0] * 3), torch.zeros(3, 24, 24))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("parts", "rank"), [(1, 5), (2, 16), pytest.param(2, 40, marks=pytest.mark.full)])
def test_low_rank_terms_are_added(interpreted: ModuleType, parts: int, rank: int, interleaved: bool) -> None:
    counts, deep, wide = [0, 5, 18], 24, 36
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32)
    x, W, narrow = random(23, deep), random(3, wide, deep, seed=1), random(23, parts, rank, seed=2)
    B, A = random(3, parts, wide // parts, rank, seed=3), random(3, parts, rank, wide, seed=4)
    for second in (B, A.mT):  # columns of each part's own, and the sum over the parts
        found, expected = torch.full((23, wide), torch.nan), torch.full((23, wide), torch.nan)
        of_rows = narrow, second, ends, counts, 0.5, interleaved
        interpreted.low_rank_product_(found, x, W.mT, *of_rows)
        kernels.OPERATORS["low_rank_product_"].reference(expected, x, W.mT, *of_rows)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        tile = interpreted.Tile(16, 16, 16, num_warps=4, num_stages=2)
        columns = "all" if second.shape[2] == wide else "alternate" if interleaved else "consecutive"
        interpreted._launch_rows(x, W.mT, ends, (narrow, second, 0.5, columns), found.fill_(torch.nan), tile)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_the_sum_with_low_rank_terms_is_that_of_each_row() -> None:
    """The operator's reference, in two parts whose columns alternate, in float64."""
    counts, ends = [2, 0, 3], torch.tensor([2, 2, 5], dtype=torch.int32)
    x, W, narrow = (random(*size).double() for size in ((5, 6), (3, 8, 6), (5, 2, 3)))
    second, out = random(3, 2, 4, 3, seed=1).double(), torch.empty(5, 8).double()
    kernels.low_rank_product_(out, x, W.mT, narrow, second, ends, counts, 0.5, True)
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        terms = torch.stack([second[expert, part] @ narrow[row, part] for part in (0, 1)], 1).flatten()
        torch.testing.assert_close(out[row], W[expert] @ x[row] + 0.5 * terms)
