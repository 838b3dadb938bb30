"""TRL's trainers on adapted models: against the plain model with a reference of its own; one model in memory."""

import copy
import dataclasses
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback

pytest.importorskip("trl")

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import moetune
from moetune.adapt.build import Adapted, build
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.run.resolve import resolve
from moetune.training.trl import TRAINERS, trl_arguments, trl_model
from tests import small
from tests.reference import plain_model, plain_weights
from tests.toys import toy_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL calls what transformers has renamed
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of experimental trainers, and of pinned memory
]

ADAPT: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "experts": {"router": "1", "experts": {"layers": "1", "ids": [0, 2]}},
    "lora": {"lora": {"rank": 4, "alpha": 64, "targets": ["attention", "experts"], "ids": [1, 3]}},
}
TEXT = small._TEXT
PROMPTS = [TEXT[: 20 + 3 * row] for row in range(8)]
ANSWERS = [" " + TEXT[row : 14 + 4 * row] for row in range(8)]
OTHERS = [" " + TEXT[2 * row : 30] for row in range(8)]
PAIRS = {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": OTHERS}
RATED = {"prompt": PROMPTS, "completion": ANSWERS, "label": [row % 3 == 0 for row in range(8)]}


def a_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(id % 7 for id in ids) / 20 for ids in completion_ids]


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL: its classes, data, and arguments beside those of the run."""

    trainer: Any
    config: Any
    data: dict[str, Any]
    more: dict[str, Any]


KINDS = {
    "dpo": Kind(DPOTrainer, DPOConfig, PAIRS, {"precompute_ref_log_probs": False, "beta": 0.5}),
    "kto": Kind(KTOTrainer, KTOConfig, RATED, {"precompute_ref_log_probs": False, "beta": 0.5}),
    "orpo": Kind(ORPOTrainer, ORPOConfig, PAIRS, {"beta": 0.5}),
    "grpo": Kind(
        GRPOTrainer,
        GRPOConfig,
        {"prompt": PROMPTS},
        {"beta": 0.5, "num_generations": 2, "max_completion_length": 6, "num_iterations": 2},
    ),
}


def a_run(folder: Path, adapt: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """Two steps of two micro-batches, by an optimizer in which rounding stays rounding."""
    train = {"micro_batch": 2, "accumulate": 2, "sequence_length": 64, "steps": 2, "max_grad_norm": 0}
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "attention": "eager", **sections.pop("model", {})},
            "adapt": adapt,
            "optimizer": {"name": "sgd", "lr": 0.3},
            "train": {**train, **sections.pop("train", {})},
            "output": str(folder.parent / "out"),
            **sections,
        }
    )


LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layers_block_type": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
}
"""Hybrids: a layer with a state, and one that attends."""


def write_toy(folder: Path, model_type: str) -> Path:
    vocabulary = small.write_tokenizer(folder)["vocab_size"]
    model = toy_model(model_type, num_hidden_layers=2, vocab_size=vocabulary, **LAYERS.get(model_type, {}))
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):  # wide enough apart that rounding never changes a choice
            nn.init.normal_(parameter, std=0.5)
        if "embed" in name or "lm_head" in name:
            nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def toy(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = write_toy(tmp_path_factory.mktemp(model_type) / "model", model_type)
        return made[model_type]

    return toy


def trainer_of(kind: str, model: Any, run: Any, reference: PreTrainedModel | None = None, **more: Any) -> Any:
    of = KINDS[kind]
    arguments = trl_arguments(run, kind) | {"logging_steps": 1} | of.more | more  # type: ignore[arg-type]
    given: dict[str, Any] = {"args": of.config(**arguments)}
    if reference is not None and kind in ("dpo", "kto"):
        given["ref_model"] = reference
    if kind == "grpo":
        given["reward_funcs"] = a_reward
    tokenizer = AutoTokenizer.from_pretrained(resolve(run).model.source.folder)
    tokenizer.pad_token = tokenizer.eos_token
    return of.trainer(model, train_dataset=Dataset.from_dict(of.data), processing_class=tokenizer, **given)


def history(trainer: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, after training."""
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


class Merged(nn.Module):
    """The plain model's decoder, in whose weights what trains is merged by autograd."""

    def __init__(self, adapted: Adapted, plain: PreTrainedModel) -> None:
        super().__init__()
        self.decoder, self.embed_tokens = plain.base_model, plain.get_input_embeddings()
        self.leaves = nn.ParameterList(p.detach().clone() for p in adapted.trainable().values())
        self.weights = lambda: plain_weights(
            adapted, plain_of, dict(zip(adapted.trainable(), self.leaves, strict=True))
        )
        plain_of = copy.deepcopy(plain)
        self.prefix = f"{plain.base_model_prefix}."

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weights = {
            name.removeprefix(self.prefix): weight
            for name, weight in self.weights().items()
            if name.startswith(self.prefix)
        }
        return torch.func.functional_call(self.decoder, weights, args, kwargs)


def plain_and_reference(adapted: Adapted, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The stock model, in which the same trains, and another one with its initial weights, saved to `folder` too."""
    reference = plain_model(adapted.model.config)
    leaves = {name: p.detach().clone() for name, p in adapted.trainable().items()}
    reference.load_state_dict(plain_weights(adapted, reference, leaves), strict=False)
    reference.requires_grad_(False)
    plain = copy.deepcopy(reference)
    setattr(plain, plain.base_model_prefix, Merged(adapted, plain))
    reference.save_pretrained(folder)
    plain.config._name_or_path = str(folder)  # from where TRL reads a reference that it is not given
    return plain, reference


CASES = [(model, kind, part) for model in ("mixtral", "qwen3_moe", "olmoe") for kind in KINDS for part in ADAPT]
CASES += [(model, kind, "lora") for model in LAYERS for kind in ("dpo", "grpo")]


@pytest.mark.one_in(42)
@pytest.mark.parametrize(("model_type", "kind", "part"), CASES)
def test_losses_of_trl_with_a_second_model(
    model_type: str, kind: str, part: str, toys: Callable[[str], Path], tmp_path: Path
) -> None:
    run = resolve(a_run(toys(model_type), ADAPT[part]), "cpu")
    plain, reference = plain_and_reference(build(run, "cpu"), tmp_path / "reference")
    expected = history(trainer_of(kind, plain, run, reference))
    adapted = build(run, "cpu")
    before = {name: p.detach().clone() for name, p in adapted.trainable().items()}
    found = history(trainer_of(kind, trl_model(adapted), run))
    assert len(found) == 2
    for (loss, norm), (other_loss, other_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-5, abs=1e-6)  # GRPO's is a difference of terms near 1
        assert norm == pytest.approx(other_norm, rel=1e-5)
    assert found[0] != found[1]
    leaves = dict(zip(before, plain.base_model.leaves, strict=True))
    for name, parameter in adapted.trainable().items():
        change, other = parameter - before[name], leaves[name] - before[name]
        assert (change - other).norm() <= 1e-4 * other.norm() + 1e-7, name


class LiveBytes(TrainerCallback):
    """The most bytes of tensors that are alive at once, looked at in every call of the decoder."""

    def __init__(self, model: nn.Module) -> None:
        self.most, self.calls = 0, 0
        self.hook = model.base_model.register_forward_hook(lambda *_: self.look())

    def look(self) -> None:
        gc.collect()
        tensors = (one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not one.is_meta)
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        self.most, self.calls = max(self.most, sum(storages.values())), self.calls + 1


@pytest.mark.parametrize("part", ["experts", pytest.param("lora", marks=pytest.mark.full)])
def test_one_model_is_in_memory(part: str, toys: Callable[[str], Path]) -> None:
    """With a second model, the experts alone would be there twice."""
    run = a_run(toys("mixtral"), ADAPT[part], train={"steps": 1, "accumulate": 1}, model={"base": "fp32"})
    gc.collect()
    live = LiveBytes(nn.ModuleDict({"base_model": nn.Identity()}))
    live.look()
    before = live.most
    adapted = build(resolve(run, "cpu"), "cpu")
    model = sum(tensor.nbytes for tensor in adapted.model.state_dict().values())
    trained = sum(parameter.nbytes for parameter in adapted.trainable().values())
    live = LiveBytes(adapted.model)
    trainer_of("dpo", trl_model(adapted), resolve(run, "cpu")).train()
    assert live.calls == 2  # the model and its reference
    assert live.most - before < 1.2 * model + 3 * trained


def test_precomputed_references_are_the_same(toys: Callable[[str], Path]) -> None:
    """Without a copy of what trains: the plain `adapted.model` is the reference before the first step."""
    run = resolve(a_run(toys("mixtral"), ADAPT["experts"]), "cpu")
    in_steps = history(trainer_of("dpo", trl_model(build(run, "cpu")), run))
    before = history(trainer_of("dpo", build(run, "cpu").model, run, precompute_ref_log_probs=True))
    assert before == [pytest.approx(step, rel=1e-5) for step in in_steps]


def test_the_result_is_exported(toys: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = resolve(a_run(toys("mixtral"), ADAPT["router"], model={"base": "fp32"}), "cpu")
    adapted = build(run, "cpu")
    trainer = trainer_of("dpo", trl_model(adapted), run, max_steps=1)
    trainer.train()
    moetune.export(adapted, "merged", tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    adapted.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, adapted.model(ids).logits, rtol=1e-5, atol=1e-5)


def test_an_adapted_head_is_refused(toys: Callable[[str], Path]) -> None:
    lora = {"lora": {"rank": 4, "alpha": 8, "targets": ["lm_head"]}}
    with pytest.raises(UserError, match="lm_head"):
        trl_model(build(resolve(a_run(toys("mixtral"), lora), "cpu"), "cpu"))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_arguments(trainer: Any, toys: Callable[[str], Path]) -> None:
    config = SFTConfig if trainer == "sft" else KINDS[trainer].config
    adam = {"name": "adamw8bit", "lr": 2e-4, "betas": [0.8, 0.9]}
    run = a_run(toys("mixtral"), ADAPT["lora"], optimizer=adam, train={"schedule": "cosine", "warmup": 3})
    arguments = trl_arguments(resolve(run, "cpu"), trainer)
    assert arguments.keys() <= {field.name for field in dataclasses.fields(config)}
    made = config(**arguments)
    assert (made.optim, made.learning_rate, made.adam_beta1, made.adam_beta2) == ("adamw_8bit", 2e-4, 0.8, 0.9)
    assert (made.bf16, made.fp16, made.gradient_checkpointing, made.use_cpu) == (False, False, False, True)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps, made.max_steps) == (2, 2, 2)
    assert (made.lr_scheduler_type, made.warmup_steps, made.max_grad_norm) == ("cosine", 3, 0)
    assert getattr(made, "max_length", 64) == 64
    assert getattr(made, "num_generations", 4) == 4  # TRL's 8 does not divide 2 × 2
    assert (getattr(made, "max_completion_length", None) or 32) == 32  # a prompt has the other half of 64 tokens
    assert getattr(made, "router_aux_loss_coef", 0.0) == 0.0
    assert getattr(made, "precompute_ref_log_probs", True) is True


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        ({"name": "adalomo", "fused_backward": False}, "adalomo"),
        ({"name": "sgd", "momentum": 0.9}, "momentum"),
        ({"name": "adamw", "offload": True}, "offload"),
        ({"lora": {"lr": 1e-4}, "router": {"lr": 1e-3}}, "one optimizer"),
    ],
)
def test_optimizers_that_trl_has_not(optimizer: dict[str, Any], named: str, toys: Callable[[str], Path]) -> None:
    run = a_run(toys("mixtral"), ADAPT["lora"] | ADAPT["router"], optimizer=optimizer)
    with pytest.raises(UserError, match=named):
        trl_arguments(resolve(run, "cpu"), "dpo")


def test_settings_that_trl_would_ignore_are_refused_together(toys: Callable[[str], Path]) -> None:
    optimizer = {"name": "ademamix8bit", "betas": [0.8, 0.9, 0.9999]}
    lora = {"lora": ADAPT["lora"]["lora"] | {"lr_ratio": 4.0, "dtype": "bf16"}}
    arguments = trl_arguments(resolve(a_run(toys("mixtral"), ADAPT["lora"], optimizer=optimizer), "cpu"), "dpo")
    assert (arguments["adam_beta1"], arguments["adam_beta2"]) == (0.8, 0.9)
    train = {"max_grad_value": 0.5, "on_nonfinite": "skip", "router_z_loss": 0.1}
    optimizer["betas"] = [0.8, 0.9, 0.99]
    run = a_run(toys("mixtral"), lora, optimizer=optimizer, train=train, model={"dtype": "fp16"})
    with pytest.raises(UserError) as refused:
        trl_arguments(resolve(run, "cpu"), "dpo")
    for setting in (
        "train.max_grad_value: 0.5", "train.on_nonfinite: skip", "train.router_z_loss: 0.1", "adapt.lora.lr_ratio: 4",
        "the stochastic rounding of adapt.lora.dtype: bf16",
        "model.dtype: fp16", "optimizer.betas, 0.99",
    ):  # fmt: skip
        assert setting in str(refused.value)


@pytest.mark.parametrize(("model_type", "kind"), [("deepseek_v3", "sft"), ("mixtral", "orpo")])
def test_a_router_loss_that_is_not_computed_is_refused(model_type: str, kind: Any, toys: Callable[[str], Path]) -> None:
    run = a_run(toys(model_type), ADAPT["router"], train={"router_aux_loss": 0.1})
    with pytest.raises(UserError, match=r"would ignore train\.router_aux_loss: 0\.1"):
        trl_arguments(resolve(run, "cpu"), kind)


def test_weights_that_trl_updates_in_16_bits_are_named(toys: Callable[[str], Path]) -> None:
    in_bf16 = {"dtype": "bf16"}
    with pytest.warns(UserWarning, match="update experts and router in bf16, without a float32 copy"):
        trl_arguments(resolve(a_run(toys("mixtral"), ADAPT["experts"], model=in_bf16), "cpu"), "dpo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trl_arguments(resolve(a_run(toys("mixtral"), ADAPT["lora"], model=in_bf16), "cpu"), "dpo")


def test_a_trainer_that_is_none(toys: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"'dop'.*Did you mean 'dpo'"):
        trl_arguments(a_run(toys("mixtral"), ADAPT["lora"]), "dop")  # type: ignore[arg-type]
