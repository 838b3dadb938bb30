"""What the compiler makes of the experts' kernels for each compute capability (docs/benchmarks/kernels.md): registers,
spills, shared memory, occupancy, widths of accesses, tensor cores, instructions.

    python scripts/bench/kernel_code.py [--capability 86 ...] [--only WORD] [--json docs/benchmarks/kernels.json]

Needs Triton, whose wheel brings ptxas, cuobjdump and nvdisasm, and no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from moetune.kernels import triton_kernels as kernels
from moetune.kernels import triton_product, triton_rotary, triton_routing
from scripts.bench._common import commit, spread, versions, write_json, write_table
from tests.ptx.driver import SHARED, emulated

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# of a multiprocessor: warps, blocks, KiB of shared memory (CUDA C++ Programming Guide, table of compute capabilities)
LIMITS = {
    80: (64, 32, 164), 86: (48, 16, 100), 89: (48, 24, 100), 90: (64, 32, 228), 100: (64, 32, 228), 120: (48, 24, 100),
}  # fmt: skip
REGISTERS = 65536  # of a multiprocessor; a warp gets multiples of 256
HALF_RATE = {
    "FSEL", "SEL", "PRMT", "LOP3", "ISETP", "LEA", "SHF", "IADD3", "SGXT", "FMNMX", "PLOP3", "FSETP", "BMSK", "F2FP",
    "IMNMX", "VIADD", "VIMNMX", "IABS", "R2P", "P2R", "LEPC", "FLO", "POPC",
}  # fmt: skip
"""Instructions of the integer and logic pipe, which issues half as many as the whole multiprocessor."""
TENSOR_CORES = re.compile(r"(HMMA|QMMA|OMMA|HGMMA|UTCHMMA|UTCQMMA)")


@dataclass(frozen=True)
class Statistics:
    """Of one compiled kernel."""

    registers: int
    spilled: int  # bytes of a thread that lie in local memory
    shared: int  # bytes of a block
    warps: int
    instructions: Counter[str]

    def occupancy(self, capability: int) -> float:
        """Return the share of a multiprocessor's warps that can be resident."""
        warps, blocks, kib = LIMITS[capability]
        by_registers = REGISTERS // (-(-self.registers * 32 // 256) * 256 * self.warps)
        by_shared = kib * 1024 // (self.shared + 1024)  # 1 KiB of each block is the system's
        return min(by_registers, by_shared, warps // self.warps, blocks) * self.warps / warps

    def count(self, *names: str) -> int:
        return sum(number for name, number in self.instructions.items() if name.split(".")[0] in names)

    def widths(self, *names: str) -> dict[int, int]:
        """Return how many accesses there are of each width in bytes."""
        accesses: Counter[int] = Counter()
        for name, number in self.instructions.items():
            first, *rest = name.split(".")
            if first in names:
                bits = [int(re.sub(r"\D", "", part)) for part in rest if re.fullmatch(r"[US]?(8|16|64|128)", part)]
                accesses[bits[0] // 8 if bits else 4] += number
        return {width: accesses[width] for width in sorted(accesses, reverse=True)}

    def tensor_cores(self) -> dict[str, int]:
        names = {name: number for name, number in self.instructions.items() if TENSOR_CORES.match(name)}
        return {".".join(name.split(".")[:2]): number for name, number in names.items()}


def read(cubin: Path, metadata: Any) -> Statistics:
    """Return the statistics of a kernel's machine code."""

    def output(tool: str, *words: str) -> str:
        return subprocess.run([TOOLS / tool, *words, cubin], capture_output=True, text=True, check=True).stdout

    used = output("cuobjdump", "-res-usage")
    registers, stack = (int(re.search(rf"{what}:(\d+)", used)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
    lines = output("nvdisasm", "-c").splitlines()
    found = (re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", line) for line in lines)
    return Statistics(registers, stack, metadata.shared, metadata.num_warps, Counter(one[1] for one in found if one))


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (description, call) of the kernels at the widths of Mixtral-8x7B, Qwen3-30B-A3B and gpt-oss-20b."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    full, bytes_ = torch.float32, torch.uint8
    size = 4096 * 4096
    quantized = empty(1, size // 2, dtype=bytes_), empty(1, size // 64, dtype=bytes_)
    nested = empty(1, size // 64 // 256, dtype=full), empty(256, dtype=full), empty(1, dtype=full)
    yield "NF4, double quantization", partial(kernels.dequantize_nf4, *quantized, *nested, size, torch.bfloat16)
    scales = empty(1, size // 64, dtype=full)
    yield "NF4", partial(kernels.dequantize_nf4, quantized[0], scales, None, None, None, size, torch.bfloat16)
    rows = empty(64, 4096, dtype=torch.int8), empty(64, dtype=full)
    yield "int8, 4,096 columns", partial(kernels.dequantize_int8, *rows, torch.bfloat16)
    blocks = empty(size // 2, dtype=bytes_), empty(size // 32, dtype=bytes_), empty(256, 2, dtype=full)
    yield "MXFP4", partial(kernels.dequantize_mxfp4, *blocks, torch.bfloat16)
    eights = empty(1, 4096, 4096, dtype=bytes_), empty(1, 32, 32, dtype=full)
    yield "FP8, blocks of 128 × 128", partial(kernels.dequantize_fp8, *eights, 128, 128, torch.bfloat16)
    fours = empty(1, size // 2, dtype=bytes_), empty(1, 4096, 256, dtype=bytes_), empty(1, 2, dtype=full)
    yield "NVFP4", partial(kernels.dequantize_nvfp4, *fours, 4096, torch.bfloat16)
    for group in (32, 128):
        scales, zeros = empty(1, 4096, 4096 // group, dtype=torch.int16), empty(1, 4096, 2048 // group, dtype=bytes_)
        words = empty(1, 4096, 2048, dtype=bytes_), scales, empty(1, dtype=bytes_), zeros, None
        unpack = partial(kernels.dequantize_int4, *words, group, 4096, torch.bfloat16)
        yield f"INT4, groups of {group}", unpack
    weights, order = empty(128, dtype=full), torch.arange(64)
    for name, wide, gate in (("Mixtral", 14336, (False, 1.0, 0.0)), ("gpt-oss", 2880, (True, 1.702, 7.0))):
        yield f"gate of {name}", partial(kernels.gated, empty(64, 2 * wide), *gate)
        backward = partial(kernels.gated_backward_, empty(64, 2 * wide), empty(64, wide), weights, order, weights)
        yield f"gate of {name}, backward", partial(backward, *gate)
    tokens, of_tokens = empty(64, 4096), empty(8, 4096)
    inverse = empty(64, dtype=torch.int32)
    yield "rows of 4,096", partial(kernels.gather_rows, tokens, order, 8, inverse)
    yield "rows of 4,096", partial(kernels.sum_rows_, of_tokens, tokens, inverse, weights)
    yield "rows of 4,096", partial(kernels.add_rows_, of_tokens, tokens, order, 8, weights)
    heads = (empty(2, 64, count, 128).transpose(1, 2) for count in (32, 4))
    q, k, angles, norms = *heads, empty(1, 64, 128), empty(128)
    yield "heads of 128, norms", partial(triton_rotary.rotate, q, k, angles, angles, norms, norms, 1e-6)
    yield (
        "heads of 128, norms, backward",
        partial(triton_rotary.rotate_backward, q, k, q, k, angles, angles, norms, norms, 1e-6),
    )
    ids = torch.zeros(64, 8, dtype=torch.int64)
    yield "8 of 128 experts", partial(triton_routing.choose, empty(64, 128), 8, True, torch.bfloat16)
    yield (
        "8 of 128 experts, backward",
        partial(triton_routing.weigh_backward, empty(64, 8), empty(64, 128), ids, True),
    )
    yield "rows of 128 experts", partial(triton_routing.sorted_positions, ids.flatten(), 128)
    yield from products()
    for rank in (16, 64, 256, 1024):
        yield from low_rank(rank, 1, torch.bfloat16)
    yield from low_rank(16, 2, torch.bfloat16)
    for rank in (16, 64, 256):
        yield from low_rank(rank, 2, torch.float32)


def low_rank(rank: int, parts: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the calls for gate and up of 8 experts of Qwen3-30B-A3B's width; `parts` is 2 where both have factors."""
    rows, experts, hidden, wide = 64, 8, 2048, 1536 // parts
    A, B = torch.empty(experts, parts, rank, hidden), torch.empty(experts, parts, wide, rank)
    x, out = torch.empty(rows, hidden, dtype=dtype), torch.empty(rows, parts, wide, dtype=dtype)
    out = out if parts > 1 else out[:, 0]
    narrow, ends = torch.empty(rows, parts, rank, dtype=dtype), torch.empty(experts, dtype=torch.int32)
    what = f"rank {rank}{', gate and up apart' if parts > 1 else ''}{', float32' if dtype == torch.float32 else ''}"
    groups = ends, [rows]
    yield f"{what}, forward", partial(kernels.low_rank, x, A, B, out, out, *groups, 1.0)
    yield f"{what}, backward", partial(kernels.low_rank, out, B.mT, A.mT, x, x, *groups, 1.0)
    gradients = partial(kernels.low_rank_gradients_, narrow, x, narrow, out, A, B)
    yield f"{what}, gradients", partial(gradients, torch.empty(128), torch.arange(64), *groups, 1.0)


def products() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the products of groups, with every tile: gate and up of 8 experts of Qwen3-30B-A3B, LoRA of rank 16."""
    rows, experts, hidden, wide, rank = 512, 8, 2048, 1536, 16
    x, dout, W = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, hidden), (rows, wide), (8, wide, hidden))
    )
    ends = torch.empty(experts, dtype=torch.int32)
    terms = torch.empty(rows, 1, rank, dtype=torch.bfloat16), torch.empty(experts, 1, wide, rank), 1.0, "all"
    for tile in triton_product.TILES:
        what = f"{tile.rows} × {tile.wide} × {tile.deep}, {tile.num_warps} warps"
        yield f"product, {what}", partial(triton_product._launch_rows, x, W.mT, ends, terms, dout, tile)
    tile = triton_product.TILES[0]
    yield "product, gradient of weights", partial(triton_product._launch_outer, dout.T, x, ends, W, tile)


def measured(capability: int, only: str) -> Iterator[dict[str, Any]]:
    """Yield what the JSON file has of each kernel."""
    for what, call in calls():
        if only not in what or (capability == 90 and what.startswith("product")):  # torch's there
            continue
        about = {"capability": capability, "call": what}
        with emulated(capability, executes=False) as driver:
            try:
                call()
            except triton.runtime.errors.OutOfResources as error:
                yield about | {"failed": str(error)}
                continue
        compiled, metadata = driver.launched[-1]
        code = read(compiled.files["cubin"], metadata)
        yield about | {
            "kernel": compiled.name,
            "registers": code.registers,
            "spilled": code.spilled,
            "shared": code.shared,
            "occupancy": round(code.occupancy(capability), 2),
            "loads": code.widths("LDG", "LDGSTS"),
            "stores": code.widths("STG"),
            "tensor_cores": code.tensor_cores(),
            "instructions": code.instructions.total() - code.count("NOP"),
            "logic": code.count(*HALF_RATE),
        }


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table: least, median and most of each capability's kernels."""
    yield "| capability | kernels | registers | occupancy | of the logic pipe | 16 bytes a load | spill |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for capability in dict.fromkeys(row["capability"] for row in report["kernels"]):
        rows = [row for row in report["kernels"] if row["capability"] == capability and "failed" not in row]
        wide = sum(max(map(int, row["loads"]), default=0) == 16 for row in rows)
        cells = (
            f"{capability // 10}.{capability % 10}", len(rows), spread(row["registers"] for row in rows),
            spread((100 * row["occupancy"] for row in rows), "{:.0f} %"),
            spread((100 * row["logic"] / row["instructions"] for row in rows), "{:.0f} %"), wide,
            sum(row["spilled"] > 0 for row in rows),
        )  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    yield f"Triton {report['versions']['triton']}, commit {report['commit'][:12]}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=list(SHARED), choices=list(SHARED))
    parser.add_argument("--only", default="", help="calls whose description contains this word")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here, and the page beside it")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for capability in args.capability:
        for row in measured(capability, args.only):
            print(row, flush=True)
            rows.append(row)
    if args.json is not None:
        report = {"schema": 1, "benchmark": "kernels", "versions": versions("triton"), "commit": commit()}
        report["kernels"] = rows
        write_json(report, args.json)
        write_table(table(report), args.json.with_suffix(".md"))


if __name__ == "__main__":
    main()
