"""Whatever a configuration says of quantization, wherever it says it, is seen: a model is never counted as 16 bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from moetune.adapt.count import count
from moetune.config.schema import ModelConfig
from moetune.errors import UserError
from moetune.exporting.writers.merged import write_config
from moetune.formats.source_quantization import SourceQuantization, left_out
from moetune.models.source import find_model_source
from moetune.run.resolve import resolve_model
from tests.toys import toy_config

METHODS = [method for method in AUTO_QUANTIZATION_CONFIG_MAPPING if not method.startswith("bitsandbytes_")]
SETTINGS: dict[str, dict[str, Any]] = {
    **{method: {"quant_method": method, "bits": 3, "group_size": 128} for method in METHODS},
    "bitsandbytes": {"load_in_8bit": True},
    "bitsandbytes of 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": []},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    "not known to anyone": {"quant_method": "not known to anyone"},
}


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
        ("re:.*self_attn.*", "model.layers.1.self_attn.q_proj", True),
        (r"re:.*mlp\.(gate|up)_proj$", "model.layers.1.mlp.down_proj", False),
        ("*[", "model.layers.1.mlp", False),
    ],
)
def test_modules_that_are_left_out(key: str, pattern: str, path: str, is_left_out: bool) -> None:
    """By whatever program's key, and its kind of pattern."""
    published = SourceQuantization("fp8", "fp8", left_out=left_out({key: [pattern]}))
    assert published.leaves_out(path, "fp8") == is_left_out
    assert not published.leaves_out(path, "nf4")
