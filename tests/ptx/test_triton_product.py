"""The PTX of grouped products gives what a product for each expert gives, and the same bits with every tile."""

from itertools import accumulate, product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moetune.adapt.guard.comparison import is_alike
from moetune.kernels import triton_product
from moetune.kernels.operators import OPERATORS
from moetune.kernels.triton_product import TILES
from tests.ptx.cases import Draw
from tests.ptx.driver import emulated

BF16 = torch.bfloat16
OTHERS = (80, 89, 120)
COUNTS = {"uneven": [5, 0, 33, 1], "many": [number % 3 for number in range(128)]}
RANKS = (4, 16, 64, 200)
REAL = {  # width of the rows and of the product, experts' rows, tile
    "qwen3 gate_up": (2048, 512, [20, 0, 45], 4),
    "qwen3 down": (768, 2048, [20, 0, 45], 4),
    "mixtral": (4096, 256, [40, 3], 0),
    "olmoe": (1024, 512, [0, 130, 7], 3),
    "gpt-oss": (2880, 360, [33, 1], 7),
}


def assert_alike(found: list[Tensor], expected: Tensor) -> None:
    assert is_alike(float((found[0] - expected).abs().max() / expected.abs().max()), BF16)
    assert all(torch.equal(one, found[0]) for one in found)


def operands(deep: int, wide: int, counts: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of both widths, matrices [C, wide, deep] and the ends of the experts' rows."""
    draw, ends = Draw(0, BF16), torch.tensor([*accumulate(counts)], dtype=torch.int32)
    return draw.normal(sum(counts), deep), draw.normal(sum(counts), wide), draw.normal(len(counts), wide, deep), ends


def check(deep: int, wide: int, counts: list[int], tiles: list[triton_product.Tile]) -> None:
    """Forward, the gradient of the rows, and that of the matrices."""
    x, dout, W, ends = operands(deep, wide, counts)
    for a, b in ((x, W.mT), (dout, W)):
        expected, found = OPERATORS["grouped_mm"].reference(a.float(), b.float(), ends, counts), []
        for tile in tiles:
            found.append(torch.full_like(expected, torch.nan, dtype=BF16))
            triton_product._launch_rows(a, b, ends, None, found[-1], tile)
        assert_alike(found, expected)
    expected, found = OPERATORS["grouped_mm"].reference(dout.float().T, x.float(), ends, counts), []
    for tile in [tile for tile in tiles if tile.rows >= 64]:
        found.append(torch.full_like(expected, torch.nan, dtype=BF16))
        triton_product._launch_outer(dout.T, x, ends, found[-1], tile)
    if found:
        assert_alike(found, expected)


@pytest.mark.parametrize(
    ("deep", "wide", "name", "tiles", "capability"),
    [
        (40, 56, "uneven", TILES[3:5], 86),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (40, 56, "uneven", TILES, 86),
                (64, 48, "many", TILES[::3], 86),
                *((37, 29, "uneven", TILES, one) for one in (86, *OTHERS)),
            )
        ),
    ],
)
def test_products_agree_with_every_tile(
    deep: int, wide: int, name: str, tiles: tuple[triton_product.Tile, ...], capability: int
) -> None:
    with torch.no_grad(), emulated(capability):
        check(deep, wide, COUNTS[name], [*tiles])


@pytest.mark.full
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_fits_capability_10(tile: triton_product.Tile) -> None:
    """It is compiled to machine code; what it computes is not shown, because its tensor cores are not emulated."""
    x, dout, W, ends = operands(64, 48, COUNTS["uneven"])
    with torch.no_grad(), emulated(100, executes=False) as driver:
        for a, b in ((x, W.mT), (dout, W)):
            triton_product._launch_rows(a, b, ends, None, torch.empty(len(a), b.shape[2], dtype=BF16), tile)
    assert [metadata.shared > 0 for _, metadata in driver.launched] == [True, True]


@pytest.mark.full
@pytest.mark.parametrize("capability", [86, *OTHERS])
@pytest.mark.parametrize("name", REAL)
def test_real_widths_agree(capability: int, name: str) -> None:
    deep, wide, counts, tile = REAL[name]
    with torch.no_grad(), emulated(capability):
        check(deep, wide, counts, [TILES[tile]])


@pytest.mark.parametrize(
    ("parts", "rank", "interleaved", "capability"),
    [
        (2, 12, False, 86),
        *(pytest.param(1, rank, False, 86, marks=pytest.mark.full) for rank in RANKS),
        *(pytest.param(2, *case, 86, marks=pytest.mark.full) for case in product(RANKS, (False, True))),
        *(pytest.param(2, *case, marks=pytest.mark.full) for case in product((4, 64), (True,), OTHERS)),
    ],
)
def test_low_rank_terms_agree_with_every_tile(parts: int, rank: int, interleaved: bool, capability: int) -> None:
    deep, wide, counts = 40, 56, COUNTS["uneven"]
    x, dout, W, ends = operands(deep, wide, counts)
    draw, reference = Draw(1, BF16), OPERATORS["low_rank_product_"].reference
    narrow = draw.normal(len(x), parts, rank)
    A, B = (draw.normal(4, parts, *size, dtype=torch.float32) for size in ((rank, deep), (wide // parts, rank)))
    for rows, matrices, second in ((x, W.mT, B), (dout, W, A.mT)):
        expected, found = torch.empty(len(rows), matrices.shape[2]), []
        of_rows = ends, counts, 0.5, interleaved
        reference(expected, rows.float(), matrices.float(), narrow.float(), second.to(BF16).float(), *of_rows)
        columns = "all" if second is not B or parts == 1 else "alternate" if interleaved else "consecutive"
        with torch.no_grad(), emulated(capability):
            for tile in TILES[::4]:
                found.append(torch.full_like(expected, torch.nan, dtype=BF16))
                terms = narrow, second, 0.5, columns
                triton_product._launch_rows(rows, matrices, ends, terms, found[-1], tile)
        assert_alike(found, expected)


def test_a_tile_that_is_asked_for_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that these few rows would not admit; that of the products for each expert has 64 rows or more."""
    launched = list[object]()
    for launch in ("_launch_rows", "_launch_outer"):
        monkeypatch.setattr(triton_product, launch, lambda *args: launched.append(args[-1]))
    x, _, W, ends = operands(16, 16, [2, 3])
    for tile in triton_product.grouped_mm.tiles:
        triton_product.grouped_mm(x, W, ends, [2, 3], tile=tile)
        triton_product.grouped_mm(x.T, x, ends, [2, 3], tile=tile)
    terms = Draw(0, BF16).normal(5, 1, 4), Draw(1, BF16).normal(2, 1, 16, 4)
    for tile in triton_product.low_rank_product_.tiles:
        triton_product.low_rank_product_(torch.empty(5, 16), x, W, *terms, ends, [2, 3], 1, False, tile=tile)
    assert [*dict.fromkeys(launched)] == [*TILES]


def test_without_any_row() -> None:
    x, _, W, ends = operands(24, 16, [0, 0, 0])
    with emulated(86):
        assert triton_product.grouped_mm(x, W.mT, ends, [0] * 3).shape == (0, 16)
        assert torch.equal(triton_product.grouped_mm(x.T, x, ends, [0] * 3), torch.zeros(3, 24, 24, dtype=BF16))
