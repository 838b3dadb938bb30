"""Whatever a configuration says of quantization, wherever it says it, is seen: a model is never counted as 16 bit."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from moetune.adapt.count import count
from moetune.config.schema import BASE_PARTS, ModelConfig
from moetune.errors import UserError
from moetune.exporting.writers.merged import write_config
from moetune.formats.source_quantization import SourceQuantization, left_out
from moetune.formats.table import quantization_of
from moetune.models.selection import NOTHING
from moetune.models.source import find_model_source
from moetune.run.resolve import resolve_model
from tests.reference import small_linears_are_quantized
from tests.toys import toy_config

METHODS = [method for method in AUTO_QUANTIZATION_CONFIG_MAPPING if not method.startswith("bitsandbytes_")]
SETTINGS: dict[str, dict[str, Any]] = {
    **{method: {"quant_method": method, "bits": 3, "group_size": 128} for method in METHODS},
    "bitsandbytes": {"load_in_8bit": True},
    "bitsandbytes of 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": []},
    "not known to anyone": {"quant_method": "not known to anyone"},
}
GROUP: dict[str, Any] = {
    "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
}  # fmt: skip
CT: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"x": GROUP},
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def write(folder: Path, place: tuple[str, ...], settings: Any, model_type: str = "qwen3_vl_moe") -> str:
    """A folder without weights, whose configuration has settings in one place."""
    config: Any = toy_config(model_type).to_dict()
    section = config
    for key in place[:-1]:
        section = section.setdefault(key, {})
    section[place[-1]] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


PLACES = [
    ("quantization_config",),
    ("text_config", "quantization_config"),
    ("vision_config", "x", "quantization_config"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_quantizer_of_transformers_is_taken_for_16_bits(
    settings: dict[str, Any], place: tuple[str, ...], tmp_path: Path
) -> None:
    """Of each the format is read, or a run and a count are refused with its name."""
    path = write(tmp_path, place, settings)
    published = find_model_source(path).quantization
    assert published.method == settings.get("quant_method", "bitsandbytes")
    if not published.is_read:
        with pytest.raises(UserError, match=rf"already quantized \({published.method}\)"):
            count(path)
        with pytest.raises(UserError, match=rf"already quantized \({published.method}\)"):
            resolve_model(ModelConfig.named(path))
    else:
        assert published.method in ("mxfp4", "fp8", "mxfp8", "fbgemm_fp8", "bitsandbytes")


MODELOPT: dict[str, str | None] = {
    "FP8": "fp8-tensor", "FP8_PER_CHANNEL_PER_TOKEN": "fp8-row", "fp8_pb_wo": "fp8", "fp8_pb_real": "fp8",
    "FP8_PB_WO": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4",
    **dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL", "NVFP4_AWQ", "NVFP4_SVD")),
    **dict.fromkeys(("W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "mxfp4", "MIXED_PRECISION", "INT4_AWQ", "of tomorrow")),
}  # fmt: skip
"""Algorithm that ModelOpt 0.47 writes (`process_layer_quant_config` in modelopt/torch/export/quant_utils.py; vLLM has
capitals) -> the value of `model.base` that keeps it, None if it is refused."""


@pytest.mark.parametrize("beside", [False, True], ids=["in config.json", "beside it"])
@pytest.mark.parametrize("algorithm", MODELOPT)
def test_no_algorithm_of_modelopt_is_taken_for_16_bits(algorithm: str, beside: bool, tmp_path: Path) -> None:
    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    path = write(tmp_path, ("x",) if beside else PLACES[0], settings, "mixtral")
    if beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    if MODELOPT[algorithm] is None:
        with pytest.raises(UserError, match=rf"already quantized \(modelopt {algorithm}\)"):
            count(path)
    else:
        assert resolve_model(ModelConfig.named(path)).config.base == MODELOPT[algorithm]


@pytest.mark.parametrize(
    ("place", "settings", "method"),
    [
        (("quantization",), {"group_size": 64, "bits": 4}, "quantization without quant_method"),  # as MLX writes
        (("text_config", "compression_config"), {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        (("quantization_config",), {}, "quantization_config without quant_method"),
    ],
)
def test_other_keys_of_settings(place: tuple[str, ...], settings: Any, method: str, tmp_path: Path) -> None:
    assert find_model_source(write(tmp_path, place, settings)).quantization == SourceQuantization(method, is_read=False)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (CT | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (CT | {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}, "sparsity_config"),
        (CT | {"moe_sparsity_config": {"method": "novice"}}, "moe_sparsity_config"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"rotation": "hadamard"}, "rotation"),
        (GPTQ | {"quant_method": "auto-round", "rotation_config": {"hadamard_type": "random"}}, "rotation_config"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "x": {"rotate": True}}, "rotate"),
        # gptqmodel's FP8: what it calls weight_scale_inv is the reciprocal of everyone else's
        ({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "weight_scale_semantics"),
        ({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"}, "moe_quant_algo"),
    ],
)
def test_weights_that_are_more_than_codes_and_scales_are_refused_by_the_setting(
    settings: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"already quantized \({settings['quant_method']} with {setting}\)"):
        count(write(tmp_path, PLACES[0], settings, "mixtral"))


@pytest.mark.parametrize(
    ("settings", "base", "has_activations"),
    [
        (CT, "int4-g32", False),
        (CT | {"sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"}}, "int4-g32", False),
        (CT | {"transform_config": {}, "kv_cache_scheme": {"num_bits": 8}}, "int4-g32", False),
        (CT | {"config_groups": {"x": GROUP | {"input_activations": {"num_bits": 8}}}}, "int4-g32", True),
        (
            CT | {"format": "mixed-precision", "config_groups": {"x": GROUP | {"format": CT["format"]}}},
            "int4-g32",
            False,
        ),
        (GPTQ | {"pack_dtype": "int32", "rotation": None, "adapter": None}, "int4-g128", False),
        (GPTQ | {"group_size": -1, "desc_act": True}, "int4-row", False),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "act_bits": 8}, "int4-g32", True),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8-tensor", True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", True),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "nvfp4", False),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "fp8", False),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_real"}, "fp8", True),
    ],
)
def test_what_is_read(settings: dict[str, Any], base: str, has_activations: bool, tmp_path: Path) -> None:
    published = find_model_source(write(tmp_path, PLACES[0], settings, "mixtral")).quantization
    assert (published.base, published.has_activations) == (base, has_activations)


L = "model.layers"
AWQ = GPTQ | {"quant_method": "awq", "version": "gemm"}
AUTO_ROUND = GPTQ | {"quant_method": "auto-round"}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
Q_PROJ, ATTENTION = [f"{L}.0.self_attn.q_proj"], [f"{L}.{n}.self_attn.{p}_proj" for n in range(4) for p in "qkvo"]
EACH = [f"{L}.{n}.mlp.experts.{e}.{p}_proj" for n in range(4) for e in range(8) for p in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("model_type", "settings", "base", "left"),
    [
        ("qwen3_moe", FP8 | {"modules_to_not_convert": [r"model\.layers\.0\.self_attn\.q_proj"]}, "fp8", Q_PROJ),
        (
            "qwen3_vl_moe",
            FP8 | {"modules_to_not_convert": ["model.language_model.layers.0.mlp"]},
            "fp8; bf16 (layer 0, experts)",
            [],
        ),
        (
            "qwen3_vl_moe",
            FP8 | {"modules_to_not_convert": ["language_model.model.layers.0.self_attn.q_proj", "visual"]},
            "fp8",
            ["model.language_model.layers.0.self_attn.q_proj"],
        ),
        ("qwen3_vl_moe", FP8 | {"modules_to_not_convert": ["vision_tower.layers.0.self_attn.q_proj"]}, "fp8", []),
        (
            "deepseek_v3",
            CT | {"ignore": ["re:.*shared_experts.*"]},
            "int4-g32",
            [f"{L}.{n}.mlp.shared_experts.{p}_proj" for n in (1, 2, 3) for p in ("gate", "up", "down")],
        ),
        (
            "deepseek_v3",
            CT | {"ignore": [f"re:{L}.0.mlp.*"]},
            "int4-g32",
            [f"{L}.0.mlp.{p}_proj" for p in ("gate", "up", "down")],
        ),
        ("qwen3_moe", CT | {"ignore": EACH}, "int4-g32; bf16 (experts)", []),
        (
            "mixtral",
            CT | {"ignore": [rf"re:{L}\.3\.block_sparse_moe\.experts.*"]},
            "int4-g32; bf16 (layer 3, experts)",
            [],
        ),
        ("mixtral", CT | {"ignore": [r"re:.*block_sparse_moe\.gate$", "lm_head"]}, "int4-g32", []),
        (
            "qwen3_moe",
            CT | {"config_groups": {"x": GROUP | {"targets": ["re:.*self_attn.*"]}}},
            "int4-g32; bf16 (experts)",
            [],
        ),
        ("qwen3_moe", CT | {"config_groups": {"x": GROUP | {"targets": ["re:.*experts.*"]}}}, "int4-g32", ATTENTION),
        ("qwen3_moe", GPTQ | {"dynamic": {"-:.*self_attn.*": {}}}, "int4-g128", ATTENTION),
        ("qwen3_moe", GPTQ | {"dynamic": {"-:.*experts.*": {}}}, "int4-g128; bf16 (experts)", []),
        ("qwen3_moe", AWQ | {"modules_to_not_convert": ["self_attn", "mlp.gate"]}, "int4-g128", ATTENTION),
        ("qwen3_moe", AWQ | {"modules_to_not_convert": ["experts"]}, "int4-g128; bf16 (experts)", []),
        (
            "qwen3_moe",
            AUTO_ROUND | {"extra_config": {Q_PROJ[0]: {"bits": 16}, r".*mlp\.gate.*": {"bits": 16}}},
            "int4-g128",
            Q_PROJ,
        ),
        (
            "qwen3_moe",
            NVFP4 | {"exclude_modules": ["*self_attn*", f"{L}.0*"]},
            "nvfp4; bf16 (layer 0, experts)",
            ATTENTION,
        ),
    ],
)
def test_what_is_published_in_16_bits_is_known_before_any_weight_is_read(
    model_type: str, settings: dict[str, Any], base: str, left: list[str], tmp_path: Path
) -> None:
    """Linear layers and layers' experts, by every program's patterns and by checkpoints' own names."""
    with small_linears_are_quantized():
        model = resolve_model(ModelConfig.named(write(tmp_path, PLACES[0], settings, model_type)))
        stored = model.linears_to_quantize(NOTHING)
    linears = model.structure.linears().items()
    assert str(model.config.base) == base
    assert [path for path, one in linears if one.component in BASE_PARTS and path not in stored] == left


@pytest.mark.parametrize(
    "settings",
    [
        GPTQ | {"dynamic": {"+:.*self_attn.*": {"bits": 8}}},
        GPTQ | {"dynamic": {".*self_attn.*": {"bits": 8}}},
        *(GPTQ | {"bits": bits} for bits in (2, 3, 8)),
        GPTQ | {"group_size": 256},
        AWQ | {"version": "gemv"},
        AUTO_ROUND | {"extra_config": {Q_PROJ[0]: {"bits": 8}}},
        AUTO_ROUND | {"data_type": "fp"},
        CT | {"config_groups": {"x": GROUP, "y": {"targets": ["re:.*attn.*"], "weights": {"num_bits": 8}}}},
        CT | {"format": "int-quantized"},
        CT | {"format": "dense"},
        {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"},
    ],
)
@pytest.mark.parametrize("section", ["", "thinker_config", "language_config", "llm_config"])
def test_mixed_bits_and_other_layouts_are_refused_by_name(
    section: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    place = tuple(filter(None, (section, "quantization_config")))
    with pytest.raises(UserError, match=rf"already quantized \({settings['quant_method']}"):
        count(write(tmp_path, place, settings, "qwen3_moe"))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (CT | {"config_groups": [1]}, "config_groups"),
        (CT | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups"),
        (CT | {"config_groups": {"x": GROUP | {"targets": "Linear"}}}, "config_groups.targets"),
        (CT | {"config_groups": {"x": GROUP | {"targets": ["re:(("]}}}, "config_groups.targets"),
        (GPTQ | {"dynamic": ["-:x"]}, "dynamic"),
        (GPTQ | {"modules_in_block_to_quantize": 3}, "modules_in_block_to_quantize"),
        (GPTQ | {"dynamic": {"-:((": {}}}, "dynamic"),
        (GPTQ | {"quant_method": "auto-round", "extra_config": {"x": None}}, "extra_config"),
        (GPTQ | {"quant_method": "auto-round", "extra_config": {"((*": {"bits": 16}}}, "extra_config"),
    ],
)
def test_settings_of_a_wrong_type_are_named(settings: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"quantization_config\.{key} .* is not valid"):
        find_model_source(write(tmp_path, PLACES[0], settings, "mixtral"))


def places(settings: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in settings."""
    keys = settings if isinstance(settings, dict) else range(len(settings)) if isinstance(settings, list) else ()
    for key in keys:
        yield (*before, key)
        yield from places(settings[key], (*before, key))


FLOAT = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


@pytest.mark.parametrize(
    "settings",
    [
        CT | {"ignore": ["lm_head"], "sparsity_config": {"format": "dense"}},
        CT | {"format": "float-quantized", "config_groups": {"x": GROUP | {"weights": FLOAT}}},
        GPTQ | {"desc_act": True, "dynamic": {"-:x": {}}, "modules_in_block_to_quantize": [["x"]], "format": "gptq"},
        GPTQ | {"quant_method": "awq", "version": "gemm", "modules_to_not_convert": ["x"]},
        GPTQ | {"quant_method": "auto-round", "extra_config": {"x": {"bits": 16}}, "data_type": "int", "act_bits": 16},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "modules_to_not_convert": ["x"]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["x"]},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ],
)
def test_no_value_of_a_setting_ends_in_another_error(settings: dict[str, Any]) -> None:
    for place in places(settings):
        for value in (None, 3, 2.5, "x", "re:((", [], [3], [["a"]], [None], {}, {"a": 1}, {"a": {"b": []}}, True):
            changed: Any = copy.deepcopy(settings)
            section = changed
            for key in place[:-1]:
                section = section[key]
            section[place[-1]] = value
            with suppress(UserError):
                quantization_of(PretrainedConfig(quantization_config=changed))


def test_settings_that_differ_are_refused_by_both_names(tmp_path: Path) -> None:
    path = write(tmp_path, PLACES[1], SETTINGS["hqq"])
    assert find_model_source(path).quantization.method == "hqq"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS["hqq"]}))
    assert find_model_source(path).quantization.method == "hqq"
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS["aqlm"]}))
    with pytest.raises(UserError, match=r"already quantized \(aqlm and hqq\)"):
        count(path)


@pytest.mark.parametrize(
    ("name", "method"),
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("quantization_config.json", "auto-round")],
)
def test_settings_in_a_file_of_their_own(name: str, method: str, tmp_path: Path) -> None:
    toy_config("mixtral").save_pretrained(tmp_path)
    (tmp_path / name).write_text(json.dumps({"bits": 3}))
    assert find_model_source(str(tmp_path)).quantization.method == method


def test_settings_beside_a_configuration_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    home = "moetune.models.source."
    monkeypatch.setattr(f"{home}AutoConfig.from_pretrained", lambda *_, **__: toy_config("mixtral"))
    monkeypatch.setattr(f"{home}snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(f"{home}hub_is_reachable", lambda: True)
    published = find_model_source("someone/something").quantization
    assert (published.method, published.is_read) == ("modelopt W4A8_AWQ", False)


def test_a_dequantized_copy_says_nothing_of_it(tmp_path: Path) -> None:
    write(tmp_path, PLACES[1], SETTINGS["hqq"])
    (tmp_path / "out").mkdir()
    write_config(tmp_path, tmp_path / "out", None)
    assert not find_model_source(str(tmp_path / "out")).quantization.method


@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"])
@pytest.mark.parametrize(
    ("pattern", "path", "is_left_out"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.*.self_attn*", "model.layers.1.self_attn.q_proj", True),
        (r"model\.layers\.\d\.mlp", "model.layers.1.mlp.up_proj", True),
        (r"model\.layers\.\d\.mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate", True),
        ("expert_gate", "model.layers.1.mlp.shared_expert_gate", True),
        ("re:.*self_attn.*", "model.layers.1.self_attn.q_proj", True),
        (r"re:.*mlp\.(gate|up)_proj$", "model.layers.1.mlp.down_proj", False),
        ("*[", "model.layers.1.mlp", False),
    ],
)
def test_modules_that_are_left_out(key: str, pattern: str, path: str, is_left_out: bool) -> None:
    """By whatever program's key, and its kind of pattern."""
    published = SourceQuantization("fp8", "fp8", left_out=left_out({key: [pattern]}))
    assert published.leaves_out("fp8", path) == is_left_out
    assert not published.leaves_out("nf4", path)
