"""A vLLM plugin: experts with LoRA on a CPU, by loops in torch over experts and adapters in place of Triton's kernels.

vLLM's own emulation of experts in INT4 (`moe_backend="emulation"`), which dequantizes and calls Triton's kernels, is
allowed on a CPU too. Everything else (loading, packing, stacking, slots, mapping of tokens to adapters, scheduling, the
server) is vLLM's.
"""

import torch


def apply(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, expert_map, a1q_scale,
    apply_router_weight_on_input, **_,
):  # fmt: skip
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    assert expert_map is None
    assert a1q_scale is None
    assert not apply_router_weight_on_input
    ctx = self._lora_context
    n = hidden_states.shape[0]
    lora = torch.full((n,), -1) if ctx is None else ctx.punica_wrapper.token_lora_indices[:n]
    oai = activation == MoEActivation.SWIGLUOAI
    total = torch.zeros(n, w2.shape[1], dtype=torch.float32)
    for e in topk_ids.unique().tolist():
        rows, slot = (topk_ids == e).nonzero(as_tuple=True)
        x = hidden_states[rows]
        h = x @ w1[e].T
        if self.w1_bias is not None:
            h = h + self.w1_bias[e]
        ids = lora[rows]
        adapters = [i for i in ids.unique().tolist() if i >= 0]
        for i in adapters:
            s = (ids == i).nonzero(as_tuple=True)[0]
            parts = [
                (x[s] @ a[i, e].T) @ b[i, e].T
                for a, b in zip(ctx.w13_lora_a_stacked, ctx.w13_lora_b_stacked, strict=True)
            ]
            h[s] += torch.stack(parts, -1).flatten(1) if oai and len(parts) == 2 else torch.cat(parts, 1)
        if oai:
            gate, up = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            assert activation == MoEActivation.SILU, activation
            gate, up = h.chunk(2, 1)
            h = torch.nn.functional.silu(gate) * up
        y = h @ w2[e].T
        if self.w2_bias is not None:
            y = y + self.w2_bias[e]
        for i in adapters:
            s = (ids == i).nonzero(as_tuple=True)[0]
            y[s] += (h[s] @ ctx.w2_lora_a_stacked[0][i, e].T) @ ctx.w2_lora_b_stacked[0][i, e].T
        total.index_add_(0, rows, y.float() * topk_weights[rows, slot, None].float())
    output.copy_(total)


def register():
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    TritonExperts.apply = apply
    from vllm.model_executor.layers.fused_moe.experts.int4_emulation_moe import Int4EmulationTritonExperts

    Int4EmulationTritonExperts._supports_current_device = staticmethod(lambda: True)
