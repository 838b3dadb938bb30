"""Whole toys that the publishing libraries pack load with their values, train, and are exported, also packed again.

Where a library is installed; a push has tests/formats/published, which the same functions wrote.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from moetune.exporting.export import export
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from scripts import make_published_values as values
from tests.exporting import runs
from tests.exporting.runs import tensors_of, write_run
from tests.toys import toy_config

PACKERS: dict[str, tuple[str, Callable[[Tensor], values.Packed]]] = {
    "compressed_tensors": ("int4", values.pack_compressed_tensors),
    "gptqmodel": ("int4", lambda of: values.pack_gptq(of.half())),
    "gptqmodel.quantization.awq": ("int4", lambda of: values.pack_awq(of.half())),
    "auto_round": ("int4", lambda of: values.pack_auto_round(of.half())),
    "modelopt": ("fp8", values.pack_modelopt),
    "modelopt.torch": ("mxfp8", lambda of: values.pack_modelopt(of, "MXFP8")),
}
"""Library -> `--into` of its format, and what packs a matrix."""


@pytest.mark.full
@pytest.mark.parametrize("library", PACKERS)
def test_a_toy_of_a_library_loads_trains_and_is_exported(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    into, pack = PACKERS[library]
    torch.manual_seed(0)
    config = toy_config("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    for name, weight in revert_weight_conversion(model, model.state_dict()).items():
        if weight.ndim == 2 and "_proj." in name:
            settings, parts = pack(weight.contiguous())
            expected[name] = parts.pop("expected")
            tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        else:
            tensors[name] = weight.contiguous()
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": settings}))
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    stored = open_checkpoint(base)
    assert {name for name, tensor in stored.items() if isinstance(tensor, Quantized)} == expected.keys()
    # ModelOpt rounds a scale in float32 to 16 bits first
    for name, weight in expected.items():
        found = stored[name].rows()
        assert (
            torch.equal(found, weight)
            if library != "modelopt"
            else (found - weight).abs().max() <= weight.abs().max() / 128
        )
    run = write_run(tmp_path / "run", base, runs.ADAPT["both"], storage="auto")
    assert run.adapted.run.config.model.base.split("-")[0] == into
    export(run.path, "merged", tmp_path / "merged")
    export(run.path, "merged", tmp_path / "again", into=into)  # type: ignore[arg-type]
    merged, again = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "again")
    assert again.keys() == tensors.keys()
    untrained = [name for name in expected if "layers.0." in name]
    assert untrained
    assert all(
        torch.equal(merged[name], expected[name].to(merged[name].dtype)) for name in untrained if library != "modelopt"
    )
    same = [name for name in tensors if "layers.0." in name and "_proj" in name]
    assert all(
        torch.equal(again[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in same if again[name].ndim
    )
