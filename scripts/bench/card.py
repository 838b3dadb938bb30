"""What a card shows before all else: that kernels are right, how fast each is, and that steps repeat.

    python scripts/bench/card.py check          every kernel at the widths of four models, beside torch's operations
    python scripts/bench/card.py bandwidth      time, GB/s and TFLOP/s of each
    python scripts/bench/card.py repeat         two equal steps of two layers, of each of two models, bit for bit

`check` is what compute-sanitizer is to watch (`--tokens 8` then). `repeat` asks torch for deterministic algorithms: the
backward of its flash attention otherwise adds up the gradient of the queries by atomics, in any order. Exit code 1: a
kernel differs, or the steps do.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from moetune.adapt.build import build
from moetune.adapt.guard.comparison import copied, differences, is_alike
from moetune.kernels import rotary, routing  # noqa: F401  define their operators
from moetune.kernels.registry import OPERATORS
from moetune.memory.time.work import Work, works
from moetune.memory.trace.steps import batches_of
from moetune.run.resolve import resolve
from moetune.training.step.micro_step import count_loss_tokens, token_loss
from scripts.bench._common import LORA_16, commit, lora_run, versions, write_json
from tests.kernels.recorded import calls
from tests.nullcuda import device as nullcuda

Call = tuple[str, list[Any]]
WIDTHS = {  # hidden, intermediate, rank; query heads, key heads, size of a head; experts, experts of a token
    "mixtral-8x7b": ((4096, 14336, 16), (32, 8, 128), (8, 2)),
    "qwen3-30b-a3b": ((2048, 768, 16), (32, 4, 128), (128, 8)),
    "gpt-oss-20b": ((2880, 2880, 8), (64, 8, 64), (32, 4)),
    "olmoe-1b-7b": ((2048, 1024, 64), (16, 16, 128), (64, 8)),
}
REPEATED = ("mixtral-8x7b", "qwen3-30b-a3b")
TIMES = 20


def calls_of(model: str, device: torch.device, tokens: int) -> Iterator[Call]:
    """Yield a call of every operator at a model's widths, in bfloat16."""
    (hidden, intermediate, rank), (heads, key_heads, size), (experts, top_k) = WIDTHS[model]
    yield from calls(device, torch.bfloat16, tokens, hidden=hidden, intermediate=intermediate, rank=rank)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    q, k = (drawn(1, tokens, count, size).transpose(1, 2) for count in (heads, key_heads))
    angles, norms, none = [drawn(1, tokens, size) for _ in range(2)], [drawn(size) for _ in range(2)], [None, None]
    for weights, kept in ((norms, [q, k]), (none, none)):
        yield "rotate", [q, k, *angles, *weights, 1e-6]
        yield "rotate_backward", [q, k, *kept, *angles, *weights, 1e-6]
    order = torch.rand(tokens, experts, device=device).argsort(-1)
    logits = order.div(experts / 4).bfloat16()  # equal logits may be chosen in any order, so all differ
    ids = order.topk(top_k).indices
    for dtype in (torch.float32, torch.bfloat16):
        yield "choose", [logits, top_k, True, dtype]
        yield "weigh", [logits, ids, True, dtype]
        yield "weigh_backward", [drawn(tokens, top_k).to(dtype), logits, ids, True]
    yield "sorted_positions", [ids.flatten(), experts]


def shapes(args: Sequence[Any]) -> str:
    return " ".join("×".join(map(str, arg.shape)) for arg in args if isinstance(arg, Tensor))


def check(device: torch.device, tokens: int) -> int:
    """Print the difference of every kernel; return how many are too large."""
    wrong = 0
    for model in WIDTHS:
        for name, args in calls_of(model, device, tokens):
            operator = OPERATORS[name]
            kernel = operator.kernel(*args)
            if kernel is None:
                print(f"{model:15} {name:20} has no kernel here")
                continue
            with torch.no_grad():
                off = next(differences(operator, args, kernel))
            is_right = is_alike(off, torch.bfloat16)
            wrong += not is_right
            print(f"{model:15} {name:20} {'right' if is_right else 'WRONG'} {off:.1e}  {shapes(args)}")
    print(f"{wrong} kernels differ")
    return wrong


def seconds_of(run: Callable[[], Any]) -> float:
    """Return the seconds that the stream takes for the fastest of `TIMES` calls, after one that is not counted."""
    taken = []
    for _ in range(TIMES + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return max(min(taken[1:]), 1e-9)


def bandwidth(device: torch.device, tokens: int) -> list[dict[str, Any]]:
    """Print and return the time of every kernel, the smallest of `TIMES` launches, beside its bytes and FLOPs."""
    capability, rows = torch.cuda.get_device_capability(device), []
    print("model           kernel                     µs   GB/s  TFLOP/s  tensors")
    for model in WIDTHS:
        for name, args in calls_of(model, device, tokens):
            kernel = OPERATORS[name].kernel(*args)
            if kernel is None:
                continue
            func, given = getattr(torch.ops.moetune, name).default, copied(args)
            with torch.no_grad():
                work = sum((work for work, _ in works(func, given, {}, func(*given), capability)), Work())
            copies = iter([copied(args) for _ in range(TIMES + 1)])
            run = partial(lambda kernel, copies: kernel(*next(copies)), kernel, copies)
            best, flops = seconds_of(run), round(work.flops + work.flops32)
            rows.append({"model": model, "kernel": name, "tensors": shapes(args), "seconds": best})
            rows[-1] |= {"bytes": round(work.bytes), "flops": flops}
            rates = f"{1e6 * best:8.1f} {work.bytes / best / 1e9:6,.0f} {flops / best / 1e12:8.1f}"
            print(f"{model:15} {name:20} {rates}  {shapes(args)}")
    return rows


def repeat(device: torch.device) -> int:
    """Take a step twice from the same weights; print and return how many losses and gradients differ in a bit."""
    differ = 0
    for model in REPEATED:
        train = {"micro_batch": 2, "sequence_length": 1024}
        with tempfile.TemporaryDirectory() as folder:
            config = lora_run(Path(folder), model, 2, train, adapt={"router": "all", **LORA_16})
            adapted = build(resolve(config, device.type), device)
        adapted.model.train()
        batch = batches_of(adapted)(2)
        batch |= {name: value.to(device) for name, value in batch.items() if torch.is_tensor(value)}
        found = []
        for _ in range(2):
            adapted.model.zero_grad(set_to_none=True)
            loss = token_loss(adapted.model, batch) / count_loss_tokens(batch)
            loss.backward()
            gradients = {name: one.grad.clone() for name, one in adapted.trainable().items() if one.grad is not None}
            found.append({"loss": loss.detach(), **gradients})
        first, second = found
        names = [name for name, value in first.items() if not torch.equal(value, second[name])]
        differ += len(names)
        print(f"{model}: {len(first)} tensors, {len(names)} differ{': ' if names else ''}{', '.join(names[:9])}")
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("check", "bandwidth", "repeat"))
    parser.add_argument("--tokens", type=int, help="token rows of a call; 100 for check, 8192 for bandwidth")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("card.py: there is no CUDA device")
    device, wrong = torch.device("cuda", 0), 0
    torch.manual_seed(0)
    if given.part == "check":
        wrong = check(device, given.tokens or 100)
    elif given.part == "repeat":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch wants it for deterministic products
        torch.use_deterministic_algorithms(True)
        with nullcuda.answering() if nullcuda.is_present() else nullcontext():
            wrong = repeat(device)
    else:
        rows = bandwidth(device, given.tokens or 8192)
        if given.json is not None:
            about = {"schema": 1, "commit": commit(), "device": torch.cuda.get_device_name(device)}
            write_json({**about, "versions": versions("torch", "triton", "moetune"), "kernels": rows}, given.json)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
