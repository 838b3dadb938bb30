"""The emulator: what is undefined on a GPU is a fault, and what it cannot execute is refused."""

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moetune.kernels import operators, triton_kernels
from moetune.kernels.registry import KernelError
from tests.ptx import driver
from tests.ptx.cases import Draw
from tests.ptx.emulator import launch
from tests.ptx.memory import Fault
from tests.ptx.program import Program

KERNEL = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 64
{{
    .reg .pred %p<3>;
    .reg .b16 %rs<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    {body}
    ret;
}}
"""
STORE_SHARED = "mov.b32 %r3, global_smem; add.s32 %r4, %r3, %r2; st.shared.b32 [%r4], %r1;"
LOAD_NEIGHBOUR = "xor.b32 %r5, %r2, 128; ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd3], %r6;"  # of the other warp


def run(body: str, words: int = 64) -> Tensor:
    """Execute a kernel of 64 threads: %r1 is the thread, %r2 = 4·thread, %rd3 the address of a word for each thread."""
    out = torch.zeros(words, dtype=torch.int32)
    launch(Program(KERNEL.format(body=body)), [out], [out.data_ptr()], (1, 1, 1), 256)
    return out


def test_warps_may_write_the_same_in_one_instruction() -> None:
    same = "and.b32 %r5, %r2, 127; and.b32 %r6, %r1, 31; st.shared.b32 [%r5], %r6;"
    found = run(same + "bar.sync 0; ld.shared.b32 %r7, [%r5]; st.global.b32 [%rd3], %r7;")
    assert found.tolist() == 2 * [*range(32)]
    with pytest.raises(Fault, match="race"):
        run(same + same)


def test_warps_may_reach_bytes_side_by_side() -> None:
    """Two warps take turns from byte to byte, as where Triton lays out one byte of each row; one that reads a byte of
    the other, alone or among two or 16, races with it."""
    own = "shr.u32 %r3, %r1, 5; and.b32 %r4, %r1, 31; shl.b32 %r4, %r4, 1; add.s32 %r5, %r4, %r3;"
    store = own + "cvt.u16.u32 %rs1, %r1; st.shared.b8 [%r5], %rs1; bar.warp.sync -1;"
    load = "xor.b32 %r6, %r5, {}; ld.shared.{} {}, [%r6]; st.global.b32 [%rd3], %r7;"
    found = run(store + load.format(2, "b8", "%r7"))  # of the next lane of the same warp
    assert found.tolist() == [thread ^ 1 for thread in range(64)]
    for others in (
        load.format(1, "b8", "%r7"),
        "and.b32 %r5, %r4, 62;" + load.format(0, "b16", "%rs2"),
        "and.b32 %r5, %r4, 48;" + load.format(0, "v4.b32", "{%r7, %r8, %r3, %r5}"),
    ):
        with pytest.raises(Fault, match="race in shared memory: two warps"):
            run(store + others)
        run(store + "bar.sync 0;" + others)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (STORE_SHARED + LOAD_NEIGHBOUR, "race in shared memory: two warps"),
        (STORE_SHARED + "bar.sync 0;" + LOAD_NEIGHBOUR + STORE_SHARED, "race in shared memory: two warps"),
        ("st.shared.b32 [%r2], %r1; xor.b32 %r5, %r2, 130; ld.shared.b16 %rs1, [%r5];", "memory: two warps"),
        ("st.shared.b32 [%r2+4], %r1;", "outside of 256 bytes of shared memory"),
        ("st.global.b32 [%rd3+4], %r1;", "outside of the kernel's tensors"),
        ("ld.global.b64 %rd4, [%rd3];", "an address of 8 bytes is not a multiple of 8"),
        ("setp.lt.s32 %p1, %r1, 7; @%p1 bar.sync 0; @!%p1 bar.sync 0;", "wait at different barriers"),
        ("setp.lt.s32 %p1, %r1, 7; @%p1 shfl.sync.idx.b32 %r3, %r1, 0, 31, -1;", "a part of its threads"),
    ],
)
def test_what_is_undefined_is_a_fault(body: str, message: str) -> None:
    with pytest.raises(Fault, match=re.escape(message)):
        run(body)


@pytest.mark.parametrize(
    "text", ["atom.global.add.u32 %r3, [%rd3], 1;", "add.cc.u32 %r3, %r1, 1;", "ld.local.b32 %r3, [%r2];"]
)
def test_what_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(text[:-1])):
        run(text)


def test_copies_have_arrived_when_they_were_waited_for() -> None:
    copies = "cp.async.ca.shared.global [%r2], [%rd3], 0x4; cp.async.commit_group;"
    load = "ld.shared.b32 %r3, [%r2]; add.s32 %r3, %r3, 5; st.global.b32 [%rd3], %r3;"
    assert run(copies + "cp.async.wait_group 0;" + load).unique().tolist() == [5]
    assert run(copies + "cp.async.wait_group 1;" + load).unique().tolist() == [4]  # all bits are set until then


@pytest.mark.parametrize(
    "left_out", [r"bar\.sync\s.*?;", r"cp\.async\.wait_group\s.*?;", r"cp\.async\.commit_group\s*;"]
)
def test_a_kernel_without_its_synchronization_is_wrong(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Barriers, waits and groups of copies are left out of the PTX of a pipelined product."""
    monkeypatch.setattr(driver, "program_of", lambda text: Program(re.sub(left_out, "", text)))
    draw = Draw(0, torch.bfloat16)
    A, B = draw.normal(1, 1, 16, 512), draw.normal(1, 1, 256, 16)
    x, base = torch.randn(33, 512).bfloat16(), torch.randn(33, 256).bfloat16()
    args = x, A, B, base, torch.zeros_like(base), None, [33], 1.0
    expected = operators.low_rank(*args)
    with torch.no_grad(), driver.emulated(86), pytest.raises((KernelError, AssertionError)):
        torch.testing.assert_close(triton_kernels.low_rank(*args), expected, rtol=1e-2, atol=1e-2)
