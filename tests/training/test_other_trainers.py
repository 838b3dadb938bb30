"""Checkpoints of transformers' and TRL's trainers: a run that resumes ends like one that was not interrupted."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import moetune
from moetune.adapt.build import Adapted
from moetune.exporting.finished_run import in_memory
from tests.thinned import thinned

ROWS = torch.randint(5, 60, (8, 16), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {
    "save_steps": 1, "save_strategy": "steps", "report_to": "none", "use_cpu": True, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant", "per_device_train_batch_size": 2,
}  # fmt: skip


def stock(adapted: Adapted, out: Path, steps: int) -> Any:
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    return Trainer(adapted.model, TrainingArguments(out, max_steps=steps, **OPTIONS), train_dataset=rows)  # type: ignore[arg-type]


def dpo(adapted: Adapted, out: Path, steps: int, **more: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    pairs = {"prompt": ["Two experts"] * 8, "chosen": [" take each token."] * 8, "rejected": [" rest."] * 8}
    arguments = moetune.trl_arguments(adapted.run, "dpo") | OPTIONS | {"output_dir": str(out), "max_steps": steps}
    return DPOTrainer(
        moetune.trl_model(adapted),
        args=DPOConfig(**arguments | more),
        train_dataset=Dataset.from_dict(pairs),
        eval_dataset=Dataset.from_dict(pairs),
        processing_class=moetune.trl_tokenizer(adapted.run),
    )


@pytest.mark.parametrize("trainer", [stock, pytest.param(dpo, marks=pytest.mark.full)])
@pytest.mark.parametrize("adapt", thinned([
    {"lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}},
    {"router": "all"},
    {"experts": {"layers": "0-1", "ids": "0-1"}, "router": "all"},
], always=()))  # fmt: skip
def test_a_trainer_resumes(adapt: dict[str, Any], trainer: Callable[..., Any], tmp_path: Path) -> None:
    raw = {"model": {"path": "tiny-mixtral", "base": "nf4"}, "adapt": adapt, "train": {"sequence_length": 32}}
    run = moetune.resolve(moetune.RunConfig.model_validate(raw), "cpu")

    def trained(out: Path, steps: int, resume: Path | None = None) -> dict[str, torch.Tensor]:
        adapted = moetune.build(run, "cpu")
        trainer(adapted, out, steps).train(resume_from_checkpoint=resume)
        return {name: tensor.detach().clone() for name, tensor in adapted.learned().items()}

    whole = trained(tmp_path / "whole", 2)
    checkpoint = tmp_path / "whole/checkpoint-1"
    resumed = trained(tmp_path / "again", 2, checkpoint)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())
    (weights,) = checkpoint.glob("*model.safetensors")
    with safe_open(weights, "pt") as file:
        assert set(file.keys()) == whole.keys()
    with pytest.raises(ValueError, match="moetune-adapted"):
        AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(
        moetune.UserError, match=r"'moetune-adapted'.*resume it \(resume_from_checkpoint\), then export"
    ):
        moetune.count(str(checkpoint))


def test_the_best_checkpoint_is_taken_at_the_end(tmp_path: Path) -> None:
    raw = {"model": {"path": "tiny-mixtral", "base": "nf4"}, "adapt": {"router": "all"}}
    adapted = moetune.build(moetune.RunConfig.model_validate(raw | {"train": {"sequence_length": 32}}), "cpu")
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = dpo(adapted, tmp_path, 2, eval_strategy="steps", eval_steps=1, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    with safe_open(tmp_path / "checkpoint-1/adapter_model.safetensors", "pt") as file:
        assert all(torch.equal(tensor, file.get_tensor(name)) for name, tensor in adapted.learned().items())


def test_the_vocabulary_stays() -> None:
    """TRL's `chat_template_path` cuts the rows that no token of the tokenizer needs, or adds rows."""
    raw = {"model": {"path": "tiny-mixtral"}, "adapt": {"router": "0"}}
    model = moetune.build(moetune.RunConfig.model_validate(raw), "cpu").model
    rows = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(rows - 70, pad_to_multiple_of=64)
    assert model.get_input_embeddings().num_embeddings == model.get_output_embeddings().out_features == rows
    with pytest.raises(ValueError, match=f"{rows + 1} tokens, and the model was built with {rows}"):
        model.resize_token_embeddings(rows + 1)


def test_casts_and_a_frozen_model_are_refused() -> None:
    """As PEFT's prepare_model_for_kbit_training freezes it, after which Trainer would train nothing in silence."""
    raw = {"model": {"path": "tiny-mixtral", "base": "nf4"}, "adapt": {"router": "all"}}
    adapted = moetune.build(moetune.RunConfig.model_validate(raw), "cpu")
    model, ids = adapted.model, torch.arange(6)[None]
    for cast in (lambda: model.to("cpu", torch.bfloat16), lambda: model.to(dtype=torch.float16), model.half):
        with pytest.raises(ValueError, match=r"torch\.b?float16 would round the weights .* model\.dtype"):
            cast()
    assert model.to("cpu") is model
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"float32, and autocast .*float16.*off"):
        model(input_ids=ids)
    peft.prepare_model_for_kbit_training(model)
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()(input_ids=ids)
    with pytest.raises(ValueError, match=r"nothing in the model requires a gradient .*prepare_model_for_kbit_training"):
        model.train()(input_ids=ids)
    routers = in_memory(adapted).notes
    assert len(routers) == 1
    assert re.fullmatch(r"4 chosen tensors, as .*gate\.weight, were frozen: did they train\?", routers[0])


def test_pefts_adapters_are_refused() -> None:
    raw = {"model": {"path": "tiny-mixtral"}, "adapt": {"lora": {"rank": 2, "alpha": 4, "targets": ["attention"]}}}
    model = moetune.build(moetune.RunConfig.model_validate(raw), "cpu").model
    parameters = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for add in (peft.get_peft_model, type(model).add_adapter):  # as TRL does with `peft_config`
        with pytest.raises(ValueError, match=r"PEFT would add an adapter \(default\).*adapt: .* without peft_config"):
            add(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == parameters


def test_a_copy_saves_its_own_weights(tmp_path: Path) -> None:
    raw = {"model": {"path": "tiny-mixtral"}, "adapt": {"router": "0"}}
    model = moetune.build(moetune.RunConfig.model_validate(raw), "cpu").model
    copied = copy.deepcopy(model)
    (name,) = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    torch.nn.init.ones_(copied.get_parameter(name))
    copied.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor(name).eq(1).all()
    assert not model.get_parameter(name).eq(1).any()
