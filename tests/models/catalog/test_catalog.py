"""The catalog's facts: every entry builds, and its parameters add up to the published number exactly."""

import re
import subprocess
import sys
from functools import cache
from math import ceil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from moetune.models import catalog
from moetune.models.catalog import CatalogModel, find_model, model_names
from moetune.models.text import auto_class

NAMES = model_names()
MTP_COPIES = {"deepseek-v3": 2, "deepseek-v3.2": 2, "glm-4.5-air": 2, "glm-4.7-flash": 2}
"""Model -> matrices of the size of the embedding in its multi-token-prediction (MTP) module; of others none."""
IN_BF16 = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "indexer.weights_proj.weight")
"""Matrices of checkpoints in FP8 that are not in FP8."""


def get(name: str) -> CatalogModel:
    model = find_model(name)
    assert model is not None, name
    return model


MORE_ON_THE_HUB = [name for name in NAMES if "hub_metadata" in get(name).published]


@cache
def build(name: str) -> nn.Module:
    """The whole model, towers included, without memory."""
    settings = dict(get(name).config)
    built = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return auto_class(built).from_config(built)


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


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", NAMES)
def test_parameters_add_up_to_the_published_total(name: str) -> None:
    entry, model = get(name), build(name)
    buffers = entry.published.get("buffers", {})
    assert count(model) + sum(buffers.values()) == entry.published["total"]
    assert saved_buffers(model) == buffers


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MORE_ON_THE_HUB)
def test_hub_total_is_ours_and_what_transformers_does_not_build(name: str) -> None:
    entry = get(name)
    hub = entry.published["hub_metadata"]
    assert entry.published["total"] + sum(hub["not_built"].values()) == hub["total"]
    text = entry.config.get("text_config", entry.config)
    expected = {"inv_freq": 56 * text["num_hidden_layers"]} if name == "kimi-k2" else {}
    has_mtp = text.get(
        "num_nextn_predict_layers", text.get("mtp_num_hidden_layers", int(name.startswith("qwen3-next")))
    )
    if has_mtp:
        expected["mtp"] = mtp_elements(name)
    if "quantization_config" in entry.config:
        expected["fp8_scales"] = fp8_scales(name, has_mtp)
    assert hub["not_built"] == expected


def last_layer(name: str) -> nn.Module:
    return build(name).get_decoder().layers[-1]


def fp8_scales(name: str, has_mtp: int) -> int:
    """One scale per block of the matrices in FP8, of the model and of the MTP module, which is one more layer; without
    blocks one of the matrix, and one of its inputs."""
    blocks = get(name).config["quantization_config"]["weight_block_size"]
    scales = 0
    for module in (build(name), *[last_layer(name)] * has_mtp):
        for path, weight in module.named_parameters():
            if weight.ndim > 1 and not path.endswith(IN_BF16) and not re.search("vision|projector", path):
                *experts, height, width = weight.shape
                # gate and up are two tensors on disk, but each is a whole number of blocks high
                each = ceil(height / blocks[0]) * ceil(width / blocks[1]) if blocks else 2
                scales += each * (experts[0] if experts else 1)
    return scales


def mtp_elements(name: str) -> int:
    """What a checkpoint with one MTP module holds beyond the model itself.

    A decoder layer like the last one, a projection [H, 2H], three norms [H], and in some models copies of the embedding
    and the LM head [V, H]: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md
    """
    text = get(name).config.get("text_config", get(name).config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    decoder_layer = count(last_layer(name)) + sum(saved_buffers(last_layer(name)).values())
    if name == "glm-5.3-flash":  # the module attends as the layer before the last, and has one residual stream
        state = build(name).get_decoder().layers[-2].state_dict()
        decoder_layer = sum(tensor.numel() for key, tensor in state.items() if "_hc." not in key)
    norms = 3 * hidden
    if name == "qwen3.8-flash-next":  # it reads the residual streams by a norm of each and a mixer, without a last norm
        norms = (1 + text["hc_count"]) * hidden + count(build(name).get_decoder().hyper_connection_mixer)
    return decoder_layer + 2 * hidden**2 + norms + MTP_COPIES.get(name, 0) * vocab * hidden


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
