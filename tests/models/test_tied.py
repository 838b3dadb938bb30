"""Whether a checkpoint's files hold apart what its configuration ties: as transformers decides when it loads them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moetune.adapt.build import build
from moetune.errors import UserError
from moetune.models.source import find_model_source
from moetune.run.resolve import resolve
from tests.exporting.runs import write_base
from tests.reference import run_config

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Change = Callable[[dict[str, Tensor]], object]


def tied(folder: Path, change: Change, model_type: str = "qwen3_moe") -> Path:
    """Write a checkpoint whose configuration ties, and change the tensors in its file."""
    write_base(folder, model_type, num_hidden_layers=2, tie_word_embeddings=True)
    changed(folder, change)
    return folder


def changed(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def one_value(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[TABLE].clone()
    tensors[HEAD][-1, -1] += 1


STORED: dict[str, tuple[Change, bool]] = {
    "the embedding": (lambda tensors: None, False),
    "the head": (lambda tensors: tensors.update({HEAD: tensors.pop(TABLE)}), False),
    "both, equal": (lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}), False),
    "both, equal in two types": (lambda tensors: tensors.update({HEAD: tensors[TABLE].double()}), False),
    "both, of which one value differs": (one_value, True),
    "both, under another name": (lambda tensors: tensors.update({f"model.{HEAD}": torch.randn(96, 32)}), True),
}


@pytest.mark.parametrize("how", STORED)
def test_weights_are_apart_where_transformers_loads_two(how: str, tmp_path: Path) -> None:
    change, is_apart = STORED[how]
    base = tied(tmp_path / "base", change)
    source = find_model_source(str(base))
    assert (source.is_apart, source.config.tie_word_embeddings) == (is_apart, not is_apart)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    assert (loaded.lm_head.weight is not loaded.model.embed_tokens.weight) == is_apart


def test_the_configuration_alone_counts_without_the_weights(tmp_path: Path) -> None:
    base = tied(tmp_path / "base", one_value)
    (base / "model.safetensors").unlink()
    assert find_model_source(str(base)).config.tie_word_embeddings is True


def test_a_head_of_another_shape_is_left_to_the_reader(tmp_path: Path) -> None:
    base = tied(tmp_path / "base", lambda tensors: tensors.update({HEAD: torch.zeros(96, 16)}))
    assert not find_model_source(str(base)).is_apart
    with pytest.raises(UserError, match=r"lm_head\.weight is \[96, 16\], not \[96, 32\]"):
        build(run_config(base, {"also": ["norm"]}, model={"weights": "pretrained", "base": "fp32"}), "cpu")


def test_a_configuration_that_ties_more_cannot_be_untied(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "zamba", tie_word_embeddings=True)
    assert not find_model_source(str(base)).is_apart
    changed(base, one_value)
    with pytest.raises(UserError, match=r"lm_head\.weight has other values than model\.embed_tokens\.weight"):
        find_model_source(str(base))


def test_weights_that_came_after_the_model_was_resolved_are_refused(tmp_path: Path) -> None:
    """As when the weights of a hub model are downloaded to be loaded: what trains was chosen on the configuration."""
    base = tied(tmp_path / "base", one_value)
    weights = (base / "model.safetensors").rename(tmp_path / "weights")
    run = resolve(run_config(base, {"also": ["norm"]}, model={"weights": "pretrained", "base": "fp32"}))
    weights.rename(base / "model.safetensors")
    with pytest.raises(UserError, match=r"an LM head of their own, .* run the command again"):
        build(run, "cpu")
