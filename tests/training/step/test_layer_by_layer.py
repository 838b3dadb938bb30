"""Micro-batches layer by layer: the gradients of one after the other, and each layer's experts copied once a step."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moetune.adapt.attention import document_inputs
from moetune.adapt.build import Adapted
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.trace.tracker import Tracker
from moetune.models.stack import below_head
from moetune.run.resolve import resolve
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.step.batch import Batch, collate, random_rows
from moetune.training.step.micro_step import MicroStep, count_loss_tokens
from moetune.training.step.stepper import Stepper
from moetune.training.trl import trl_arguments
from tests import small
from tests.reference import build_toy
from tests.resolved import train
from tests.thinned import in_pairs
from tests.toys import LAYERS, VOCAB, expert_model_types, toy_config

LORA = {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}
ADAPT: dict[str, dict[str, Any]] = {
    "lora": {"lora": LORA},
    "all three ways": {"router": "all", "experts": {"ids": [0, 3]}, "lora": {**LORA, "ids": [1, 2]}},
    "upper layers": {"router": "2-3", "experts": {"layers": "3", "ids": [1]}},
    "everything": {"also": ["*"]},
}
TYPES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "qwen3_next"]
AUTO = {"rows": "2-3", "rest": "3"}
"""What `checkpointing: auto` writes for eager attention where not all fits (tests/planning/test_settle.py)."""
DRAWS = ("phimoe",)  # its routers add noise


def toy(folder: Path, model_type: str, adapt: str, together: bool, **train: Any) -> Adapted:
    train = {"accumulate": 3, "layer_by_layer": together, **train}
    model = {"experts_on": "host", "base": "nf4"}
    adapted = build_toy(toy_config(model_type), folder, ADAPT[adapt], model=model, train=train)
    adapted.model.train()
    return adapted


def batches_of(adapted: Adapted, *, packing: bool) -> list[Batch]:
    """Three micro-batches; the last has a single row."""
    random.seed(5)
    documents = document_inputs(adapted.model)
    return [collate(random_rows(rows, 16, VOCAB, packing=packing), 0, document_inputs=documents) for rows in (2, 2, 1)]


def micro_steps(stepper: Stepper, batches: list[Batch]) -> list[MicroStep]:
    total = torch.stack([count_loss_tokens(batch) for batch in batches]).sum()
    if stepper.takes_all:
        return stepper.micro_steps(batches, total)
    return [stepper.micro_step(batch, total) for batch in batches]


def step(adapted: Adapted, packing: bool = False) -> tuple[list[MicroStep], dict[str, Tensor]]:
    """Run a step's micro-batches; return their results, and the gradients."""
    stepper = Stepper(adapted, make_optimizer(adapted))
    done = micro_steps(stepper, batches_of(adapted, packing=packing))
    stepper.watch.remove()
    return done, {name: p.grad for name, p in adapted.trainable().items() if p.grad is not None}


def assert_equal(folder: Path, model_type: str, adapt: str, *, packing: bool, bits: bool, **train: Any) -> None:
    expected, gradients = step(toy(folder, model_type, adapt, False, **train), packing)
    adapted = toy(folder, model_type, adapt, True, **train)
    found, of_all = step(adapted, packing)
    assert of_all.keys() == gradients.keys() != set()
    for name, gradient in gradients.items():
        apart = 0.0 if bits else 1e-6 * float(gradient.abs().max())
        torch.testing.assert_close(of_all[name], gradient, rtol=0, atol=apart, msg=name)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine.loss, other.loss)
        assert (mine.router_loss is None) is (other.router_loss is None)
        assert mine.router_loss is None or torch.equal(mine.router_loss, other.router_loss)
        assert mine.load.keys() == other.load.keys() != set()
        assert all(torch.equal(mine.load[layer], load) for layer, load in other.load.items())
    assert adapted.expert_context.prefetcher is not None
    assert adapted.expert_context.prefetcher._on_device.keys() <= adapted.run.carried_layers


@pytest.mark.one_in(32)
@pytest.mark.parametrize(
    ("model_type", "adapt", "checkpointing", "packing"),
    in_pairs(TYPES, ["lora", "all three ways", "everything"], ["none", "full", "offload", "auto"], [False, True]),
)
def test_gradients_are_those_of_one_after_the_other(
    model_type: str, adapt: str, checkpointing: str, packing: bool, tmp_path: Path
) -> None:
    """Bit for bit, but where one tensor has gradients from several places of a micro-batch: of each document in a
    layer with a state."""
    bits = not (packing and model_type == "qwen3_next")
    losses = {} if checkpointing == "none" else {"router_aux_loss": 0.02, "router_z_loss": 0.01}
    kept = AUTO if checkpointing == "auto" else checkpointing
    assert_equal(tmp_path, model_type, adapt, packing=packing, bits=bits, checkpointing=kept, **losses)


@pytest.mark.full
@pytest.mark.parametrize("model_type", [name for name in expert_model_types() if name not in DRAWS])
def test_of_every_type(model_type: str, tmp_path: Path) -> None:
    assert_equal(tmp_path, model_type, "lora", packing=False, bits=False, checkpointing="full")


@pytest.mark.parametrize(
    ("adapt", "checkpointing"),
    [
        ("lora", "offload"),
        ("upper layers", "none"),
        pytest.param("lora", "none", marks=pytest.mark.full),
        pytest.param("upper layers", "full", marks=pytest.mark.full),
    ],
)
def test_a_step_copies_what_a_micro_batch_does(
    adapt: str, checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's experts once in forward and once in backward, but the last layer's, which stay; two at a time."""
    adapted = toy(tmp_path, "mixtral", adapt, True, checkpointing=checkpointing, sequence_length=8)
    prefetcher, copied = adapted.expert_context.prefetcher, []
    assert prefetcher is not None
    to_device = prefetcher._copies.to_device

    def counted(tensors: Any) -> Any:
        tensors = [*tensors]
        copied.append(sum(tensor.nbytes for tensor in tensors))
        assert len(prefetcher._on_device) <= 1
        return to_device(tensors)

    monkeypatch.setattr(prefetcher._copies, "to_device", counted)
    batches = batches_of(adapted, packing=False)
    once = []
    for some in (batches, batches[:1]):
        micro_steps(Stepper(adapted, make_optimizer(adapted)), some)
        once.append(list(copied))
        copied.clear()
    assert once[0] == once[1]
    reached = LAYERS if adapt == "lora" or checkpointing == "full" else 2
    assert len(once[0]) == LAYERS + reached - 1


def test_after_an_error_all_is_as_before(tmp_path: Path) -> None:
    adapted = toy(tmp_path, "mixtral", "lora", True, checkpointing="offload")
    stepper = Stepper(adapted, make_optimizer(adapted))
    batches = batches_of(adapted, packing=False)
    broken = {**batches[1], "input_ids": batches[1]["input_ids"] + VOCAB}
    stack = below_head(adapted.model)
    hooks = [len(module._forward_pre_hooks) for module in adapted.model.modules()]
    with pytest.raises(IndexError):
        micro_steps(stepper, [batches[0], broken, batches[2]])
    assert below_head(adapted.model) is stack
    assert [len(module._forward_pre_hooks) for module in adapted.model.modules()] == hooks
    micro_steps(stepper, batches)
    expected = step(toy(tmp_path, "mixtral", "lora", False, checkpointing="offload"))[1]
    assert all(torch.equal(p.grad, expected[name]) for name, p in adapted.trainable().items())


def run_of(folder: Path, model: Path, data: Path, adapt: str, together: bool, **sections: Any) -> RunConfig:
    own = {"layer_by_layer": together, "accumulate": 3, "steps": 4, "router_aux_loss": 0.02, "max_grad_norm": 0.1}
    sections = {"model": {"path": str(model), "experts_on": "host", "base": "nf4"}, **sections}
    return small.run_config(model, data, folder, adapt, **sections, train=own)


@pytest.mark.parametrize(
    ("adapt", "sections"),
    [
        ("experts", {"optimizer": {"name": "adamw", "offload": True, "lr": 1e-2}}),
        pytest.param("lora", {}, marks=pytest.mark.full),
        pytest.param("router", {"optimizer": {"name": "adamw8bit", "lr": 1e-2}}, marks=pytest.mark.full),
    ],
)
def test_runs_and_their_resumption(
    adapt: str, sections: dict[str, Any], small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    """Bit for bit; an epoch ends with a step of a micro-batch less. A resumed run may change the setting."""
    for name, together in (("plain", False), ("together", True)):
        train(run_of(tmp_path / name, small_model, small_data, adapt, together, **sections))
    for together, steps in ((True, 1), (True, 3), (False, 4)):
        run = run_of(tmp_path / "resumed", small_model, small_data, adapt, together, **sections)
        train(run.but(train={"steps": steps}), resume="never" if steps == 1 else "auto")
    expected = small.read_metrics(tmp_path / "plain")
    weights = load_file(tmp_path / "plain" / "checkpoints" / "step-4" / "trained.safetensors")
    for name in ("together", "resumed"):
        assert [line["loss"] for line in small.read_metrics(tmp_path / name)] == [line["loss"] for line in expected]
        found = load_file(tmp_path / name / "checkpoints" / "step-4" / "trained.safetensors")
        assert all(torch.equal(found[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize(
    ("model_type", "sections", "message"),
    [
        (
            "mixtral",
            {"parallel": {"fsdp": 2}},
            "layer_by_layer: over several ranks micro-batches run one after the other",
        ),
        (
            "mixtral",
            {"adapt": {"lora": {**LORA, "targets": ["attention"], "dropout": 0.1}}},
            r"lora.dropout: 0.1\) would",
        ),
        ("mixtral", {"train": {"neftune_alpha": 5}}, r"numbers \(train.neftune_alpha: 5\) would be drawn"),
        ("hrm_text", {"adapt": {"lora": {**LORA, "targets": ["attention"]}}}, "layers of this model run several times"),
        ("phimoe", {}, r"router_jitter_noise: 0.01\) would be drawn in another order; set that to 0"),
    ],
)
def test_refusals(model_type: str, sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    toy_config(model_type).save_pretrained(tmp_path)
    run = {"model": {"path": str(tmp_path), "weights": "random"}, "adapt": ADAPT["lora"], **sections}
    allowed = resolve(RunConfig.model_validate(run), "cpu")
    assert not allowed.layer_by_layer
    run["train"] = {"layer_by_layer": True, **run.get("train", {})}
    with pytest.raises(UserError, match=message):
        resolve(RunConfig.model_validate(run), "cpu")


def test_trl_has_no_such_order(configure: small.Configure, tmp_path: Path) -> None:
    run = configure("lora", output=tmp_path, train={"layer_by_layer": True})
    with pytest.raises(UserError, match=r"would ignore train\.layer_by_layer: true"):
        trl_arguments(run, "sft")


def test_a_tracker_names_the_modules_of_the_pass_that_goes_on() -> None:
    tracker = Tracker({})
    with tracker.turn_of(0):
        tracker.phase, tracker.module, tracker._stack = "forward", "model", [("", "forward")]
    with tracker.turn_of(1):
        assert (tracker.module, tracker._stack, tracker.turn) == ("", [], 1)
    with tracker.turn_of(0):
        assert (tracker.module, tracker._stack, tracker.turn) == ("model", [("", "forward")], 0)
