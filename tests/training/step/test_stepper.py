"""Every optimizer, fused into backward or not, in every precision, against the plain float32 step."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.config.schema import OptimizerName
from moetune.errors import UserError
from moetune.memory.trace import Steps, Trace, batches_of, vocabulary_of
from moetune.memory.trace.tracker import Tracker
from moetune.training.optim.loss_scale import LossScale
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.optim.values import bound_
from moetune.training.step.batch import collate
from moetune.training.step.micro_step import count_loss_tokens
from moetune.training.step.stepper import Stepper
from tests import small
from tests.resolved import build
from tests.thinned import in_pairs, thinned

MIXED = {
    "router": "all",
    "experts": {"layers": "0-1", "ids": [0, 2]},
    "lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"], "ids": [1, 3]},
    "also": ["norm"],
}
NAMES = get_args(OptimizerName)
UNPAGED = [name for name in NAMES if not name.startswith("paged")]  # pages are a GPU's
RATE = {"lomo": 0.3, "sgd": 0.3, "adalomo": 0.03, "adafactor": 0.03, "lion8bit": 3e-3, "ademamix8bit": 3e-3}


def run_config(model: Path, optimizer: dict[str, Any], dtype: str = "fp32", /, **train: Any) -> small.RunConfig:
    name = optimizer.get("name")
    lr = {} if name is None else {"lr": RATE.get(name, 1e-2)}
    run = small.run_file(model, Path("-"), Path("-"), train={"accumulate": 1, "max_grad_norm": 0.0} | train)
    sections = {"model": {"path": str(model), "dtype": dtype}, "adapt": MIXED, "optimizer": lr | optimizer}
    return small.RunConfig.model_validate(run | sections)


def drawn(vocabulary: int, length: int) -> dict[str, torch.Tensor]:
    """Two rows, one of them padded."""
    first, second = torch.randint(vocabulary, (2, length)).tolist()
    return collate([{"input_ids": row, "labels": row} for row in (first[:-1], second)], 0)


class Run:
    """A model that takes steps on random tokens."""

    def __init__(self, config: small.RunConfig) -> None:
        self.adapted: Adapted = build(config, "cpu")
        self.adapted.model.train()
        self.optimizer = make_optimizer(self.adapted)
        self.stepper = Stepper(self.adapted, self.optimizer)
        torch.manual_seed(0)
        self.batches = [drawn(vocabulary_of(self.adapted), config.train.sequence_length) for _ in range(2)]
        torch.manual_seed(1)
        self.norms: list[float] = []

    def steps(self, count: int = 4) -> list[float]:
        return [self.step(self.batches[number % 2]) for number in range(count)]

    def step(self, batch: Any) -> float:
        loss = self.stepper.micro_step(batch, count_loss_tokens(batch)).loss
        self.norms.append(self.stepper.finish().norm.item())
        return loss.item()

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.adapted.trainable().items()}


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("name", "clip"),
    [
        pytest.param(name, clip, marks=[] if name in UNPAGED and not (clip and number % 3) else pytest.mark.full)
        for number, name in enumerate(NAMES)
        for clip in (0.0, 0.1)
    ],
)
def test_in_float32_fused_is_unfused(name: str, clip: float, small_model: Path) -> None:
    """Without clipping bit for bit; with it to 1e-5, because a norm is summed in another order, which may move an 8-bit
    state to the next of its values: a twentieth of a step."""
    plain, fused = (
        Run(run_config(small_model, {"name": name, "fused_backward": on}, max_grad_norm=clip)) for on in (False, True)
    )
    losses = plain.steps(3), fused.steps(3)
    assert losses[0][2] < losses[0][0] or name == "lomo"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if clip else 0)
    assert fused.norms == pytest.approx(plain.norms, rel=1e-5)
    assert not clip or plain.norms[0] > clip
    for key, weight in plain.weights().items():
        apart = (5e-4 if "8bit" in name else 1e-5) if clip else 0
        torch.testing.assert_close(fused.weights()[key], weight, rtol=0, atol=apart, msg=key)


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(UNPAGED, 6))
def test_in_bfloat16_losses_are_those_of_float32(name: str, small_model: Path) -> None:
    """To 1 %: bfloat16 has 8 significant bits, and the forward pass alone moves the loss by 0.1 to 0.5 %."""
    reference = Run(run_config(small_model, {"name": name, "fused_backward": False})).steps(3)
    for fused, masters in ((False, "none"), (True, "none"), (False, "fp32"), (True, "stochastic")):
        optimizer = {"name": name, "fused_backward": fused, "master_weights": masters}
        losses = Run(run_config(small_model, optimizer, "bf16")).steps(3)
        assert losses == pytest.approx(reference, rel=1e-2), (fused, masters)
        assert losses[2] < losses[0] or name == "lomo", (fused, masters)


def test_parts_have_optimizers_of_their_own(small_model: Path) -> None:
    """LOMO on experts, AdamW on LoRA, SGD on routers and norms: each moves as it does alone."""
    by_part = {
        "experts": {"name": "lomo", "lr": 0.1},
        "lora": {"name": "adamw", "lr": 1e-2},
        "router": {"name": "sgd", "lr": 0.2},
        "other": {"name": "sgd", "lr": 0.3},
    }
    mixed = Run(run_config(small_model, by_part))
    mixed.steps(1)
    for part, optimizer in by_part.items():
        alone = Run(run_config(small_model, optimizer | {"fused_backward": False}))
        alone.steps(1)
        names = [name for name in alone.weights() if alone.adapted.part_of(name) == part]
        assert names
        for name in names:
            assert torch.equal(mixed.weights()[name], alone.weights()[name]), name


def test_a_gradient_may_be_bounded_element_by_element(small_model: Path) -> None:
    results = []
    for name in ("sgd", "lomo"):
        run = Run(run_config(small_model, {"name": name}, max_grad_value=1e-3))
        before = {key: weight.clone() for key, weight in run.weights().items()}
        run.steps(1)
        results.append(run.weights())
        for key, weight in run.weights().items():
            moved = (weight - before[key]).abs().max()
            assert moved <= 0.3 * 1e-3 * 1.001, key
            assert moved or "lora_A" in key or "_A" in key  # its B is zero at first
    assert all(torch.equal(weight, results[1][key]) for key, weight in results[0].items())


def test_an_empty_shard_has_nothing_to_bound() -> None:
    bound_(torch.empty(0, 4), 1.0)


# --- Gradients that are not finite ------------------------------------------------------------------------------------


def break_gradient(run: Run, name: str, value: float) -> None:
    run.adapted.trainable()[name].register_hook(lambda gradient: torch.full_like(gradient, value))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("value", "optimizer", "clip"), in_pairs([math.nan, math.inf], ["adamw", "lomo", "adalomo"], [0.0, 1.0], every=2)
)
def test_a_broken_gradient_stops_the_run_by_name(value: float, optimizer: str, clip: float, small_model: Path) -> None:
    run = Run(run_config(small_model, {"name": optimizer}, max_grad_norm=clip))
    run.steps(1)
    name = next(name for name in run.weights() if name.endswith("layers.0.self_attn.q_proj.lora_A.default.weight"))
    break_gradient(run, name, value)
    with pytest.raises(UserError, match=f"the gradient of {name}"):
        run.steps(1)
    assert all(weight.isfinite().all() for weight in run.weights().values())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("optimizer", ["adamw", "lomo"])
def test_a_broken_step_is_skipped_and_counted(optimizer: str, clip: float, small_model: Path) -> None:
    run = Run(run_config(small_model, {"name": optimizer}, max_grad_norm=clip, on_nonfinite="skip"))
    run.steps(1)
    before = {key: weight.clone() for key, weight in run.weights().items()}
    name = next(name for name in before if "layers.1.mlp.experts.lora" in name)
    handle = run.adapted.trainable()[name].register_hook(lambda gradient: gradient * math.nan)
    run.steps(1)
    handle.remove()
    assert run.stepper.skipped == 1
    changed = {key for key, weight in run.weights().items() if not torch.equal(weight, before[key])}
    # A fused step without a norm has updated what backward passed before it met the gradient, and nothing after it.
    assert not any("layers.0." in key for key in changed)
    assert bool(changed) == (optimizer == "lomo" and not clip)
    assert all(math.isfinite(loss) for loss in run.steps(2))
    assert run.stepper.skipped == 1
    assert any(not torch.equal(weight, before[key]) for key, weight in run.weights().items())


def test_a_broken_forward_pass_is_met_too(small_model: Path) -> None:
    """A weight of infinity makes every gradient NaN; LOMO without a norm must not use the first one it meets."""
    run = Run(run_config(small_model, {"name": "lomo"}))
    with torch.no_grad():
        run.adapted.model.get_input_embeddings().weight[:] = math.inf
    before = {key: weight.clone() for key, weight in run.weights().items()}
    with pytest.raises(UserError, match="is not finite"):
        run.steps(1)
    assert all(torch.equal(weight, before[key]) for key, weight in run.weights().items())


# --- Memory -----------------------------------------------------------------------------------------------------------


def tracked(config: small.RunConfig) -> tuple[Trace, Steps]:
    """What two steps took, and what is left of them."""
    adapted = build(config, "cpu")
    adapted.model.train()
    steps = Steps(adapted, batches_of(adapted))
    return steps.run(Tracker(steps.named), 1), steps


@pytest.fixture
def expert_run(small_model: Path) -> Callable[..., small.RunConfig]:
    def make(optimizer: dict[str, Any], **train: Any) -> small.RunConfig:
        config = run_config(small_model, optimizer, **train)
        adapt = config.adapt.model_copy(update={"router": "none", "lora": None, "also": ()})
        return config.model_copy(update={"adapt": adapt})

    return make


def most_gradients(traced: Trace) -> int:
    """The most bytes of gradients that are on the device at once."""
    alive = most = 0
    for entry in traced.log.entries:
        block = traced.log.blocks[entry if entry >= 0 else ~entry]
        if block.part == "gradients" and not block.on_host:
            alive += block.bytes if entry >= 0 else -block.bytes
            most = max(most, alive)
    return most


MATRIX = 4 * 2 * 96 * 64  # bytes of one expert's gate and up projections, float32
EXPERT = 4 * 3 * 96 * 64


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "clip", "checkpointing"),
    in_pairs(["lomo", "adalomo", "adamw", "adamw8bit"], [0.0, 1.0], ["none", "full"]),
)
def test_fused_gradients_are_one_matrix(name: str, clip: float, checkpointing: str, expert_run: Any) -> None:
    settings = {"max_grad_norm": clip, "checkpointing": checkpointing}
    fused, _ = tracked(expert_run({"name": name, "fused_backward": True}, **settings))
    assert most_gradients(fused) == MATRIX
    plain, _ = tracked(expert_run({"name": name, "fused_backward": False}, **settings))
    assert most_gradients(plain) >= 4 * EXPERT  # two experts of two layers


# --- float16 ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(UNPAGED, 6))
def test_in_float16_losses_and_norms_are_those_of_float32(name: str, small_model: Path) -> None:
    """To 0.5 %, and gradient norms to 2 %: the loss is scaled by 65,536, and the scale is off again in every norm."""
    clip = 0.1 if name in ("lomo", "adamw") else 0.0
    masters = "none" if name in ("lomo", "adalomo", "adafactor") else "fp32"
    optimizer = {"name": name, "master_weights": masters}
    reference = Run(run_config(small_model, optimizer | {"fused_backward": False}, max_grad_norm=clip))
    losses = reference.steps(3)
    for fused in (False, True):
        run = Run(run_config(small_model, optimizer | {"fused_backward": fused}, "fp16", max_grad_norm=clip))
        assert run.steps(3) == pytest.approx(losses, rel=5e-3), fused
        assert run.norms == pytest.approx(reference.norms, rel=2e-2), fused
        assert run.stepper.skipped == 0


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", [{"name": "lomo"}, {"name": "adamw", "master_weights": "fp32"}])
def test_an_overflow_halves_the_scale_and_changes_no_weight(optimizer: dict[str, Any], small_model: Path) -> None:
    run = Run(run_config(small_model, optimizer, "fp16"))
    assert run.stepper.loss_scale is not None
    run.stepper.loss_scale.value = 2.0**24  # far above what these gradients bear
    before = {key: weight.clone() for key, weight in run.weights().items()}
    run.steps(1)
    assert run.stepper.skipped == 1
    assert run.stepper.loss_scale.value == 2.0**23
    assert all(torch.equal(weight, before[key]) for key, weight in run.weights().items())
    run.steps(8)
    assert run.stepper.skipped < 9
    assert any(not torch.equal(weight, before[key]) for key, weight in run.weights().items())


def test_the_scale_grows_after_many_good_steps_and_has_a_floor() -> None:
    scale = LossScale(interval=3)
    for _ in range(3):
        scale.went_well()
    assert scale.value == 2.0**17
    for _ in range(17):
        scale.overflowed()
    with pytest.raises(UserError, match="overflow float16 at every loss scale"):
        scale.overflowed()


def test_float16_needs_updates_in_float32(small_model: Path) -> None:
    with pytest.raises(UserError, match="master_weights: fp32"):
        Run(run_config(small_model, {"name": "adamw"}, "fp16"))


# --- On the host ------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "cut"), in_pairs(["adamw", "adamw8bit", "sgd", "adalomo"], [(0.0, 1), (0.1, 2)], every=2)
)
def test_an_update_on_the_host_is_the_same_update(name: str, cut: tuple[float, int], small_model: Path) -> None:
    """Losses, norms and weights to 1e-5; and of the gradients one matrix is on the device, of states nothing."""
    clip, accumulate = cut
    settings = {"max_grad_norm": clip, "accumulate": accumulate}
    runs = [
        Run(run_config(small_model, {"name": name, "offload": on} | {"fused_backward": False}, **settings))
        for on in (False, True)
    ]
    losses = []
    for run in runs:
        losses.append([])
        for _ in range(3):
            total = sum(count_loss_tokens(batch) for batch in run.batches[:accumulate])
            micro = [run.stepper.micro_step(batch, total).loss for batch in run.batches[:accumulate]]
            losses[-1].append(sum(micro).item())
            run.norms.append(run.stepper.finish().norm.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert runs[1].norms == pytest.approx(runs[0].norms, rel=1e-5)
    for key, weight in runs[0].weights().items():
        torch.testing.assert_close(runs[1].weights()[key], weight, rtol=0, atol=2e-4)


def test_a_broken_gradient_on_the_host_is_named_and_dropped(small_model: Path) -> None:
    run = Run(run_config(small_model, {"name": "adamw", "offload": True}, on_nonfinite="skip"))
    run.steps(1)
    before = {key: weight.clone() for key, weight in run.weights().items()}
    handle = run.adapted.trainable()["model.norm.weight"].register_hook(lambda gradient: gradient * math.nan)
    run.steps(1)
    handle.remove()
    assert run.stepper.skipped == 1
    assert all(torch.equal(weight, before[key]) for key, weight in run.weights().items())
    run.steps(1)
    assert all(weight.isfinite().all() for weight in run.weights().values())
    stopping = Run(run_config(small_model, {"name": "adamw", "offload": True}))
    break_gradient(stopping, "model.norm.weight", math.nan)
    with pytest.raises(UserError, match=r"the gradient of model\.norm\.weight"):
        stopping.steps(1)


def test_what_the_host_holds_is_counted_apart(expert_run: Any) -> None:
    """Device: weights, the gradient that leaves and the one that is made. Host, for each weight: float32 weight,
    gradient and two moments, and what goes over the bus, 20 bytes in all in float32."""
    traced, _left = tracked(expert_run({"name": "adamw", "offload": True}))
    assert most_gradients(traced) == EXPERT
    parts = traced.parts(traced.peak)
    assert parts.optimizer_states == parts.master_weights == 0
    on_host = sum(block.bytes for block in traced.log.blocks if block.on_host and block.died is None)
    assert on_host == pytest.approx(5 * 4 * EXPERT, rel=1e-3)


# --- What a run in 16 bits must not lose ------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", [{"name": "lomo"}, {"name": "adamw", "master_weights": "fp32"}])
def test_a_bound_hides_no_infinity(optimizer: dict[str, Any], dtype: str, small_model: Path) -> None:
    """Nor does a bound above the largest float16, once it is scaled, break anything."""
    run = Run(run_config(small_model, optimizer, dtype, max_grad_value=1.0, on_nonfinite="skip"))
    run.steps(1)
    assert run.stepper.skipped == 0
    before = {key: weight.clone() for key, weight in run.weights().items()}
    name = "model.layers.0.mlp.gate.weight"
    handle = run.adapted.trainable()[name].register_hook(lambda gradient: gradient * math.inf)
    run.steps(1)
    handle.remove()
    assert run.stepper.skipped == 1
    assert torch.equal(run.weights()[name], before[name])


def test_a_norm_is_taken_in_float32(small_model: Path) -> None:
    """Of gradients scaled by 65,536 the norm passes 65,504, the largest float16, where no element does."""
    run = Run(run_config(small_model, {"name": "adamw", "master_weights": "fp32"}, "fp16"))
    handle = run.adapted.trainable()["model.norm.weight"].register_hook(lambda gradient: gradient * 80)
    run.steps(2)
    handle.remove()
    assert run.stepper.skipped == 0
    assert run.norms[0] > 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("offload", [False, True])
def test_a_bound_is_of_the_whole_step(offload: bool, small_model: Path) -> None:
    """Micro-steps add up before their sum is bounded, on the host as on the device."""
    optimizer = {"name": "sgd", "offload": offload}
    run = Run(run_config(small_model, optimizer, max_grad_value=1e-3, accumulate=2))
    total = sum(count_loss_tokens(batch) for batch in run.batches)
    gradients = Run(run_config(small_model, {"name": "sgd"}, accumulate=2))
    before = {key: weight.clone() for key, weight in run.weights().items()}
    for batch in run.batches:
        run.stepper.micro_step(batch, total)
        gradients.stepper.micro_step(batch, total)
    expected = {key: p.grad.clamp(-1e-3, 1e-3) for key, p in gradients.adapted.trainable().items()}
    run.stepper.finish()
    for key, weight in run.weights().items():
        torch.testing.assert_close(weight, before[key] - 0.3 * expected[key], rtol=0, atol=1e-6, msg=key)
