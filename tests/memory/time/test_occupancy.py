"""What multiprocessors without a tile could compute, by the arithmetic of tiles."""

import pytest
import torch
from torch import Tensor, randn

from moetune.memory.time.occupancy import Product, idle
from moetune.memory.time.work import works


def flops(rows: int, columns: int, places: int) -> float:
    return 2.0 * rows * columns * places


def test_a_last_wave_takes_as_long_as_a_full_one() -> None:
    """1,024 rows by 1,536 columns are 96 tiles: 57 % of the 84 multiprocessors of an A6000 work in two waves."""
    assert idle(Product([1024], 1536, [2048], True), 84) == 0.75 * flops(1024, 1536, 2048)
    assert idle(Product([1024], 1536, [2048], True), 96) == 0


def test_a_tile_is_whole() -> None:
    assert idle(Product([130], 64, [32], True), 2) == flops(256, 128, 32) - flops(130, 64, 32)


def test_places_are_divided_where_multiprocessors_are_left() -> None:
    assert idle(Product([128], 128, [4096], True), 4) == 0
    assert idle(Product([128], 128, [2048], True), 4) == flops(128, 128, 2048)  # in two, not in four
    assert idle(Product([128], 128, [4096], False), 4) == 3 * flops(128, 128, 4096)


def test_experts_of_a_group_share_waves() -> None:
    alone = [idle(Product([rows], 1536, [2048], True), 84) for rows in (1024, 1024, 0)]
    together = idle(Product([1024, 1024, 0], 1536, [2048] * 3, False), 84)
    assert together == flops(1024, 1536, 2048) * 2 * (3 * 84 / 192 - 1) < sum(alone)


@pytest.mark.parametrize(("capability", "is_loop"), [((8, 6), False), ((9, 0), False), ((7, 5), True)])
def test_of_operators(capability: tuple[int, int], is_loop: bool) -> None:
    counts, ends = [100, 0, 300], torch.tensor([100, 100, 400], dtype=torch.int32)

    def lost(name: str, *args: object) -> float:
        operator = getattr(torch.ops.moetune if name == "grouped_mm" else torch.ops.aten, name).default
        (share,) = works(operator, args, {}, torch.empty(0), capability, 10)
        return share.work.idle

    def rows(*size: int) -> Tensor:
        return randn(size, dtype=torch.bfloat16)

    alone = [Product([count], 256, [64], True) for count in counts]
    grouped = alone if is_loop else [Product(counts, 256, [64] * 3, False)]
    assert lost("grouped_mm", rows(400, 64), rows(3, 64, 256), ends, counts) == sum(idle(one, 10) for one in grouped)
    alone = [Product([64], 256, [count], True) for count in counts]
    grouped = alone if is_loop else [Product([64] * 3, 256, counts, False)]
    assert lost("grouped_mm", rows(400, 64).T, rows(400, 256), ends, counts) == sum(idle(one, 10) for one in grouped)
    assert lost("mm", rows(400, 64), rows(64, 256)) == idle(Product([400], 256, [64], True), 10)
    assert lost("addmm", rows(256), rows(400, 64), rows(64, 256)) == idle(Product([400], 256, [64], True), 10)
    assert lost("bmm", rows(2, 400, 64), rows(2, 64, 256)) == idle(Product([400] * 2, 256, [64] * 2, True), 10)
