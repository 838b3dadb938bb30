"""A run on a base as it is published quantized, from training to every export: all compute the same."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moetune.adapt.start_from.start import open_start
from moetune.errors import UserError
from moetune.exporting.adapter import merge_adapter
from moetune.exporting.apply import apply_delta
from moetune.exporting.export import export
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from moetune.inference.evaluate import evaluate
from moetune.inference.opened import open_model
from moetune.models.hub.fingerprint import Base, take_fingerprint
from tests import small
from tests.exporting import runs
from tests.exporting.runs import tensors_of, write_run
from tests.published import write_4bit, write_floats, write_fp8, write_int4, write_mxfp4, write_nvfp4
from tests.reference import run_config, token_ids
from tests.resolved import build, train

ADAPT: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}, "router": "all"},
    "full": {"router": "all", "experts": {"layers": "1", "ids": [0, 3]}},
}

INT4 = {
    "compressed-tensors": "int4-g32", "gptq": "int4-g32-order", "awq": "int4-g32", "auto-round": "int4-g32",
}  # fmt: skip
FLOATS = {"tensor": "fp8-tensor", "modelopt": "fp8-tensor", "row": "fp8-row", "mxfp8": "mxfp8", "deepseek_v4": "mxfp4"}
"""Program that publishes INT4, and kind of 8-bit floats -> the value of `model.base` that keeps its toy."""


def write(folder: Path) -> Path:
    """With a tokenizer."""
    sizes = {"vocab_size": small.write_tokenizer(folder)["vocab_size"], "num_hidden_layers": 2, "num_local_experts": 4}
    return write_mxfp4(folder, **sizes, layer_types=["sliding_attention", "full_attention"])


@dataclass(frozen=True)
class Run:
    base: Path
    data: Path
    path: Path


@pytest.fixture(scope="module", params=ADAPT)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    base, data = write(folder / "base"), small.write_data(folder / "data.jsonl")
    more = {"model": {"attention": "eager", "dtype": "fp32"}, "train": {"steps": 4, "save_every": 2}}
    train(small.run_config(base, data, folder / "run", **{**more, "adapt": ADAPT[request.param]}))
    return Run(base, data, folder / "run")


@pytest.mark.one_in(4)
def test_exports_compute_what_the_run_does(run: Run, tmp_path: Path) -> None:
    def loss(what: Path) -> float:
        return evaluate(open_model(str(what), dtype="fp32"), str(run.data), 64, "auto").loss

    expected = loss(run.path)
    assert expected != pytest.approx(loss(run.base), rel=1e-4)
    assert open_model(str(run.base)).kind == "packed"
    merged = export(run.path, "merged", tmp_path / "merged")
    assert any("published quantized" in note for note in merged.notes)
    assert loss(tmp_path / "merged") == pytest.approx(expected, rel=2e-3)  # trained weights rounded to bfloat16
    if "lora" in run.path.parent.name:
        export(run.path, "peft", tmp_path / "adapter")
        assert loss(tmp_path / "adapter") == pytest.approx(expected, rel=1e-5)
        assert merge_adapter(str(run.base), tmp_path / "adapter", tmp_path / "by_adapter").notes == [*merged.notes]
        return
    export(run.path, "delta", tmp_path / "delta")
    assert apply_delta(tmp_path / "delta", run.base, tmp_path / "applied").notes == merged.notes
    one, other = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "applied")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_merged_checkpoint_has_frozen_weights_as_transformers_unpacks_them(run: Run, tmp_path: Path) -> None:
    export(run.path, "merged", tmp_path / "merged")
    expected = AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.bfloat16).state_dict()
    found = tensors_of(tmp_path / "merged")
    assert found.keys() == expected.keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    changed = {name for name in found if not torch.equal(found[name], expected[name])}
    assert changed
    if "lora" in run.path.parent.name:
        assert not any("embed" in name or "norm" in name for name in changed)
    else:
        assert changed <= {name for name in found if "router" in name or "layers.1.mlp.experts" in name}
        down = "model.layers.1.mlp.experts.down_proj"
        assert torch.equal(found[down][[1, 2]], expected[down][[1, 2]])


@pytest.mark.one_in(28)
@pytest.mark.parametrize(
    ("kind", "adapt"),
    [("4bit", "full"), ("4bit", "lora"), ("apart", "full"), ("apart", "lora")]
    + [("fp8", "full"), ("fp8", "both"), ("nvfp4", "both")]
    + [(producer, "both") for producer in (*INT4, *FLOATS)],
)
def test_other_formats_are_exported_in_16_bits(kind: str, adapt: str, tmp_path: Path) -> None:
    """Frozen weights as the checkpoint's own unpacking gives them, and the stock model computes what was trained."""
    if kind == "4bit":
        base = write_4bit(tmp_path / "base", "mixtral", hidden_size=64)
    elif kind == "apart":
        base = write_4bit(tmp_path / "base", "gpt_oss", hidden_size=64, intermediate_size=96, apart=True)
    elif kind in INT4:
        base = write_int4(tmp_path / "base", kind)
    elif kind in FLOATS:
        base = write_floats(tmp_path / "base", kind)
    else:
        write = write_fp8 if kind == "fp8" else write_nvfp4
        base = write(tmp_path / "base", "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    run = write_run(tmp_path / "run", base, runs.ADAPT[adapt], storage="auto")
    is_4bit = kind in ("4bit", "apart")
    assert run.adapted.run.config.model.base == ("nf4" if is_4bit else (INT4 | FLOATS).get(kind, kind))
    export(run.path, "merged", tmp_path / "merged")
    expected, found = open_checkpoint(base), tensors_of(tmp_path / "merged")
    assert found.keys() == expected.keys()
    same = [name for name in found if torch.equal(found[name], expected[name].rows().reshape(found[name].shape))]
    assert 0 < len(found) - len(same) < len(found)
    assert any(isinstance(expected[name], Quantized) and "experts" in name for name in same) or adapt == "lora"
    if is_4bit:  # kept as it is, so nothing was lost but in rounding to 16 bits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        with torch.no_grad():
            logits, trained = (model(token_ids()).logits for model in (plain, run.adapted.model))
        error = (logits - trained).norm(dim=-1) / trained.norm(dim=-1)
        assert error.median() < 0.01  # of tokens: one may be routed otherwise
    if adapt == "lora":
        assert export(run.path, "vllm", tmp_path / "vllm").tensors
        assert export(run.path, "peft", tmp_path / "peft").tensors
        with pytest.raises(UserError, match="transformers loads no experts so; use a merged export"):
            open_model(str(tmp_path / "peft"))
    else:
        export(run.path, "delta", tmp_path / "delta")
        apply_delta(tmp_path / "delta", base, tmp_path / "applied")
        applied = tensors_of(tmp_path / "applied")
        full = {name for name in applied if adapt == "full" or torch.equal(applied[name], found[name])}
        assert all(torch.equal(applied[name], found[name]) for name in full)
        again = runs.ADAPT[adapt] | {"start_from": str(tmp_path / "delta")}
        started = build(run_config(base, again, model={"weights": "pretrained", "dtype": "fp32"}), "cpu")
        start = open_start(started)
        assert start is not None
        start.load(started, Base("base", take_fingerprint(base)))
        whole = {name for name in run.adapted.trainable() if "lora" not in name}
        assert all(torch.equal(started.trainable()[name], run.adapted.trainable()[name]) for name in whole)
