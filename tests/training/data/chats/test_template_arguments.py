"""`data.template` and the date: read by every command, equal to transformers' own arguments, kept with a run."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from pydantic import ValidationError
from transformers.utils.chat_template_utils import render_jinja_template

import moetune
from moetune.config.load import load_run_config
from moetune.config.schema import DataConfig, RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.inference.check import check_export
from moetune.inference.evaluate import evaluate, rows_of
from moetune.inference.generate import token_ids
from moetune.inference.opened import open_model
from moetune.routing.data_sets import read_sources
from moetune.routing.drift import drift
from moetune.run.resolve import resolve
from moetune.training.data.chats.template_arguments import fix_template, given, reads, with_arguments
from moetune.training.folder.run_folder import RunFolder
from moetune.training.preview import preview
from tests import small
from tests.chat_templates import NAMES, of_trl
from tests.resolved import train
from tests.training.data.test_load import CHATML, make_tokenizer

TEMPLATES = {name: of_trl(name) for name in NAMES}
SWITCHED = [name for name, text in TEMPLATES.items() if "enable_thinking" in text or "reasoning_effort" in text]
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho", "reasoning_content": "hm"},
    {"role": "user", "content": "and?"},
]
MOMENT = datetime(2020, 1, 2, 3, 4, 5)
DATED = "{{ 'On ' + strftime_now('%Y-%m-%d') + (', briefly' if brief else '') }}\n" + CHATML


def written(template: str, **arguments: Any) -> str:
    """The chat as transformers writes it; or the name of the error by which the template refuses the arguments."""
    more: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **arguments}
    try:
        texts, _ = render_jinja_template([TALK], chat_template=template, **more)
    except Exception as error:
        return type(error).__name__
    return str(texts[0])


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.one_in(12)
def test_arguments_are_those_of_transformers(name: str) -> None:
    template = TEMPLATES[name]
    for key in reads(template).arguments:
        for value, other in ((False, True), (True, False), ("low", "medium"), (["python"], [])):
            given_by_us = with_arguments(template, {key: value})
            assert written(given_by_us) == written(template, **{key: value}), (key, value)
            assert written(given_by_us, **{key: other}) == written(template, **{key: other}), (key, other)


def test_what_a_template_reads() -> None:
    assert {name: reads(TEMPLATES[name]).arguments for name in ("qwen3", "qwen3_8", "llama3_2", "phi3")} == {
        "qwen3": {"enable_thinking"},
        "qwen3_8": {"add_vision_id", "enable_thinking", "preserve_thinking", "reasoning_effort"},
        "llama3_2": {"custom_tools", "date_string", "tools_in_user_message"},
        "phi3": set(),
    }
    assert reads(TEMPLATES["gptoss"]).arguments >= {"builtin_tools", "model_identity", "reasoning_effort"}
    asks = (
        "{% macro m(a) %}{{ a }}{% if b %}{{ c or 1 }}{% endif %}{% endmacro %}{% set d = d | default(1) %}{{ m(e) }}"
    )
    assert reads(asks).arguments == {"b", "c", "d", "e"}
    assert reads("{% macro m(a) %}{{ a }}{% endmacro %}{{ m(a) }}{{ 'x' * 10000000000 }}").arguments == {"a"}
    clocks = {name: reads(TEMPLATES[name]).clock for name in ("gptoss", "llama3_2", "muse_glimmer", "llama3_1")}
    assert clocks == {"gptoss": True, "llama3_2": True, "muse_glimmer": True, "llama3_1": False}


@pytest.mark.parametrize(
    "value",
    [True, 3, -2.5e-7, 'it\'s "so" %} }} {{\n\\ \u2028 \U0001f600', [1, "a", None, [True]], {"a": {"b": [0.5]}}],
)
def test_values_arrive_as_they_are(value: Any) -> None:
    template = "\n  {% if x is defined %}{{ x | tojson }}{% endif %}\n"
    ours = with_arguments(template, {"x": value})
    assert written(ours) == written(template, x=value)
    assert json.loads(written(ours)) == value
    assert given(ours) == {"x"}
    assert given(template) == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"enable_thinkin": False}, ("data.template.enable_thinkin", "'enable_thinking'")),
        ({"zzz": 1}, ("data.template.zzz", "It reads enable_thinking")),
        ({"enable_thinking": "False"}, ("data.template.enable_thinking: 'False' is text", "write false")),
        ({"messages": []}, ("data.template.messages", "leave it out")),
        ({"bos_token": "x"}, ("data.template.bos_token", "leave it out")),
        ({"strftime_now": "x"}, ("data.template.strftime_now", "leave it out")),
        ({"zzz": 1, "tools": []}, ("data.template.zzz", "data.template.tools")),
    ],
)
def test_an_argument_that_is_not_read_is_refused(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        fix_template(make_tokenizer(TEMPLATES["qwen3"]), arguments, MOMENT)
    assert all(word in str(caught.value) for word in words)


def test_a_template_with_a_byte_order_mark_is_refused() -> None:
    with pytest.raises(UserError, match="byte order mark"):
        fix_template(make_tokenizer("\ufeff{{ messages }}"), {}, MOMENT)


def test_arguments_need_a_template() -> None:
    with pytest.raises(UserError, match=r"data\.chat_template"):
        fix_template(make_tokenizer(), {"enable_thinking": False}, MOMENT)
    with pytest.raises(UserError, match="the chat template cannot be read"):
        fix_template(make_tokenizer("{% if %}"), {"enable_thinking": False}, MOMENT)


def test_the_run_file_checks_names_and_values(tmp_path: Path) -> None:
    for wrong, word in (
        ({"a b": 1}, "a b"),
        ({"a": None}, "leave it out"),
        ({"a": MOMENT}, "in quotes"),
        ({1: 2}, "no name"),
        (5, "template"),
    ):
        with pytest.raises(ValidationError, match=word):
            DataConfig(train="x", template=wrong)
    run = small.run_file(tmp_path, tmp_path / "d.jsonl", tmp_path / "out")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    config = load_run_config(tmp_path / "run.yaml", ["data.template.enable_thinking=false", "data.template.a=[1, x]"])
    assert config.data is not None
    assert config.data.template == {"enable_thinking": False, "a": [1, "x"]}
    assert RunConfig.model_validate(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2020"),
        ("{{ strftime_now('%-d. %B, %H:%M, %j 100%%') }}", f"{MOMENT:%-d. %B, %H:%M, %j 100%%}"),
        ("{% set f = '%A' %}{% macro m() %}{{ strftime_now(f ~ ' %y') }}{% endmacro %}{{ m() }}", "Thursday 20"),
        ("{% if strftime_now is defined %}{{ strftime_now(format='%Y') | int + 1 }}{% endif %}", "2021"),
        ("{% generation %}{{ strftime_now('%m') }}{% endgeneration %}", "01"),
    ],
)
def test_the_clock_stands_still(template: str, expected: str) -> None:
    tokenizer = make_tokenizer(template)
    assert fix_template(tokenizer, {}, MOMENT) == MOMENT
    assert written(str(tokenizer.chat_template)) == expected
    assert fix_template(tokenizer, {}, datetime.now()) is None
    assert written(str(tokenizer.chat_template)) == expected


@pytest.mark.parametrize(
    "template", ["{% macro strftime_now(f) %}own{% endmacro %}{{ strftime_now('%Y') }}", "{{ date_string or 'July' }}"]
)
def test_a_template_without_clock_stays_as_it_is(template: str) -> None:
    tokenizer = make_tokenizer(template)
    assert fix_template(tokenizer, {}, MOMENT) is None
    assert tokenizer.chat_template == template


def test_each_of_several_templates_is_fixed() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = {"default": DATED, "tool_use": CHATML + DATED}
    assert fix_template(tokenizer, {"brief": True}, MOMENT) == MOMENT
    for name, template in tokenizer.chat_template.items():
        assert "On 2020-01-02, briefly" in written(template), name


@pytest.fixture
def date_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Moves this process to a time zone, and returns the date there."""

    def moved(zone: str) -> str:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        return f"{datetime.now():%Y-%m-%d}"

    yield moved
    monkeypatch.undo()
    time.tzset()


def test_date_and_arguments_of_a_run_are_used_by_every_command(
    small_model: Path, tmp_path: Path, date_in: Callable[[str], str]
) -> None:
    (tmp_path / "dated.jinja").write_text(DATED)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    data = small.write_data(tmp_path / "data.jsonl", [{"messages": chat}] * 4)
    run = small.run_file(
        small_model, data, tmp_path / "out", "lora", model={"base": "fp32"},
        train={"steps": 1, "eval_every": 1, "sequence_length": 128},
        data={"eval": str(data), "chat_template": str(tmp_path / "dated.jinja"), "template": {"brief": True}},
    )  # fmt: skip
    config = RunConfig.model_validate(run)
    first = date_in("Pacific/Kiritimati")
    train(config, device="cpu")
    begun = json.loads((tmp_path / "out/inputs.json").read_text())
    today = date_in("Pacific/Pago_Pago")
    assert today < first

    result = train(config.but(train={"steps": 2}), device="cpu", resume="auto")
    now = json.loads((tmp_path / "out/inputs.json").read_text())
    assert (result.steps, now["clock"], now["data"]) == (2, begun["clock"], begun["data"])
    assert now["clock"].startswith(first)

    opened = open_model(str(tmp_path / "out"), device="cpu")
    at_first, at_last = f"On {first}, briefly", f"On {today}, briefly"

    def begins(ids: list[int], begin: str) -> bool:
        return begin in str(opened.tokenizer.decode(ids))

    assert begins(token_ids(opened, chat[:1]), at_first)
    assert begins(rows_of(opened)[0][0]["input_ids"], at_first)
    assert begins(rows_of(opened, str(data))[0][0]["input_ids"], at_first)
    assert evaluate(opened).date == first
    _, shown = preview(config)
    assert at_first in "".join(token for token, _ in shown["first"][0])
    assert any(first in note for note in shown["notes"])
    began = RunFolder(tmp_path / "out").clock()
    sources, _ = read_sources(resolve(config, "cpu"), [str(data)], 10, began)
    assert begins(sources[0].rows[0]["input_ids"], at_first)
    with patch("moetune.routing.drift.read_sources", wraps=read_sources) as read:
        drift(tmp_path / "out", tokens=10, device="cpu")
    assert read.call_args.args[-1] == began

    export(tmp_path / "out", "merged", tmp_path / "merged")
    assert (tmp_path / "merged/chat_template.jinja").read_text() == with_arguments(DATED, {"brief": True})
    with patch("moetune.inference.check.rows_of", wraps=rows_of) as of:
        compared = check_export(tmp_path / "out", tmp_path / "merged", 2)
    assert (compared.of, of.call_args.args[0].clock) == ("held-out data", began)
    merged = open_model(str(tmp_path / "merged"), device="cpu")
    assert begins(token_ids(merged, chat[:1]), at_last)
    assert evaluate(merged, str(data)).date == today
    assert begins(moetune.trl_tokenizer(config).apply_chat_template(chat)["input_ids"], at_last)
