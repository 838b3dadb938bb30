"""`moetune data`: what a run's data become, as text, JSON and a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moetune.cli.main import app
from moetune.report.data import words
from tests.report.test_page import Page

RUN = """
model: {path: tiny-mixtral}
adapt: {router: all}
data: {train: talks.json, validation: 0.2, too_long: drop}
train: {sequence_length: 64, micro_batch: 2, accumulate: 2}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [{"instruction": f"Say <b>{row}</b>", "input": "", "output": "so " * row} for row in range(1, 81, 2)]
    (tmp_path / "talks.json").write_text(json.dumps(records))
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def data(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_counts_add_up(run: Path) -> None:
    found = json.loads(data(run, "--json"))
    train, held_out = found["train"], found["eval"]
    assert found["schema"] == 1
    assert train["dropped"] > 0
    assert train["records"] + held_out["records"] + train["dropped"] == 40
    assert train["tokens"] + train["padding"] == 64 * train["sequences"]
    assert sum(count for *_, count in train["lengths"]["histogram"]) == train["records"]
    assert found["steps_an_epoch"] == -(-train["sequences"] // found["sequences_a_step"])
    for record in found["first"]:
        text = "".join(token for token, _ in record)
        answer = "".join(token for token, trains in record if trains)
        assert "[INST]Say <b>" in text
        assert re.fullmatch(r"(so ?)+</s>", answer)


def test_text_marks_what_carries_loss(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    talks = run.with_name("talks.json")
    talks.write_text(talks.read_text().replace("Say", "\\u001b[31mSay"))
    text = data(run, "--records", "1")
    assert "«so" in text
    assert "</s>»" in text
    assert "\\x1b[31mSay" in text
    assert "\x1b" not in text
    for line in words(json.loads(data(run, "--json"))):
        assert line in text


def test_the_page_stands_alone_and_shows_text_as_text(run: Path, tmp_path: Path) -> None:
    data(run, "--html", tmp_path / "data.html")
    html = (tmp_path / "data.html").read_text()
    page = Page(html)
    assert "Say <b>" in page.text
    assert "src=" not in html
    assert "http" not in html.replace("http-equiv", "")


def test_splits_of_a_folder_and_what_is_passed_over(tmp_path: Path) -> None:
    """Training and evaluation of one folder read two of its splits; `data.split` names another."""
    for split, count in {"train": 3, "validation": 2, "test": 4}.items():
        file = tmp_path / "set" / "data" / f"{split}-00000-of-00001.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(["text", *(f"{split} {number}" for number in range(count))]))
    run = tmp_path / "run.yaml"
    run.write_text(RUN.replace("train: talks.json, validation: 0.2, too_long: drop", "train: set, eval: set"))
    found = json.loads(data(run, "--json"))
    assert (found["train"]["records"], found["eval"]["records"]) == (3, 2)
    of_train, of_eval = found["notes"]
    assert "the split 'train' is read" in of_train
    assert "the split 'validation' is read" in of_eval
    assert "data/test-00000-of-00001.csv (split test)" in of_train
    found = json.loads(data(run, "--json", "--set", "data.split=test", "--set", "data.eval=set:train"))
    assert (found["train"]["records"], found["eval"]["records"]) == (4, 3)
    weighted = ["--set", "data.train=[{path: 'set:validation', weight: 2}, set]", "--set", "data.split=test"]
    assert json.loads(data(run, "--json", *weighted))["train"]["records"] == 2 * 2 + 4
