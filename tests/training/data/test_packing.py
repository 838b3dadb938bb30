"""What packing keeps: every token, every label, and documents apart, down to logits and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetune.training.data.documents import Document
from moetune.training.data.packing import packed, separate
from moetune.training.step.batch import collate
from tests.training.test_isolation import excited

PAD = 0


def document(size, prompt=1, first=0, divisible=True):
    """Ids that name document and place, so that a token that moves, is lost or appears twice shows."""
    ids = np.arange(first, first + size, dtype=np.int32)
    labels = ids.copy()
    labels[:prompt] = -100
    return Document(ids, labels, divisible)


@st.composite
def document_lists(draw, divisible, longest):
    sizes = draw(st.lists(st.integers(2, longest), min_size=1, max_size=25))
    return [
        document(size, draw(st.integers(1, size - 1)) if not divisible else 1, 1000 * (index + 1), divisible)
        for index, size in enumerate(sizes)
    ]


def pieces(item):
    """(ids, labels) of each stretch of a packed sequence whose positions count up from 0, without padding."""
    starts = [at for at, position in enumerate(item["position_ids"]) if position == 0]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(item["position_ids"])], strict=True):
        assert item["position_ids"][start:stop] == list(range(stop - start))
        ids, labels = item["input_ids"][start:stop], item["labels"][start:stop]
        assert labels[0] == -100
        if ids[0] == PAD:
            assert stop == len(item["position_ids"])
            assert set(ids) == {PAD}
            assert set(labels) == {-100}
        else:
            assert len({token // 1000 for token in ids}) == 1
            found.append((ids, labels))
    return found


def loss_tokens(dataset):
    return sorted(label for labels in dataset["labels"] for label in labels if label != -100)


@given(st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), document_lists(divisible=False, longest=n))))
def test_what_must_stay_whole_is_packed_whole(case):
    length, documents = case
    dataset = packed(documents, length, PAD)
    assert all(len(item["input_ids"]) == len(item["labels"]) == length for item in dataset)
    found = sorted(piece for item in dataset for piece in pieces(item))
    assert found == [(document.ids.tolist(), document.labels.tolist()) for document in documents]
    assert loss_tokens(dataset) == loss_tokens(separate(documents, length))
    assert len(dataset) <= len(documents)


@given(st.integers(2, 12), document_lists(divisible=True, longest=40))
def test_text_is_cut_without_losing_or_repeating_a_target(length, documents):
    dataset, unpacked = packed(documents, length, PAD), separate(documents, length)
    assert all(len(item["input_ids"]) == length for item in dataset)
    assert all(2 <= len(ids) <= length for ids in unpacked["input_ids"])
    in_order = [piece for item in dataset for piece in pieces(item)]
    for cut in (in_order, list(zip(unpacked["input_ids"], unpacked["labels"], strict=True))):
        rebuilt = {}
        for ids, labels in cut:
            assert labels == [-100, *ids[1:]]
            whole = rebuilt.setdefault(ids[0] // 1000, [ids[0]])
            assert whole[-1] == ids[0]  # a further piece repeats one token, as context
            whole += ids[1:]
        assert list(rebuilt.values()) == [document.ids.tolist() for document in documents]
    assert loss_tokens(dataset) == loss_tokens(unpacked)
    for data in (dataset, unpacked):  # a batch without any target would have no mean loss
        assert all(any(label != -100 for label in labels) for labels in data["labels"])


def test_best_fit_fills_the_fullest_sequence_with_room():
    sizes = [6, 7, 3, 4, 10]
    documents = [document(size, first=1000 * (i + 1), divisible=False) for i, size in enumerate(sizes)]
    dataset = packed(documents, 10, PAD)
    contents = [[ids[0] // 1000 for ids, _ in pieces(item)] for item in dataset]
    assert contents == [[1, 4], [2, 3], [5]]


def toy_batch():
    """Two sequences of documents of unlike lengths, the second one padded."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    for size in (7, 3, 6, 9, 2):
        ids = torch.randint(1, 64, (size,), generator=generator).numpy().astype(np.int32)
        documents.append(Document(ids, np.concatenate([[-100], ids[1:]]).astype(np.int32), True))
    return documents, collate(list(packed(documents, 16, PAD)), PAD)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_packed_logits_and_gradients_equal_those_of_each_document_alone(model_type, attention, checkpointing):
    torch.set_num_threads(1)
    model = excited(model_type, attn_implementation=attention).train()
    documents, batch = toy_batch()
    assert batch["input_ids"].shape == (2, 16)
    if checkpointing:
        model.activation_checkpointing_enable()
    out = model(**batch, use_cache=False)
    out.loss.backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    total = sum(len(document) - 1 for document in documents)
    packed_logits = out.logits.detach().flatten(0, 1)
    start = 0
    for one in documents:
        ids = torch.from_numpy(one.ids).long()[None]
        alone = model(input_ids=ids, labels=ids, use_cache=False)
        (alone.loss * (len(one) - 1) / total).backward()
        torch.testing.assert_close(
            packed_logits[start : start + len(one)], alone.logits.detach()[0], rtol=1e-5, atol=1e-5
        )
        start += len(one)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
