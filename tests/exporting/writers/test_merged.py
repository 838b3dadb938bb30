"""The merged checkpoint: stock transformers computes what was trained, and what did not train is what it was."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.exporting.finished_run import base_folder, open_run
from moetune.exporting.memory import predict_merged
from moetune.exporting.writers.merged import complete_config
from moetune.inference.check import check_export
from moetune.memory.trace.tracker import Tracker
from moetune.tensor_files import read_headers
from tests.exporting.runs import ADAPT, FULL, ToyRun, tensors_of, write_base, write_run
from tests.reference import small_linears_are_quantized, token_ids
from tests.resolved import write_quantized_base
from tests.thinned import in_pairs
from tests.toys import expert_model_types, toy_config

TYPES = ["mixtral", "qwen2_moe", "deepseek_v2", "gpt_oss", "granitemoe", "llama4_text"]
LARGE = {"hidden_size": 256, "intermediate_size": 1024}
TOLERANCE = 1e-5
EXPERT = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.5.",
    "qwen2_moe": "model.layers.1.mlp.experts.5.",
    "deepseek_v2": "model.layers.1.mlp.experts.5.",
}


def merge(run: ToyRun, out: Path, **options: Any) -> Path:
    export(run.path, "merged", out, **options)
    return out


def difference_of_logits(run: ToyRun, merged: Path) -> float:
    stock = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        found, expected = (m(input_ids=token_ids(), use_cache=False).logits for m in (stock, run.adapted.model))
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("model_type", "adapt"), in_pairs(TYPES, ADAPT, every=2))
def test_logits_are_those_of_the_trained_model(
    model_type: str, adapt: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", base(model_type), ADAPT[adapt])
    merged = merge(run, tmp_path / "merged")
    assert difference_of_logits(run, merged) < TOLERANCE
    assert difference_of_logits(run, run.base) > 100 * TOLERANCE  # what trained shows


@pytest.mark.one_in(4)
@pytest.mark.parametrize("model_type", TYPES)
def test_what_did_not_train_is_equal_bit_for_bit(model_type: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base(model_type), FULL)
    before, after = tensors_of(run.base), tensors_of(merge(run, tmp_path / "merged"))
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained_experts = {name for name in changed if any(word in name for word in (".experts.", "t_linear."))}
    rest = {name for name in changed - trained_experts if "norm" not in name}
    assert all(".1." in name and (".gate." in name or ".router." in name) for name in rest), rest
    assert rest
    if model_type in EXPERT:
        five = {name for name in before if name.startswith(EXPERT[model_type])}
        assert len(five) == 3
        assert trained_experts == five | {name.replace("experts.5", "experts.0") for name in five}
        return
    for name in trained_experts:
        moved = (before[name] != after[name]).flatten(1).any(1)
        assert moved.tolist() == [expert in (0, 5) for expert in range(8)]


@pytest.mark.full
def test_the_host_holds_what_is_predicted(tmp_path: Path) -> None:
    """Four times an expert's matrix, and not another from the update before."""
    run = write_run(tmp_path / "run", write_base(tmp_path / "base", "mixtral", **LARGE), ADAPT["lora"])
    predicted = predict_merged(open_run(run.path)).fullest.peak_allocated
    with Tracker({}) as tracker:
        merge(run, tmp_path / "merged")
    assert tracker.peak_bytes == pytest.approx(predicted, rel=0.1)


def test_shards_index_configuration_and_tokenizer_are_the_bases(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", shard="60KB", num_hidden_layers=2)
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "modeling_own.py").write_text("raise SystemExit")
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own", "AutoTokenizer": ["modeling_own.Own", None]}}
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((base / name).read_text()) if (base / name).is_file() else {}
        (base / name).write_text(json.dumps(settings | own))
    run = write_run(tmp_path / "run", base, ADAPT["both"])
    merged = merge(run, tmp_path / "merged")
    assert difference_of_logits(run, merged) < TOLERANCE
    names = {file.name for file in base.iterdir()} - {"modeling_own.py"}
    assert {file.name for file in merged.iterdir()} == names | {"manifest.json", ".moetune"}
    assert len(list(merged.glob("model-*-of-*.safetensors"))) > 2
    for file in merged.iterdir():
        if file.name.endswith("config.json"):
            assert "auto_map" not in json.loads(file.read_text())
        elif file.name not in ("manifest.json", ".moetune") and file.suffix != ".safetensors":
            assert file.read_bytes() == (base / file.name).read_bytes(), file.name
    AutoModelForCausalLM.from_pretrained(merged, trust_remote_code=True)
    (base / "tokenizer.json").unlink()
    with_code = export(run.path, "merged", tmp_path / "with_code")
    assert any("tokenizer is code, {'AutoModelForCausalLM'" in note for note in with_code.notes)
    assert json.loads((tmp_path / "with_code/tokenizer_config.json").read_text()) == own
    before, after = read_headers(base), read_headers(merged)
    assert {name: (t.file.name, t.offset) for name, t in before.items()} == {
        name: (t.file.name, t.offset) for name, t in after.items()
    }


@pytest.mark.one_in(8)
@pytest.mark.parametrize("model_type", expert_model_types())
def test_keys_of_before_transformers_5_say_the_same(model_type: str, tmp_path: Path) -> None:
    """mlx-lm reads no `rope_parameters`, and takes its own default for a `rope_theta` that is missing."""
    toy_config(model_type).save_pretrained(tmp_path)
    before, stored = AutoConfig.from_pretrained(tmp_path).to_dict(), json.loads((tmp_path / "config.json").read_text())
    complete_config(tmp_path, {})
    after = json.loads((tmp_path / "config.json").read_text())
    for old, new in ((stored, after), (stored.get("text_config", {}), after.get("text_config", {}))):
        assert old.keys() <= new.keys()
        rope = old.get("rope_parameters") or {}
        assert new.get("rope_theta") == rope.get("rope_theta", old.get("rope_theta"))
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before
    if model_type == "qwen3_moe":
        assert (after["num_experts"], after["rope_scaling"]) == (8, None)


def test_a_bf16_base_is_written_in_bf16_and_summed_in_float32(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", dtype=torch.bfloat16, num_hidden_layers=2)
    run = write_run(tmp_path / "run", base, ADAPT["lora"], storage="bf16")
    before, after = tensors_of(base), tensors_of(merge(run, tmp_path / "merged"))
    path = "model.layers.1.self_attn.q_proj"
    layer = run.adapted.model.get_submodule(path)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = (before[f"{path}.weight"].float() + 5 / 2 * B @ A).bfloat16()
    assert torch.equal(after[f"{path}.weight"], expected)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def test_a_base_saved_with_stacked_experts(tmp_path: Path) -> None:
    """transformers also reads checkpoints that keep its own names, with a layer's experts in one tensor."""
    toy = write_base(tmp_path / "toy", "mixtral", num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors_of(tmp_path / "base")
    run = write_run(tmp_path / "run", tmp_path / "base", ADAPT["both"])
    assert difference_of_logits(run, merge(run, tmp_path / "merged")) < TOLERANCE


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["fp32", "nf4"])
def test_check_says_how_far_the_losses_are_apart(packing: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base("mixtral"), ADAPT["both"], storage=packing)
    export(run.path, "merged", tmp_path / "merged")
    check = check_export(run.path, tmp_path / "merged", 3)
    assert (check.rows, check.of, check.tokens, check.unread) == (3, "random tokens", 3 * 63, None)
    difference = abs(check.trained_loss / check.exported_loss - 1)
    assert difference < TOLERANCE if packing == "fp32" else 0 < difference < 0.1


@pytest.mark.full
def test_it_is_the_same_whatever_the_base_is_stored_in(base: Callable[[str], Path], tmp_path: Path) -> None:
    """In several precisions too; and an adapter is."""
    exports = []
    for storage in ("fp32", {"default": "nf4", "parts": {"attention": "int8"}, "layers": {"0": {"experts": "fp32"}}}):
        path = tmp_path / f"run{len(exports)}"
        with small_linears_are_quantized():
            run = write_run(path, base("mixtral"), ADAPT["lora"], storage=storage)
            merged = tensors_of(merge(run, path / "merged"))
            export(run.path, "peft", path / "peft")
        exports.append(merged | load_file(path / "peft" / "adapter_model.safetensors"))
    assert exports[0].keys() == exports[1].keys()
    assert all(tensor.equal(exports[1][name]) for name, tensor in exports[0].items())


class Trap:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("safetensors", [True, False])
def test_a_pickle_in_the_base_is_not_executed(safetensors: bool, tmp_path: Path) -> None:
    base, sprung = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2), tmp_path / "sprung"
    run = write_run(tmp_path / "run", base, FULL)
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "tokenizer.pkl"):
        (base / name).write_bytes(pickle.dumps(Trap(sprung)))
    if safetensors:
        merged = merge(run, tmp_path / "merged")
        check_export(run.path, merged, 1)
        assert not [file for file in merged.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]
    else:
        (base / "model.safetensors").unlink()
        with pytest.raises(UserError, match=r"holds no model\.safetensors and no .*; only safetensors"):
            merge(run, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    assert not sprung.exists()


def test_a_failure_leaves_nothing_behind(
    base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", base("mixtral"), FULL)
    out = tmp_path / "out" / "merged"
    monkeypatch.setattr(
        "moetune.exporting.writers.merged.write_export_manifest", lambda *_: os.open(tmp_path / "none", os.O_RDONLY)
    )
    with pytest.raises(UserError, match=r"merged' was not written: No such file .*none"):
        merge(run, out)
    assert list(out.parent.iterdir()) == []
    monkeypatch.setattr("shutil.disk_usage", lambda _: os.statvfs_result and type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"[\d,]+ bytes are needed there and 1,000 are free"):
        merge(run, out)


def test_a_run_on_a_packed_base_is_merged_into_what_was_packed(base: Callable[[str], Path], tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    write_quantized_base(str(base("mixtral")), packed, "nf4", True)
    run = write_run(tmp_path / "run", base("mixtral"), FULL)
    text = (run.path / "run.yaml").read_text()
    (run.path / "run.yaml").write_text(text.replace(str(base("mixtral")), str(packed)))
    assert base_folder(open_run(run.path)) == base("mixtral").resolve()
    manifest = packed / "packed.json"
    manifest.write_text(manifest.read_text().replace(str(base("mixtral").resolve()), str(tmp_path / "elsewhere")))
    with pytest.raises(UserError, match=r"is a quantized base; .* '?.*elsewhere'? is gone"):
        base_folder(open_run(run.path))
