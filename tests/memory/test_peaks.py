"""Commands that do not train take of the host's memory what is predicted: within 5 % of the peak of their process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import small
from tests.memory.peaks import off
from tests.toys import toy_config

WIDE = {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 2048, "intermediate_size": 2048}
MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 512, "head_dim": 64},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 64},
    "deepseek_v2": {"n_routed_experts": 16, "moe_intermediate_size": 512},
}
COMMANDS = ("eval", "generate", "score", "quantize", "export")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_data(tmp_path_factory.mktemp("data") / "rows.jsonl")


def write(folder: Path, model_type: str) -> Path:
    """A toy of 100 to 250 MB in float32, with the tokenizer of `tests/small.py`."""
    small.write_model(folder, num_hidden_layers=1)
    for file in (folder / "model.safetensors", folder / "config.json", folder / "generation_config.json"):
        file.unlink(missing_ok=True)
    config = toy_config(model_type, **{**WIDE, **MODELS[model_type]})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def run_of(model: Path, data: Path, here: Path) -> Path:
    """A run of one step with LoRA, in a process of its own."""
    import yaml

    run = small.run_file(model, data, here / "run", "router", train={"steps": 1, "accumulate": 1})
    run["adapt"] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
    (here / "run.yaml").write_text(yaml.safe_dump(run))
    from tests.memory.peaks import taken

    taken("train", here / "run.yaml")
    return here / "run"


@pytest.mark.full
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_host_holds_what_is_predicted(command: str, model_type: str, data: Path, tmp_path: Path) -> None:
    model = write(tmp_path / "model", model_type)
    match command:
        case "eval":
            found = off(tmp_path, "eval", model, "--data", data, out=False)
        case "generate":
            found = off(tmp_path, "generate", model, "--prompt", "a router sends", "--max-new-tokens", "16", out=False)
        case "score":
            found = off(tmp_path, "score", model, "--data", data)
        case "quantize":
            found = off(tmp_path, "quantize", model)
        case "export":
            found = off(tmp_path, "export --format merged", run_of(model, data, tmp_path))
    assert abs(found) <= 0.05, found
