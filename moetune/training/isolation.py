"""Whether a model keeps packed documents apart. Some do not, and nothing in transformers says so.

transformers turns `position_ids` into a block-diagonal mask only if the model's code hands them to the mask
builder (gpt_oss does not), attention is all that mixes tokens (not so in Mamba, linear-attention or
convolution layers) and, with flash attention, the batch has one row. So the model itself is asked, by way of
gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from moetune.adapt.attention import borders, wants_borders
from moetune.errors import UserError
from moetune.training.notices import refuse_broken_weights

DOCUMENT_TOKENS = 6
CUDA_DOCUMENT_TOKENS = 64
"""CUDA's kernels work in blocks of so many tokens: the probe shall run what training runs."""


def refuse_leaky_packing(model: torch.nn.Module, micro_batch: int) -> None:
    """Differentiates a packed document's logits by the embeddings of the document before it.

    Masked attention makes that gradient exactly zero, so there is no tolerance to choose. Parameters get no
    gradient, and no hook on them fires.

    Args:
        model: a transformers causal LM, or PEFT's wrapper of one, with its weights, as it will train.
        micro_batch: rows a batch has in training or evaluation, whichever is more.

    Raises:
        UserError: the first document reaches the second.
    """
    wrapped: Any = model
    embedding = wrapped.get_input_embeddings()
    device = embedding.weight.device
    length = CUDA_DOCUMENT_TOKENS if device.type == "cuda" else DOCUMENT_TOKENS
    tokens = 2 * length
    ids = torch.arange(tokens, device=device).remainder(embedding.weight.shape[0]).expand(micro_batch, tokens)
    positions = torch.arange(length, device=device).repeat(micro_batch, 2)
    documents = borders([length] * (2 * micro_batch)) if wants_borders(wrapped) else {}
    documents = {name: value.to(device) if torch.is_tensor(value) else value for name, value in documents.items()}
    was_training = model.training
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    model.eval()  # dropout and router jitter would draw from the random state
    hook = embedding.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, **documents).logits
            second = logits[:, length:].float().logsumexp(-1).sum()
            (gradient,) = torch.autograd.grad(second, embedded[0])
    finally:
        hook.remove()
        model.train(was_training)
    if not gradient.isfinite().all():
        refuse_broken_weights(model)
    elif gradient[:, :length].any():
        config = wrapped.config
        raise UserError(
            f"data.packing: true, but {config.model_type} with attention {config._attn_implementation} and "
            f"{micro_batch} sequences a batch lets one packed document see another; set data.packing: false"
        )
