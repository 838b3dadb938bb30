"""Recomputing a layer replays its routing and does not run the experts' products again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import moetune.experts.mlp
from moetune.adapt import attention
from moetune.adapt.attention import cu_seqlens
from moetune.adapt.build import Adapted
from moetune.adapt.checkpointing import _KERNELS, ChoicesOf, _Choices
from moetune.errors import UserError
from moetune.experts.context import ReadCounts
from moetune.experts.projection import Projection
from moetune.kernels import routing
from moetune.run.resolve import resolve
from tests.adapt.flash_on_cpu import flash_on_cpu  # noqa: F401  # a fixture
from tests.reference import build_toy, next_token_loss, token_ids
from tests.toys import LAYERS, toy_config

ADAPT = {
    "router": "all",
    "experts": {"ids": [0, 3]},
    "lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]},
}


def mixtral(folder: Path, adapt: dict[str, Any], checkpointing: str = "none", **train: Any) -> Adapted:
    """In training mode, with ties: three neighbouring experts get the same score, and a token goes to two of them."""
    adapted = build_toy(toy_config("mixtral"), folder, adapt, train={"checkpointing": checkpointing, **train})
    for part in adapted.structure.parameters_of("router"):
        weight = adapted.model.get_parameter(part.name).data
        weight.copy_(weight[[0, 0, 0, 3, 3, 3, 6, 6]])
    adapted.model.train()
    return adapted


class Ties:
    """Stands in for `torch.topk` and lets ties fall to the later entry, or to the earlier once `turned`."""

    def __init__(self) -> None:
        self.turned, self.calls, self.stock = False, 0, torch.topk

    def __call__(self, input: Tensor, k: int, dim: int = -1) -> Any:
        self.calls += type(input) is Tensor  # resolving a run calls it on fake tensors
        slope = torch.linspace(0.0, -1e-6 if self.turned else 1e-6, input.shape[dim])
        _, ids = self.stock(input.detach() + slope, k, dim=dim)
        return input.gather(dim, ids), ids


@pytest.fixture
def ties(monkeypatch: pytest.MonkeyPatch) -> Ties:
    stand_in = Ties()
    monkeypatch.setattr(torch, "topk", stand_in)
    return stand_in


def gradients(adapted: Adapted, ties: Ties) -> dict[str, Tensor]:
    """Ties turn between the forward pass and the backward pass."""
    adapted.model.zero_grad(set_to_none=True)
    ties.turned = False
    loss = next_token_loss(adapted.model(input_ids=token_ids(), use_cache=False).logits, token_ids())
    ties.turned = True
    loss.backward()
    return {name: parameter.grad for name, parameter in adapted.trainable().items() if parameter.grad is not None}


def test_a_tie_that_falls_the_other_way_in_recomputation_changes_no_gradient(tmp_path: Path, ties: Ties) -> None:
    expected = gradients(mixtral(tmp_path, ADAPT, "none"), ties)
    assert ties.calls == LAYERS
    found = gradients(mixtral(tmp_path, ADAPT, "full"), ties)
    assert ties.calls == 2 * LAYERS  # a router that runs again does not choose again
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each run of a layer's products, whether it kept rows."""
    kept: list[bool] = []
    stock = moetune.experts.mlp._add_group

    def add_group(bank: Any, group: Any, tokens: Any, rows: Any, norms: Any) -> None:
        if group.slots.start == 0:
            kept.append(rows is not None)
        stock(bank, group, tokens, rows, norms)

    monkeypatch.setattr(moetune.experts.mlp, "_add_group", add_group)
    return kept


@pytest.mark.parametrize("adapt", [{"router": "all"}, ADAPT], ids=["router-only", "all three ways"])
def test_the_experts_products_run_once(adapt: dict[str, Any], tmp_path: Path, ties: Ties, fills: list[bool]) -> None:
    gradients(mixtral(tmp_path, adapt, "full"), ties)
    assert len(fills) == LAYERS


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpointing", ["experts_only", "full", "offload"])
def test_kept_rows_spare_their_layer_a_product_and_change_no_bit(
    checkpointing: str, tmp_path: Path, ties: Ties, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(mixtral(tmp_path, ADAPT, "none"), ties)
    forwards: list[tuple[int, ...]] = []
    stock = Projection.forward

    def forward(self: Projection, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        forwards.append(tuple(x.shape))
        return stock(self, x, *args, **kwargs)

    monkeypatch.setattr(Projection, "forward", forward)
    products = []
    for kept in (0, 1, LAYERS):
        forwards.clear()
        found = gradients(mixtral(tmp_path, ADAPT, checkpointing, keep_rows=kept), ties)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
        products.append(len(forwards))
    none, last, every = products
    assert (none - last) * LAYERS == none - every == every // 2  # one of three: gate_up, down, and gate_up again


def test_a_recomputation_that_runs_the_experts_again_keeps_no_rows(tmp_path: Path, fills: list[bool]) -> None:
    train = {"checkpointing": "full", "keep_rows": LAYERS}
    adapted = build_toy(toy_config("qwen2_moe"), tmp_path, {"router": "all"}, train=train)  # with shared experts
    adapted.model.train()
    next_token_loss(adapted.model(input_ids=token_ids(), use_cache=False).logits, token_ids()).backward()
    assert fills == [True] * LAYERS + [False] * LAYERS


class Kernels(TorchDispatchMode):
    """Counts the runs of attention's kernels, forward."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func.name() in _KERNELS and "attention" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("model_type", "packed"), [("mixtral", False), ("qwen3_moe", False), ("gpt_oss", True), ("deepseek_v3", False)]
)
def test_what_layers_keep_is_not_computed_again_and_changes_no_bit(
    model_type: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sinks attention's output and logsumexp are changed in place after the kernel has run (flash.py)."""
    monkeypatch.setattr(attention, "BY_DOCUMENTS", attention.VARLEN)
    config, train = toy_config(model_type), dict[str, Any](loss_memory="none")
    sections: dict[str, Any] = {"model": {"attention": "sdpa"}, "data": {"train": "unread", "packing": packed}}
    given = cu_seqlens([5, 7, 12]) if packed else {}
    runs, found = {}, {}
    last = config.num_hidden_layers - 1
    some = {"attention": 1, "rows": f"2-{last}", "rest": last}
    hosted = {"host": f"0-{last - 1}", "attention": last}
    ways = {"full": "full", "attention": {"attention": "all"}, "some": some, "host": hosted, "none": "none"}
    for name, how in ways.items():
        adapted = build_toy(config, tmp_path / name, ADAPT, train=train | {"checkpointing": how}, **sections)
        adapted.model.train()
        with Kernels() as kernels:
            logits = adapted.model(input_ids=token_ids(), use_cache=False, **given).logits
            next_token_loss(logits, token_ids()).backward()
        runs[name] = kernels.runs
        found[name] = {name: p.grad for name, p in adapted.trainable().items() if p.grad is not None}
    for gradients in found.values():
        assert gradients.keys() == found["full"].keys()
        assert all(torch.equal(gradient, found["full"][name]) for name, gradient in gradients.items())
    layers = runs["none"]
    some_runs, host_runs = 2 * layers - 2 * bool(layers), 2 * layers - bool(layers)
    assert runs == {
        "full": 2 * layers, "attention": layers, "some": some_runs, "host": host_runs, "none": layers,
    }  # fmt: skip


@pytest.mark.full
def test_attention_is_kept_for_one_backward_pass_and_not_with_dropout(tmp_path: Path) -> None:
    def runs(train: dict[str, Any], dropout: float = 0.0) -> tuple[int, dict[str, Tensor]]:
        config = toy_config("mixtral", attention_dropout=dropout)
        adapted = build_toy(config, tmp_path / str(train), ADAPT, train=train, model={"attention": "sdpa"})
        adapted.model.train()
        torch.manual_seed(0)
        with Kernels() as kernels:
            loss = next_token_loss(adapted.model(input_ids=token_ids(), use_cache=False).logits, token_ids())
            loss.backward(retain_graph=not dropout)
            if not dropout:
                loss.backward()
        return kernels.runs, {name: p.grad for name, p in adapted.trainable().items() if p.grad is not None}

    twice, gradients = runs({"checkpointing": {"attention": "all"}})
    assert twice == 2 * LAYERS
    _, expected = runs({"checkpointing": "full"})
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())
    _, gradients = runs({"checkpointing": {"attention": "all"}}, 0.5)
    _, expected = runs({"checkpointing": "full"}, 0.5)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


class Choosing:
    """What a model's routers are to checkpointed calls, where all of a call is a router's work."""

    def __init__(self, mode: _Choices) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.mode.restart()
        self.mode.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.mode.__exit__(*exception)


def choosing() -> tuple[Choosing, Choosing]:
    kept: list[Tensor] = []
    return Choosing(_Choices(kept, again=False)), Choosing(_Choices(kept, again=True))


@pytest.mark.parametrize("fused", [True, False])
def test_choices_are_watched_around_the_router_alone(
    fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dispatch mode costs microseconds for every operation under it; fused routers record and replay without one."""
    adapted = mixtral(tmp_path, ADAPT, "full")
    seen: list[str] = []
    chosen: list[Tensor] = []
    stock, choose = _Choices.__torch_dispatch__, routing.choose

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return stock(self, func, types, args, kwargs)

    monkeypatch.setattr(_Choices, "__torch_dispatch__", dispatch)
    monkeypatch.setattr(routing, "choose", lambda logits, *rest: chosen.append(logits) or choose(logits, *rest))
    if not fused:
        for module in adapted.model.modules():
            module.__dict__.pop("choices", None)
    next_token_loss(adapted.model(input_ids=token_ids(), use_cache=False).logits, token_ids()).backward()
    assert len(chosen) == (LAYERS if fused else 0)
    assert seen.count("topk.default") == (0 if fused else 2 * LAYERS)
    assert len(seen) <= (0 if fused else 2 * LAYERS * 12)


def test_rows_are_counted_once_for_forward_and_recomputation(tmp_path: Path) -> None:
    adapted = mixtral(tmp_path, ADAPT, "full")
    asked: list[int] = []

    def count(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
        asked.append(layer)
        return read()

    with adapted.expert_context.hooks.using(count_rows=count):
        next_token_loss(adapted.model(input_ids=token_ids(), use_cache=False).logits, token_ids()).backward()
    assert asked == list(range(LAYERS))


def test_a_graph_that_is_kept_is_recomputed_at_every_backward() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = checkpoint(lambda x: x.topk(2)[0].exp().sum(), x, use_reentrant=False, context_fn=choosing)
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (again,) = torch.autograd.grad(y, x)
    assert torch.equal(first, again)
    assert first.any()


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.topk(2, dim=-1),
        lambda x: x.topk(2, dim=0, largest=False),
        lambda x: x.max(dim=-1),
        lambda x: x.max(dim=0, keepdim=True),
    ],
    ids=["topk", "smallest of a column", "max", "max, dimension kept"],
)
def test_every_kind_of_choice_is_replayed_with_the_values_that_stand_there_now(choose: Any) -> None:
    scale = torch.tensor(1.0)
    chosen: list[tuple[Tensor, Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        values, ids = choose(x * scale)
        chosen.append((values.detach(), ids))
        return (values.exp() * values).sum()

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=False, context_fn=choosing)
    scale.data.fill_(-1.0)  # would turn every choice around
    loss.backward()
    (first, ids), (again, replayed) = chosen
    assert torch.equal(replayed, ids)
    assert torch.equal(again, -first)
    touched = torch.zeros_like(x, dtype=torch.bool)
    touched[x.grad != 0] = True
    assert touched.sum() == ids.numel()


def test_an_architecture_without_checkpointing_is_refused(tmp_path: Path) -> None:
    run = mixtral(tmp_path, {"router": "all"}).run
    run.model.plain.supports_gradient_checkpointing = False
    train = run.config.train.model_copy(update={"checkpointing": "full"})
    with pytest.raises(UserError, match=r"train\.checkpointing: MixtralForCausalLM does not support"):
        resolve(run.config.model_copy(update={"train": train}), "cpu", like=run)


def test_a_model_that_trains_generates_from_the_whole_prompt(tmp_path: Path) -> None:
    """Layers that are checkpointed drop the cache."""
    adapted = build_toy(toy_config("mixtral"), tmp_path, {"router": "all"}, train={"checkpointing": "full"})
    expected = adapted.model.eval().generate(token_ids(), max_new_tokens=5, do_sample=False)
    assert torch.equal(adapted.model.train().generate(token_ids(), max_new_tokens=5, do_sample=False), expected)
    assert adapted.model.is_activation_checkpointing


@pytest.mark.parametrize("checkpointing", ["none", "experts_only", "full"])
def test_who_switches_it_on_later_gets_the_same_kind(checkpointing: str, tmp_path: Path) -> None:
    """Trainers switch it by settings of their own, TRL's off and on around a reference model."""
    adapted = build_toy(toy_config("mixtral"), tmp_path, {"router": "all"}, train={"checkpointing": checkpointing})
    layers = [module for module in adapted.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert {layer.gradient_checkpointing for layer in layers} == {checkpointing == "full"}
    adapted.model.activation_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in layers)
    adapted.model.activation_checkpointing_enable({"use_reentrant": True})
    for layer in layers:
        assert layer.gradient_checkpointing
        keywords = layer._gradient_checkpointing_func.keywords
        assert keywords["use_reentrant"] is False
        assert isinstance(keywords["context_fn"].__self__, ChoicesOf)
