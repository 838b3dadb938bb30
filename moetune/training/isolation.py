"""Whether a model keeps packed documents apart. Some do not, and nothing in transformers says so.

transformers turns `position_ids` into a block-diagonal mask only if the model's code passes them to the mask builder
(gpt_oss does not), only attention mixes tokens (not Mamba, linear-attention or convolution layers), every choice among
tokens sees the mask (not an indexer that picks the best keys, nor scores of blocks), and, with flash attention, the
batch has one row. So the model is tested, at the length that it trains with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moetune.adapt.attention import cu_seqlens, wants_cu_seqlens
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.models.moe import is_experts
from moetune.models.stack import decoder_stack
from moetune.training.run_warnings import refuse_broken_weights


@torch.no_grad()
def refuse_leaky_packing(model: nn.Module, micro_batch: int, length: int) -> None:
    """Compare a document's hidden states behind two different documents, bit by bit.

    What a mask hides contributes exactly zero, so there is no tolerance. Experts are left out: other tokens would
    change the sizes of their products, and so the rounding. It takes less than two forward passes of a micro-step.

    Args:
        model: a causal LM, or PEFT's wrapper of one, with its weights, as it will train.
        micro_batch: the most rows of a batch in training and evaluation.
        length: tokens of a row.

    Raises:
        UserError: the hidden states differ.
    """
    wrapped: Any = model
    embedding = wrapped.get_input_embeddings()
    device, rows = embedding.weight.device, min(micro_batch, 2)
    first = length // 2 | 1  # odd: no block of a power of two ends there
    if length <= first:
        return
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.weight.shape[0], (2, rows, length), generator=generator)
    ids[1, :, first:] = ids[0, :, first:]
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(rows, length).to(device)
    documents = cu_seqlens([first, length - first] * rows) if wants_cu_seqlens(wrapped) else {}
    documents = {name: value.to(device) if torch.is_tensor(value) else value for name, value in documents.items()}
    stack, was_training = decoder_stack(wrapped), model.training
    model.eval()  # dropout and router jitter would draw from the random state
    try:
        with _without_experts(model):
            one, other = (
                stack(input_ids=of.to(device), position_ids=positions, use_cache=False, **documents)[0][:, first:]
                for of in ids
            )
    finally:
        model.train(was_training)
    if not (one.isfinite().all() and other.isfinite().all()):
        refuse_broken_weights(model)
    elif not one.equal(other):
        config = wrapped.config
        raise UserError(
            f"data.packing: true, but {config.model_type} with attention {config._attn_implementation} and "
            f"{micro_batch} sequences of {length} tokens a batch lets one packed document see another; set "
            "data.packing: false"
        )


class _Scaling(nn.Module):
    """Replaces experts: each multiplies its rows by a number of its own, so that choices and weights still matter."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * (top_k_weights / (1 + top_k_index)).sum(-1, keepdim=True).to(hidden_states.dtype)


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    experts = {
        path: module for path, module in model.named_modules() if isinstance(module, ExpertBank) or is_experts(module)
    }
    for path in experts:
        model.set_submodule(path, _Scaling())
    try:
        yield
    finally:
        for path, module in experts.items():
            model.set_submodule(path, module)
