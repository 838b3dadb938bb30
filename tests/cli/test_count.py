"""The commands `count` and `models`, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.cli import main

RUN_FILE = """
model: {path: tiny-mixtral}
adapt: {router: all, lora: {rank: 4, alpha: 8, targets: [attention]}}
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs the program in this process and returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["moetune", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_count_json_of_mixtral(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "count", "mixtral-8x7b", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == 1
    assert result["total"] == 46_702_792_704
    assert result["active_per_token"] == 12_879_925_248
    assert result["components"]["experts"] == 45_097_156_608
    assert result["components"]["router"] == 1_048_576
    assert (result["num_moe_layers"], result["num_experts"], result["top_k"]) == (32, 8, 2)


def test_count_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "count", "qwen1.5-moe-a2.7b") == 0
    out = capsys.readouterr().out
    for text in ("14,315,784,192", "shared_experts", "24 of 24 layers", "60 a layer, 4 of them", "8,650,752"):
        assert text in out


def test_count_table_of_a_dense_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "count", "llama-7b") == 0
    out = capsys.readouterr().out
    assert "6,738,415,616" in out
    assert "none with experts" in out


def test_count_with_a_run_file_also_says_what_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    assert run(monkeypatch, "count", "--run", str(path), "--json") == 0
    trainable = json.loads(capsys.readouterr().out)["trainable"]
    assert trainable["router"] == 4096
    assert trainable["lora"] > 0
    assert trainable["total"] == sum(trainable[part] for part in ("router", "experts", "lora", "other"))
    assert run(monkeypatch, "count", "--run", str(path), "--set", "adapt.lora.rank=8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["trainable"]["lora"] == 2 * trainable["lora"]
    assert run(monkeypatch, "count", "--run", str(path)) == 0
    assert f"{trainable['total']:,}" in capsys.readouterr().out


def test_model_given_beside_a_run_file_replaces_its_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    assert run(monkeypatch, "count", "mixtral-8x7b", "--run", str(path), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["total"] == 46_702_792_704
    assert result["trainable"]["router"] == 1_048_576


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mixtral-8x7"], "Did you mean 'mixtral-8x7b'"),
        ([], "needs a MODEL or --run"),
        (["tiny-mixtral", "--set", "adapt.router=all"], "--set changes a run file"),
        (["--run", "no-such.yaml"], "no-such.yaml"),
    ],
)
def test_bad_input_exits_with_2_and_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(monkeypatch, "count", *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_models_lists_the_catalog(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "models", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == 1
    totals = {model["name"]: model["published_total"] for model in result["models"]}
    assert totals["mixtral-8x7b"] == 46_702_792_704
    assert [model["name"] for model in result["models"] if model["embedded_weights"]] == ["tiny-mixtral"]
    assert run(monkeypatch, "models") == 0
    out = capsys.readouterr().out
    assert "granite-3.1-3b-a800m" in out
    assert "671,026,419,200" in out


@pytest.mark.parametrize("arguments", ["['count', '--help']", "['models']"])
def test_help_and_models_do_not_import_torch(arguments: str) -> None:
    code = (
        "import sys; from moetune.cli.main import app\n"
        f"try: app({arguments})\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
