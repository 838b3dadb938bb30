"""The tail of every architecture: given the stack's hidden states it gives the model's logits."""

import pytest
import torch
from transformers import PreTrainedModel

from moetune.training.step.lm_head import below_head, split
from tests.thinned import thinned
from tests.toys import VOCAB, causal_lm_types, expert_model_types, toy_model

IDS = torch.arange(3, 25).reshape(2, 11)
NO_TAIL_OF_ITS_OWN = ("prophetnet",)  # its logits are of predicted streams, not of one hidden state a token


def toy_that_runs(model_type: str) -> PreTrainedModel:
    """A toy and its logits, if toy sizes suit the type."""
    try:
        model = toy_model(model_type)
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False)
    except Exception as error:
        assert model_type not in expert_model_types() or model_type == "longcat_flash"
        pytest.skip(f"no toy of {model_type}: {type(error).__name__}")
    return model


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "model_type",
    thinned((name for name in causal_lm_types() if name not in NO_TAIL_OF_ITS_OWN), 4, ("mixtral", "gemma2")),
)
def test_the_tail_gives_the_models_logits(model_type: str) -> None:
    model = toy_that_runs(model_type)
    modules = list(model.named_modules())
    with torch.no_grad():
        expected_NV = model(input_ids=IDS, use_cache=False).logits.flatten(0, 1)
    with split(model, {"input_ids": IDS}) as (hidden_BSH, tail):
        hidden_NH = hidden_BSH.flatten(0, 1)
        found_NV = torch.cat([tail(hidden_NH[start : start + 5]) for start in range(0, len(hidden_NH), 5)])
        assert (tail.vocabulary, tail.width) == (expected_NV.shape[-1], 4)
        assert tail.row_bytes >= 4 * tail.vocabulary
        assert tail.trained
    torch.testing.assert_close(found_NV, expected_NV, rtol=1e-5, atol=1e-5)
    assert list(model.named_modules()) == modules


def test_a_model_is_whole_again_after_an_error() -> None:
    model = toy_model("mixtral")
    stack = below_head(model)
    with pytest.raises(ZeroDivisionError), split(model, {"input_ids": IDS}):
        raise ZeroDivisionError
    with pytest.raises(TypeError), split(model, {"input_ids": "no tensor"}):
        pass
    assert below_head(model) is stack


@pytest.mark.parametrize(("model_type", "tensors"), [("mixtral", 1), ("granitemoe", 2), ("cohere", 2), ("gemma2", 4)])
def test_row_bytes_count_what_the_tail_makes(model_type: str, tensors: int) -> None:
    model = toy_model(model_type, tie_word_embeddings=False)
    with split(model, {"input_ids": IDS}) as (_, tail):
        assert tail.row_bytes == tensors * 4 * VOCAB


def test_what_trains_in_the_tail() -> None:
    model = toy_model("llama", tie_word_embeddings=True)
    with split(model, {"input_ids": IDS}) as (_, tail):
        assert [id(p) for p in tail.trained] == [id(model.model.embed_tokens.weight)]
    model.requires_grad_(False)
    with split(model, {"input_ids": IDS}) as (_, tail):
        assert tail.trained == ()
    model.requires_grad_(True)
    with torch.no_grad(), split(model, {"input_ids": IDS}) as (_, tail):
        assert tail.trained == ()


def test_the_stack_runs_once() -> None:
    model = toy_model("mixtral")
    calls: list[str] = []
    for name, module in below_head(model).named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    with split(model, {"input_ids": IDS}) as (hidden_BSH, tail):
        tail(hidden_BSH[0]), tail(hidden_BSH[1])
    assert calls.count("") == calls.count("layers.0") == 1
