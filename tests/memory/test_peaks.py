"""Commands that do not train take of the host's memory what is predicted: within 5 % of the peak of their process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests import small
from tests.memory.peaks import MODELS, off, taken, write

COMMANDS = ("eval", "generate", "generate --prompts", "score", "quantize", "export")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_data(tmp_path_factory.mktemp("data") / "rows.jsonl")


def run_of(model: Path, data: Path, here: Path) -> Path:
    """A run of one step with LoRA, in a process of its own."""
    run = small.run_file(model, data, here / "run", "router", train={"steps": 1, "accumulate": 1})
    run["adapt"] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
    (here / "run.yaml").write_text(yaml.safe_dump(run))
    taken("train", here / "run.yaml")
    return here / "run"


@pytest.mark.full
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_host_holds_what_is_predicted(command: str, model_type: str, data: Path, tmp_path: Path) -> None:
    # of four experts that are drawn at random one receives three quarters of the tokens; balanced routing is predicted
    routes = model_type == "gpt_oss" and command in ("score", "generate --prompts")
    more = {"num_local_experts": 16, "intermediate_size": 512} if routes else {}
    model = write(tmp_path / "model", model_type, **more)
    match command:
        case "eval":
            found = off(tmp_path, "eval", model, "--data", data, out=False)
        case "generate":
            found = off(tmp_path, "generate", model, "--prompt", "a router sends", "--max-new-tokens", "16", out=False)
        case "generate --prompts":
            prompts = tmp_path / "prompts.jsonl"
            texts = ["a router sends every token to two of the experts, " * (1 + number % 5) for number in range(24)]
            prompts.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in texts))
            found = off(tmp_path, command, prompts, model, "--batch", 24, "--max-new-tokens", 24, "--temperature", 0.7)
        case "score":
            rows = small.write_data(tmp_path / "rows.jsonl", small.DATA * 24)  # all padding goes to the same
            found = off(tmp_path, "score", model, "--data", rows, "--tokens", 4096)
        case "quantize":
            found = off(tmp_path, "quantize", model)
        case "export":
            found = off(tmp_path, "export --format merged", run_of(model, data, tmp_path))
    assert abs(found) <= 0.05, found
