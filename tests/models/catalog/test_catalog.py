"""The catalog's facts: every entry builds, and its parameters add up to the published number exactly."""

import subprocess
import sys
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from moetune.models import catalog
from moetune.models.catalog import CatalogModel, find_model, model_names

NAMES = model_names()
WITH_MTP = ["deepseek-v3", "glm-4.5-air"]


def get(name: str) -> CatalogModel:
    model = find_model(name)
    assert model is not None, name
    return model


def build(config: dict[str, Any], **overrides: Any) -> nn.Module:
    settings = {**config, **overrides}
    built = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(built)


def count(module: nn.Module) -> int:
    """Parameters of `module`; `parameters()` yields a tied one once."""
    return sum(parameter.numel() for parameter in module.parameters())


def saved_buffers(module: nn.Module) -> dict[str, int]:
    """Elements of the buffers that a checkpoint holds, summed per buffer name."""
    saved = module.state_dict().keys()
    sums: dict[str, int] = {}
    for path, buffer in module.named_buffers():
        if path in saved:
            name = path.rpartition(".")[2]
            sums[name] = sums.get(name, 0) + buffer.numel()
    return sums


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_parameters_add_up_to_the_published_total(name: str) -> None:
    entry = get(name)
    model = build(entry.config)
    buffers = entry.published.get("buffers", {})
    assert count(model) + sum(buffers.values()) == entry.published["total"]
    assert saved_buffers(model) == buffers


@pytest.mark.parametrize("name", WITH_MTP)
def test_hub_total_is_ours_and_what_transformers_does_not_build(name: str) -> None:
    entry = get(name)
    hub = entry.published["hub_metadata"]
    assert entry.published["total"] + sum(hub["not_built"].values()) == hub["total"]
    assert hub["not_built"]["mtp"] == mtp_elements(entry.config)


def test_only_the_models_with_an_mtp_layer_have_a_second_total() -> None:
    assert [name for name in NAMES if "hub_metadata" in get(name).published] == WITH_MTP


def test_deepseek_v3_has_one_scale_per_fp8_block() -> None:
    entry = get("deepseek-v3")
    rows, columns = entry.config["quantization_config"]["weight_block_size"]
    in_bf16 = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    scales = 0
    for path, weight in with_mtp_decoder_layer(entry.config).named_parameters():
        if weight.ndim > 1 and not path.endswith(in_bf16):
            *experts, height, width = weight.shape
            # gate and up are two tensors on disk, but each is a whole number of blocks high
            scales += ceil(height / rows) * ceil(width / columns) * (experts[0] if experts else 1)
    assert scales == entry.published["hub_metadata"]["not_built"]["fp8_scales"]


def with_mtp_decoder_layer(config: dict[str, Any]) -> nn.Module:
    """The model with the decoder layer of its multi-token-prediction (MTP) module as one more layer."""
    layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    return build(config, num_hidden_layers=layers)


def mtp_elements(config: dict[str, Any]) -> int:
    """What a checkpoint with one MTP module holds beyond the model itself.

    A decoder layer, `eh_proj` [H, 2H], three norms [H], and copies of the embedding and the head [V, H] each:
    https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md
    """
    assert config["num_nextn_predict_layers"] == 1
    longer, model = with_mtp_decoder_layer(config), build(config)
    decoder_layer = count(longer) - count(model)
    decoder_layer += sum(saved_buffers(longer).values()) - sum(saved_buffers(model).values())
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    return decoder_layer + 2 * hidden**2 + 3 * hidden + 2 * vocab * hidden


@pytest.mark.parametrize("name", NAMES)
def test_entry_is_complete_safe_and_documented(name: str) -> None:
    entry = get(name)
    assert entry.name == name
    assert entry.license
    assert entry.published["source"]
    assert isinstance(entry.published["total"], int)
    if entry.folder is None:
        assert entry.hub_id is not None
        assert entry.hub_id.count("/") == 1
    else:
        assert (entry.folder / "config.json").is_file()
        assert list(entry.folder.glob("*.safetensors"))

    assert not {"auto_map", "custom_pipelines", "_name_or_path"} & entry.config.keys()
    page = Path(__file__).parents[3] / "docs/reference/catalog.md"
    (row,) = [line for line in page.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    assert f" {entry.published['total']:,} " in row
    assert (entry.hub_id or "shipped with moetune") in row


def test_names_are_sorted_and_lower_case() -> None:
    assert sorted(NAMES) == NAMES
    assert [name.lower() for name in NAMES] == NAMES
    assert {"mixtral-8x7b", "llama-7b", "tiny-mixtral"} <= set(NAMES)


def test_hub_ids_are_unique() -> None:
    hub_ids = [hub_id.lower() for name in NAMES if (hub_id := get(name).hub_id)]
    assert len(set(hub_ids)) == len(hub_ids)


def test_find_model_by_name_or_hub_id_in_any_case() -> None:
    for query in ("mixtral-8x7b", "Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1", "mistralai/mixtral-8x7b-v0.1"):
        assert get(query).name == "mixtral-8x7b"
    for query in ("", "mixtral", "../models/mixtral-8x7b", "someone/mixtral-8x7b"):
        assert find_model(query) is None
    assert [name for name in NAMES if get(name).folder is not None] == ["tiny-mixtral"]


def test_a_caller_cannot_spoil_the_next_lookup() -> None:
    get("mixtral-8x7b").config["hidden_size"] = 1
    assert get("mixtral-8x7b").config["hidden_size"] == 4096


def test_reading_the_catalog_imports_neither_torch_nor_transformers() -> None:
    code = (
        f"import sys, {catalog.__name__} as c, {catalog.__name__}.gpus as gpus; gpus.find_gpu('l40s');"
        "[c.find_model(n) for n in c.model_names()];"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
