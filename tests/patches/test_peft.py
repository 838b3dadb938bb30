"""What is changed of PEFT is still necessary and possible."""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from moetune.patches.peft import cast_inputs_by


def test_a_lora_layer_casts_its_input_by_ours_only() -> None:
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q"]), nn.ModuleDict({"q": nn.Linear(4, 4)}))
    layer, x = model["q"].bfloat16(), torch.ones(1, 4, dtype=torch.bfloat16)
    layer.lora_A.float(), layer.lora_B.float()
    asked = []

    def cast(x, dtype):
        asked.append(dtype)
        return x.to(dtype)

    assert type(layer)._cast_input_dtype(layer, x, torch.float32) is not type(layer)._cast_input_dtype(
        layer, x, torch.float32
    )  # a copy at each call, which is what is to be spared
    cast_inputs_by(layer, cast)
    layer(x)
    assert asked == [torch.float32]
