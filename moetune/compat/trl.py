"""TRL: a model whose reference is itself, by the hooks that TRL's trainers have for PEFT models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PeftType
from torch import nn
from transformers import PreTrainedModel


class SelfReferencing(PeftModel):
    """A model for TRL's trainers that computes its own reference, so that they load no second model.

    TRL recognizes a `PeftModel`, and runs its reference passes within `disable_adapter()` of the model that trains.
    Only public methods of `PeftModel` are replaced: no adapter is added, and the calls go to `model`.

    Args:
        model: the model that trains.
        reference: returns a context within which `model` computes the reference.
    """

    active_adapter = "default"
    base_model: Any

    def __init__(self, model: PreTrainedModel, reference: Callable[[], AbstractContextManager[None]]) -> None:
        nn.Module.__init__(self)
        self.base_model = model
        self.reference = reference

    @property
    def peft_config(self) -> dict[str, PeftConfig]:
        return {self.active_adapter: PeftConfig(peft_type=PeftType.LORA, task_type="CAUSAL_LM")}

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        with self.reference():
            yield

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)

    def add_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add nothing. TRL adds a copy of the adapter as reference, under the name "ref", if it can."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter; of the adapter "ref", which TRL fills with values, one that nothing refers to."""
        parameter = super().get_parameter(target.replace(".ref.", ".default."))
        if ".ref." not in target:
            return parameter
        return nn.Parameter(torch.empty_like(parameter), requires_grad=False)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: a trainer's checkpoint would hold the quantized model."""
        raise NotImplementedError("the model is quantized; set save_strategy='no', and write it with moetune.export")
