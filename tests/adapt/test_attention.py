"""Packed documents by their cu_seqlens are what they are by a mask."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moetune.adapt import attention
from moetune.adapt.attention import (
    BY_DOCUMENTS,
    MASKED_SINKS,
    VARLEN,
    attention_for,
    cu_seqlens,
    give_way_to_masks,
    takes_cu_seqlens,
)
from moetune.adapt.documents import document_lengths, split_by_documents
from moetune.compat.transformers import has_sinks
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.models.structure import meta_model
from moetune.training.isolation import refuse_leaky_packing
from moetune.training.step.batch import collate
from tests.adapt.flash_on_cpu import flash_on_cpu  # noqa: F401  # a fixture
from tests.thinned import thinned
from tests.toys import VOCAB, expert_model_types, toy_config, toy_model

L40S, T4 = (8, 9), (7, 5)


def plain_of(model_type: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> PreTrainedModel:
    config = toy_config(model_type, **sizes)
    config.dtype = dtype
    return meta_model(config)


def accepts(model_type: str, capability: Any = L40S, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> bool:
    return takes_cu_seqlens(plain_of(model_type, dtype, **sizes), capability)


USUAL = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "phi3", "falcon_h1", "lfm3", "qwen3_5_text", "zamba2")
# fmt: off
ACCEPTED = [
    "aria_text", "axk1", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoeshared", "hunyuan_v1_moe",
    "hy_v3", "kolibri1", "laguna", "lfm2_moe", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen2_moe",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open", "zaya",
]
# fmt: on
"""Every mixture of experts without sinks that is built and takes cu_seqlens."""
BY_OFFSETS_ONLY = ["granitemoehybrid"]
"""A mixture of experts that takes cu_seqlens, and whose mask does not separate documents (test_documents.py)."""
WITH_SINKS = ["flint", "gpt_oss", "granitemoe_swa", "mimo_v2_flash"]


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


def test_a_window_that_attention_is_not_told_of_is_left_to_the_mask() -> None:
    windowed = {"layer_types": ["sliding_attention"] * 4} | WINDOWS
    assert accepts("qwen2_moe")
    assert not accepts("qwen2_moe", **windowed)
    assert accepts("qwen3_moe", **windowed)
    assert accepts("qwen3_moe", **windowed | {"sliding_window": 1 << 16})
    assert not accepts("qwen3_moe", **windowed | {"sliding_window": 1 << 17})


def with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name
    return model


POSITIONS = torch.stack(
    [torch.cat([torch.arange(10), torch.arange(14)]), torch.cat([torch.arange(17), torch.arange(7)])]
)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize(
    "model_type", thinned([*ACCEPTED, *USUAL], 6, ("mixtral", "qwen3_moe", "deepseek_v3", "granitemoe"))
)
def test_borders_give_the_values_and_gradients_of_a_mask(model_type: str) -> None:
    model = toy_model(model_type).eval().float()
    ids = torch.randint(3, VOCAB, POSITIONS.shape, generator=torch.Generator().manual_seed(0))
    seen = []
    split_by_documents(model)
    lengths = document_lengths([10, 14, 17, 7])
    offsets = lengths | cu_seqlens([10, 14, 17, 7])
    for name, documents in (("sdpa", lengths), (BY_DOCUMENTS, offsets), (VARLEN, offsets)):
        model.zero_grad()
        with_attention(model, name)
        logits = model(input_ids=ids, position_ids=POSITIONS, use_cache=False, **documents).logits
        logits.float().logsumexp(-1).sum().backward()
        seen.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(seen[0]) > 1
    for masked, *by_offsets in zip(*seen, strict=True):
        for told in by_offsets:
            assert (masked - told).abs().max() <= 1e-5 * masked.abs().max().clamp(min=1.0)


@pytest.mark.full
def test_the_models_that_people_train_take_borders_and_those_that_cannot_do_not() -> None:
    accepted = [name for name in expert_model_types() if accepts(name)]
    assert sorted(accepted) == sorted([*ACCEPTED, *BY_OFFSETS_ONLY, *WITH_SINKS])
    assert all(has_sinks(plain_of(name)) == (name in WITH_SINKS) for name in accepted)
    for model_type in USUAL:
        assert accepts(model_type), model_type
    for model_type in ("gemma2", "jamba", "mamba", "phimoe", "bert", "deepseek_v32", "deepseek_v4", "hy_v4"):
        assert not accepts(model_type), model_type
    assert not accepts("mixtral", T4)
    assert not accepts("mixtral", dtype=torch.float32)
    assert not accepts("mixtral", head_dim=512)
    assert accepts("mixtral", (8, 0), head_dim=224)
    assert not accepts("mixtral", L40S, head_dim=224)
    assert not accepts("mixtral", attention_dropout=0.1)


def chosen(model_type: str, capability: Any, attention: str = "sdpa", packing: bool = True, **sizes: Any) -> str:
    raw = {"model": {"path": "unread", "attention": attention}, "adapt": {}, "data": {"train": "x", "packing": packing}}
    run, plain = RunConfig.model_validate(raw), plain_of(model_type, **sizes)
    return attention_for(run, plain, torch.device("cuda"), capability)


def test_only_packed_runs_on_a_gpu_take_them() -> None:
    assert chosen("mixtral", L40S) == VARLEN
    assert chosen("mixtral", None) == chosen("mixtral", L40S, packing=False) == chosen("mixtral", T4) == "sdpa"
    assert chosen("mixtral", L40S, "eager") == "eager"


def test_models_with_sinks_take_them_on_a_cpu_too_and_else_a_mask() -> None:
    assert chosen("gpt_oss", L40S) == VARLEN
    assert chosen("gpt_oss", None) == chosen("gpt_oss", None, dtype=torch.float32) == BY_DOCUMENTS
    assert chosen("gpt_oss", L40S, packing=False) == chosen("gpt_oss", None, packing=False) == MASKED_SINKS
    assert chosen("gpt_oss", T4) == chosen("deepseek_v4", L40S) == chosen("hy_v4", None) == MASKED_SINKS
    assert chosen("gpt_oss", L40S, attention_dropout=0.1) == MASKED_SINKS
    assert chosen("gpt_oss", L40S, "eager") == "eager"


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize("name", [BY_DOCUMENTS, VARLEN])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_attention_gives_way_to_a_mask_where_a_pass_needs_one(model_type: str, name: str) -> None:
    """Rows padded on the left, and keys of earlier tokens; padding on the right needs none."""
    model: Any = toy_model(model_type).eval().float()
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :5] = right[0, 7:] = 0
    with_attention(model, "eager")
    wanted = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [model(input_ids=ids, attention_mask=mask, use_cache=False).logits for mask in (left, right)]
    written = model.generate(input_ids=ids, attention_mask=left, use_cache=True, **wanted)
    with_attention(model, name)
    give_way_to_masks(model)
    padded = model(input_ids=ids, attention_mask=right, use_cache=False).logits
    assert model.config._attn_implementation == name
    torch.testing.assert_close(padded[right == 1], expected[1][right == 1], atol=1e-5, rtol=1e-4)
    padded = model(input_ids=ids, attention_mask=left, use_cache=False).logits
    assert model.config._attn_implementation == (MASKED_SINKS if model_type == "gpt_oss" else "sdpa")
    torch.testing.assert_close(padded[left == 1], expected[0][left == 1], atol=1e-5, rtol=1e-4)
    with_attention(model, name)
    give_way_to_masks(model)
    assert model.generate(input_ids=ids, attention_mask=left, use_cache=True, **wanted).equal(written)


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("gpt_oss", BY_DOCUMENTS),
        ("gpt_oss", VARLEN),
        ("lfm2_moe", "sdpa"),
        ("lfm2_moe", VARLEN),
        ("qwen3_5_moe", VARLEN),
    ],
)
def test_documents_are_found_in_positions(model_type: str, name: str) -> None:
    """Other trainers give these alone: TRL with `packing`, transformers with `DataCollatorWithFlattening`."""
    model: Any = toy_model(model_type).train().float()
    ids = torch.randint(3, VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0, 0, 1, 2, 3]])
    with_attention(model, name)
    split_by_documents(model)
    give_way_to_masks(model)
    for rows in (1, 2):
        numbers = positions[:rows].eq(0).cumsum(-1)  # which TRL gives too, for kernels of packages
        packed = model(input_ids=ids[:rows], position_ids=positions[:rows], seq_idx=numbers, use_cache=False).logits
        apart = [
            model(input_ids=document[None], use_cache=False).logits[0]
            for row, lengths in zip(ids[:rows], ([4, 6], [2, 3, 1, 4]), strict=False)
            for document in row.split(lengths)
        ]
        torch.testing.assert_close(packed.flatten(0, 1), torch.cat(apart), atol=1e-5, rtol=1e-4)


def test_offsets_are_the_sums_of_lengths() -> None:
    told = cu_seqlens([3, 2, 1, 4])
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 3, 5, 6, 10]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert told["max_length_q"] == told["max_length_k"] == 4


def test_the_collator_tells_them_to_models_that_ask() -> None:
    item = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "position_ids": [0, 1, 0], "is_token": [1, 1, 0]}
    assert collate([item, item], 0, document_inputs=cu_seqlens)["cu_seq_lens_q"].tolist() == [0, 2, 3, 5, 6]
    assert not [name for name in collate([item], 0) if "cu_seq" in name or "max_length" in name]


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize("rows", [1, 2])
def test_isolation_is_proved_of_borders_and_a_kernel_that_ignores_them_is_refused(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_attention(toy_model("qwen3_moe"), VARLEN)
    refuse_leaky_packing(model, rows, 12)
    kernel = attention.within_documents

    def leaky(q: Tensor, k: Tensor, v: Tensor, sink: None, starts: Tensor, longest: int, *more: Any) -> Tensor:
        return kernel(q, k, v, sink, starts[[0, -1]], len(q), *more)

    monkeypatch.setattr(attention, "within_documents", leaky)
    with pytest.raises(UserError, match="lets one packed document see another"):
        refuse_leaky_packing(model, rows, 12)
