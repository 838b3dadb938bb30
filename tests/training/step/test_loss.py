"""The loss by chunks, against torch's cross-entropy of all logits at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import PreTrainedModel

from moetune.memory.trace import Trace
from moetune.memory.trace.tracker import Tracker
from moetune.parallel.ranks import SINGLE_RANK
from moetune.training.step import loss
from moetune.training.step.lm_head import LMHead
from moetune.training.step.loss import IGNORED, chunk_tokens, summed_cross_entropy
from moetune.training.step.micro_step import count_loss_tokens, held_out_loss, token_loss
from tests.toys import VOCAB, toy_model

MiB, GiB = 2**20, 2**30
TOKENS, HIDDEN, VOCABULARY = 23, 16, 37
CHUNKS = [1, 5, 22, 23, 100]  # tokens of a chunk; there are 23
IDS = torch.arange(3, 25).reshape(2, 11)

Tensors = dict[str, Tensor]


def head(dtype: torch.dtype = torch.float32, **trains: bool) -> tuple[LMHead, Tensor, Tensor]:
    """A linear head as a tail, hidden states with a gradient, and targets of which some are ignored."""
    random = torch.Generator().manual_seed(0)
    weight_VH = (
        (torch.randn(VOCABULARY, HIDDEN, generator=random)).to(dtype).requires_grad_(trains.get("weight", False))
    )
    hidden_NH = torch.randn(TOKENS, HIDDEN, generator=random).to(dtype).requires_grad_()
    targets_N = torch.randint(VOCABULARY, (TOKENS,), generator=random)
    targets_N[::5] = IGNORED
    tail = LMHead(lambda hidden: hidden @ weight_VH.T, hidden_NH[None, :0].detach())
    return tail, hidden_NH, targets_N


def memory_of(tail: LMHead, tokens: int) -> int:
    """As much as chunks of so many tokens take."""
    return tokens * (tail.row_bytes + 4 * tail.vocabulary * (tail.width < 4))


def plain(tail: LMHead, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
    return functional.cross_entropy(tail(hidden_NH[None][0]).float(), targets_N, reduction="sum", ignore_index=IGNORED)


# --- A linear head --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", CHUNKS)
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_float32_equals_torch(tokens: int, trains: bool) -> None:
    tail, hidden_NH, targets_N = head(weight=trains)
    leaves = [hidden_NH, *tail.trained]
    assert len(leaves) == 1 + trains
    expected = plain(tail, hidden_NH, targets_N) / 7
    gradients = torch.autograd.grad(expected, leaves)
    found = summed_cross_entropy(tail, hidden_NH, targets_N, divisor=7, memory=memory_of(tail, tokens))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(torch.autograd.grad(found, leaves), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("elements", [1, 5 * VOCABULARY, 2**23])
def test_bfloat16_logits_give_the_gradient_of_float32_rounded_once(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(loss, "block_tokens", lambda memory, vocabulary: max(1, elements // vocabulary))
    logits_NV = 4 * torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits_NV = logits_NV.bfloat16().requires_grad_()
    targets_N = head()[2]
    as_they_are = LMHead(lambda hidden: hidden * 1, logits_NV[None, :0].detach())
    wide_NV = logits_NV.detach().float().requires_grad_()
    expected = functional.cross_entropy(wide_NV, targets_N, reduction="sum", ignore_index=IGNORED) / 1e5
    (expected_NV,) = torch.autograd.grad(expected, wide_NV)
    found = summed_cross_entropy(as_they_are, logits_NV * 1, targets_N, divisor=1e5, memory=10**6)
    (gradient_NV,) = torch.autograd.grad(found, logits_NV)
    assert (found.dtype, gradient_NV.dtype) == (torch.float32, torch.bfloat16)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert gradient_NV.equal(expected_NV.bfloat16()) or torch.allclose(
        gradient_NV.float(), expected_NV, rtol=2**-8, atol=1e-12
    )


def test_bfloat16_chunks_are_as_exact_as_one() -> None:
    """A weight's gradient is a sum over tokens: chunks add to it in float32."""
    wide, hidden_NH, targets_N = head(weight=True)
    exact = torch.autograd.grad(plain(wide, hidden_NH, targets_N), [hidden_NH, *wide.trained])
    errors = []
    for tokens in (1, TOKENS):
        tail, hidden_NH, targets_N = head(torch.bfloat16, weight=True)
        found = summed_cross_entropy(tail, hidden_NH, targets_N, memory=memory_of(tail, tokens))
        gradients = torch.autograd.grad(found, [hidden_NH, *tail.trained])
        assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 2
        errors.append([(one.float() - other).norm().item() for one, other in zip(gradients, exact, strict=True)])
    for by_one, at_once in zip(*errors, strict=True):
        assert by_one <= 1.1 * at_once


def test_float16_keeps_what_a_loss_scale_is_for() -> None:
    """Over a million tokens, most gradients are below the least float16; the scale comes with backward."""
    divisor, scale = 10**6, 2.0**16
    wide, hidden_NH, targets_N = head()
    (exact_NH,) = torch.autograd.grad(plain(wide, hidden_NH, targets_N) / divisor, hidden_NH)
    tail, hidden_NH, targets_N = head(torch.float16)
    found = summed_cross_entropy(tail, hidden_NH, targets_N, divisor=divisor, memory=memory_of(tail, 5))
    (gradient_NH,) = torch.autograd.grad(found * scale, hidden_NH)
    assert gradient_NH.dtype == torch.float16
    assert (gradient_NH.float() / scale - exact_NH).norm() <= 5e-3 * exact_NH.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ignored_is_no_loss_and_no_gradient(dtype: torch.dtype) -> None:
    tail, hidden_NH, targets_N = head(dtype, weight=True)
    found = summed_cross_entropy(tail, hidden_NH, torch.full_like(targets_N, IGNORED), memory=memory_of(tail, 5))
    assert found.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(found, [hidden_NH, *tail.trained]))


# --- Models ---------------------------------------------------------------------------------------------------------


def frozen(model: PreTrainedModel) -> None:
    model.get_output_embeddings().requires_grad_(False)


def everything(model: PreTrainedModel) -> None:
    pass


def head_only(model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)


def lora_on_the_head(model: PreTrainedModel) -> None:
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["lm_head"]), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)


def gradients_of(model: PreTrainedModel, value: Tensor) -> Tensors:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize(
    ("model_type", "settings", "adapt"),
    [
        ("mixtral", {}, frozen),
        ("mixtral", {}, everything),
        ("mixtral", {}, head_only),
        ("mixtral", {}, lora_on_the_head),
        ("llama", {"tie_word_embeddings": True}, everything),
        ("gemma2", {"final_logit_softcapping": 3.0}, everything),  # tied as well
        ("gemma3_text", {"final_logit_softcapping": 3.0}, everything),
        ("granitemoe", {"logits_scaling": 3.0}, everything),
        ("granitemoe", {"logits_scaling": 3.0, "tie_word_embeddings": False}, lora_on_the_head),
        ("cohere", {"logit_scale": 0.3}, frozen),
        ("phimoe", {"lm_head_bias": True}, everything),
        ("gpt_oss", {}, everything),
    ],
)
def test_chunks_of_a_model_equal_its_logits(
    model_type: str, settings: dict[str, Any], adapt: Callable[[PreTrainedModel], None], tokens: int
) -> None:
    model = toy_model(model_type, **settings)
    adapt(model)
    labels = IDS.clone()
    labels[0, :4] = labels[1, -2:] = IGNORED
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": labels}
    logits_BSV = model(input_ids=IDS, attention_mask=batch["attention_mask"], use_cache=False).logits
    expected = functional.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=IGNORED
    )
    gradients = gradients_of(model, expected / 11)
    count = count_loss_tokens(batch)
    assert count == 15
    found = token_loss(model, batch, 11, tokens * 4 * VOCAB)
    assert found.item() == pytest.approx(expected.item() / 11, rel=1e-6)
    again = gradients_of(model, found)
    assert again.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (again[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-7, name
    summed, predicted = held_out_loss(model, batch, tokens * 4 * VOCAB)
    assert (summed.requires_grad, predicted) == (False, count)
    assert summed.item() == pytest.approx(expected.item(), rel=1e-6)


# --- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [1, 100_000, 40 * MiB, 256 * MiB, GiB])
@pytest.mark.parametrize(("vocabulary", "width"), [(256, 2), (32_000, 2), (32_000, 4), (150_000, 2), (2**24, 2)])
def test_a_chunk_is_as_large_as_fits(vocabulary: int, width: int, memory: int) -> None:
    block = max(1, max(2**23, memory // 8) // vocabulary) if width < 4 else 0

    def taken(tokens: int) -> int:
        return tokens * vocabulary * width + 4 * vocabulary * min(tokens, block)

    tokens = chunk_tokens(memory, vocabulary, width, vocabulary * width, 10**9)
    assert tokens == 1 or taken(tokens) <= memory
    more = -(-block // 8) if block and tokens % block == 0 else 1  # too few tokens for a block of their own
    assert taken(tokens + more) > memory
    assert chunk_tokens(memory, vocabulary, width, vocabulary * width, 3) == min(3, tokens)
    assert chunk_tokens(None, vocabulary, width, vocabulary * width, 3) == 3


def fake_peak(run: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int, vocabulary: int, hidden: int) -> int:
    """What a loss and its backward take at most beyond a batch's hidden states, targets and a frozen bf16 head."""
    with FakeTensorMode():
        hidden_NH = torch.empty(tokens, hidden, dtype=torch.bfloat16).requires_grad_()
        weight_VH = torch.empty(vocabulary, hidden, dtype=torch.bfloat16)
        targets_N = torch.zeros(tokens, dtype=torch.long)
        tracker = Tracker({})
        for tensor in (hidden_NH, weight_VH, targets_N):
            tracker.add(tensor)
        begin = len(tracker.log.entries)
        with tracker:
            run(hidden_NH, weight_VH, targets_N).backward()
    traced = Trace.of(tracker.log, SINGLE_RANK.axis_of)
    return traced.parts(traced.peak).total - traced.parts(begin - 1).total


def by_chunks(memory: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
        tail = LMHead(lambda hidden: functional.linear(hidden, weight_VH), hidden_NH[None, :0].detach())
        return summed_cross_entropy(tail, hidden_NH, targets_N, divisor=len(targets_N), memory=memory)

    return run


def test_a_chunk_takes_what_it_is_given() -> None:
    for memory in (64 * MiB, 256 * MiB, GiB):
        taken = fake_peak(by_chunks(memory), 16_384, 32_000, 64) - 16_384 * 64 * 2
        assert 0.95 * memory <= taken <= 1.02 * memory


# --- A head that trains -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_heads_gradient_exists_once(tied: bool) -> None:
    """Until the backward pass of a tied embedding makes a second one, as large, to be added to it. (A third one for the
    sum there is under a dispatch mode only: autograd otherwise adds in place.)"""
    weight_VH = torch.nn.Parameter(torch.randn(VOCABULARY * 16, HIDDEN))
    ids_N, size = torch.arange(TOKENS), weight_VH.nbytes
    hidden_NH = functional.embedding(ids_N, weight_VH) if tied else torch.randn(TOKENS, HIDDEN, requires_grad=True)
    tail = LMHead(lambda hidden: functional.linear(hidden, weight_VH), hidden_NH[None, :0].detach())
    tracker = Tracker({})
    tracker.add(weight_VH, "trainable_weights")
    with tracker:
        summed_cross_entropy(tail, hidden_NH, ids_N, divisor=TOKENS, memory=None).backward()
    gradients = [block for block in tracker.log.blocks if block.bytes == size and block.part != "trainable_weights"]
    assert [block.op for block in gradients[1:]] == (["embedding_dense_backward.default", "add.Tensor"] if tied else [])
    assert weight_VH.grad is not None


def test_a_tied_embeddings_gradient_is_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    stock = loss._each_in_its_own_memory

    def watched(gradients: list[Tensor]) -> list[Tensor]:
        own = stock(gradients)
        made.append(own[0].data_ptr())
        return own

    monkeypatch.setattr(loss, "_each_in_its_own_memory", watched)
    weight_VH = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
    ids_N = torch.arange(TOKENS)
    hidden_NH = functional.embedding(ids_N, weight_VH)
    tail = LMHead(lambda hidden: functional.linear(hidden, weight_VH), hidden_NH[None, :0].detach())
    summed_cross_entropy(tail, hidden_NH, ids_N, memory=None).backward()
    assert weight_VH.grad is not None
    assert weight_VH.grad.data_ptr() == made[0]


def test_a_loss_goes_backward_once() -> None:
    tail, hidden_NH, targets_N = head(weight=True)
    found = summed_cross_entropy(tail, hidden_NH, targets_N, memory=None)
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        found.backward()


def test_gradients_that_share_memory_are_scaled_once_each() -> None:
    """Two biases of one shape have the same gradient, and autograd gives it as one tensor."""
    random = torch.Generator().manual_seed(0)
    hidden_NV = torch.randn(1, VOCABULARY, generator=random, requires_grad=True)
    one, two = (torch.zeros(1, VOCABULARY, requires_grad=True) for _ in range(2))
    tail = LMHead(lambda hidden: hidden + one + two, hidden_NV[None, :0].detach())
    summed_cross_entropy(tail, hidden_NV, torch.tensor([3]), memory=None).mul(3.0).backward()
    expected = torch.autograd.grad(
        3 * functional.cross_entropy(hidden_NV, torch.tensor([3]), reduction="sum"), hidden_NV
    )
    for found in (one.grad, two.grad, hidden_NV.grad):
        torch.testing.assert_close(found, expected[0])
