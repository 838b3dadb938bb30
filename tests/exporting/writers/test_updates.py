"""Of every type: a checkpoint in hub format, packed, trained a little and exported, is itself but for what trained.

What is expected is made without this project: the trained values are put into the plain model, and transformers writes
it. The merged checkpoint must have the same tensors, bit for bit, although the base was packed in between.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.experts.bank import ExpertBank
from moetune.exporting.export import export
from moetune.models import catalog
from moetune.models.structure import ModelStructure, read_structure
from tests.exporting.runs import make_toy, tensors_of, write_run
from tests.reference import expert_weights, small_linears_are_quantized
from tests.thinned import thinned
from tests.toys import expert_model_types

EXPERT = 3
IN_CATALOG = sorted(
    {
        json.loads(file.read_text())["config"]["model_type"]
        for file in (Path(catalog.__file__).parent / "models").glob("*.json")
        if "config" in json.loads(file.read_text())
    }
)


def selection(structure: ModelStructure) -> dict[str, Any]:
    """One whole expert and the router of the last layer that has experts; of a model without experts its norms."""
    if not structure.moe_layers:
        return {"also": ["norm"]}
    last = [structure.moe_layers[-1].index]
    return {"router": last, "experts": {"layers": last, "ids": [EXPERT]}}


@pytest.mark.one_in(12)
@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", thinned(sorted({*expert_model_types(), *IN_CATALOG} - {"llama4"}), 6, ("mixtral", "gpt_oss"))
)
def test_hub_to_bank_to_hub(model_type: str, tmp_path: Path) -> None:
    toy = make_toy(model_type)
    toy.save_pretrained(tmp_path / "base")
    structure = read_structure(toy)
    with small_linears_are_quantized():
        run = write_run(tmp_path / "run", tmp_path / "base", selection(structure), storage="nf4")
        export(run.path, "merged", tmp_path / "merged")

    trained = {name: parameter.detach() for name, parameter in run.adapted.trainable().items()}
    moved = set()
    with torch.no_grad():
        for layer in structure.moe_layers[-1:]:
            bank = run.adapted.model.get_submodule(layer.experts)
            assert isinstance(bank, ExpertBank)
            assert bank.gate_up.data.dtype == torch.uint8  # of the base's own values nothing is left
            for name, stack in expert_weights(bank, layer.experts, trained).items():
                toy.get_parameter(f"{layer.experts}.{name}")[EXPERT] = stack[EXPERT]
                moved.add(f"{layer.experts}.{name}")
        for name, value in trained.items():
            if not any(name.startswith(f"{layer.experts}.") for layer in structure.moe_layers):
                toy.get_parameter(name).copy_(value)
                moved.add(name)
    assert len(moved) >= (3 if structure.moe_layers else 2)
    toy.save_pretrained(tmp_path / "expected")

    before, expected, found = (tensors_of(tmp_path / name) for name in ("base", "expected", "merged"))
    assert found.keys() == expected.keys() == before.keys()
    assert all(found[name].equal(expected[name]) for name in found), [
        name for name in found if not found[name].equal(expected[name])
    ]
    changed = [name for name in found if not found[name].equal(before[name])]
    assert len(moved) <= len(changed) <= 3 + len(moved)
    of_experts = [name for name in changed if ".experts." in name]
    assert all(str(structure.moe_layers[-1].index) in name.split(".") for name in of_experts)
