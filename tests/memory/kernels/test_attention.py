"""Which attention a GPU runs, and what that leaves of a trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moetune.memory.kernels.attention import attention, choose_operator, replace_attention
from moetune.memory.trace import Trace, trace
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import find_gpu
from tests.memory.models import toy_run, write_toy
from tests.thinned import in_pairs

A100, A6000, L40S, H100, B200, RTX_5090, T4 = (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (7, 5)
LORA = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention"]}}


def inputs(d: int, d_v: int, dtype: torch.dtype, heads: int = 8, grad: bool = True) -> tuple[torch.Tensor, ...]:
    """Query, key and value of 2 rows of 64 tokens and 8 heads, `heads` of keys and values; no storage."""
    with torch.device("meta"):
        query = torch.empty(2, 8, 64, d, dtype=dtype, requires_grad=grad)
        return query, torch.empty(2, heads, 64, d, dtype=dtype), torch.empty(2, heads, 64, d_v, dtype=dtype)


# Every row is what `torch._fused_sdp_choice` of torch 2.11 (CUDA 13, cuDNN 9.19) answers; the rule is in
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, under the name that stands behind it.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHOICES: list[tuple[Any, int, int, torch.dtype, dict[str, Any], str]] = [
    (L40S, 128, 128, BF16, {}, "flash"),  # priority_order: cuDNN first on 9.x and 10.x only
    (A6000, 128, 128, BF16, {"mask": True}, "efficient"),  # check_for_attn_mask
    (A100, 192, 128, BF16, {}, "efficient"),  # check_head_dim_size_flash: all sizes alike
    (A100, 512, 512, BF16, {}, "efficient"),  # check_head_dim_size_flash: 256 at most
    (L40S, 224, 224, BF16, {}, "efficient"),  # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    (L40S, 224, 224, BF16, {"grad": False}, "flash"),
    (L40S, 256, 256, BF16, {}, "flash"),
    (L40S, 256, 256, BF16, {"dropout": 0.1}, "efficient"),
    (A100, 224, 224, BF16, {}, "flash"),
    (L40S, 128, 128, FP32, {}, "efficient"),  # check_dtypes_low_precision
    (L40S, 36, 36, BF16, {}, "flash"),  # padded to 40
    (L40S, 36, 36, BF16, {"mask": True}, "math"),  # check_head_dim_size_mem_efficient: multiples of 16 bytes
    (L40S, 36, 36, FP32, {"mask": True}, "efficient"),
    (L40S, 128, 128, BF16, {"heads": 2, "gqa": True}, "flash"),  # check_grouped_query_attention
    (L40S, 128, 128, BF16, {"heads": 2}, "math"),  # check_batch_size_and_num_heads_dense
    (L40S, 128, 128, BF16, {"heads": 2, "gqa": True, "mask": True}, "math"),  # mem-efficient has no grouped heads
    (L40S, 128, 128, FP32, {"heads": 2, "gqa": True}, "math"),
    (H100, 128, 128, BF16, {}, "cudnn"),  # check_prefer_cudnn_attention
    (H100, 128, 128, BF16, {"mask": True}, "cudnn"),  # check_attn_mask_shape
    (H100, 128, 128, BF16, {"heads": 2, "gqa": True, "mask": True}, "cudnn"),
    (H100, 192, 128, BF16, {"mask": True}, "cudnn"),  # check_cudnn_tensor_shapes: up to 256 on 9.0
    (H100, 256, 256, BF16, {}, "cudnn"),
    (H100, 264, 264, BF16, {}, "efficient"),
    (H100, 60, 60, BF16, {}, "flash"),  # multiples of 8
    (H100, 128, 128, FP32, {}, "efficient"),
    (B200, 192, 128, BF16, {}, "cudnn"),
    (B200, 160, 160, BF16, {}, "flash"),  # 128 on 10.x
    (RTX_5090, 128, 128, BF16, {}, "flash"),
    (T4, 128, 128, BF16, {}, "math"),  # greater_than_or_equal_sm80_mem_efficient_dtypes
    (T4, 128, 128, FP16, {}, "efficient"),  # check_flash_attention_hardware_support: from 8.0
]


@pytest.mark.parametrize(("capability", "d", "d_v", "dtype", "more", "expected"), CHOICES)
def test_the_operator_is_the_one_that_torch_chooses(
    capability: Any, d: int, d_v: int, dtype: torch.dtype, more: dict[str, Any], expected: str
) -> None:
    tensors = inputs(d, d_v, dtype, more.get("heads", 8), more.get("grad", True))
    mask = torch.empty(2, 1, 64, 64, dtype=torch.bool, device="meta") if "mask" in more else None
    is_causal = mask is None
    chosen = choose_operator(capability, *tensors, mask, more.get("dropout", 0.0), is_causal, more.get("gqa", False))
    assert chosen == expected


def test_what_the_process_has_turned_off_is_not_chosen() -> None:
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert choose_operator(H100, *inputs(128, 128, BF16), is_causal=True) == "flash"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


@pytest.mark.parametrize("capability", [L40S, H100])
@pytest.mark.parametrize(
    ("d", "d_v", "length", "masked"), [(16, 16, 64, False), (24, 16, 64, True), (16, 16, 60, True)]
)
def test_fused_operators_have_the_shapes_and_gradients_of_plain_attention_and_no_scores(
    capability: Any, d: int, d_v: int, length: int, masked: bool
) -> None:
    gpu = find_gpu("h100-80gb" if capability == H100 else "l40s")
    with FakeTensorMode(), (tracker := Tracker({}, capability=gpu.capability)), replace_attention(gpu.capability):
        q, k = (torch.empty(2, 4, length, d, dtype=BF16, requires_grad=True) for _ in range(2))
        v = torch.empty(2, 4, length, d_v, dtype=BF16, requires_grad=True)
        mask = torch.empty(2, 1, length, length, dtype=torch.bool) if masked else None
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
        assert out.shape == (2, 4, length, d_v)
        out.sum().backward()
        assert [tensor.grad.shape for tensor in (q, k, v)] == [tensor.shape for tensor in (q, k, v)]
    scores = 2 * 4 * length * length
    assert all(block.bytes < 2 * scores for block in tracker.log.blocks if "inside" not in block.op)


def test_a_mask_whose_rows_are_not_aligned_is_padded_for_the_efficient_kernel() -> None:
    """`preprocess_mask`: once for all heads, to a multiple of 8."""
    with FakeTensorMode(), (tracker := Tracker({})):
        q, k, v = (torch.empty(1, 4, 60, 16, dtype=BF16) for _ in range(3))
        attention(L40S, q, k, v, torch.empty(1, 1, 60, 60, dtype=torch.bool))
    assert [block.bytes for block in tracker.log.blocks if block.op.startswith("constant_pad")] == [60 * 64 * 2]


def traced(folder: Path, model_type: str, gpu: str | None, *, packing: bool, length: int = 256) -> Trace:
    config = toy_run(
        write_toy(folder / model_type, model_type, num_hidden_layers=1),
        model_type,
        LORA,
        model={"dtype": "bf16"},
        train={"sequence_length": length},
        data={"train": "unread", "packing": packing},
    )
    return trace(config, gpu=None if gpu is None else find_gpu(gpu))


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("model_type", "packing"), in_pairs(["deepseek_v2", "deepseek_v3"], [True, False], every=2))
def test_latent_attention_has_no_float32_scores_on_a_gpu(tmp_path: Path, model_type: str, packing: bool) -> None:
    scores = 2 * 4 * 256 * 256 * 4  # B · h · S · S in float32

    def largest(gpu: str | None) -> int:
        return max(block.bytes for block in traced(tmp_path, model_type, gpu, packing=packing).log.blocks)

    assert largest(None) >= scores  # the CPU's math kernel: what this test would find
    for gpu in ("a6000", "l40s", "h100"):
        assert largest(gpu) < scores / 2


def test_packed_documents_have_no_mask_on_a_gpu(tmp_path: Path) -> None:
    """Padding needs a mask [B, 1, S, S], as numbers too; packed documents need neither."""
    mask = 2 * 250 * 250

    def has_mask(gpu: str | None, *, packing: bool) -> bool:
        blocks = traced(tmp_path, "mixtral", gpu, packing=packing, length=250).log.blocks
        return any(block.bytes in (mask, 2 * mask, 4 * mask) for block in blocks)

    assert has_mask("l40s", packing=False)
    assert has_mask(None, packing=True)
    assert not has_mask("l40s", packing=True)
