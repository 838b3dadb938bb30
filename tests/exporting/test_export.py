"""The trained model, the merged checkpoint in stock transformers and the adapter in stock PEFT give the same logits.

On a quantized base they agree to what quantizing alone changes; on float32 bases: test_merged.py, test_peft.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from moetune.exporting.export import export
from moetune.training.folder.checkpoint import TRAINED_FILE
from moetune.training.folder.run_writer import RunWriter
from tests.exporting.runs import ToyRun, make_toy, write_base, write_run
from tests.reference import plain_weights, small_linears_are_quantized, token_ids
from tests.resolved import build
from tests.thinned import thinned

TOLERANCE = 1e-4  # |difference| / |logits|, in float32
LORA: dict[str, Any] = {"rank": 2, "alpha": 5}
TARGETS: dict[str, list[str]] = {
    "mixtral": ["attention", "experts"],
    "gpt_oss": ["attention", "experts"],
    "deepseek_v2": ["attention", "experts", "shared_experts", "dense_mlp"],
    "deepseek_v3": ["attention", "experts", "dense_mlp"],
    "qwen2_moe": ["attention", "experts", "shared_experts"],
}
every_type = pytest.mark.parametrize("model_type", thinned(TARGETS, 5, ("mixtral", "gpt_oss")))


@dataclass
class Logits:
    trained: Tensor
    merged: Tensor
    peft: Tensor


def adapt_of(model_type: str) -> dict[str, Any]:
    return {"router": "all", "lora": LORA | {"targets": TARGETS[model_type]}}


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=token_ids(), use_cache=False).logits


def stock(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def three_ways(run: ToyRun, folder: Path) -> Logits:
    """Exports twice; what trained is read back from the checkpoint."""
    export(run.path, "merged", folder / "merged")
    export(run.path, "peft", folder / "adapter")
    adapter = PeftModel.from_pretrained(stock(run.base), str(folder / "adapter"))
    return Logits(logits(run.adapted.model), logits(stock(folder / "merged")), logits(adapter))


@pytest.mark.one_in(2)
@every_type
def test_on_a_packed_base(model_type: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The exports belong to the unpacked base, so they differ by what packing changes, and by little more: training
    makes some tokens of a random model choose other experts too."""
    base = write_base(tmp_path / "base", model_type)
    with small_linears_are_quantized():
        run = write_run(tmp_path / "run", base, adapt_of(model_type), storage="nf4")
        untrained = build(run.config, "cpu")  # its B are zero
        found = three_ways(run, tmp_path)
    packing = difference(logits(untrained.model), logits(stock(base)))
    apart = [difference(way, found.trained) for way in (found.merged, found.peft)]
    numbers = {"packing": packing, "merged": apart[0], "peft": apart[1]}
    for name, value in numbers.items():
        record_property(name, value)
    print(model_type, {name: f"{value:.4f}" for name, value in numbers.items()})
    assert 0.01 < packing < 1
    assert all(0 < value <= 3 * packing for value in apart)
    assert difference(found.peft, found.merged) < TOLERANCE


@pytest.mark.one_in(2)
@every_type
def test_on_the_values_of_a_packed_base(model_type: str, tmp_path: Path) -> None:
    """A checkpoint of what the packed base holds, unpacked: the same change exported for it is exact."""
    base = write_base(tmp_path / "base", model_type)
    with small_linears_are_quantized():
        run = write_run(tmp_path / "run", base, adapt_of(model_type), storage="nf4")
        untrained = build(run.config, "cpu")
    unpacked = make_toy(model_type)
    leaves = {name: parameter.detach() for name, parameter in untrained.trainable().items()}
    values = plain_weights(untrained, unpacked, leaves)
    with torch.no_grad():
        for name, tensor in (*unpacked.named_parameters(), *unpacked.named_buffers()):
            tensor.copy_(values[name])
    unpacked.save_pretrained(tmp_path / "unpacked")
    assert difference(logits(unpacked), logits(untrained.model)) < TOLERANCE

    moved = write_run(tmp_path / "moved", tmp_path / "unpacked", adapt_of(model_type))
    trained = load_file(run.path / "checkpoints" / "step-7" / TRAINED_FILE)
    with RunWriter(moved.path).new_checkpoint(8, keep=1) as aside:
        save_file(trained, aside / TRAINED_FILE)
    found = three_ways(moved, tmp_path)
    expected = logits(run.adapted.model)
    apart = [difference(way, expected) for way in (found.merged, found.peft)]
    print(model_type, [f"{value:.1e}" for value in apart])
    assert max(apart) < TOLERANCE
    assert difference(logits(unpacked), expected) > 100 * TOLERANCE
