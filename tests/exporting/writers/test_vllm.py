"""The adapter that vLLM reads: its keys and shapes, and that they multiply out to what was trained."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moetune.exporting.export import export
from tests.exporting.runs import tensors_of, write_base, write_run

LORA: dict[str, Any] = {"rank": 2, "alpha": 5, "targets": ["attention", "experts"], "layers": "1-2", "ids": [2, 3]}
EXPERTS = 8


def read_as_vllm(folder: Path, rank: int) -> Iterator[tuple[str, int | None, Tensor]]:
    """Yield B·A of each module, as `LoRAModelManager` takes factors apart: name, expert of a stack, product."""
    factors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        assert found is not None, key
        factors.setdefault(found[1], {})[found[2]] = tensor
    for module, pair in factors.items():
        A, B = pair["A"], pair["B"]
        if not module.endswith((".experts", ".experts.base_layer")):
            assert len(A) == B.shape[1] == rank
            yield module, None, B @ A
            continue
        assert len(A) == B.shape[1] == EXPERTS * rank
        stack = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
        for expert in range(EXPERTS):
            of_expert = B.reshape(len(B), rank, EXPERTS)[:, :, expert] @ A.reshape(EXPERTS, rank, -1)[expert]
            yield f"{module.removesuffix('.base_layer')}.{stack}", expert, of_expert


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("model_type", "gate_up", "rank"),
    [
        *(
            (model_type, gate_up, 2)
            for model_type in ("mixtral", "qwen3_moe", "gpt_oss")
            for gate_up in ("fused", "split")
        ),
        ("mixtral", "fused", {"attention": 4, "experts": {1: 3, 2: 2}}),
    ],
)
def test_vllm_would_compute_what_a_merged_checkpoint_does(
    model_type: str, gate_up: str, rank: Any, tmp_path: Path
) -> None:
    """Every projection of every expert of an adapted layer has factors; those of experts 2 and 3 are not zero."""
    base = write_base(tmp_path / "base", model_type, num_hidden_layers=3)
    run = write_run(tmp_path / "run", base, {"lora": LORA | {"gate_up": gate_up, "rank": rank}})
    result = export(run.path, "vllm", tmp_path / "vllm")
    export(run.path, "merged", tmp_path / "merged")
    settings = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    assert scale == 2.5
    assert settings["rank_pattern"] == settings["alpha_pattern"] == {}
    assert settings["modules_to_save"] is None
    assert result.tensors == len(load_file(tmp_path / "vllm" / "adapter_model.safetensors"))

    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    adapted = {
        key
        for key in before
        if key.startswith(("model.layers.1.", "model.layers.2."))
        and ("_proj" in key or ".experts." in key)
        and not key.endswith("bias")
    }
    for name, expert, product in read_as_vllm(tmp_path / "vllm", settings["r"]):
        key = name if expert is not None else f"{name}.weight"
        old, new = ((tensors[key] if expert is None else tensors[key][expert].T) for tensors in (before, after))
        torch.testing.assert_close(old + scale * product, new)
        if ".experts." in name:
            number = int(name.split(".experts.")[1].split(".")[0]) if expert is None else expert
            assert bool(product.any()) == (number in (2, 3))
        adapted.discard(key)
    assert not adapted
