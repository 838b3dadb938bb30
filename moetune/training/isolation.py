"""Test that a model keeps packed documents apart, which transformers does not report.

Documents packed into one row must not affect each other. transformers keeps them apart by a block-diagonal mask, made
from `position_ids`, and this works only if all of the following holds:

    - the model's code passes `position_ids` to the mask builder (gpt_oss does not)
    - Mamba, linear-attention and convolution layers, which no mask reaches, run document by document
    - every choice among tokens applies the mask (an indexer that picks the best keys, or scores of blocks, may not)
    - with flash attention, the batch has one row

The code of a model does not show this reliably, so the model is run, on rows of the length that it trains with.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from moetune.adapt.attention import document_inputs
from moetune.compat.transformers import attention_name
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.models.moe import is_experts
from moetune.models.stack import StageLayers, below_head
from moetune.training.run_warnings import refuse_broken_weights


@torch.no_grad()
def refuse_leaky_packing(model: nn.Module, micro_batch: int, length: int, stages: Sequence[StageLayers] = ()) -> None:
    """Raise `UserError` if the hidden states of a packed document depend on the document before it in the row.

    The same random document follows two different ones, and its hidden states [rows, tokens, hidden] must be equal bit
    by bit, because what a mask hides contributes exactly zero. During the test a function without weights replaces the
    experts, because the sizes of their matrix products, and so the rounding, depend on all tokens. The test costs less
    than two forward passes of a micro-step.

    Args:
        model: a causal LM, or PEFT's wrapper of one, with weights loaded, in the form in which it will train.
        micro_batch: the larger number of rows of a batch in training and in evaluation. At most 2 rows are tested.
        length: tokens per row; rows of one token are not tested.
        stages: the stages of a pipeline that this rank holds. Each is tested alone, on random hidden states.

    Raises:
        UserError: the hidden states differ, or a weight of the model is not finite.
    """
    wrapped: Any = model
    embedding = wrapped.get_input_embeddings()
    device, rows = next(model.parameters()).device, min(micro_batch, 2)
    first = length // 2 | 1  # odd, so that no block of 2, 4, 8, … tokens ends where the first document does
    if length <= first:
        return
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.weight.shape[0], (2, rows, length), generator=generator)
    ids[1, :, first:] = ids[0, :, first:]
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(rows, length).to(device)
    documents = document_inputs(wrapped)([first, length - first] * rows)
    documents = {name: value.to(device) if torch.is_tensor(value) else value for name, value in documents.items()}
    hidden = torch.randn(2, rows, length, embedding.weight.shape[1], generator=generator)
    hidden[1, :, first:] = hidden[0, :, first:]
    stack, was_training = below_head(wrapped), model.training

    def states(number: int, stage: StageLayers | None) -> Tensor:
        """Return the hidden states of the second document, after the document `number`."""
        inputs = {"input_ids": ids[number].to(device), "position_ids": positions, **documents}
        if stage is None:
            return stack(**inputs, use_cache=False)[0][:, first:]
        with stage.entered(hidden[number].to(device, wrapped.dtype)):
            return stage.hidden_states(inputs)[:, first:]

    model.eval()  # no dropout or router jitter, which would draw random numbers
    try:
        with _without_experts(model):
            after_first, after_second = (
                torch.stack([states(number, stage) for stage in stages or (None,)]) for number in range(len(ids))
            )
    finally:
        model.train(was_training)
    if not (after_first.isfinite().all() and after_second.isfinite().all()):
        refuse_broken_weights(model)
    elif not after_first.equal(after_second):
        config = wrapped.config
        raise UserError(
            f"data.packing: true, but {config.model_type} with attention {attention_name(wrapped)} and "
            f"{micro_batch} sequences of {length} tokens a batch lets one packed document see another; set "
            "data.packing: false"
        )


def _scaled(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute in place of the experts: expert e scales its tokens by 1 / (1 + e), so that routing affects the output.

    Shapes: hidden_states and the result [tokens, hidden]; top_k_index and top_k_weights [tokens, K].
    """
    return hidden_states * (top_k_weights / (1 + top_k_index)).sum(-1, keepdim=True).to(hidden_states.dtype)


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """Replace the forward of every layer's experts by `_scaled` inside the `with`.

    Only `forward` is replaced, not the module: FSDP2 links its modules in the first forward pass, and one missing then
    would become a separate root, which holds its gradient buffers until the end of the backward pass.
    """
    with ExitStack() as replaced:
        for module in model.modules():
            if isinstance(module, ExpertBank) or is_experts(module):
                replaced.enter_context(patch.object(module, "forward", _scaled))
        yield
