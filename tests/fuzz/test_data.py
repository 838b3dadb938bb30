"""Damaged data and chat templates: sequences, or one short message."""

import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from moetune.config.schema import DataConfig, TrainConfig
from moetune.errors import UserError
from moetune.training.data.load import Datasets, load_data
from tests import small
from tests.fuzz.damage import answer, cases, damaged, garbled, garbled_bytes, to_json, write

CHAT = {"messages": [{"role": "user", "content": "a router"}, {"role": "assistant", "content": "sends tokens"}]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "a router sends every token"}, {"text": "to two of four experts"}],
    "prompt": small.DATA[:3],
    "chat": [CHAT, CHAT],
}
TEMPLATES = (
    "{% for i in range(100000) %}{% for j in range(100000) %}{{ 'x' * (1000000 + j) }}{% endfor %}{% endfor %}",
    "{{ 'x' * 10000000000 }}", "{{ ['x'] * 10000000000 }}", "{{ 10 ** 10000 }}", "{{ messages.__class__ }}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ raise_exception('no') }}", "{{ messages[9].content }}", "{% include 'x' %}", "{{ 1 / 0 }}",
    "{{ nothing.at.all }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ messages | map('upper') | join }}", "{% generation %}x",
    "{% generation %}{% endgeneration %}", "{{ '\\ud800' }}", "{{ cycler.__init__.__globals__.os.system('false') }}",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(small_model)


def read(file: Path, tokenizer: Any, format: Any, packing: bool) -> Datasets:
    return load_data(
        DataConfig(train=str(file), format=format, packing=packing), tokenizer, TrainConfig(sequence_length=32)
    )


def test_data(pytestconfig: pytest.Config, tokenizer: Any, tmp_path: Path) -> None:
    answers = []
    for seed in cases(pytestconfig):
        draw = random.Random(seed)
        rows: list[Any] = list(draw.choice(list(ROWS.values())))
        at = draw.randrange(len(rows))
        rows[at] = damaged(rows[at], draw)
        raw = b"\n".join(to_json(row).encode() for row in rows) + b"\n"
        if draw.random() < 0.3:
            raw = garbled_bytes(raw, draw)
        if draw.random() < 0.01:
            raw = b"[" * 100_000 + b"\n"
        name = draw.choice(
            ("d.jsonl", "d.jsonl", "d.jsonl", "d.json", "d.csv", "d.txt", "d.parquet", "d", "d.jsonl:train")
        )
        file = write(tmp_path / name, raw)
        format, packing = (
            draw.choice(("auto", "auto", "text", "prompt", "chat", "alpaca", "sharegpt")),
            draw.random() < 0.5,
        )
        answers.append(answer(seed, lambda f=file, o=(format, packing): read(f, tokenizer, *o), lambda r=raw: repr(r)))
    assert len(answers) / 10 < sum(isinstance(one, UserError) for one in answers) < len(answers)


def test_templates(pytestconfig: pytest.Config, small_model: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Whatever a template writes, reads or never stops to write, nothing runs and memory stays."""
    file = write(tmp_path / "d.jsonl", (json.dumps(CHAT) + "\n").encode())
    whole = (small_model / "chat_template.jinja").read_text()
    before = tokenizer.chat_template
    try:
        for seed in cases(pytestconfig):
            draw = random.Random(seed)
            template = TEMPLATES[seed] if seed < len(TEMPLATES) else whole
            for _ in range(0 if seed < len(TEMPLATES) else draw.choice((1, 1, 2, 5))):
                template = garbled(template, draw)
            tokenizer.chat_template = template
            answer(seed, lambda: read(file, tokenizer, "auto", False), lambda t=template: t)
    finally:
        tokenizer.chat_template = before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 * 2**20  # KiB
