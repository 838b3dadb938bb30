"""INT4 and FP8 as published: kept by experts and linear layers, predicted to the byte, named where damaged."""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moetune.adapt.count import count
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.checkpoint import open_checkpoint
from moetune.memory.trace.tracker import Tracker
from moetune.models.hub.key_mapping import key_mappings
from moetune.planning.predict import predict
from tests.exporting.runs import write_base
from tests.memory.trace.test_loading import load
from tests.published import write_4bit, write_floats, write_int4, write_nvfp4
from tests.reference import run_config, small_linears_are_quantized, token_ids
from tests.resolved import build
from tests.toys import toy_config

INT4 = ("compressed-tensors", "gptq", "awq", "auto-round")
FLOATS = {"tensor": "fp8-tensor", "modelopt": "fp8-tensor", "row": "fp8-row", "mxfp8": "mxfp8", "deepseek_v4": "mxfp4"}
FEW: dict[str, Any] = {"num_hidden_layers": 2}
KINDS: dict[str, tuple[str, Callable[..., Path]]] = {
    **{
        kind: ("int4-g32-order" if kind == "gptq" else "int4-g32", partial(write_int4, producer=kind, **FEW))
        for kind in INT4
    },
    **{
        kind: (base, partial(write_floats, kind=kind, **(FEW if kind != "deepseek_v4" else {})))
        for kind, base in FLOATS.items()
    },
}
"""Program that publishes INT4, or kind of 8-bit floats -> the value of `model.base` that keeps it, and its writer."""
LORA: dict[str, Any] = {"lora": {"rank": 2, "alpha": 4, "targets": ["experts", "attention"]}, "router": "all"}


def built(folder: Path, adapt: dict[str, Any] = LORA, device: str = "cpu", **model: Any) -> Any:
    with small_linears_are_quantized():
        return build(run_config(folder, adapt, model={"weights": "pretrained", "dtype": "fp32", **model}), device)


def size(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_and_linear_layers_are_kept(kind: str, tmp_path: Path) -> None:
    """With the values of the checkpoint's own matrices; what is left out stays in 16 bits; experts that train are in
    full; and a model on the meta device takes the same bytes."""
    base, write = KINDS[kind]
    folder = write(tmp_path) if kind == "deepseek_v4" else write(tmp_path, left_out=["self_attn.o_proj"])
    adapt = LORA | {"experts": {"layers": "1", "ids": [2]}}
    adapted, stored = built(folder, adapt), open_checkpoint(folder)
    assert adapted.run.config.model.base == base
    buffers = sum(buffer.numel() for buffer in adapted.run.model.plain.buffers() if kind == "deepseek_v4")
    assert 0 <= sum(tensor.numel for tensor in stored.values()) - count(str(folder)).parameter_count.total <= buffers
    mappings = key_mappings(adapted.run.model.plain, stored, split=True)
    dtype = torch.float16 if kind in ("gptq", "awq", "auto-round") else torch.bfloat16  # of the program
    for layer in adapted.structure.moe_layers:
        bank = adapted.model.get_submodule(layer.experts)
        assert isinstance(bank, ExpertBank)
        for expert, name in product(range(bank.num_experts), ("gate_up", "down")):
            mapping = mappings[f"{layer.experts}.{name}_proj"].of_expert(expert)
            expected = mapping.to_model(lambda key: stored[key].rows())[0]
            if expert in bank.frozen_slots:
                found = getattr(bank, name).matrix(bank.frozen_slots[expert], torch.float32)
                assert torch.equal(found.to(dtype), expected.to(dtype))
            else:
                found = getattr(bank.trained[str(expert)], name).weight
                torch.testing.assert_close(found, expected.float(), rtol=4e-3, atol=0)
    linears = () if base == "mxfp4" else adapted.run.quantized_linears  # MXFP4 is of experts only
    assert bool(linears) == (base != "mxfp4")
    for path in linears:
        linear = adapted.model.get_submodule(path)
        linear = getattr(linear, "base_layer", linear)
        assert linear.stack.storage == base
        expected = stored[f"{path}.weight"].rows()
        assert torch.equal(linear.stack.matrix(0, expected.dtype), expected)
    assert not any(path.endswith("o_proj") for path in linears)
    with torch.no_grad():
        assert adapted.model.eval()(token_ids()).logits.isfinite().all()
    assert size(built(folder, adapt, "meta").model) == size(adapted.model)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layers", ["", r"layers\.1\.mlp\."], ids=["all", "of a layer"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("awq", "deepseek_v4")])
def test_experts_that_are_published_in_16_bits_stay_so(kind: str, layers: str, tmp_path: Path) -> None:
    """Beside others that are quantized: where the settings say so, with the checkpoint's bytes and values."""
    base, write = KINDS[kind]
    folder = write(tmp_path, left_out=[rf"{layers}experts\..*"])
    adapted, stored = built(folder), load_file(folder / "model.safetensors")
    model = adapted.run.config.model
    assert (model.default_base, model.storage_of("attention", 1)) == (base, base)
    for layer in adapted.structure.moe_layers:
        bank = adapted.model.get_submodule(layer.experts)
        is_left = layer.index == 1 or not layers
        assert {bank.gate_up.storage, bank.down.storage} == {"bf16" if is_left else base}
        if is_left:
            assert torch.equal(bank.down.matrix(2, torch.bfloat16), stored[f"{layer.experts}.2.down_proj.weight"])
    assert size(built(folder, device="meta").model) == size(adapted.model)


@pytest.mark.parametrize(
    "kind", ["row", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("compressed-tensors", "awq"))]
)
def test_reading_takes_what_is_predicted(kind: str, tmp_path: Path) -> None:
    """No more than 4 % of a checkpoint of some size beside the model, and no layer's experts in 16 bits."""
    config = run_config(
        KINDS[kind][1](tmp_path, hidden_size=128, moe_intermediate_size=128, num_local_experts=64, num_hidden_layers=3),
        {"router": "all"},
        model={"weights": "pretrained", "dtype": "bf16"},
    )
    with Tracker({}) as tracker:
        model = build(config, "cpu").model
    beside = tracker.peak_bytes - size(model)
    assert beside < 0.04 * (tmp_path / "model.safetensors").stat().st_size
    assert beside < 2 * 64 * 128 * 128
    predicted = load(config)
    assert tracker.peak_bytes <= predicted.gpu + predicted.host
    assert predicted.gpu < 1.1 * tracker.peak_bytes


def test_kimi_k25_with_its_settings_in_the_text_section(tmp_path: Path) -> None:
    """And regular expressions of what is in 16 bits: all but the experts."""
    others = ["self_attn.*", "shared_experts.*", r"mlp\.(gate|up|down)_proj", "vision.*", "mm_projector.*"]
    text = toy_config("kimi_k25").text_config.to_dict() | {"hidden_size": 64, "moe_intermediate_size": 64}
    folder = write_int4(tmp_path, "compressed-tensors", "kimi_k25", left_out=others, text_config=text)
    assert "quantization_config" not in (config := json.loads((folder / "config.json").read_text()))
    assert config["text_config"]["quantization_config"]["format"] == "pack-quantized"
    adapted = built(folder, {"router": "all"})
    assert adapted.run.config.model.base == "int4-g32"
    assert not adapted.run.quantized_linears
    stored = open_checkpoint(folder)
    layer = adapted.structure.moe_layers[0]
    (name,) = (name for name in stored if f".{layer.index}.mlp.experts.1.down_proj" in name)
    assert torch.equal(adapted.model.get_submodule(layer.experts).down.matrix(1, torch.bfloat16), stored[name].rows())


UP = "model.layers.0.mlp.experts.1.up_proj"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("compressed-tensors", {f"{UP}.weight_scale": None}, rf"{UP}.weight' .* do not fit together"),
        ("gptq", {f"{UP}.scales": None}, rf"{UP}.weight' .* do not fit together"),
        ("gptq", {f"{UP}.g_idx": torch.zeros(64).int() + 7}, rf"{UP}.g_idx names groups that have no scale"),
        (
            "gptq",
            {f"{UP}.g_idx": torch.arange(64).int() // 32},
            "up_proj.weight is in another layout and others are int",
        ),
        ("awq", {f"{UP}.scales": torch.zeros(2, 64).half()}, rf"{UP}.scales holds a scale that is 0"),
        ("awq", {f"{UP}.scales": torch.full((2, 64), torch.nan).half()}, rf"{UP}.scales holds values that are not"),
        ("auto-round", {f"{UP}.qzeros": torch.zeros(2, 7).int()}, rf"{UP}.weight' .* do not fit together"),
        (
            "compressed-tensors",
            dict.fromkeys((f"{UP}.weight_{part}" for part in ("packed", "scale", "shape", "zero_point")), None)
            | {f"{UP}.weight": torch.ones(64, 64).bfloat16()},
            rf"{UP}.weight is BF16 and others are int4-g32.*set model.base: nf4",
        ),
        (
            "awq",
            dict.fromkeys((f"model.layers.1.self_attn.q_proj.{part}" for part in ("qweight", "qzeros", "scales")), None)
            | {"model.layers.1.self_attn.q_proj.weight": torch.ones(64, 64).bfloat16()},
            r"self_attn.q_proj.weight is BF16 and others are int4-g32",
        ),
        ("tensor", {f"{UP}.weight_scale_inv": None}, rf"{UP}.weight has type F8_E4M3, which is not one of weights"),
        ("tensor", {f"{UP}.weight_scale_inv": torch.zeros(())}, rf"{UP}.weight_scale_inv holds a scale that is 0"),
        ("modelopt", {f"{UP}.weight_scale": torch.tensor(torch.nan)}, rf"{UP}.weight_scale holds values that are not"),
        (
            "modelopt",  # as ModelOpt makes of a matrix that is all zero
            {f"{UP}.weight": torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn)},
            rf"{UP}.weight holds values that are not",
        ),
        ("mxfp8", {f"{UP}.weight_scale": torch.full((64, 2), 255).byte()}, rf"{UP}.weight_scale holds values that are"),
        (
            "mxfp8",
            {f"{UP}.weight_scale": torch.zeros(64, 3).byte()},
            r"weight_block_size None is not valid|fit together",
        ),
        ("row", {f"{UP}.weight_scale": torch.ones(())}, r"up_proj.weight is in another layout and others are fp8-row"),
        ("row", {f"{UP}.weight_scale": torch.ones(1, 64)}, rf"{UP}.weight' .* do not fit together"),
        # which of two is right is not known, nor what is left out
        ("compressed-tensors", {f"{UP}.weight": torch.ones(64, 64)}, rf"{UP}.weight' .* do not fit together"),
        ("gptq", {f"{UP}.weight": torch.ones(64, 64)}, rf"{UP}.weight' .* do not fit together"),
        ("tensor", {f"{UP}.weight_scale": torch.ones(())}, rf"{UP}.weight' .* do not fit together"),
        ("compressed-tensors", {f"{UP}.weight_zero_point": None}, rf"{UP}.weight' .* do not fit together"),
        ("compressed-tensors", {f"{UP}.weight_shape": torch.tensor([64, 62])}, rf"{UP}.weight' .* do not fit together"),
        (
            "compressed-tensors",  # four groups of 16, and 32 in the settings
            {f"{UP}.weight_scale": torch.ones(64, 4).bfloat16(), f"{UP}.weight_zero_point": torch.zeros(8, 4).int()},
            rf"{UP}.weight' .* do not fit together",
        ),
        ("tensor", {f"{UP}.weight": torch.ones(2, 64, 64).to(torch.float8_e4m3fn)}, rf"{UP}.weight' .* a stack of mat"),
        ("4bit", {f"{UP}.weight.absmax": None}, rf"{UP}.weight' .* do not fit together"),
        ("4bit", {f"{UP}.weight.nested_quant_map": None}, rf"{UP}.weight' .* do not fit together"),
        ("4bit", {f"{UP}.weight": torch.zeros(7, 1).byte()}, rf"{UP}.weight' .* do not fit together"),
        ("nvfp4", {f"{UP}.weight_scale": torch.ones(3, 4).to(torch.float8_e4m3fn)}, rf"{UP}.weight' .* do not fit tog"),
        ("nvfp4", {f"{UP}.weight_global_scale": torch.zeros(1)}, rf"{UP}.weight_global_scale holds a scale that is 0"),
    ],
)
def test_tensors_that_disagree_with_the_settings_are_named(
    kind: str, changes: dict[str, Tensor | None], says: str, tmp_path: Path
) -> None:
    write = partial(write_nvfp4, model_type="qwen3_moe", producer="compressed-tensors", hidden_size=64)
    by_kind = {"nvfp4": write, "4bit": partial(write_4bit, model_type="qwen3_moe")}
    folder = (by_kind.get(kind) or KINDS[kind][1])(tmp_path, moe_intermediate_size=64)
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=says):
        built(folder, {"router": "all"})


@pytest.mark.parametrize(("model_type", "matrix"), [("gpt_oss", "experts.down_proj"), ("qwen3_moe", "up_proj.weight")])
def test_experts_in_16_bits_are_not_rounded_by_settings_that_were_left(
    model_type: str, matrix: str, tmp_path: Path
) -> None:
    """As of a gpt-oss that was trained in bf16 and saved with its base's settings; transformers leaves it so."""
    folder = write_base(tmp_path, model_type, num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(UserError, match=rf"{matrix} is F32 and config.json says mxfp4; .* take out of config.json"):
        built(folder, {"router": "all"})


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (
            "gptq",
            ('"desc_act": true', '"desc_act": false'),
            r"in another layout and config.json says int4-g32; set mod",
        ),
        (
            "row",
            ('"strategy": "channel"', '"strategy": "tensor"'),
            r"in another layout and config.json says fp8-tensor",
        ),
        (
            "awq",
            ('"group_size": 32', '"group_size": "32"'),
            r"is not read: 'bits': 4, 'group_size': '32', 'version': 'gemm'; of",
        ),
        (
            "compressed-tensors",
            ('"num_bits": 4', '"num_bits": 8'),
            r"is not read: 'format': 'pack-quantized', 'num_bits': 8, 'type': 'int'",
        ),
    ],
)
def test_settings_that_disagree_with_all_tensors_are_named(
    kind: str, settings: tuple[str, str], says: str, tmp_path: Path
) -> None:
    """They are not followed by quantizing all tensors anew."""
    folder = KINDS[kind][1](tmp_path)
    file = folder / "config.json"
    file.write_text(file.read_text(encoding="utf-8").replace(*settings), encoding="utf-8")
    with pytest.raises(UserError, match=says):
        built(folder, {"router": "all"})


def test_names_of_a_wrapper_are_named(tmp_path: Path) -> None:
    file = KINDS["awq"][1](tmp_path) / "model.safetensors"
    save_file({f"module.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"'module' in its names is of a wrapper"):
        built(tmp_path, {"router": "all"})


@pytest.mark.parametrize("storage", ["int4-g32", "int4-g128-order", "int4-row"])
def test_it_rounds_to_the_nearest(storage: Any) -> None:
    stack = QuantizedExperts(1, (33, 100), storage)
    weight = torch.randn(33, 100) * torch.logspace(-3, 1, 33)[:, None]
    weight[5] = 0
    stack.quantize_(0, weight)
    found = stack.matrix(0, torch.float32)
    scales = stack.scales[0].view(torch.bfloat16).float()
    group = {"int4-g32": 32, "int4-g128-order": 128, "int4-row": 100}[storage]
    steps = scales[:, torch.arange(100) // group]
    assert ((found - weight).abs() <= steps * 0.55).all()
    assert not found[5].any()


@pytest.mark.parametrize(("kind", "is_said"), [("tensor", True), pytest.param("awq", False, marks=pytest.mark.full)])
def test_a_prediction_says_that_activations_are_not_quantized(kind: str, is_said: bool, tmp_path: Path) -> None:
    report = predict(run_config(KINDS[kind][1](tmp_path), {"router": "all"}, train={"sequence_length": 64}))
    assert any(line.startswith("activations are not quantized") for line in report.assumptions) == is_said
