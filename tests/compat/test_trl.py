"""What moetune relies on in TRL and PEFT, by name."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from accelerate.utils import is_peft_model
from torch import nn

pytest.importorskip("trl")

from trl.trainer.utils import use_adapter

from moetune.compat.trl import SelfReferencing, make_trainer, quiet
from tests.toys import toy_model


def test_trl_asks_the_model_for_its_reference() -> None:
    calls = []

    @contextmanager
    def reference() -> Iterator[None]:
        calls.append("in")
        yield
        calls.append("out")

    model = toy_model("mixtral", num_hidden_layers=1)
    wrapped = SelfReferencing(model, reference)
    assert is_peft_model(wrapped)
    assert wrapped.peft_config["default"].is_prompt_learning is False
    with use_adapter(wrapped, None):
        assert calls == ["in"]
    assert calls == ["in", "out"]
    assert wrapped.get_base_model() is model
    assert wrapped.config is model.config
    ids = torch.arange(3, 9)[None]
    assert wrapped(ids).logits.equal(model(ids).logits)


def test_a_reference_adapter_is_never_added() -> None:
    """TRL adds one that it names "ref", and copies the values of each parameter of "default" into it."""
    model = toy_model("mixtral", num_hidden_layers=1)
    model.extra = nn.ModuleDict({"default": nn.Linear(2, 2)})
    wrapped = SelfReferencing(model, lambda: None)  # type: ignore[arg-type, return-value]
    wrapped.add_adapter("ref", wrapped.peft_config["default"])
    assert wrapped.peft_config.keys() == {"default"}
    (weight,) = (name for name, _ in wrapped.named_parameters() if name.endswith("default.weight"))
    before = wrapped.get_parameter(weight).clone()
    wrapped.get_parameter(weight.replace(".default.", ".ref.")).data.fill_(7)
    assert wrapped.get_parameter(weight) is model.extra["default"].weight
    assert before.equal(model.extra["default"].weight)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "orpo"])
def test_thousands_of_rows_take_no_longer_than_two(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer prepares its data set row by row, with a progress bar."""
    model = SelfReferencing(toy_model("mixtral", num_hidden_layers=1), nullcontext)
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", "max_length": 8}
    with quiet():
        trainer = make_trainer(kind, model, arguments | {"per_device_train_batch_size": 4}, 4000)
    assert len(trainer.train_dataset) == 4000
    assert trainer.train_dataset.data.num_rows == 2
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["chosen_input_ids" if kind == "orpo" else "input_ids"].shape == (8 if kind == "dpo" else 4, 8)
    if kind == "kto":
        assert sum(batch["label"]) == 2
    assert capsys.readouterr().err == ""


def test_a_number_may_be_text(tmp_path: Path) -> None:
    model = SelfReferencing(toy_model("mixtral", num_hidden_layers=1), nullcontext)
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", "max_length": 8}
    with quiet():
        assert make_trainer("dpo", model, arguments | {"beta": "2e-1"}, 4).beta == 0.2
        with pytest.raises(ValueError, match="beta=much: give a number"):
            make_trainer("dpo", model, arguments | {"beta": "much"}, 4)
