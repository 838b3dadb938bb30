"""What is changed of PEFT is still necessary and possible."""

import inspect

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.bnb import Linear4bit
from peft.tuners.lora.layer import Linear
from torch import nn

from moetune.compat.peft import compute_in_the_inputs_dtype


def test_a_lora_layer_multiplies_in_its_inputs_dtype_by_ours_only() -> None:
    torch.manual_seed(0)
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q"]), nn.ModuleDict({"q": nn.Linear(4, 4)}))
    layer, x = model["q"].bfloat16(), torch.ones(1, 4, dtype=torch.bfloat16)
    layer.lora_A.float(), layer.lora_B.float()
    nn.init.ones_(layer.lora_B["default"].weight)
    seen = []
    layer.lora_A["default"].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    theirs = layer(x)
    compute_in_the_inputs_dtype(layer, lambda *_: None)
    torch.testing.assert_close(layer(x), theirs, rtol=0.02, atol=0.02)
    assert seen == [torch.float32, torch.bfloat16]


def test_plain_lora_is_still_the_formula_that_ours_replaces() -> None:
    for kind in (Linear, Linear4bit):
        assert "lora_B(lora_A(dropout(x))) * scaling" in inspect.getsource(kind.forward)
