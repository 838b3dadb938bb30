"""What is changed of transformers, and used of it without being public, is still necessary and possible."""

import inspect

import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from moetune.compat.transformers import (
    activation_of,
    checkpoint_layers_by,
    draw,
    mark_initialized,
    never_ask_for_the_length,
)
from moetune.models.structure import read_structure
from tests.toys import toy_model


def test_layers_checkpoint_by_another_function() -> None:
    assert "checkpoint" not in inspect.signature(PreTrainedModel.activation_checkpointing_enable).parameters
    model = toy_model("mixtral")
    model.activation_checkpointing_enable({"use_reentrant": False})
    called = []

    def checkpoint(function, *args):
        called.append(function)
        return function(*args)

    checkpoint_layers_by(model, checkpoint)
    model.train()(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)
    assert len(called) == model.config.num_hidden_layers


def test_rules_draw_what_is_not_marked() -> None:
    model = toy_model("mixtral")
    drawn, kept = (model.get_submodule(f"model.layers.{layer}.self_attn.q_proj") for layer in (0, 1))
    for linear in (drawn, kept):
        linear.weight.data.fill_(7.0)
    mark_initialized(kept.weight)
    for linear in (drawn, kept):
        draw(model, linear)
    assert not (drawn.weight == 7.0).any()
    assert (kept.weight == 7.0).all()


def test_an_activation_is_what_experts_compute_between_their_products() -> None:
    model = toy_model("mixtral")
    experts = model.get_submodule(read_structure(model).moe_layers[0].experts)
    rows = torch.randn(3, 2 * experts.intermediate_dim)
    gate, up = rows.chunk(2, dim=-1)
    assert torch.equal(activation_of(experts, has_gate=True)(rows), torch.nn.functional.silu(gate) * up)


def test_a_rotary_embedding_that_asks_for_the_length_does_not() -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, rope_parameters=parameters, max_position_embeddings=4)
    rotary, x, positions = LlamaRotaryEmbedding(config), torch.ones(1, 8, 16), torch.arange(8)[None]
    never_ask_for_the_length(rotary)
    before = rotary.inv_freq
    rotary(x, positions)  # beyond the length that it was made for
    assert rotary.inv_freq is before
    assert config.rope_parameters["rope_type"] == "dynamic"
