"""The delta: the checkpoint's own names, nothing that did not train, and no other base without being told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moetune.errors import UserError
from moetune.exporting.apply import apply_delta
from moetune.exporting.export import export
from moetune.exporting.writers.merged import copy_checkpoint
from moetune.inference.opened import open_model
from moetune.models.hub.fingerprint import take_fingerprint
from tests.exporting.runs import ADAPT, FULL, LORA, tensors_of, write_base, write_run

TYPES = ["mixtral", "qwen2_moe", "deepseek_v2", "gpt_oss", "granitemoe", "llama4_text"]


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v2"])
def test_it_has_the_original_names_and_shapes_of_what_was_selected(
    model_type: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    adapt = {"router": "1", "experts": {"layers": "1", "ids": [0, 5]}}
    run = write_run(tmp_path / "run", base(model_type), adapt)
    result = export(run.path, "delta", tmp_path / "delta")
    delta, whole = load_file(tmp_path / "delta" / "delta.safetensors"), tensors_of(run.base)
    block, parts = (
        ("block_sparse_moe", "123") if model_type == "mixtral" else ("mlp", ("gate_proj", "down_proj", "up_proj"))
    )
    names = [f"experts.{expert}.{'w' * (block != 'mlp')}{part}.weight" for expert in (0, 5) for part in parts]
    assert set(delta) == {f"model.layers.1.{block}.{name}" for name in ["gate.weight", *names]}
    assert {name: tensor.shape for name, tensor in delta.items()} == {name: whole[name].shape for name in delta}
    assert not any(torch.equal(tensor, whole[name]) for name, tensor in delta.items())
    assert (result.tensors, result.step) == (7, 7)
    assert result.bytes == sum(tensor.nbytes for tensor in delta.values())

    bank = run.adapted.model.model.layers[1].mlp.experts
    up, down = bank.trained["5"].gate_up.weight, bank.trained["5"].down.weight
    gate_name, down_name, up_name = names[3:]
    prefix = f"model.layers.1.{block}."
    assert torch.equal(torch.cat([delta[prefix + gate_name], delta[prefix + up_name]]), up)
    assert torch.equal(delta[prefix + down_name], down)


def test_of_stacked_experts_it_has_the_chosen_rows(base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base("gpt_oss"), {"experts": {"layers": "1", "ids": [0, 5]}})
    export(run.path, "delta", tmp_path / "delta")
    delta = load_file(tmp_path / "delta" / "delta.safetensors")
    manifest = json.loads((tmp_path / "delta" / "manifest.json").read_text())
    assert (
        set(delta)
        == set(manifest["slices"])
        == {
            f"model.layers.1.mlp.experts.{name}"
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        }
    )
    assert all(ids == [0, 5] for ids in manifest["slices"].values())
    whole, bank = tensors_of(run.base), run.adapted.model.model.layers[1].mlp.experts
    for name, tensor in delta.items():
        assert tensor.shape == (2, *whole[name].shape[1:])
    trained = bank.trained["5"].gate_up
    assert torch.equal(delta["model.layers.1.mlp.experts.gate_up_proj"][1], trained.weight.T)
    assert torch.equal(delta["model.layers.1.mlp.experts.gate_up_proj_bias"][1], trained.bias)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("adapt", ["full", "all"])
@pytest.mark.parametrize("model_type", TYPES)
def test_applied_to_its_base_it_is_the_merged_checkpoint(
    model_type: str, adapt: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", base(model_type), ADAPT[adapt])
    export(run.path, "delta", tmp_path / "delta")
    export(run.path, "merged", tmp_path / "merged")
    apply_delta(tmp_path / "delta", run.base, tmp_path / "applied")
    assert take_fingerprint(tmp_path / "applied") == take_fingerprint(tmp_path / "merged")
    assert take_fingerprint(tmp_path / "applied") != take_fingerprint(run.base)


def test_the_manifest_tells_where_it_comes_from(base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base("mixtral"), FULL)
    export(run.path, "delta", tmp_path / "delta")
    manifest = json.loads((tmp_path / "delta" / "manifest.json").read_text())
    assert (manifest["schema"], manifest["format"], manifest["run"], manifest["step"]) == (1, "delta", "run", 7)
    assert manifest["run_file"] == run.config.model_dump(mode="json")
    assert manifest["selection"]["experts"] == {"1": [0, 5]}
    assert "model.layers.1.mlp.gate.weight" in manifest["selection"]["full"]
    assert manifest["base"]["name"] == "mixtral"
    assert manifest["base"]["fingerprint"] == take_fingerprint(run.base).to_json()
    with pytest.raises(UserError, match="is a delta; moetune apply"):
        open_model(str(tmp_path / "delta"))


def test_another_base_is_refused_unless_forced_by_name(base: Callable[[str], Path], tmp_path: Path) -> None:
    run, delta = write_run(tmp_path / "run", base("mixtral"), FULL), tmp_path / "delta"
    export(run.path, "delta", delta)
    out = tmp_path / "out"
    other = write_base(tmp_path / "other", "mixtral", num_hidden_layers=2, seed=1)
    for force in (None, "mixtral"):
        with pytest.raises(
            UserError, match=r"was made for another base .*the same tensors with other values .*--force other"
        ):
            apply_delta(delta, other, out, force=force)
    larger = write_base(tmp_path / "larger", "mixtral", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"model\.layers\.2\..* is F32 .*, not no such tensor"):
        apply_delta(delta, larger, out)
    wider = write_base(tmp_path / "wider", "mixtral", num_hidden_layers=2, intermediate_size=64)
    with pytest.raises(UserError, match=r"experts\.\d\.w\d\.weight of the delta is \[.*\] and \[.*\] in"):
        apply_delta(delta, wider, out, force="wider")
    assert not out.exists()

    applied = apply_delta(delta, other, out, force="other")
    changed, before = tensors_of(out), tensors_of(other)
    trained = load_file(delta / "delta.safetensors")
    assert applied.tensors == len(trained)
    assert applied.forced == "the same tensors with other values (model.safetensors)"
    assert all(torch.equal(tensor, trained.get(name, before[name])) for name, tensor in changed.items())


def test_a_base_that_changes_while_it_is_copied_is_refused(
    base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path(shutil.copytree(base("mixtral"), tmp_path / "base"))
    run = write_run(tmp_path / "run", plain, FULL)
    export(run.path, "delta", tmp_path / "delta")

    def changes_first(folder: Path, *rest: Any) -> Any:
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").write_bytes(data)
        return copy_checkpoint(folder, *rest)

    monkeypatch.setattr("moetune.exporting.apply.copy_checkpoint", changes_first)
    message = r"base' changed while it was copied: .*other values \(model\.safetensors\); run the command again"
    with pytest.raises(UserError, match=message):
        apply_delta(tmp_path / "delta", plain, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "delta", "run"]


def test_a_run_with_lora_says_what_the_delta_leaves_out(base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "both", base("mixtral"), {"router": "all", "lora": LORA})
    result = export(run.path, "delta", tmp_path / "delta")
    assert result.tensors == 2
    assert result.notes == ("LoRA factors are not in the delta; --format peft or merged has them",)
    run = write_run(tmp_path / "lora", base("mixtral"), {"lora": LORA})
    with pytest.raises(UserError, match=r"trained only LoRA, .*use --format peft for the adapter, or --format merged"):
        export(run.path, "delta", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_changed_fingerprint_is_named(base: Callable[[str], Path], tmp_path: Path) -> None:
    """Other damage is in tests/cli/test_apply.py."""
    run, delta = write_run(tmp_path / "run", base("mixtral"), FULL), tmp_path / "delta"
    export(run.path, "delta", delta)
    raw = json.loads((delta / "manifest.json").read_text())
    raw["base"]["fingerprint"]["files"]["model.safetensors"] = "0" * 64
    (delta / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"base\.fingerprint: the fingerprint of the base is damaged; export"):
        apply_delta(delta, run.base, tmp_path / "out")
