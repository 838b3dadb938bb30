"""FLOPs that idle multiprocessors could do while a matrix product runs on the others, from the shapes of its launches.

A product is computed in tiles of 128 × 128 elements of its result, one at a time on each multiprocessor, and takes as
long as the multiprocessor with the most tiles: ⌈tiles / multiprocessors⌉ times one tile (tile and wave quantization:
Matrix Multiplication Background User's Guide, docs.nvidia.com/deeplearning/performance). cuBLAS may divide the inner
dimension, called places here, among several tiles (split-K); kernels of grouped products do not. Other tile sizes are
not considered.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

TILE = 128  # rows and columns of a tile
FEWEST_PLACES = 1024  # assumed for each tile if cuBLAS divides the inner dimension


class Product(NamedTuple):
    """One launch of matrix products [rows, places] · [places, columns], one for each entry of `rows` and `places`.
    `is_divided`: whether several tiles may share the inner dimension of a product (split-K)."""

    rows: Sequence[int]
    columns: int
    places: Sequence[int]
    is_divided: bool


def products(name: str, args: Sequence[Any], is_loop: bool) -> Iterator[Product]:
    """Yield the launches of an operator; none for an operator that is no dense product.

    Args:
        name: the operator's name without namespace, such as `mm`.
        args: its arguments.
        is_loop: whether a grouped product is a launch for each expert.
    """
    if name in ("grouped_mm", "low_rank_product_"):
        a, b, counts = (args[0], args[1], args[3]) if name == "grouped_mm" else (args[1], args[2], args[6])
        by_rows = b.dim() == 3  # rows of each expert by its matrix; else sums over the rows of each expert
        rows = counts if by_rows else [a.shape[0]] * len(counts)
        places = [a.shape[1]] * len(counts) if by_rows else counts
        if is_loop:
            yield from (Product([one], b.shape[-1], [deep], True) for one, deep in zip(rows, places, strict=True))
        else:
            yield Product(rows, b.shape[-1], places, False)
    elif name in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"):
        a, b = (argument for argument in args if isinstance(argument, Tensor)) if "add" not in name else args[1:3]
        batch = a.shape[0] if a.dim() == 3 else 1
        yield Product([a.shape[-2]] * batch, b.shape[-1], [a.shape[-1]] * batch, True)


def idle(product: Product, multiprocessors: int) -> float:
    """Return the FLOPs that the GPU could do in the time of a launch, minus those that the launch does."""
    tiles = [-(-rows // TILE) * -(-product.columns // TILE) for rows in product.rows]
    flops = 2.0 * product.columns * sum(rows * deep for rows, deep in zip(product.rows, product.places, strict=True))
    total, deepest = sum(tiles), max(product.places, default=0)
    if not flops:
        return 0.0
    of_tiles = 2.0 * TILE * TILE * sum(count * deep for count, deep in zip(tiles, product.places, strict=True))
    parts = 1
    if product.is_divided and total < multiprocessors:
        parts = max(1, min(multiprocessors // total, deepest // FEWEST_PLACES))
    waves = -(-total * parts // multiprocessors) * multiprocessors / (total * parts)
    return of_tiles * waves - flops
