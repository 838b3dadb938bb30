"""Every tensor of a checkpoint has its place in the model, and what goes back to it is what came from it."""

from pathlib import Path

import pytest
import torch

from moetune.models.hub.key_mapping import key_mappings
from moetune.models.structure import meta_model, read_structure
from moetune.run.names import stacks
from moetune.tensor_files import read_headers
from tests.exporting.runs import make_toy
from tests.thinned import thinned
from tests.toys import expert_model_types


@pytest.mark.one_in(7)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", thinned(expert_model_types(), 3, ("mixtral", "gpt_oss")))
def test_there_and_back(model_type: str, tmp_path: Path) -> None:
    """Of every type: each parameter has a home that holds its values, and writing those back changes no bit."""
    toy = make_toy(model_type)
    toy.save_pretrained(tmp_path)
    base, model = read_headers(tmp_path), meta_model(toy.config)
    structure = read_structure(model)
    homes = key_mappings(model, base)
    of_experts = {f"{layer.experts}.{stack}": layer for layer in structure.moe_layers for stack in stacks(layer)}
    for part in structure.parameters:
        home = homes[part.name]
        count = of_experts[part.name].shape.num_experts if part.name in of_experts else 0
        for expert in range(count) if count else [None]:
            here = home if expert is None else home.of_expert(expert)
            sliced = expert is not None and not home.has_experts_apart
            rows = (expert, expert + 1) if sliced else (0, None)
            tensors = {key: base[key].rows(*rows) for key in here.every_key()}
            value = here.to_model(tensors.__getitem__)
            true = toy.get_parameter(part.name)
            assert torch.equal(value.squeeze(), (true if expert is None else true[expert]).squeeze()), part.name
            back = here.to_checkpoint(value, base)
            assert back.keys() == tensors.keys()
            assert all(torch.equal(back[key], tensors[key]) for key in back), part.name
