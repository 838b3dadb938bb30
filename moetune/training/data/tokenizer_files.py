"""`load_tokenizer`: a tokenizer as its files describe it, refused where transformers would put another there.

Code of a model's tokenizer (Kimi's `tokenization_kimi.py`) is never run. transformers then takes a class of its own
without a word, which splits text by another pattern, because a vocabulary such as tiktoken's does not contain it. Only
`tokenizer.json` describes a tokenizer in full. Of that transformers 5 takes the vocabulary alone where
`tokenizer_config.json` names a class that has a pattern of its own (`GPT2Tokenizer`, `Qwen2Tokenizer`, …).
"""

import importlib.util
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from moetune.errors import UserError, note
from moetune.files import refuse_pointer
from moetune.json_files import read_json

_WHOLE, _TEKKEN, _VOCABULARIES = "tokenizer.json", "tekken.json", ("tiktoken.model", "tokenizer.model")
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")
"""A line of a vocabulary in tiktoken's format: a token in base64, and its rank."""
_PROBE = "It's 12345.67 of HERS,  DON'T you\n\n\tthink? e\u0301 ﬁ 你好 foo_bar() <b>"
"""A text that patterns of classes split in different ways."""
_MOST_GROWTH = 1000  # factor by which a tokenizer may lengthen a text; common rules replace a space by 3 bytes
_REMEDY = f"put a {_WHOLE} beside it, from a copy of the model that has one (docs/guides/what-goes-wrong.md)"


def load_tokenizer(folder: str, on_disk: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `folder`, a folder or a name on the hub (`on_disk`: only from the local cache).

    One that has a `tokenizer.json` is read from it, unchanged, whatever class its settings name.

    Raises:
        UserError: it has code of its own and no `tokenizer.json`; its vocabulary is tiktoken's or Mistral's; a package
            is missing; the folder has none of its files, or files that contradict each other.
        Exception: whatever transformers raises for files that it cannot read.
    """

    def find(name: str) -> Path | None:
        if Path(folder).is_dir():
            return file if (file := Path(folder, name)).is_file() else None
        try:
            return Path(hf_hub_download(folder, name, local_files_only=on_disk))
        except EntryNotFoundError:
            return None

    files = map(find, ("tokenizer_config.json", "config.json"))
    configs = [read_json(file, dict[str, Any]) if file else {} for file in files]
    code = next((code for config in configs if (code := _code_in(config)) is not None), None)
    whole = find(_WHOLE)
    tokenizer: PreTrainedTokenizerBase
    if whole is not None:
        refuse_pointer(whole)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=on_disk)
    else:
        _refuse_vocabulary(f"the tokenizer in {folder!r}", code, find)
        tokenizer = _made(folder, on_disk, find)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if getattr(tokenizer, name) == "":  # which is no token: transformers would look for its id without end
            setattr(tokenizer, name, None)
    if tokenizer.is_fast:
        _refuse_growth(tokenizer.backend_tokenizer)  # before any text is tokenized
    if whole is not None:
        if dropout := getattr(tokenizer.backend_tokenizer.model, "dropout", None):
            raise UserError(
                f"tokenizer.json in {folder!r} has model.dropout: {dropout:g}, by which a text has other tokens each "
                "time; set it to null"
            )
        says, begins = configs[0].get("add_bos_token"), [*tokenizer("a")["input_ids"][:1]] == [tokenizer.bos_token_id]
        if says not in (None, begins) and tokenizer.bos_token is not None:
            note(
                f"{folder}: texts begin {'with' if begins else 'without'} {tokenizer.bos_token} by tokenizer.json; "
                f"add_bos_token: {says} of tokenizer_config.json is not read, by transformers 5 neither"
            )
        with suppress(Exception):  # where transformers fails, nothing else is read in silence
            auto = AutoTokenizer.from_pretrained(folder, local_files_only=on_disk, trust_remote_code=False)
            if auto(_PROBE, verbose=False)["input_ids"] != tokenizer(_PROBE, verbose=False)["input_ids"]:
                remedy = "set tokenizer_class: PreTrainedTokenizerFast in tokenizer_config.json"
                if (kind := type(auto).__name__) == "MistralCommonBackend":  # whatever class is set
                    remedy = f"remove {_TEKKEN}"
                note(
                    f"{folder}: what transformers 5 makes of it, and servers with it, is a {kind} that gives other "
                    f"tokens than tokenizer.json, which is read here: {remedy}, in exports too"
                )
    others = {"tokenizer_config.json": configs[0]}
    if file := find("chat_template.json"):  # where processors keep it
        tokenizer.chat_template = tokenizer.chat_template or template_in(file)
        others[file.name] = read_json(file, dict[str, Any])
    texts = _texts(tokenizer.chat_template)
    for name, settings in others.items():
        if any(texts.get(key) != text for key, text in _texts(settings.get("chat_template")).items()):
            note(f"{folder}: {name} has another chat template than the one that is read")
    _refuse_contradictions(tokenizer, configs[0], folder)
    return tokenizer


def _refuse_growth(backend: Tokenizer) -> None:
    """Raise `UserError` if a tokenizer's replacement rules could make a text more than `_MOST_GROWTH` times as long.

    Tokenizing would then take practically forever, and it cannot be interrupted.
    """
    empty = Tokenizer(BPE())
    empty.normalizer, empty.decoder = backend.normalizer, backend.decoder
    settings = json.loads(empty.to_str())

    def growth(step: dict[str, Any] | None) -> float:
        if step is None or step["type"] not in ("Sequence", "Replace"):
            return 1.0
        if step["type"] == "Sequence":
            steps: list[dict[str, Any]] = step["normalizers" if "normalizers" in step else "decoders"]
            return float(np.prod([growth(inner) for inner in steps]))
        pattern = step["pattern"].get("String")
        return max(1.0, len(step["content"]) / len(pattern) if pattern else 1.0 + len(step["content"]))

    for part in ("normalizer", "decoder"):
        if (times := growth(settings[part])) > _MOST_GROWTH:
            raise UserError(
                f"the {part} in tokenizer.json may make a text {times:.3g} times as long, and {_MOST_GROWTH} is the "
                "most; take the original tokenizer of the model"
            )


def _refuse_contradictions(tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], folder: str) -> None:
    """Raise `UserError` if a special token is not that of `tokenizer_config.json`, or special tokens would be read as
    text."""
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str) and token and token != (read := getattr(tokenizer, name)):
            raise UserError(
                f"the {name} in {folder!r} is {token!r} by tokenizer_config.json and {read!r} by "
                "special_tokens_map.json, which transformers 5 reads and no longer writes: remove that file, or "
                "correct one of them"
            )
    if getattr(tokenizer, "split_special_tokens", False):
        raise UserError(
            f"tokenizer_config.json in {folder!r} has split_special_tokens: true, by which special tokens such as "
            f"{tokenizer.eos_token!r} of a chat template are read as text; set it to false"
        )


def _texts(template: Any) -> dict[Any, str]:
    """Return name -> text of a chat template, or of several, in a list or by name; nothing for None or ""."""
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    named = template if isinstance(template, dict) else {"default": template}
    return {name: text.strip() for name, text in named.items() if isinstance(text, str) and text}


def template_in(file: Path) -> str:
    """Return the chat template in a file: its text or, of a JSON file, what is under `chat_template`.

    Raises `UserError` for JSON without one.
    """
    if file.suffix != ".json":
        return file.read_text(encoding="utf-8")
    template = read_json(file, dict[str, Any]).get("chat_template")
    if not isinstance(template, str):
        raise UserError(f"{str(file)!r} has no text under chat_template; give the template in a .jinja file")
    return template


def _made(folder: str, on_disk: bool, find: Callable[[str], Path | None]) -> PreTrainedTokenizerBase:
    """Return the tokenizer that transformers makes of a vocabulary; raise `UserError` if there is none in `folder`."""
    nothing = UserError(
        f"there is no tokenizer in {folder!r}: no {_WHOLE}, nor other files of which transformers makes one; copy the "
        "files of the model's tokenizer there"
    )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=on_disk, trust_remote_code=False, mistral_format=False
        )
    except ValueError as error:
        raise nothing from error
    names = tokenizer.vocab_files_names.values()
    if names and not any(map(find, names)):  # transformers makes one without tokens
        raise nothing
    for file in filter(None, map(find, _VOCABULARIES)):
        model = importlib.import_module("sentencepiece").SentencePieceProcessor(model_file=str(file))
        # transformers 5.23.0 merges by id, not by score, and may drop the space before the first word
        if tokenizer(_PROBE, add_special_tokens=False)["input_ids"] != model.encode(_PROBE):
            raise UserError(
                f"what transformers makes of {file.name} in {folder!r} gives other tokens than the model itself, for "
                f"runs of spaces above all: {_REMEDY}, or that transformers 4.57.6 writes with save_pretrained"
            )
    return tokenizer


def _code_in(config: dict[str, Any]) -> str | None:
    """Return the tokenizer's class that a configuration names, if transformers does not have it."""
    mapped = config.get("auto_map")
    code = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    own = [name for name in (code if isinstance(code, list) else [code]) if isinstance(name, str)]
    if own:
        return own[0]
    name = config.get("tokenizer_class")
    is_known = not isinstance(name, str) or any(map(tokenizer_class_from_name, (name, f"{name}Fast")))
    return None if is_known else name


def _refuse_vocabulary(where: str, code: str | None, find: Callable[[str], Path | None]) -> None:
    """Raise `UserError` if a tokenizer without `tokenizer.json`, which the message calls `where`, is not described by
    its other files. `code` is its own class, None if transformers has it."""
    if find(_TEKKEN) is not None:
        raise UserError(
            f"{where} is Mistral's {_TEKKEN}, which mistral-common reads, and there is no {_WHOLE}. Write one, with "
            'mistral-common installed: python -c "from transformers.integrations.mistral import '
            f"convert_tekken_tokenizer as convert; convert('{_TEKKEN}').save_pretrained('.')\""
        )
    if code is not None:
        raise UserError(
            f"{where} is {code}, code that is not part of transformers and is never run; what transformers takes in "
            f"its place splits text into other tokens: {_REMEDY}"
        )
    for file in filter(None, map(find, _VOCABULARIES)):
        with file.open("rb") as opened:
            is_tiktoken = _TIKTOKEN_LINE.match(opened.read(1000)) is not None
        if is_tiktoken:
            raise UserError(
                f"{where} is a vocabulary of tiktoken, {file.name}, which does not say how text is split: {_REMEDY}"
            )
        if importlib.util.find_spec("sentencepiece") is None:
            raise UserError(
                f"{where} is a SentencePiece model, {file.name}, and there is no {_WHOLE}: pip install sentencepiece"
            )
