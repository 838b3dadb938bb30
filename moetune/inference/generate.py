"""`moetune generate` and `moetune chat`: generate text with any opened model, by transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, TextStreamer

from moetune.errors import UserError, shown
from moetune.inference.opened import Found, Opened, open_model
from moetune.training.data.load import pad_token_id

Message = dict[str, str]
"""A chat message: `role` and `content`."""


def generate(
    opened: Opened | Path | str,
    prompt: str | list[Message],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stream: bool = False,
) -> str:
    """Generate text that continues a prompt, and return it without the prompt and without special tokens.

    Args:
        opened: an opened model; or what `open_model` opens.
        prompt: the text to continue; or chat messages, which the tokenizer's chat template turns into text.
        max_new_tokens: the largest number of tokens to generate; less if the model has fewer positions left.
        temperature: 0 for the most likely token at each position; above 0, tokens are sampled.
        stream: also print the text on stdout while it is generated.

    Raises:
        UserError: messages are given and the tokenizer has no chat template; the prompt is empty, is longer than the
            model's positions, or has tokens that the model does not have; generation_config.json holds an invalid
            value; or the model computes NaN.
    """
    opened = opened if isinstance(opened, Opened) else open_model(str(opened))
    ids, max_new_tokens = asked(opened, prompt, max_new_tokens)
    tokenizer: Any = opened.tokenizer
    torch.manual_seed(seed)

    def numbers(_: Tensor, logits: Tensor) -> Tensor:
        if logits.isnan().any():
            raise UserError(f"{opened.name!r} computes NaN: its weights are damaged")
        return logits

    opened.model.generation_config = sampling(opened.name, opened.model.generation_config)
    written = continued(
        opened.model,
        ids.to(opened.model.device),
        max_new_tokens,
        temperature,
        ends=tokenizer.eos_token_id,
        pad=pad_token_id(tokenizer),
        logits_processor=[numbers],
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None,
    )
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def asked(opened: Opened | Found, prompt: str | list[Message], max_new_tokens: int) -> tuple[Tensor, int]:
    """Return the tokens of a prompt [1, S], and the number of tokens to generate after them. Raises as `generate`."""
    tokenizer: Any = opened.tokenizer
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    elif not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {opened.name!r} has no chat template; give a prompt as text, or train with "
            "data.chat_template"
        )
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    ids = inputs["input_ids"]
    if not ids.numel():
        raise UserError("the prompt is empty: it has no tokens")
    known = opened.settings.get_text_config().vocab_size
    if (largest := max(int(ids.max()), pad_token_id(tokenizer))) >= known:
        raise UserError(
            f"the tokenizer of {opened.name!r} has token {largest}; the model has embeddings for {known} only. Its "
            "tokenizer_config.json says which tokens there are"
        )
    positions = getattr(opened.settings.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        if ids.shape[1] >= positions:
            raise UserError(f"the prompt has {ids.shape[1]:,} tokens, and the model has positions for {positions:,}")
        max_new_tokens = min(max_new_tokens, positions - ids.shape[1])
    return ids, max_new_tokens


def continued(
    model: PreTrainedModel,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    *,
    ends: int | None,
    pad: int,
    **more: Any,
) -> Tensor:
    """Return tokens `ids` [1, S] with those that a model generates after them.

    Args:
        ends, pad: ids of the token that ends a text, and of the one that pads.
        more: further arguments of transformers' `generate`.
    """
    generate: Any = model.generate
    return generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad,
        use_cache=True,
        do_sample=temperature > 0,
        **({"temperature": temperature} if temperature else {}),
        **more,
    )


class _Sampling(BaseModel):
    """The settings of a model's `generation_config.json` that are used; all others are ignored."""

    model_config = ConfigDict(from_attributes=True)

    top_k: NonNegativeInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0)] | None = None


def sampling(name: str, settings: GenerationConfig | None) -> GenerationConfig:
    """Return the sampling settings of a model's `generation_config.json`; raise `UserError` for an invalid value."""
    try:
        found = _Sampling.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"generation_config.json of {name!r}: {key}: {shown(first['input'])}: {first['msg']}") from None
    return GenerationConfig(**found.model_dump(exclude_none=True))
