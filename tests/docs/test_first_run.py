"""The guide from a file to a model in use, as a new user would follow it: on its model, and on other folders."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetune.models.catalog import find_model
from tests.docs.test_commands import ROOT
from tests.exporting.runs import write_base

PAGE = (ROOT / "docs" / "guides" / "first-run.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[tuple[str, str]]:
    """(what stands behind the language, content) of the page's blocks of a kind."""
    return re.findall(rf"^```{kind} ([\w.]+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A random Qwen3-MoE with the tokenizer of `tiny-mixtral`, whose template it has."""
    tiny = find_model("tiny-mixtral")
    assert tiny is not None
    assert tiny.folder is not None
    folder = write_base(tmp_path / "qwen", "qwen3_moe", num_hidden_layers=2, vocab_size=tiny.config["vocab_size"])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny.folder / name, folder)
    return folder


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["small_model", *(pytest.param(m, marks=pytest.mark.full) for m in ("tiny-mixtral", "qwen"))]
)
def test_the_guide(
    model: str, moetune: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    path = model if model == "tiny-mixtral" else str(request.getfixturevalue(model))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for kind in ("json", "yaml"):
        for name, content in blocks(kind):
            Path(name).write_text(content.replace("tiny-mixtral", path), encoding="utf-8")
    said = {}
    for _, block in blocks("bash"):
        for line in block.splitlines():
            program, *arguments = shlex.split(line.replace("tiny-mixtral", path))
            assert program == "moetune"
            ended = moetune(*arguments)
            assert ended.code == 0, f"{line}\n{ended.err}"
            said[line] = ended.out

    assert "held out: 2 records" in said["moetune data run.yaml"]
    assert "next: moetune report runs/first" in said["moetune train run.yaml"]
    assert Path("runs/first/report.html").is_file()
    tokenizer = AutoTokenizer.from_pretrained("out/merged")
    ids = tokenizer("A router sends every token", return_tensors="pt").input_ids
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained("out/merged", dtype=torch.float32).eval()(ids).logits
        base = path if model != "tiny-mixtral" else str(find_model(path).folder)  # type: ignore[union-attr]
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        before = plain(ids).logits
        adapted = PeftModel.from_pretrained(plain, "out/adapter").eval()(ids).logits
        applied = AutoModelForCausalLM.from_pretrained("out/applied", dtype=torch.float32).eval()(ids).logits
    moved = (merged - before).norm()
    assert (merged - adapted).norm() < 0.1 * moved  # a merged checkpoint is rounded to the base's precision
    assert not torch.equal(applied, before)
    settings = json.loads(Path("out/vllm/adapter_config.json").read_text())
    factors = load_file("out/vllm/adapter_model.safetensors")
    assert all(settings["r"] in tensor.shape for tensor in factors.values())
    losses = [float(re.search(r"loss (\S+),", said[line])[1]) for line in said if "--data mine.json" in line]  # type: ignore[index]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
