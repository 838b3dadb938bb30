"""`moetune generate` and `moetune chat`: text by transformers' `generate`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, StopStringCriteria, TextStreamer
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING

from moetune.errors import UserError, note, note_once, reading
from moetune.inference.opened import Opened, open_model
from moetune.json_files import first_problem
from moetune.training.data.chats.chat_template import ChatTemplate
from moetune.training.data.chats.stop_tokens import stop_ids
from moetune.training.data.encoder import begun, bos_of
from moetune.training.data.load import pad_token_id

_NEUTRAL: tuple[object, ...] = (None, False, 0, 1, "", [], {})
"""Values with which a setting of generation changes nothing."""
_OTHERS = re.compile(
    "do_sample$|temperature$|max_|use_|cache_|(pad|bos|decoder_start)_token_id$|transformers_version$|_|output_|"
    "return_|assistant_|num_assistant_|target_lookbehind$|.*compile"
)
"""Settings of `generation_config.json` that options of the commands stand for, or that change no text."""
Message = dict[str, Any]
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

    A thought that special tokens part from the answer, as gpt-oss's channels do, is put in <think> tags before it.

    Args:
        opened: an opened model; or what `open_model` opens.
        prompt: the text to continue; or chat messages, which the tokenizer's chat template turns into text.
        max_new_tokens: the largest number of tokens to generate; less if the model has fewer positions left.
        temperature: 0 for the most likely token at each position; above 0, tokens are sampled.
        seed: seed of the sampling.
        stream: also print the text on stdout while it is generated.

    Raises:
        UserError: messages are given and the tokenizer has no chat template; the prompt is empty, is longer than the
            model's positions, or has tokens that the model does not have; generation_config.json holds an invalid
            value; or the model computes NaN.
    """
    opened = opened if isinstance(opened, Opened) else open_model(str(opened))
    prompts = [token_ids(opened, prompt)]
    return continued(opened, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stream=stream)[
        0
    ]


def token_ids(opened: Opened, prompt: str | list[Message]) -> list[int]:
    """Return the token ids of a prompt: text, or chat messages, to which the chat template is applied.

    Raises `UserError` for messages without a template, a prompt that is empty or takes all positions of the model, and
    tokens that the model does not have.
    """
    tokenizer: Any = opened.tokenizer
    if isinstance(prompt, str):
        ids = begun(bos_of(tokenizer), np.array(tokenizer(prompt, add_special_tokens=False)["input_ids"])).tolist()
    elif not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {opened.name!r} has no chat template; give a prompt as text, or train with "
            "data.chat_template"
        )
    else:
        ids = tokenizer(ChatTemplate(tokenizer).prompt(prompt), add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError("the prompt is empty: it has no tokens")
    text_config = opened.settings.get_text_config()
    if (largest := max(*ids, pad_token_id(tokenizer))) >= text_config.vocab_size:
        raise UserError(
            f"the tokenizer of {opened.name!r} has token {largest}; the model has embeddings for "
            f"{text_config.vocab_size} only. Its tokenizer_config.json says which tokens there are"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and len(ids) >= positions:
        raise UserError(f"the prompt has {len(ids):,} tokens, and the model has positions for {positions:,}")
    return list(ids)


def continued(
    opened: Opened,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stream: bool = False,
) -> list[str]:
    """Return the text that continues each prompt, generated in one batch.

    The prompts are padded on the left to the longest. Keys and values of all positions are allocated once (a static
    cache), for B prompts of at most S tokens B·(S + max_new_tokens) positions; layers with a sliding window keep no
    more than the window. Models without a static cache grow theirs.

    Args:
        prompts: token ids of each prompt, from `token_ids`.
        max_new_tokens: the largest number of tokens to generate; less if the longest prompt leaves fewer positions.
        temperature, seed: 0 for the most likely tokens; above 0, tokens are sampled with this seed.
        stream: also print the text on stdout while it is generated; for one prompt only.

    Raises:
        UserError: the temperature, the number of tokens or generation_config.json is invalid; or the model computes
            NaN.
    """
    if not (temperature == 0 or 1e-3 <= temperature <= 1e3) or max_new_tokens < 1:  # NaN is neither
        raise UserError(
            f"temperature={temperature}, max_new_tokens={max_new_tokens}: give a temperature of 0 or from 0.001 to "
            "1000, and 1 token or more"
        )
    model: Any = opened.model
    tokenizer: Any = opened.tokenizer
    pad, length = pad_token_id(tokenizer), max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in prompts], device=model.device)
    is_token = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    model.generation_config = sampling(opened.name, model.generation_config)
    if strings := model.generation_config.stop_strings:
        with reading(f"generation_config.json of {opened.name!r}: stop_strings"):
            StopStringCriteria(tokenizer, strings)  # `generate` makes it again, from a cache
    torch.manual_seed(seed)

    def numbers(_: Tensor, logits: Tensor) -> Tensor:
        if logits.isnan().any():
            raise UserError(f"{opened.name!r} computes NaN: its weights are damaged")
        return logits

    most = new_tokens(opened.settings, length, max_new_tokens)
    ends = stop_ids(tokenizer, opened.settings, model.generation_config)
    written = written_after(
        model,
        ids,
        is_token,
        most,
        temperature,
        ends=ends,
        pad=pad,
        logits_processor=[numbers],
        tokenizer=tokenizer,
        streamer=_Stream(tokenizer, ends) if stream else None,
    )
    if stream and written.shape[1] == length + most and int(written[0, -1]) not in ends:
        note(f"the text ends after {most} tokens (--max-new-tokens), and the model would go on")
    return [_text(opened.name, tokenizer, row) for row in written[:, length:].tolist()]


class _Stream(TextStreamer):
    """Prints what a model writes, with special tokens, up to the one of `ends` that ends it."""

    def __init__(self, tokenizer: Any, ends: list[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        self._ends = ends

    def put(self, value: Tensor) -> None:
        if self.next_tokens_are_prompt or int(value) not in self._ends:
            super().put(value)


def _text(name: str, tokenizer: Any, ids: list[int]) -> str:
    """Return generated tokens as text without special tokens.

    Where these part a thought from an answer, the thought is in <think> tags, as in data for training. Others within
    the text are named in a note.
    """
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    while ids and ids[-1] in special:
        ids = ids[:-1]
    plain: str = tokenizer.decode(ids, skip_special_tokens=True)
    if not (within := {special[number]: None for number in ids if number in special}):
        return plain

    if tokenizer.chat_template:
        apart = ChatTemplate(tokenizer).told_apart(tokenizer.decode(ids), within)
        if apart is not None:
            return apart
    note_once(f"special tokens within a text of {name!r} are left out of it: {', '.join(within)}")
    return plain


def new_tokens(settings: PretrainedConfig, prompt: int, most: int) -> int:
    """Return how many tokens are generated after `prompt` tokens: `most`, or as many as the model has positions for.

    `settings` is the model's configuration. The result is below 1 if the prompt takes all positions.
    """
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None)
    return most if positions is None else min(most, positions - prompt)


def written_after(
    model: PreTrainedModel,
    ids: Tensor,
    is_token: Tensor,
    max_new_tokens: int,
    temperature: float,
    *,
    ends: int | list[int],
    pad: int,
    **overrides: Any,
) -> Tensor:
    """Return prompts `ids` [B, S] with the N ≤ `max_new_tokens` tokens that a model generates after them, [B, S + N].

    Args:
        is_token: 1 for each token of a prompt, 0 for padding on its left; [B, S].
        max_new_tokens: the number of tokens to generate, for which the model must have positions.
        temperature: 0 for the most likely token at each position; above 0, tokens are sampled.
        ends, pad: ids of the tokens that end a text, and of the one that follows it, as padding.
        overrides: further arguments of transformers' `generate`.
    """
    generate: Any = model.generate
    settings = {"cache_implementation": "static" if has_static_cache(model.config) else "dynamic", **overrides}
    return generate(
        input_ids=ids,
        attention_mask=is_token,
        max_new_tokens=max_new_tokens,
        eos_token_id=None if ends == [] else ends,
        pad_token_id=pad,
        use_cache=True,
        disable_compile=True,
        do_sample=temperature > 0,
        **({"temperature": temperature} if temperature else {}),
        **settings,
    )


def has_static_cache(settings: PretrainedConfig) -> bool:
    """Return whether transformers has a static cache for all layers of a model with this configuration.

    It has none for compressed attention (DeepSeek-V4).
    """
    kinds = getattr(settings.get_text_config(), "layer_types", None) or ()
    return {*kinds} <= STATIC_LAYER_TYPE_MAPPING.keys()


class _Sampling(BaseModel):
    """The settings of a model's `generation_config.json` that are used; others that change a text are named."""

    model_config = ConfigDict(from_attributes=True)

    top_k: NonNegativeInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0)] | None = None
    no_repeat_ngram_size: NonNegativeInt | None = None
    min_new_tokens: NonNegativeInt | None = None
    suppress_tokens: list[NonNegativeInt] | None = None
    begin_suppress_tokens: list[NonNegativeInt] | None = None
    stop_strings: str | list[str] | None = None
    eos_token_id: Any = None


def sampling(name: str, settings: GenerationConfig | None) -> GenerationConfig:
    """Return only the settings in `_Sampling` of the `generation_config.json` of the model `name`.

    None, for a model without this file, gives the defaults. Others that change a text are named in a note. Raises
    `UserError` for an invalid value.
    """
    try:
        valid = _Sampling.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"generation_config.json of {name!r}: {first_problem(error)}") from None
    given = {} if settings is None else settings.to_dict()
    unread = [key for key, value in given.items() if value not in _NEUTRAL and not _OTHERS.match(key)]
    if keys := ", ".join(key for key in unread if key not in _Sampling.model_fields):
        note_once(f"generation_config.json of {name!r}: {keys}: not applied")
    return GenerationConfig(**{key: value for key, value in valid.model_dump().items() if value not in (None, [], "")})
