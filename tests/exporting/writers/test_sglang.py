"""The adapter that SGLang reads where all experts share the outer factors: stored once, and the same updates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moetune.exporting.adapter import convert_adapter, merge_adapter
from moetune.exporting.export import export
from tests.exporting.runs import tensors_of, write_base, write_run

LORA: dict[str, Any] = {"rank": 2, "alpha": 5, "targets": ["attention", "experts"]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("model_type", "gate_up"), [("mixtral", "fused"), ("qwen3_moe", "split")])
def test_outer_factors_are_stored_once_and_everything_else_by_expert(
    model_type: str, gate_up: str, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", model_type, num_hidden_layers=2)
    run = write_run(tmp_path / "run", base, {"lora": LORA | {"gate_up": gate_up, "share": "outer"}})
    result = export(run.path, "sglang", tmp_path / "sglang")
    assert "--experts-shared-outer-loras" in " ".join(result.notes)
    of_experts = {
        n: t for n, t in load_file(tmp_path / "sglang" / "adapter_model.safetensors").items() if "experts" in n
    }
    once = {name for name, tensor in of_experts.items() if tensor.ndim == 3}
    assert len(once) == 2 * 3  # two layers: A of gate and of up, B of down
    for name, tensor in of_experts.items():
        is_outer = ("lora_B" in name) == any(down in name for down in (".w2.", ".down_proj."))
        assert (name in once) == is_outer == (not any(part.isdigit() for part in name.split("experts.")[1].split(".")))
        assert (tensor.shape[0] == 1) == is_outer

    export(run.path, "merged", tmp_path / "merged")
    merge_adapter(str(base), tmp_path / "sglang", tmp_path / "again")
    expected, found = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "again")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)

    export(run.path, "peft", tmp_path / "peft")
    convert_adapter(str(base), tmp_path / "sglang", "peft", tmp_path / "converted")
    convert_adapter(str(base), tmp_path / "peft", "sglang", tmp_path / "back")
    for made, there in (("converted", "peft"), ("back", "sglang")):
        made_of, like = (load_file(tmp_path / name / "adapter_model.safetensors") for name in (made, there))
        assert made_of.keys() == like.keys()
        assert all(made_of[name].equal(tensor) for name, tensor in like.items())
    assert json.loads((tmp_path / "sglang" / "adapter_config.json").read_text())["r"] == 2


def test_experts_with_factors_of_their_own_stay_apart(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2)
    export(write_run(tmp_path / "run", base, {"lora": LORA}).path, "sglang", tmp_path / "sglang")
    assert {t.ndim for t in load_file(tmp_path / "sglang" / "adapter_model.safetensors").values()} == {2}
