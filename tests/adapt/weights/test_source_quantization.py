"""Checkpoints that are published quantized: kept as they are, to the bit, or packed as what they stand for."""

import copy
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moetune.adapt.weights.published import read_published
from moetune.adapt.weights.target import LoadTarget
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.context import ExpertContext
from moetune.experts.quantized import QuantizedExperts
from moetune.exporting.writers.merged import copy_checkpoint
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.mxfp4 import StoredMxfp4
from moetune.formats.table import format_of
from moetune.memory.trace.tracker import Tracker
from moetune.run.dtypes import DTYPES
from moetune.run.placement import Placement
from moetune.run.resolve import resolve
from moetune.tensor_files import Stored
from tests.memory.trace.test_loading import load
from tests.published import write_4bit, write_floats, write_fp8, write_int4, write_mxfp4, write_nvfp4
from tests.reference import run_config, small_linears_are_quantized, token_ids
from tests.resolved import build, write_quantized_base
from tests.toys import toy_config

FROZEN: dict[str, Any] = {"also": ["norm"]}


def built(folder: Path, adapt: dict[str, Any], **model: Any) -> Any:
    return build(run_config(folder, adapt, model={"weights": "pretrained", **model}), "cpu")


def stock(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """As transformers unpacks it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mxfp4(tmp_path_factory.mktemp("models") / "gpt-oss", shards=True)


@pytest.fixture(scope="module")
def unpacked(mxfp4: Path) -> PreTrainedModel:
    return stock(mxfp4, torch.bfloat16)


def banks(model: torch.nn.Module) -> dict[str, ExpertBank]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertBank)}


@pytest.mark.parametrize(("base", "dtype"), [("auto", "bf16"), ("mxfp4", "fp32"), ("bf16", "fp32")])
def test_mxfp4_has_transformers_values_to_the_bit(
    base: str, dtype: str, mxfp4: Path, unpacked: PreTrainedModel
) -> None:
    """Kept, or unpacked; what trains is there in full."""
    adapted = built(mxfp4, {"experts": {"layers": "1", "ids": [2]}}, base=base, dtype=dtype)
    for name, bank in banks(adapted.model).items():
        assert bank.gate_up.storage == ("mxfp4" if base == "auto" else base)
        experts: Any = unpacked.get_submodule(name)
        for expert in range(bank.num_experts):
            of_stacks = experts.gate_up_proj[expert].T, experts.down_proj[expert].T
            for stack, expected in zip(("gate_up", "down"), of_stacks, strict=True):
                if expert in bank.frozen_slots:
                    found = getattr(bank, stack).matrix(bank.frozen_slots[expert], torch.bfloat16)
                else:
                    found = getattr(bank.trained[str(expert)], stack).weight.bfloat16()
                assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))
        frozen = [expert for expert in range(bank.num_experts) if expert in bank.frozen_slots]
        assert torch.equal(bank.gate_up_bias.bfloat16(), experts.gate_up_proj_bias[frozen])
    assert adapted.run.config.model.base == ("mxfp4" if base == "auto" else base)


def test_mxfp4_computes_what_the_stock_model_does(mxfp4: Path) -> None:
    adapted, plain = built(mxfp4, FROZEN, dtype="fp32"), stock(mxfp4, torch.float32)
    with torch.no_grad():
        found = adapted.model.eval()(token_ids()).logits
        torch.testing.assert_close(found, plain(token_ids()).logits, rtol=1e-4, atol=1e-5)


def test_mxfp4_packed_otherwise_is_packing_what_it_stands_for(
    mxfp4: Path, unpacked: PreTrainedModel, tmp_path: Path
) -> None:
    config = json.loads((mxfp4 / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in unpacked.state_dict().items()}, tmp_path / "model.safetensors")
    found, expected = (banks(built(folder, FROZEN, base="nf4").model) for folder in (mxfp4, tmp_path))
    for name, bank in expected.items():
        assert all(torch.equal(bank.state_dict()[key], value) for key, value in found[name].state_dict().items())


@pytest.mark.full
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "base", "adapt"),
    [
        ("mxfp4", "auto", FROZEN),
        ("mxfp4", "nf4", {"experts": {"ids": [0]}}),
        ("4bit", "auto", FROZEN),
        ("fp8", "auto", FROZEN),
        ("nvfp4", "auto", FROZEN),
    ],
)
def test_reading_takes_what_is_predicted(kind: str, base: str, adapt: dict[str, Any], tmp_path: Path) -> None:
    """Expert by expert, on either side."""
    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_hidden_layers": 2
    }  # fmt: skip
    match kind:
        case "mxfp4":
            write_mxfp4(tmp_path, **sizes)
        case "4bit":
            write_4bit(tmp_path, "mixtral", **sizes)
        case _:
            write = write_fp8 if kind == "fp8" else write_nvfp4
            write(tmp_path, "qwen3_moe", **sizes, moe_intermediate_size=512)
    reads: list[int] = []
    config = run_config(tmp_path, adapt, model={"weights": "pretrained", "base": base, "dtype": "bf16"})
    stock_rows = Stored.rows

    def rows(self: Stored, *where: Any, **more: Any) -> torch.Tensor:
        reads.append((found := stock_rows(self, *where, **more)).nbytes)
        return found

    predicted = load(config)  # first, so that the tracker sees no fake tensors of a dry run
    with patch.object(Stored, "rows", rows), Tracker({}) as tracker:
        build(config, "cpu")
    assert max(reads) <= predicted.host
    if (kind, base) == ("mxfp4", "auto"):
        assert predicted.gpu == pytest.approx(tracker.peak_bytes, rel=0.06)
    else:  # at most: indices that torch widens are no storage that a tracker sees, and NF4 is not unpacked
        assert 0.95 * tracker.peak_bytes < predicted.gpu < 1.25 * tracker.peak_bytes


@pytest.mark.parametrize("base", ["mxfp4", "nf4"])
def test_a_rank_reads_its_own_experts(base: str, mxfp4: Path) -> None:
    run = resolve(run_config(mxfp4, FROZEN, model={"weights": "pretrained", "base": base, "dtype": "fp32"}), "cuda")
    held = {layer.index: ((0, 1, 2, 3), (4, 5, 6, 7)) for layer in run.structure.moe_layers}
    model = copy.deepcopy(run.model.plain)
    target = LoadTarget(
        model,
        run.structure,
        run.selection,
        run.config.model,
        run.quantized_linears,
        torch.device("cpu"),
        context=ExpertContext(),
        placement=Placement(1, held),
    )
    reads: list[int] = []
    stock_rows = StoredMxfp4.rows if base == "nf4" else StoredMxfp4.quantized

    def noted(self: StoredMxfp4, expert: int, *more: Any) -> Any:
        reads.append(expert)
        return stock_rows(self, expert, *more)  # type: ignore[arg-type]

    with patch.object(StoredMxfp4, "rows" if base == "nf4" else "quantized", noted):
        read_published(target, run.model)
    found = banks(model)
    assert set(reads) == {4, 5, 6, 7}
    for name, bank in banks(built(mxfp4, FROZEN, base=base, dtype="fp32").model).items():
        assert torch.equal(found[name].gate_up.matrix(1, torch.float32), bank.gate_up.matrix(5, torch.float32))


# --- Values of the producers ----------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]


def nf4_value(tensors: Tensors, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight as bitsandbytes itself unpacks it."""
    parts = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
    state = QuantState.from_dict(parts, torch.device("cpu"))
    shape, state.dtype, state.shape = state.shape, dtype, torch.Size([state.shape.numel()])
    return dequantize_4bit(tensors[name], state).view(shape)


def fp8_value(tensors: Tensors, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight as transformers itself dequantizes it."""
    return Fp8Dequantize(None)._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], dtype)


def nvfp4_value(tensors: Tensors, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight as ModelOpt or compressed-tensors computes it, in float32 before it is rounded."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    scales = tensors[f"{name}_scale"].float()
    if f"{name}_scale_2" in tensors:
        codes, scales = tensors[name], scales * tensors[f"{name}_scale_2"]
    else:
        codes, scales = tensors[f"{name}_packed"], scales / tensors[f"{name}_global_scale"]
    values = levels[torch.stack([codes & 15, codes >> 4], -1).int()].flatten(1)
    return (values * scales.repeat_interleave(16, 1)).to(dtype)


def experts_of(
    tensors: Tensors, model_type: str, layer: int, expert: int, value: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate and up, down), as `value` unpacks them."""
    names = {"mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2")}
    block, *matrices = names.get(model_type, ("mlp.experts", "gate_proj", "up_proj", "down_proj"))
    path = f"model.layers.{layer}.{block}.{expert}"
    gate, up, down = (value(tensors, f"{path}.{name}.weight") for name in matrices)
    return torch.cat([gate, up]), down


LEFT_OUT = {"left_out": ["self_attn.o_proj"]}
WHOLE = LEFT_OUT | {"hidden_size": 256, "moe_intermediate_size": 256}
KEPT: dict[str, tuple[Callable[..., Path], Callable[..., torch.Tensor], tuple[dict[str, Any], ...]]] = {
    "nf4": (write_4bit, nf4_value, ({}, {"double_quant": False})),
    "fp8": (write_fp8, fp8_value, (LEFT_OUT, WHOLE)),
    "nvfp4": (write_nvfp4, nvfp4_value, (LEFT_OUT, LEFT_OUT | {"producer": "compressed-tensors"})),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("base", "options", "model_type", "dtype"),
    [
        pytest.param(base, options, model_type, dtype, marks=[pytest.mark.full] * (number + (dtype != "fp32") > 0))
        for base, (_, _, choices) in KEPT.items()
        for model_type in (("mixtral", "qwen3_moe") if base == "nf4" else ("deepseek_v3", "qwen3_moe"))
        for number, options in enumerate(choices)
        for dtype in ("fp32", "bf16")
    ],
)
def test_values_are_kept_to_the_bit(
    base: str, options: dict[str, Any], model_type: str, dtype: Literal["fp32", "bf16"], tmp_path: Path
) -> None:
    """Of experts, some of which train, and of linear layers, but for those that are published in 16 bits. Gate and up
    were packed each by itself."""
    write, value, _ = KEPT[base]
    folder = write(tmp_path, model_type, **{"hidden_size": 64, "moe_intermediate_size": 48} | options)
    with small_linears_are_quantized():
        adapted = built(folder, {"experts": {"layers": "1", "ids": [2]}}, dtype=dtype)
    model = adapted.run.config.model
    assert (model.base, model.double_quant) == (base, options.get("double_quant", True))
    of, tensors = functools.partial(value, dtype=DTYPES[dtype]), load_file(folder / "model.safetensors")
    for layer in adapted.structure.moe_layers:
        bank: Any = adapted.model.get_submodule(layer.experts)
        for expert in range(bank.num_experts):
            both = experts_of(tensors, model_type, layer.index, expert, of)
            for name, expected in zip(("gate_up", "down"), both, strict=True):
                if expert in bank.frozen_slots:
                    found = getattr(bank, name).matrix(bank.frozen_slots[expert], DTYPES[dtype])
                else:
                    found = getattr(bank.trained[str(expert)], name).weight
                assert torch.equal(found, expected)
    linears = adapted.run.quantized_linears
    assert any("self_attn" in path for path in linears)
    for path in linears:
        linear = adapted.model.get_submodule(path)
        if base == "nf4":
            data, found = linear.weight.data, dequantize_4bit(linear.weight.data, linear.weight.quant_state)
        else:
            data, found = linear.stack.data[0], linear.stack.matrix(0, DTYPES[dtype])
        name = f"{path}.weight_packed" if f"{path}.weight_packed" in tensors else f"{path}.weight"
        assert torch.equal(data, tensors[name].view(torch.uint8))
        assert torch.equal(found, of(tensors, f"{path}.weight"))
    left = [layer for path, layer in adapted.model.named_modules() if path.endswith("o_proj")]
    assert {type(layer) is torch.nn.Linear for layer in left} == {"left_out" in options}
    with torch.no_grad():
        assert adapted.model.eval()(token_ids()).logits.isfinite().all()


# --- 4 bits of bitsandbytes -----------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("made", "asked", "becomes"),
    [
        ({"blocksize": 128}, {}, "nf4"),
        ({"quant_type": "fp4"}, {}, "nf4"),
        ({"double_quant": False}, {"base": "nf4", "double_quant": True}, "nf4"),
        ({}, {"base": "int8"}, "int8"),
    ],
)
def test_another_layout_is_unpacked_and_packed_anew(
    made: dict[str, Any], asked: dict[str, Any], becomes: str, tmp_path: Path
) -> None:
    folder = write_4bit(tmp_path, "mixtral", hidden_size=64, **made)
    adapted = built(folder, FROZEN, dtype="fp32", **asked)
    bank = adapted.model.model.layers[1].mlp.experts
    assert bank.gate_up.format == format_of(becomes, double_quant=True)
    gate_up, down = experts_of(load_file(folder / "model.safetensors"), "mixtral", 1, 3, nf4_value)
    stack = QuantizedExperts(1, tuple(down.shape), becomes)
    stack.quantize_(0, down)
    assert torch.equal(bank.down.matrix(3, torch.float32), stack.matrix(0, torch.float32))
    assert (bank.gate_up.matrix(3, torch.float32) - gate_up).norm() < 0.2 * gate_up.norm()


def test_bytes_of_four_bits_may_have_another_type(tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`, as which they hold NaN: sharded trainers ask for bfloat16."""
    folder = write_4bit(tmp_path, "mixtral", hidden_size=64)
    expected = built(folder, FROZEN, dtype="fp32").model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    packed = {name for name in tensors if f"{name}.absmax" in tensors}
    other = {name: tensors[name].view(-1).view(torch.bfloat16).view(-1, 1) for name in packed}
    assert not all(tensor.isfinite().all() for tensor in other.values())
    save_file(tensors | other, folder / "model.safetensors", metadata={"format": "pt"})
    for name, tensor in built(folder, FROZEN, dtype="fp32").model.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_settings_and_scales_of_attention_are_left_out(tmp_path: Path) -> None:
    """As llm-compressor writes them beside those of weights."""
    folder = write_floats(tmp_path, "row")
    expected = built(folder, FROZEN, dtype="fp32").model.state_dict()
    config = json.loads((folder / "config.json").read_text())
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"targets": ["Qwen3MoeAttention"], "weights": None, "input_activations": activations}
    config["quantization_config"]["config_groups"]["group_1"] = group
    (folder / "config.json").write_text(json.dumps(config))
    scales = {f"model.layers.0.self_attn.{part}_scale": torch.ones(1) for part in "qkv"}
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")
    for name, tensor in built(folder, FROZEN, dtype="fp32").model.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_stacked_experts_beside_four_bits_are_quantized(tmp_path: Path) -> None:
    """As transformers saves a model that bitsandbytes quantized, which packs linear layers alone."""
    folder = write_4bit(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=64)
    bank = built(folder, FROZEN, dtype="fp32").model.model.layers[1].mlp.experts
    published = load_file(folder / "model.safetensors")["model.layers.1.mlp.experts.down_proj"]
    stack = QuantizedExperts(1, (64, 64), "nf4")
    stack.quantize_(0, published[3].T.contiguous())
    assert torch.equal(bank.down.matrix(3, torch.float32), stack.matrix(0, torch.float32))


def test_experts_of_gpt_oss_apart_in_four_bits_are_kept(tmp_path: Path) -> None:
    """As Unsloth publishes it. A merged model has them in transformers' stacks."""
    folder = write_4bit(tmp_path / "apart", "gpt_oss", hidden_size=64, intermediate_size=96, apart=True)
    adapted = built(folder, {"experts": {"layers": "1", "ids": [2]}}, dtype="fp32")
    bank, tensors = adapted.model.model.layers[1].mlp.experts, load_file(folder / "model.safetensors")
    for name in ("gate_up", "down"):
        stack, path = getattr(bank, name), f"model.layers.1.mlp.experts.{name}_projs."
        assert torch.equal(stack.data[bank.frozen_slots[3]], tensors[f"{path}3.weight"].flatten())
        assert torch.equal(getattr(bank.trained["2"], name).weight, nf4_value(tensors, f"{path}2.weight"))
    (tmp_path / "merged").mkdir()
    copy_checkpoint(folder, tmp_path / "merged")
    with torch.no_grad():
        found = adapted.model.eval()(token_ids()).logits
        expected = stock(tmp_path / "merged", torch.float32)(token_ids()).logits
    assert (found - expected).norm() < 0.02 * expected.norm()  # which is in bfloat16 there
    del tensors["model.layers.1.mlp.experts.down_projs.3.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"down_proj_bias.*do not fit together"):
        built(folder, FROZEN)


def test_scales_other_than_published_are_refused_unless_it_is_packed_anew(tmp_path: Path) -> None:
    folder = write_4bit(tmp_path, "mixtral", hidden_size=64, double_quant=False)
    with pytest.raises(UserError, match=r"double_quant: true, but .* leave it out to keep that, or set base: nf4"):
        built(folder, FROZEN, double_quant=True)


@pytest.mark.parametrize(
    ("write", "dequantize"),
    [
        (write_mxfp4, Mxfp4Config(dequantize=True)),
        (
            functools.partial(write_fp8, model_type="llama", hidden_size=256, intermediate_size=128),
            FineGrainedFP8Config(dequantize=True),
        ),
    ],
    ids=["mxfp4", "fp8"],
)
def test_what_transformers_saves_of_a_dequantized_model_is_refused_with_the_remedy(
    tmp_path: Path, write: Callable[[Path], Path], dequantize: Any
) -> None:
    """findings/transformers_dequantized_saved_wrong.sh; transformers 5.24 saves it whole."""
    published = write(tmp_path / "published")
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32, quantization_config=dequantize)
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "whole", save_original_format=False)
    saved, whole = (load_file(tmp_path / name / "model.safetensors").keys() for name in ("saved", "whole"))
    if saved != whole:
        with pytest.raises(UserError, match="save it again with save_original_format=False"):
            built(tmp_path / "saved", FROZEN)
    built(tmp_path / "whole", FROZEN)


NVFP4 = functools.partial(write_nvfp4, model_type="qwen3_moe", hidden_size=64, moe_intermediate_size=48)
IN_4BIT = functools.partial(write_4bit, model_type="mixtral", hidden_size=64)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("write", "part", "poison"),
    [
        (functools.partial(write_mxfp4, shards=True), "model.layers.0.mlp.experts.down_proj_scales", 255),
        (write_fp8, "model.layers.0.self_attn.o_proj.weight", 0x7F),
        (write_fp8, "model.layers.0.self_attn.o_proj.weight_scale_inv", math.inf),
        (NVFP4, f"{Q_PROJ}_scale", 0xFF),  # as ModelOpt writes for a matrix that is all zero
        (NVFP4, f"{Q_PROJ}_scale_2", math.nan),
        (functools.partial(NVFP4, producer="compressed-tensors"), f"{Q_PROJ}_global_scale", math.nan),
        (functools.partial(IN_4BIT, double_quant=False), f"{Q_PROJ}.absmax", math.nan),
        (IN_4BIT, f"{Q_PROJ}.nested_absmax", math.nan),
    ],
)
def test_a_part_that_is_not_finite_is_named(
    write: Callable[..., Path], part: str, poison: float, tmp_path: Path
) -> None:
    """Whether the weight is kept as it is, or unpacked."""
    folder = write(tmp_path)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if part in tensors:
            bits = tensors[part].view(-1) if isinstance(poison, float) else tensors[part].view(-1).view(torch.uint8)
            bits[-1] = poison
            save_file(tensors, file, metadata={"format": "pt"})
    for base in ("auto", "bf16"):
        with pytest.raises(UserError, match=rf"{re.escape(part)} holds values that are not finite"):
            built(folder, FROZEN, base=base)


def test_mxfp4_of_other_layouts_is_refused(tmp_path: Path) -> None:
    """Of a type that stores experts [out, in]; square ones would fit by chance."""
    toy_config("granitemoe", hidden_size=64, intermediate_size=32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = AutoModelForCausalLM.from_config(toy_config("granitemoe", hidden_size=64, intermediate_size=32))
    tensors = {name: value.contiguous() for name, value in plain.state_dict().items()}
    for name in [name for name in tensors if name.endswith("gate_up_proj")]:
        del tensors[name]
        tensors[f"{name}_blocks"] = torch.zeros(8, 64, 2, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(8, 64, 2, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"gate_up_proj is .* is gpt-oss' layout of MXFP4"):
        built(tmp_path, FROZEN)


# --- FP8 in blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "block", "becomes"), [("auto", 32, "nf4"), ("fp32", 128, "fp32")])
def test_fp8_quantized_otherwise_is_quantizing_what_it_stands_for(
    base: str, block: int, becomes: str, tmp_path: Path
) -> None:
    """Blocks of other sizes among it."""
    folder = write_fp8(tmp_path, block=block, hidden_size=64, moe_intermediate_size=64)
    adapted = built(folder, {"experts": {"layers": "1", "ids": [2]}}, base=base, dtype="fp32")
    assert adapted.run.config.model.base == becomes
    tensors = load_file(folder / "model.safetensors")
    for layer in adapted.structure.moe_layers:
        bank: Any = adapted.model.get_submodule(layer.experts)
        for expert in range(bank.num_experts):
            gate_up, down = experts_of(tensors, "deepseek_v3", layer.index, expert, fp8_value)
            if expert not in bank.frozen_slots:
                assert torch.equal(bank.trained[str(expert)].gate_up.weight, gate_up)
                continue
            for name, expected in (("gate_up", gate_up), ("down", down)):
                stack = QuantizedExperts(1, tuple(expected.shape), bank.down.storage)
                stack.quantize_(0, expected)
                found = getattr(bank, name).matrix(bank.frozen_slots[expert], torch.float32)
                assert torch.equal(found, stack.matrix(0, torch.float32))


PACKED: dict[str, Callable[[Path], Path]] = {
    "mxfp4": functools.partial(write_mxfp4, shards=True),
    "int4": functools.partial(write_int4, producer="gptq", left_out=["self_attn.o_proj"]),
    **{
        kind: functools.partial(write, model_type="qwen3_moe", hidden_size=64, moe_intermediate_size=48, **LEFT_OUT)
        for kind, write in (("fp8", write_fp8), ("nvfp4", write_nvfp4))
    },
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "base"), [*((kind, "auto") for kind in PACKED), ("mxfp4", "nf4")])
def test_a_quantized_base_of_it_is_the_same(kind: str, base: str, tmp_path: Path) -> None:
    """And says by itself what it is packed in."""
    folder = PACKED[kind](tmp_path / "published")
    with small_linears_are_quantized():
        write_quantized_base(str(folder), tmp_path / "packed", base, True)
        expected = built(folder, {"router": "all"}, base=base).model.state_dict()
        found = built(tmp_path / "packed", {"router": "all"}).model.state_dict()
    assert found.keys() == expected.keys()
    assert any(name.endswith("q_proj.stack.scales") for name in found) == (kind != "mxfp4")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_fp8_blocks_may_be_cut_off(tmp_path: Path) -> None:
    """As those of DeepSeek-V3's `kv_a_proj_with_mqa`, [576, 7168], are, which transformers does not unpack."""
    weight, scales = torch.randn(80, 50).to(torch.float8_e4m3fn), torch.rand(3, 2)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [32, 32]}}))
    save_file({"a.weight": weight, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path)["a.weight"]
    expected = (weight.float() * scales.repeat_interleave(32, 0)[:80].repeat_interleave(32, 1)[:, :50]).bfloat16()
    assert torch.equal(opened.rows(), expected)
    assert torch.equal(opened.rows(20, 70), expected[20:70])
    with pytest.raises(ValueError, match="not divisible"):  # once it is, its finding is out of date
        Fp8Dequantize(None)._dequantize_one(weight, scales)


# --- NVFP4 ----------------------------------------------------------------------------------------------------------


def test_settings_of_modelopt_in_a_file_of_their_own(tmp_path: Path) -> None:
    """As before version 0.29."""
    folder = write_nvfp4(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=48)
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": settings["ignore"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": own}))
    assert built(folder, FROZEN).run.config.model.base == "nvfp4"
    own["quant_algo"] = "NVFP4_AWQ"
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": own}))
    with pytest.raises(UserError, match=r"already quantized \(modelopt NVFP4_AWQ\)"):
        built(folder, FROZEN)
