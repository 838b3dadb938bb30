"""What only a GPU can show of packed documents in layers with a state: flash-linear-attention keeps them apart."""

from contextlib import nullcontext

import pytest
import torch

from moetune.adapt.attention import document_inputs
from moetune.compat.transformers import set_attention, without_packages
from moetune.models.stack import decoder_layers
from moetune.training.isolation import refuse_leaky_packing
from moetune.training.step.batch import collate
from moetune.training.step.micro_step import token_loss
from tests.adapt.test_documents import ROWS, alone, assert_equal, gradients, hybrid, one_by_one, rows_of

pytestmark = pytest.mark.gpu
SIZES = {
    "qwen3_5_text": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "kimi_linear": {"linear_head_dim": 64, "linear_num_heads": 4, "first_k_dense_replace": 4},
}
"""Without experts: one rounding more could choose others."""
TOLERANCE = 0.05
"""Of a gradient's norm, in bfloat16, where products and sums come in another order."""


@pytest.mark.parametrize("model_type", SIZES)
def test_documents_at_once_are_the_documents_alone(model_type: str) -> None:
    """By the package's kernels, and by transformers' own code; no hidden state of a document knows another."""
    pytest.importorskip("fla")
    model, rows = hybrid(model_type, **SIZES[model_type]).to("cuda", torch.bfloat16), rows_of()
    set_attention(model.config, "sdpa")
    assert not any(map(one_by_one, decoder_layers(model).values()))
    refuse_leaky_packing(model, len(rows), sum(ROWS[0]))
    batch = collate(rows, 0, document_inputs=document_inputs(model))
    batch = {name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items()}

    loss = token_loss(model, batch)
    at_once = gradients(model, loss)
    for context in (nullcontext(), without_packages(model)):
        with context:
            expected = alone(model, rows)
            assert (loss - expected).abs() < 0.01 * expected
            assert_equal(at_once, gradients(model, expected), TOLERANCE)
