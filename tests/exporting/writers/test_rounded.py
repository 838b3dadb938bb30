"""A merged checkpoint in a published format: what was not trained keeps its bytes, and what survives is said."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

from moetune.errors import UserError
from moetune.experts.quantized import QuantizedExperts
from moetune.exporting.export import export
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.nvfp4 import StoredNvfp4
from tests.exporting import runs
from tests.exporting.runs import tensors_of, write_base, write_run
from tests.published import write_floats, write_fp8, write_int4, write_mxfp4, write_nvfp4
from tests.reference import plain_weights, run_config, token_ids
from tests.resolved import build

FEW = {"num_hidden_layers": 2}
SIZES = FEW | {"hidden_size": 64, "moe_intermediate_size": 64}
PUBLISHED: dict[str, tuple[Any, Callable[[Path], Path]]] = {
    "fp8": ("fp8", lambda folder: write_fp8(folder, "qwen3_moe", left_out=["self_attn.o_proj"], **SIZES)),
    "nvfp4": ("nvfp4", lambda folder: write_nvfp4(folder, "qwen3_moe", **SIZES)),
    "compressed-tensors": ("nvfp4", lambda folder: write_nvfp4(folder, "qwen3_moe", "compressed-tensors", **SIZES)),
    "mxfp4": ("mxfp4", lambda folder: write_mxfp4(folder, shards=True, **FEW)),
    **{producer: ("int4", partial(write_int4, producer=producer, **FEW)) for producer in ("gptq", "awq", "auto-round")},
    "mxfp8": ("mxfp8", partial(write_floats, kind="mxfp8", **FEW)),
    **{kind: ("fp8", partial(write_floats, kind=kind, **FEW)) for kind in ("tensor", "modelopt", "row")},
    "deepseek_v4": ("mxfp4", partial(write_floats, kind="deepseek_v4")),
    "pack-quantized": (
        "int4",
        partial(write_int4, producer="compressed-tensors", left_out=["self_attn.o_proj"], **FEW),
    ),
}


def kept_of(run: runs.ToyRun, out: Path, merged: Path) -> float:
    """⟨exported − base, merged − base⟩ / ⟨merged − base, merged − base⟩ over the quantized weights."""
    base, found, exact = open_checkpoint(run.base), open_checkpoint(out), open_checkpoint(merged)
    along = norm = 0.0
    for name in (name for name, tensor in base.items() if isinstance(tensor, Quantized)):
        before, after, wanted = (of[name].rows().double() for of in (base, found, exact))
        along += float(((after - before) * (wanted - before)).sum())
        norm += float((wanted - before).square().sum())
    return along / norm


@pytest.mark.full
@pytest.mark.one_in(14)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_format_is_written_again(kind: str, tmp_path: Path) -> None:
    """Under the same names; tensors that did not train are the base's, byte for byte; and it is read again as such."""
    into, write = PUBLISHED[kind]
    run = write_run(tmp_path / "run", write(tmp_path / "base"), runs.ADAPT["both"], storage="auto")
    result = export(run.path, "merged", tmp_path / "out", into=into)
    export(run.path, "merged", tmp_path / "merged")
    assert [one.layer for one in result.survival] == [1, None]
    assert result.survival[-1].kept == pytest.approx(kept_of(run, tmp_path / "out", tmp_path / "merged"), abs=0.02)
    assert 0.8 < result.survival[-1].kept < 1.2

    before, after = tensors_of(run.base), tensors_of(tmp_path / "out")
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    changed = {name for name in before if not torch.equal(bits(before[name]), bits(after[name]))}
    in_full = {name for name in changed if "embed" in name or "norm" in name or "gate.weight" in name}
    assert 0 < len(in_full) < len(changed)
    assert all("layers.1." in name for name in changed - in_full)

    again = build(
        run_config(tmp_path / "out", {"also": ["norm"]}, model={"weights": "pretrained", "dtype": "fp32"}), "cpu"
    )
    assert again.run.config.model.base == run.adapted.run.config.model.base
    assert again.run.config.model.base.split("-")[0] == into
    with torch.no_grad():
        logits, trained = (model.eval()(token_ids()).logits for model in (again.model, run.adapted.model))
    assert ((logits - trained).norm(dim=-1) / trained.norm(dim=-1)).median() < 0.3


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(1, -1).view(torch.uint8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("into", ["fp8", "mxfp8", "nvfp4", "int4"])
def test_a_base_in_16_bits_is_quantized(into: Any, tmp_path: Path) -> None:
    """What did not train as `QuantizedExperts` quantizes it, and with one global scale for what vLLM joins."""
    base = write_base(tmp_path / "base", "qwen3_moe", dtype=torch.bfloat16, **SIZES)
    run = write_run(tmp_path / "run", base, runs.ADAPT["lora"])
    assert export(run.path, "merged", tmp_path / "out", into=into).survival[-1].kept == pytest.approx(1, abs=0.1)
    plain, found = open_checkpoint(base), open_checkpoint(tmp_path / "out")
    assert plain.keys() == found.keys()
    path = "model.layers.0.mlp.experts.3"
    joined = torch.cat([plain[f"{path}.{name}_proj.weight"].rows() for name in ("gate", "up")])
    storage = "int4-g32" if into == "int4" else into
    stack = QuantizedExperts(1, tuple(joined.shape), storage, pieces=2 if into == "fp8" else 1)
    stack.quantize_(0, joined)
    rows = torch.cat([found[f"{path}.{name}_proj.weight"].rows() for name in ("gate", "up")])
    assert torch.equal(rows, stack.matrix(0, torch.bfloat16))
    queries, keys, values = (found[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    if isinstance(queries, StoredNvfp4) and isinstance(keys, StoredNvfp4) and isinstance(values, StoredNvfp4):
        assert torch.equal(queries.fraction, keys.fraction)
        assert torch.equal(queries.fraction, values.fraction)
    assert isinstance(queries, Quantized)
    assert not isinstance(found["lm_head.weight"], Quantized)
    assert build(run_config(tmp_path / "out", {"also": ["norm"]}, model={"weights": "pretrained"}), "cpu").run


def of_stock(folder: Path, into: str) -> tuple[nn.Module, set[str]]:
    """The model as transformers alone loads and dequantizes it, in float32; and the names of weights that it reads
    wrongly: transformers 5.23 leaves the global scale of experts in NVFP4 out."""
    settings: Any = {
        "fp8": lambda: FineGrainedFP8Config(dequantize=True),
        "mxfp4": lambda: Mxfp4Config(dequantize=True),
        "nvfp4": lambda: CompressedTensorsConfig(dequantize=True),
    }[into]()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=settings).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
    return model, {name for name, _ in model.named_parameters() if into == "nvfp4" and ".experts." in name}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("base", "into"),
    [
        ("16 bits", "fp8"),
        ("mxfp4", "mxfp4"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (
            ("fp8", "fp8"), ("gpt-oss", "mxfp4"), ("16 bits", "nvfp4"), ("compressed-tensors", "nvfp4"))
        ),
    ],
)  # fmt: skip
def test_other_libraries_read_the_same_weights(base: str, into: Any, tmp_path: Path) -> None:
    """transformers, and compressed-tensors where it is installed, which are stock and know nothing of this project."""
    compressed = pytest.importorskip("compressed_tensors") if into == "nvfp4" else None
    folder, wide = tmp_path / "base", {"hidden_size": 128, "moe_intermediate_size": 256}
    if base in ("16 bits", "gpt-oss"):
        sizes = wide if base == "16 bits" else {"hidden_size": 64, "intermediate_size": 96}
        write_base(folder, "qwen3_moe" if base == "16 bits" else "gpt_oss", dtype=torch.bfloat16, **sizes)
    else:
        PUBLISHED[base][1](folder)
    run = write_run(tmp_path / "run", folder, runs.ADAPT["lora"], storage="auto" if base in PUBLISHED else "fp32")
    export(run.path, "merged", tmp_path / "out", into=into)
    stock, unread = of_stock(tmp_path / "out", into)
    settings = {"weights": "pretrained", "base": "auto", "dtype": "fp32"}
    ours = build(run_config(tmp_path / "out", {"also": ["norm"]}, model=settings), "cpu")
    expected, weights = plain_weights(ours, stock, ours.trainable()), dict(stock.named_parameters())
    assert unread < weights.keys()
    for name in weights.keys() - unread:
        is_16_bit = into == "nvfp4" and "_proj" in name  # so compressed-tensors dequantizes, whatever the model's dtype
        assert weights[name].equal(expected[name].bfloat16().float() if is_16_bit else expected[name]), name
    if compressed is not None:
        said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        scheme = compressed.QuantizationConfig.model_validate(said).config_groups["group_0"]
        compressor = compressed.BaseCompressor.get_value_from_registry(said["format"])
        stored = open_checkpoint(tmp_path / "out")
        matrices = [
            tensor for name, tensor in stored.items() if isinstance(tensor, StoredNvfp4) and ".experts." in name
        ]
        assert matrices
        for one in matrices:
            parts = {f"weight_{part}": tensor.whole() for part, tensor in one.parts.items()}
            assert one.rows().bfloat16().equal(compressor.decompress(parts, scheme)["weight"].bfloat16())


def test_what_has_no_such_layout_is_refused(tmp_path: Path) -> None:
    for model_type, into, says in (
        (
            "qwen3_moe",
            "mxfp4",
            "--into mxfp4: of model type 'qwen3_moe' no checkpoints are published so, only of gpt-oss",
        ),
        ("granitemoe", "int4", "--into int4: of model type 'granitemoe' .* a tensor for each expert"),
    ):
        folder = tmp_path / model_type
        run = write_run(folder / "run", write_base(folder / "base", model_type), runs.ADAPT["lora"])
        with pytest.raises(UserError, match=says):
            export(run.path, "merged", folder / "out", into=into)  # type: ignore[arg-type]
        assert not (folder / "out").exists()
    with pytest.raises(UserError, match="--into fp8 rounds a whole checkpoint; use it with --format merged"):
        export(run.path, "peft", tmp_path / "out", into="fp8")
