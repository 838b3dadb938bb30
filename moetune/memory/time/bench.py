"""Measure the speeds of a card: products, attention, passes over memory, dequantization, copies, launches and waits."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moetune.adapt.attention import Capability
from moetune.formats import nf4  # noqa: F401  defines its operator, and imports those of kernels
from moetune.memory.time.speeds import Kind, Point
from moetune.memory.time.work import READ, Work, works
from moetune.models.catalog.gpus import Gpu

aten = torch.ops.aten
_LAUNCHES, _READS = 2000, 200


class Call(NamedTuple):
    """A call to measure.

    Attributes:
        kind: what bounds its time.
        what: description for a reader, such as shapes.
        work: its work.
        run: makes the call.
        on_host: whether the time until `run` returns is measured, instead of the device's.
    """

    kind: Kind
    what: str
    work: Work
    run: Callable[[], Any]
    on_host: bool = False


Clock = Callable[[Call], float]
"""Returns the seconds that a call takes."""


def measured(card: Gpu, device: torch.device, clock: Clock | None = None) -> tuple[Point, ...]:
    """Measure calls like those of a step (`calls`), in about a minute; return a point for each. `clock` returns the
    seconds of a call; None: measure them on `device`."""
    clock = clock or (lambda call: seconds_of(device, call.run, on_host=call.on_host))
    return tuple(Point(one.kind, one.what, _numbers(one.work), clock(one)) for one in calls(card, device))


def _numbers(work: Work) -> dict[str, float]:
    return {name: float(value) for name, value in vars(work).items() if value}


def seconds_of(device: torch.device, run: Callable[[], Any], times: int = 5, *, on_host: bool = False) -> float:
    """Return the seconds of the fastest of `times` calls of `run`, after one that is not counted.

    On a GPU they are those that its stream takes; with `on_host`, or on a CPU, those until `run` returns.
    """
    taken = []
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        began = time.perf_counter()
        for event in events[:1]:
            event.record()
        run()
        host = time.perf_counter() - began
        if events and not on_host:
            events[1].record()
            torch.cuda.synchronize(device)
            host = events[0].elapsed_time(events[1]) / 1e3
        taken.append(host)
    return max(min(taken[1:]), 1e-9)


def calls(card: Gpu, device: torch.device) -> Iterator[Call]:
    """Yield the calls to measure, at widths of models of 3 to 50 billion parameters. On the meta device they can be
    listed, but not timed."""
    half = torch.bfloat16 if card.bf16 is not None else torch.float16
    processors = None if card.multiprocessors is None else card.multiprocessors.value

    def drawn(*shape: int, dtype: torch.dtype = half) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def of(kind: Kind, what: str, func: Any, *args: Any, **kwargs: Any) -> Call:
        return Call(
            kind, what, counted(func, args, kwargs, card.capability, processors), partial(func, *args, **kwargs)
        )

    for rows, inner, columns in (
        (8192, 8192, 8192),
        (8192, 4096, 4096),
        (2048, 4096, 28672),
        (2048, 14336, 4096),
        (4096, 2048, 1536),
        (8192, 2880, 5760),
    ):
        what = f"{rows} × {inner} by {inner} × {columns}"
        yield of("products", what, aten.mm.default, drawn(rows, inner), drawn(inner, columns))
    for rows, length, heads in ((4, 2048, 32), (1, 8192, 32), (8, 1024, 16)):
        q, k, v = (drawn(rows, heads, length, 128) for _ in range(3))
        flash = aten._scaled_dot_product_flash_attention.default
        yield of("attention", f"{rows} × {length} tokens, {heads} heads", flash, q, k, v, 0.0, True)
    for rows, columns in ((8192, 4096), (16384, 14336), (65536, 768)):
        one, other = drawn(rows, columns), drawn(rows, columns)
        yield of("memory", f"a copy of {rows} × {columns}", aten.copy_.default, one, other)
        yield of("memory", f"a sum of {rows} × {columns}", aten.add.Tensor, one, other)
        both, gated = drawn(rows, 2 * columns), torch.ops.moetune.gated.default
        yield of("memory", f"SwiGLU of {rows} × {2 * columns}", gated, both, False, 0.0, 0.0)
    for experts, weights in ((1, 4096 * 4096), (1, 4096 * 28672), (16, 2048 * 1536)):
        data = torch.zeros(experts, weights // 2, dtype=torch.uint8, device=device)
        scales = torch.ones(experts, weights // 64, device=device)
        unpack = torch.ops.moetune.dequantize_nf4.default
        yield of("unpacking", f"{experts} × {weights} weights", unpack, data, scales, None, None, None, weights, half)
    for size in (8 << 20, 64 << 20, 256 << 20):
        on_cuda = device.type == "cuda"
        on_host = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda, device="cpu" if on_cuda else device)
        there = torch.empty(size, dtype=torch.uint8, device=device)
        for what, target, source in (("to", there, on_host), ("from", on_host, there)):
            work = Work(copies=1, copied=size)
            yield Call("link", f"{size >> 20} MiB {what} the card", work, partial(target.copy_, source, True))
    small, weight = drawn(64), drawn(64).requires_grad_()

    def repeated(step: Callable[[], Any], times: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                step()

        return run

    def differentiated() -> None:
        """A product and a sum forward; the sum's gradient and a product backward."""
        (small * weight).sum().backward()
        weight.grad = None

    for what, step, each in (
        ("in place", lambda: small.add_(1), 1),
        ("into a new tensor", lambda: small * 2, 1),
        ("forward and backward", differentiated, 4),
    ):
        times = _LAUNCHES // each
        yield Call("launch", what, Work(launches=times * each), repeated(step, times), on_host=True)
    for what, tensor in (("a number", small[:1]), ("a row", small)):
        yield Call("synchronization", what, READ * _READS, repeated(tensor.tolist, _READS), on_host=True)


def counted(func: Any, args: Any, kwargs: Any, capability: Capability, multiprocessors: int | None) -> Work:
    """Call an operator once, and return the work of the call on a GPU with this capability and multiprocessors."""
    with torch.no_grad():
        out = func(*args, **kwargs)
    return sum((share.work for share in works(func, args, kwargs, out, capability, multiprocessors)), Work())
