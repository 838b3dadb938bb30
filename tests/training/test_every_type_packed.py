"""Packed documents are what each is alone, or packing is refused: for every mixture of experts, and usual dense models.

Documents are longer than each window, block and budget of the toys. Tolerance: relative, of the norm of a document's
logits, in float32; rounding, as products have other sizes.
"""

from typing import Any

import pytest
import torch

from moetune.adapt.attention import document_inputs
from moetune.adapt.documents import split_by_documents
from moetune.errors import UserError
from moetune.training.isolation import refuse_leaky_packing
from tests.thinned import thinned
from tests.toys import VOCAB, expert_model_types, toy_config, toy_model

TOLERANCE = 1e-5
SIZES = (27, 5, 32)
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "phi3")
SPARSE = {"index_topk": 4, "index_topk_blocks": 1, "indexer_budget": 4, "index_n_heads": 32}
"""With few heads many scores are exactly zero, and which of equal ones are chosen depends on the length of the row."""


def small(model_type: str) -> dict[str, Any]:
    """Windows, and choices among tokens, that are smaller than a document."""
    there = toy_config(model_type).to_dict()
    sizes = {"sliding_window": 8, "sliding_window_size": 8} | SPARSE
    return {name: size for name, size in sizes.items() if there.get(name) is not None}


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", thinned((*expert_model_types(), *DENSE), 8, ("gpt_oss",)))
def test_packed_documents_are_those_alone(model_type: str, attention: str) -> None:
    model = toy_model(model_type, **small(model_type))
    split_by_documents(model)
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:
        pytest.skip(f"transformers has no such attention for it: {error}")
    total = sum(SIZES)
    try:
        refuse_leaky_packing(model, 2, total)
    except UserError as refusal:
        refused = str(refusal)
    else:
        refused = None
    if refused is not None:
        assert "data.packing: false" in refused
        return
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(3, VOCAB, (1, size), generator=generator) for size in SIZES]
    positions = torch.cat([torch.arange(size) for size in SIZES])[None]
    with torch.no_grad():
        told = document_inputs(model)(SIZES)
        packed = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False, **told).logits
        for document, found in zip(documents, packed.split(SIZES, 1), strict=True):
            alone = model(input_ids=document, use_cache=False).logits
            assert (found - alone).norm() <= TOLERANCE * alone.norm()
