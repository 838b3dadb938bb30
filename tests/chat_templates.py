"""TRL's chat templates, the models' own and those for training, and a tokenizer of bytes and control tokens."""

import re
from collections.abc import Iterable
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
_CONTROL = re.compile(r"<[|｜][^<>\s'\"{}]*>|<[a-z_]+\|>|<(?:start|end)_of_turn>|</?(?:think|tool_call|arg_\w+)>")


def of_trl(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_with(template: str, tokens: Iterable[str | AddedToken] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte, the control tokens that a template spells, and `tokens`."""
    bytes_ = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(bytes_, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [*tokens, *sorted({*_CONTROL.findall(template)} - {str(token) for token in tokens})]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special,
        chat_template=template,
    )
