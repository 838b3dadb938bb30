"""What stays on the host comes in time, two layers at a time at most, and changes no gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.experts.host import CopyStream, ExpertPrefetcher, empty_on_host, on_device, stays_on_host
from moetune.experts.quantized import QuantizedExperts
from moetune.memory.trace.tracker import Tracker
from moetune.run.resolve import resolve
from tests.reference import build_toy, loss_and_gradients, run_config, token_ids
from tests.thinned import in_pairs
from tests.toys import LAYERS, toy_config

ADAPT: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "lora": {"lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}},
    "all three ways": {
        "router": "all",
        "experts": {"ids": [0, 3]},
        "lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"], "ids": [1, 2]},
    },
    "upper layers": {"router": "2-3", "experts": {"layers": "3", "ids": [1]}},
}
TYPES = ["mixtral", "qwen2_moe", "deepseek_v2", "gpt_oss"]


def toy(
    folder: Path,
    model_type: str,
    adapt: str,
    *,
    experts_on: str = "host",
    base: str = "nf4",
    checkpointing: str,
    tokens: int = 2048,
) -> Adapted:
    model, train = {"experts_on": experts_on, "base": base}, {"checkpointing": checkpointing, "sequence_length": tokens}
    adapted = build_toy(toy_config(model_type), folder, ADAPT[adapt], model=model, train=train)
    adapted.model.train()
    return adapted


def prefetcher_of(adapted: Adapted) -> ExpertPrefetcher:
    assert adapted.expert_context.prefetcher is not None
    return adapted.expert_context.prefetcher


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("model_type", "adapt", "checkpointing", "base"),
    [
        *in_pairs(TYPES, ADAPT, ["none", "full", "offload"], ["nf4"]),
        *in_pairs(["mixtral"], ["lora"], ["full"], ["int8", "mxfp4", "bf16", "fp32"], every=1),
    ],
)
def test_gradients_are_those_of_experts_on_the_gpu(
    tmp_path: Path, model_type: str, adapt: str, checkpointing: str, base: str
) -> None:
    expected_loss, expected = loss_and_gradients(
        toy(tmp_path, model_type, adapt, experts_on="gpu", base=base, checkpointing="none"), token_ids()
    )
    adapted = toy(tmp_path, model_type, adapt, base=base, checkpointing=checkpointing)
    for _ in range(2):
        loss, found = loss_and_gradients(adapted, token_ids())
        assert torch.equal(loss, expected_loss)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
        assert prefetcher_of(adapted)._on_device.keys() == adapted.run.carried_layers


class Watched:
    """Notes which layers are on the device after each change, and how often one was fetched when it was needed."""

    def __init__(self, prefetcher: ExpertPrefetcher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.visits: list[tuple[int, bool, list[int]]] = []
        self.late: list[tuple[int, bool]] = []
        stock = prefetcher._go_to

        def go_to(number: int, in_backward: bool) -> None:
            if number not in prefetcher._on_device:
                self.late.append((number, in_backward))
            stock(number, in_backward)
            self.visits.append((number, in_backward, sorted(prefetcher._on_device)))

        monkeypatch.setattr(prefetcher, "_go_to", go_to)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpointing", ["none", "full", "offload"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_two_layers_at_most_and_the_next_in_time(
    tmp_path: Path, model_type: str, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = toy(tmp_path, model_type, "lora", checkpointing=checkpointing, tokens=8)
    prefetcher = prefetcher_of(adapted)
    adapted.model(input_ids=token_ids(), use_cache=False)  # no backward pass follows
    watched = Watched(prefetcher, monkeypatch)
    loss_and_gradients(adapted, token_ids())
    last = LAYERS - 1
    forward = [(n, False, [n, n + 1] if n < last else [n]) for n in range(LAYERS)]
    backward = [(n, True, [n - 1, n] if n else [n]) for n in reversed(range(LAYERS))]
    assert watched.visits == forward + backward
    assert watched.late == [(0, False)]  # the last layer is still there when backward begins
    assert not prefetcher._on_device


def test_the_first_layers_stay_from_backward_to_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = toy(tmp_path, "mixtral", "router", checkpointing="full", tokens=256)
    assert adapted.run.carried_layers == {0, 1}
    watched = Watched(prefetcher_of(adapted), monkeypatch)
    for _ in range(2):
        watched.visits, watched.late = [], []
        loss_and_gradients(adapted, token_ids())
    forward = [(0, False, [0, 1]), (1, False, [1, 2]), (2, False, [2, 3]), (3, False, [3])]
    backward = [(3, True, [2, 3]), (2, True, [1, 2]), (1, True, [0, 1]), (0, True, [0, 1])]
    assert watched.visits == forward + backward
    assert not watched.late
    with torch.no_grad():
        adapted.model(input_ids=token_ids(), use_cache=False)
    assert not prefetcher_of(adapted)._on_device


@pytest.mark.parametrize(
    ("train", "carried"),
    [
        ({"sequence_length": 8}, 0),
        ({"sequence_length": 256}, 2),
        ({"sequence_length": 128, "micro_batch": 2}, 2),
        ({"sequence_length": 128, "accumulate": 2}, 1),
        ({"sequence_length": 128, "accumulate": 2, "layer_by_layer": True}, 2),
        ({"sequence_length": 4096, "checkpointing": {"host": [3]}}, 2),
        ({"sequence_length": 4096, "checkpointing": {"host": [1, 2, 3]}}, 0),
        ({"sequence_length": 4096, "checkpointing": "offload"}, 0),
        ({"sequence_length": 4096, "checkpointing": "none"}, 0),
    ],
)
def test_no_more_layers_stay_than_later_layers_keep_inputs(tmp_path: Path, train: dict[str, Any], carried: int) -> None:
    toy_config("mixtral").save_pretrained(tmp_path)
    model = {"experts_on": "host", "base": "nf4"}
    run = resolve(run_config(tmp_path, ADAPT["router"], model=model, train={"checkpointing": "full"} | train), "cpu")
    assert run.carried_layers == set(range(carried))
    shortened = run.without_layers({0, 3})
    assert shortened.carried_layers == run.carried_layers
    in_full = {"experts": {"ids": [0, 1, 2, 3]}}  # whose gradients exist when backward ends
    whole = resolve(run_config(tmp_path, in_full, model=model, train={"checkpointing": "full"} | train), "cpu")
    assert len(whole.carried_layers) == (carried if train["sequence_length"] > 256 else 0)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v2"])
@pytest.mark.parametrize(
    "adapt",
    [
        *ADAPT.values(),
        {
            "lora": {
                "rank": {"attention": 4, "experts": {"0-1": 2, "2-3": 1}},
                "alpha": 4,
                "targets": ["attention", "experts"],
            }
        },
        {"lora": {"rank": 2, "alpha": 4, "targets": ["experts"], "share": "outer"}},
        {"also": ["attention", "norm"]},
    ],
)
def test_gradients_are_counted_as_the_model_has_them(model_type: str, adapt: dict[str, Any], tmp_path: Path) -> None:
    adapted = build_toy(toy_config(model_type), tmp_path, adapt)
    assert adapted.run._trained_parameters() == sum(p.numel() for p in adapted.trainable().values())


def test_layers_that_gradients_do_not_reach_are_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = toy(tmp_path, "mixtral", "upper layers", checkpointing="none")
    watched = Watched(prefetcher_of(adapted), monkeypatch)
    loss_and_gradients(adapted, token_ids())
    assert [visit for visit in watched.visits if visit[1]] == [(3, True, [2, 3]), (2, True, [2])]


def test_nothing_is_left_after_an_evaluation_nor_by_a_forward_pass_without_backward(tmp_path: Path) -> None:
    adapted = toy(tmp_path, "mixtral", "lora", checkpointing="full", tokens=8)
    prefetcher = prefetcher_of(adapted)
    with torch.no_grad():
        adapted.model(input_ids=token_ids(), use_cache=False)
    assert not prefetcher._on_device
    adapted.model(input_ids=token_ids(), use_cache=False)
    loss_and_gradients(adapted, token_ids())
    assert not prefetcher._on_device


def test_a_graph_that_is_kept_goes_backward_twice(tmp_path: Path) -> None:
    adapted = toy(tmp_path, "mixtral", "lora", checkpointing="offload")
    loss = adapted.model(input_ids=token_ids(), use_cache=False).logits.square().mean()
    trained = list(adapted.trainable().values())
    first = torch.autograd.grad(loss, trained, retain_graph=True)
    again = torch.autograd.grad(loss, trained)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_copies_are_not_the_hosts_memory() -> None:
    prefetcher = ExpertPrefetcher(torch.device("cpu"))
    stack = QuantizedExperts(2, (4, 64), "fp32", prefetcher=prefetcher)
    prefetcher.add_layer(0, [stack])
    stack.quantize_(0, torch.ones(4, 64))
    matrix: Tensor = stack.matrix(0, torch.float32)
    assert torch.equal(matrix, torch.ones(4, 64))
    assert not stays_on_host(matrix)
    assert stays_on_host(stack.data)


def test_a_copy_for_which_no_memory_was_left_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher = ExpertPrefetcher(torch.device("cpu"))
    stacks = [QuantizedExperts(1, (4, 64), "fp32", prefetcher=prefetcher) for _ in range(2)]
    for number, stack in enumerate(stacks):
        prefetcher.add_layer(number, [stack])
        stack.quantize_(0, torch.full((4, 64), number + 1.0))
    copied = CopyStream.to_device
    for fails in (1, 2):  # the copy of the layer itself, and of the following one
        made: list[int] = []

        def to_device(stream: CopyStream, sources: Any, made: list[int] = made, fails: int = fails) -> Any:
            made.append(1)
            if len(made) == fails:
                raise torch.OutOfMemoryError
            return copied(stream, sources)

        with monkeypatch.context() as patch:
            patch.setattr(CopyStream, "to_device", to_device)
            with pytest.raises(torch.OutOfMemoryError):
                stacks[0].matrix(0, torch.float32)
            assert torch.equal(stacks[0].matrix(0, torch.float32), torch.ones(4, 64))
        assert torch.equal(stacks[1].matrix(0, torch.float32), torch.full((4, 64), 2.0))
        prefetcher.free()


def test_a_tracker_tells_the_hosts_memory_by_its_marks() -> None:
    device = torch.device("cpu")
    with Tracker({}) as tracker:
        ours = empty_on_host((4,), torch.float32, device)
        ours.copy_(torch.ones(4))
        computed, mixed = ours * 2, ours + torch.ones(4)
        (fetched,) = CopyStream(device).to_device([ours]).wait()
        (stored,) = CopyStream(device).to_host(mixed).wait()
        on_gpu = on_device(computed, device)
    blocks = [tracker.log.blocks[number] for t in (ours, computed, mixed, fetched, stored, on_gpu)
              if (number := tracker.block_of(t)) is not None]  # fmt: skip
    assert [block.on_host for block in blocks] == [True, True, False, False, True, False]
    assert [block.fetched for block in blocks] == [False, False, False, True, False, False]
