"""Where tensors are: what trains on the device, packed experts where the run file says, whichever way they came."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.adapt.build import Adapted
from moetune.adapt.validate import refuse_misplaced
from moetune.config.schema import ModelConfig
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.host import mark_on_host, stays_on_host
from moetune.experts.quantized import QuantizedExperts
from tests.adapt.weights.test_quantizer import write
from tests.experts.test_host import toy
from tests.reference import run_config
from tests.resolved import build, write_packed_base

LORA: dict[str, Any] = {"lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}, "router": "all"}


def stacks(adapted: Adapted) -> list[QuantizedExperts]:
    return [module for module in adapted.model.modules() if isinstance(module, QuantizedExperts)]


def test_what_is_packed_is_on_the_host_and_stays_there(tmp_path: Path) -> None:
    adapted = toy(tmp_path, "gpt_oss", "all three ways", checkpointing="none")
    adapted.model.to(torch.bfloat16)
    for stack in stacks(adapted):
        assert all(stays_on_host(buffer) for buffer in stack.buffers())
    bank = next(module for module in adapted.model.modules() if isinstance(module, ExpertBank))
    assert not any(stays_on_host(parameter) for parameter in adapted.model.parameters())
    assert not stays_on_host(bank.gate_up_bias)


def test_a_trained_tensor_on_the_host_is_refused_by_name(tmp_path: Path) -> None:
    adapted = toy(tmp_path, "mixtral", "router", checkpointing="none")
    config = ModelConfig(path="toy", experts_on="host")
    refuse_misplaced(adapted.model, config, torch.device("cpu"))
    name = "model.layers.1.mlp.gate.weight"
    mark_on_host(adapted.model.get_parameter(name))
    with pytest.raises(UserError, match=rf"{name} trains and should be on cpu; it is on the host"):
        refuse_misplaced(adapted.model, config, torch.device("cpu"))


def test_packed_experts_that_left_the_host_are_refused_by_name(tmp_path: Path) -> None:
    adapted = toy(tmp_path, "mixtral", "router", checkpointing="none")
    stack = stacks(adapted)[0]
    stack.data = stack.data.clone()
    with pytest.raises(UserError, match=r"experts_on: host, but model\.layers\.0\.mlp\.experts\.gate_up\.data is on"):
        refuse_misplaced(adapted.model, ModelConfig(path="toy", experts_on="host"), torch.device("cpu"))


def test_frozen_weights_elsewhere_are_refused(tmp_path: Path) -> None:
    adapted = toy(tmp_path, "mixtral", "router", experts_on="gpu", checkpointing="none")
    adapted.model.model.layers[0].input_layernorm.to("meta")
    with pytest.raises(UserError, match=r"input_layernorm\.weight is frozen and should be on cpu; it is on meta"):
        refuse_misplaced(adapted.model, ModelConfig(path="toy"), torch.device("cpu"))


def states(folder: Path, experts_on: str) -> dict[str, torch.Tensor]:
    """Of a model that is read, once it has been seen to be where it should be."""
    config = run_config(folder, LORA, model={"weights": "pretrained", "experts_on": experts_on, "dtype": "bf16"})
    adapted = build(config, "cpu")
    there = [stays_on_host(buffer) for stack in stacks(adapted) for buffer in stack.buffers()]
    assert there == [experts_on == "host"] * len(there)
    return adapted.model.state_dict()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_what_is_read_onto_the_host_is_what_is_read_onto_the_gpu(tmp_path: Path, model_type: str) -> None:
    write(tmp_path / "plain", model_type)
    write_packed_base(str(tmp_path / "plain"), tmp_path / "packed", "nf4", True)
    expected = states(tmp_path / "plain", "gpu")
    for name in ("plain", "packed"):
        found = states(tmp_path / name, "host")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
