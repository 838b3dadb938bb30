"""Tokenizers that transformers would replace by others are refused; those that tokenizer.json describes are read."""

import base64
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moetune.errors import UserError
from moetune.models.catalog import find_model
from moetune.training.data.load import tokenizer_of
from tests.small import write_model
from tests.toys import toy_config

TIKTOKEN = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
TEKKEN = json.dumps({"config": {"pattern": "."}, "vocab": [], "special_tokens": []}).encode()
KIMI = ["tokenization_kimi.TikTokenTokenizer", None]
TEXT = "hello  wo\u0308rld 12345 don't"


def write(folder: Path, model_type: str = "qwen3_moe", files: dict[str, bytes] | None = None, **settings: Any) -> str:
    toy_config(model_type).save_pretrained(folder)
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('it was run')")
    return str(folder)


@pytest.mark.parametrize("model_type", ["kimi_linear", "mixtral"])
@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"tiktoken.model": TIKTOKEN}, {"auto_map": {"AutoTokenizer": KIMI}}, "tokenization_kimi.TikTokenTokenizer"),
        ({"tiktoken.model": TIKTOKEN}, {"tokenizer_class": "TikTokenTokenizer"}, "is TikTokenTokenizer"),
        ({"tiktoken.model": TIKTOKEN}, {}, "tiktoken.model, which does not say"),
        ({"qwen.tiktoken": TIKTOKEN}, {"auto_map": {"AutoTokenizer": ["t.QWenTokenizer", None]}}, "QWenTokenizer"),
        (
            {"tokenizer.model": SENTENCEPIECE, "vocab.json": b"{}", "merges.txt": b""},
            {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["t.InternLM2Tokenizer", None]}},
            "InternLM2Tokenizer",
        ),
    ],
)
def test_code_that_is_not_run_is_refused(
    model_type: str, files: dict[str, bytes], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, model_type, files, **settings)
    with pytest.raises(UserError, match=rf"{re.escape(message)}.*put a tokenizer\.json"):
        tokenizer_of("model", folder)


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "MistralCommonBackend"}])
def test_tekken_alone_is_named_with_the_command_that_converts_it(settings: dict[str, str], tmp_path: Path) -> None:
    folder = write(tmp_path, "mixtral", {"tekken.json": TEKKEN}, **settings)
    with pytest.raises(UserError, match=r"tekken\.json, .*mistral-common.*convert_tekken_tokenizer"):
        tokenizer_of("model", folder)


def test_a_sentencepiece_model_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers tells to install tiktoken."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = write(tmp_path, files={"tokenizer.model": SENTENCEPIECE}, tokenizer_class="LlamaTokenizer")
    with pytest.raises(UserError, match=r"tokenizer\.model, .*pip install sentencepiece"):
        tokenizer_of("model", folder)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_sentencepiece_model_gives_its_own_tokens_or_is_refused(
    is_same: bool, own: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.23.0 merges by id: findings/transformers_sentencepiece_spaces.sh."""
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(own.decode()))
    made.vocab_files_names = {"vocab_file": "tokenizer.model"}

    class Model:
        def __init__(self, model_file: str) -> None:
            assert Path(model_file).read_bytes() == SENTENCEPIECE

        def encode(self, text: str) -> list[int]:
            return list(made(text, add_special_tokens=False)["input_ids"]) if is_same else [0]

    package = ModuleType("sentencepiece")
    package.__spec__ = ModuleSpec("sentencepiece", None)
    vars(package)["SentencePieceProcessor"] = Model
    monkeypatch.setitem(sys.modules, "sentencepiece", package)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: made)
    folder = write(tmp_path, files={"tokenizer.model": SENTENCEPIECE}, tokenizer_class="LlamaTokenizer")
    if is_same:
        assert tokenizer_of("model", folder) is made
    else:
        with pytest.raises(UserError, match=r"tokenizer\.model .* other tokens .*put a tokenizer\.json"):
            tokenizer_of("model", folder)


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "GPT2Tokenizer"}, {"tokenizer_class": "LlamaTokenizer"}])
def test_a_folder_without_a_tokenizer_is_refused(settings: dict[str, str], tmp_path: Path) -> None:
    """transformers makes one without tokens."""
    with pytest.raises(UserError, match=r"no tokenizer in .*tokenizer\.json.*copy"):
        tokenizer_of("model", write(tmp_path, **settings))


def test_a_model_without_a_tokenizer_or_with_a_pointer_to_it_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n")
    with pytest.raises(UserError, match=r"is a pointer of Git LFS; .*git lfs pull"):
        tokenizer_of("model", str(tmp_path / "model"))
    file.unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer in .*tokenizer\.json.*copy"):
        tokenizer_of("model", str(tmp_path / "model"))


@pytest.fixture
def own() -> bytes:
    entry = find_model("tiny-mixtral")
    assert entry is not None
    return (Path(str(entry.folder)) / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"auto_map": {"AutoTokenizer": KIMI}},
        {"tokenizer_class": "TikTokenTokenizer"},
        {"auto_map": {"AutoTokenizer": KIMI}, "tokenizer_class": "LlamaTokenizer"},  # has a pattern of its own
        {"tokenizer_class": "Qwen2Tokenizer"},  # so does this, and transformers puts it in place of the file's
    ],
)
@pytest.mark.parametrize("others", [{"tiktoken.model": TIKTOKEN}, {"tekken.json": TEKKEN}])
def test_tokenizer_json_is_read_as_it_is(
    own: bytes, settings: dict[str, Any], others: dict[str, bytes], tmp_path: Path
) -> None:
    """transformers#45488, #45812, #45920: its classes split digits and accents by patterns of their own."""
    tokenizer = tokenizer_of("model", write(tmp_path, "deepseek_v3", {"tokenizer.json": own, **others}, **settings))
    expected = Tokenizer.from_str(own.decode()).encode(TEXT, add_special_tokens=False).ids
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"eos_token": "<pad>"},
            r"eos_token in .* is '<pad>' by tokenizer_config\.json and '</s>' by special_tokens_map",
        ),
        (
            {"eos_token": "</s>", "split_special_tokens": True},
            "split_special_tokens: true, .*'</s>'.*; set it to false",
        ),
        ({"eos_token": {"content": "</s>"}, "chat_template": "another"}, None),
        ({"eos_token": "</s>", "chat_template": [{"name": "default", "template": "another"}]}, None),
    ],
)
def test_settings_that_other_files_overrule_are_named(
    own: bytes, settings: dict[str, Any], said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers 5 saves an end-of-sequence token that special_tokens_map.json, of transformers 4, undoes."""
    files = {"tokenizer.json": own, "special_tokens_map.json": b'{"eos_token": "</s>"}'}
    templates = {"chat_template.jinja": b"one", "chat_template.json": b'{"chat_template": "of a processor"}'}
    folder = write(tmp_path, files=files | templates, **settings)
    if said is not None:
        with pytest.raises(UserError, match=said):
            tokenizer_of("model", folder)
        return
    assert tokenizer_of("model", folder).chat_template == "one"
    assert capsys.readouterr().err.count("has another chat template than the one that is read") == 2


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("says", [True, False, None])
def test_add_bos_token_is_said_where_tokenizer_json_does_otherwise(
    own: bytes, begins: bool, says: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers 5 takes it out of the settings before it makes the tokenizer; 4 followed it."""
    whole = own if begins else json.dumps(json.loads(own) | {"post_processor": None}).encode()
    folder = write(tmp_path, files={"tokenizer.json": whole}, bos_token="<s>", add_bos_token=says)
    assert (tokenizer_of("model", folder)(TEXT).input_ids[0] == 1) is begins
    beginning = f"texts begin {'with' if begins else 'without'} <s> by tokenizer.json; add_bos_token: {says}"
    assert (beginning in capsys.readouterr().err) is (says not in (None, begins))


@pytest.mark.parametrize(("name", "model_type"), [("Qwen2Tokenizer", "qwen3_moe"), ("LlamaTokenizer", "mixtral")])
def test_what_auto_tokenizer_gives_in_its_place_is_said(
    own: bytes, name: str, model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers read the folder so (findings/transformers_tokenizer_json_replaced.sh)."""
    tokenizer_of("model", write(tmp_path, model_type, {"tokenizer.json": own}, tokenizer_class=name))
    said = capsys.readouterr().err
    assert ("is a Qwen2Tokenizer that gives other tokens" in said) is (name == "Qwen2Tokenizer")
    write(tmp_path, model_type, {"tokenizer.json": own}, tokenizer_class="PreTrainedTokenizerFast")
    tokenizer_of("model", str(tmp_path))
    assert "gives other tokens" not in capsys.readouterr().err


def test_tekken_beside_it_is_said_where_mistral_common_reads_that(
    own: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which AutoTokenizer does where it is installed, whatever class tokenizer_config.json names."""

    class MistralCommonBackend:
        def __call__(self, *_: Any, **__: Any) -> dict[str, list[int]]:
            return {"input_ids": [1, 2]}

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: MistralCommonBackend())
    tokenizer_of("model", write(tmp_path, files={"tokenizer.json": own, "tekken.json": b"{}"}))
    said = capsys.readouterr().err
    assert "is a MistralCommonBackend that gives other tokens" in said
    assert "remove tekken.json, in exports too" in said


def test_a_tokenizer_that_draws_tokens_is_refused(own: bytes, tmp_path: Path) -> None:
    """The same data would be other data when a run is resumed."""
    drawn = json.loads(own)
    drawn["model"]["dropout"] = 0.1
    with pytest.raises(UserError, match=r"model\.dropout: 0\.1, by which a text has other tokens.*to null"):
        tokenizer_of("model", write(tmp_path, files={"tokenizer.json": json.dumps(drawn).encode()}))


@pytest.mark.parametrize("value", [None, 7, "", [], [7], [[]], {}, {"AutoTokenizer": {}}, {"AutoTokenizer": [None, 7]}])
@pytest.mark.parametrize("key", ["auto_map", "tokenizer_class"])
def test_odd_settings_are_read_or_refused(own: bytes, key: str, value: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, files={"tokenizer.json": own}, **{key: value})
    with suppress(UserError):
        assert tokenizer_of("model", folder)(TEXT).input_ids


def test_a_special_token_without_a_text_is_none(own: bytes, tmp_path: Path) -> None:
    """transformers looks for the id of such an unk_token until it ends in a RecursionError."""
    tokenizer = tokenizer_of("model", write(tmp_path, files={"tokenizer.json": own}, unk_token="", pad_token=""))
    assert (tokenizer.unk_token_id, tokenizer.pad_token, tokenizer.convert_tokens_to_ids("no such token")) == (
        None,
    ) * 3


def test_commands_refuse_it(tmp_path: Path, small_data: Path, moetune: Callable[..., Any]) -> None:
    folder = write(tmp_path, files={"tiktoken.model": TIKTOKEN}, auto_map={"AutoTokenizer": KIMI})
    for command in (["eval", folder, "--data", small_data], ["generate", folder, "--prompt", "hello"]):
        result = moetune(*command)
        assert (result.code, KIMI[0] in result.err) == (2, True), result.err
