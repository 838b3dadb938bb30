"""The adapter that vLLM reads: its keys and shapes, and that they multiply out to what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetune.errors import UserError
from moetune.exporting import vllm
from moetune.exporting.export import export
from moetune.exporting.vllm import check_vllm
from tests.exporting.runs import tensors_of, write_base, write_run

LORA: dict[str, Any] = {"rank": 2, "alpha": 5, "targets": ["attention", "experts"], "layers": "1-2", "ids": [2, 3]}
PROJECTIONS = {
    "mixtral": ("model.layers.1.block_sparse_moe.experts", ["w1", "w3", "w2"]),
    "qwen3_moe": ("model.layers.1.mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the checker was asked, and what it read."""
    asked: list[Any] = []

    def check(*arguments: Any) -> Any:
        read = check_vllm(*arguments)
        asked.append((arguments, read))
        return read

    monkeypatch.setattr(vllm, "check_vllm", check)
    return asked


@pytest.mark.parametrize("gate_up", ["fused", "split"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_vllm_would_compute_what_a_merged_checkpoint_does(
    model_type: str, gate_up: str, checked: list[Any], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", model_type, num_hidden_layers=3)
    run = write_run(tmp_path / "run", base, {"lora": LORA | {"gate_up": gate_up}})
    result = export(run.path, "vllm", tmp_path / "vllm")
    export(run.path, "merged", tmp_path / "merged")
    settings = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    (((_, layouts, linears, rank), read),) = checked
    assert (rank, scale) == (settings["r"], 2.5)
    assert settings["rank_pattern"] == settings["alpha_pattern"] == {}
    assert settings["modules_to_save"] is None
    assert result.tensors == len(load_file(tmp_path / "vllm" / "adapter_model.safetensors"))

    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    for name in linears:
        ((A, B),) = read[name]
        torch.testing.assert_close(before[f"{name}.weight"] + scale * B @ A, after[f"{name}.weight"])
        changed.discard(f"{name}.weight")
    for one in layouts:
        pairs = iter(read[one.module])
        for expert in range(one.experts):
            for projection in one.projections or ("gate_up_proj", "down_proj"):
                A, B = next(pairs)
                key = (
                    f"{one.module}.{projection}"
                    if not one.projections
                    else f"{one.module}.{expert}.{projection}.weight"
                )
                old, new = (tensors[key] if one.projections else tensors[key][expert].T for tensors in (before, after))
                torch.testing.assert_close(old + scale * B @ A, new)
                assert bool((B @ A).any()) == (expert in (2, 3))
                changed.discard(key)
    assert not changed
    if model_type in PROJECTIONS:
        assert (layouts[0].module, list(layouts[0].projections)) == PROJECTIONS[model_type]


def test_what_vllm_would_refuse_is_refused(checked: list[Any], tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=3)
    run = write_run(tmp_path / "run", base, {"lora": LORA})
    export(run.path, "vllm", tmp_path / "vllm")
    ((_, layouts, linears, rank), _) = checked[0]
    file = tmp_path / "vllm" / "adapter_model.safetensors"
    whole = load_file(file)
    some = "base_model.model.model.layers.1.block_sparse_moe.experts.7.w2.lora_A.weight"
    for tensors, said in [
        ({name: tensor for name, tensor in whole.items() if name != some}, "needs both factors of model.layers.1"),
        (whole | {some: torch.zeros(1, 3)}, r"would not read .*experts.7.w2: lora_A \[1, 3\]"),
        (whole | {"model.norm.weight": torch.zeros(1)}, "would not know the key model.norm.weight"),
        (whole | {some.replace(".1.", ".0."): torch.zeros(1)}, "would not know model.layers.0"),
    ]:
        save_file(tensors, file)
        with pytest.raises(UserError, match=said):
            check_vllm(file.parent, layouts, linears, rank)


@pytest.mark.parametrize(
    ("adapt", "said"),
    [
        ({"lora": LORA, "router": "1"}, "trains model.layers.1.mlp.gate.weight beside LoRA"),
        ({"router": "1"}, "has no adapt.lora"),
    ],
)
def test_what_an_adapter_cannot_hold(adapt: dict[str, Any], said: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=3)
    run = write_run(tmp_path / "run", base, adapt)
    with pytest.raises(UserError, match=said):
        export(run.path, "vllm", tmp_path / "vllm")
    assert not (tmp_path / "vllm").exists()
