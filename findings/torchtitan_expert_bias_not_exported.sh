#!/usr/bin/env bash
# torchtitan 0.3.0: it trains Qwen3-MoE (gpt-oss too) with a bias for each expert that evens their load, added to
# the scores before it chooses: `load_balance_coeff` is 1e-3 unless the layers' settings say None. The architecture
# has no such bias: `to_hf`, by which checkpoints for transformers and vLLM are written, leaves it out without a word,
# so the exported model sends tokens to other experts than the one that was trained. Right with None, and for
# DeepSeek-V3, which has a place for it. Hurts whoever fine-tunes Qwen3-MoE there and uses it elsewhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.3.5 \
  tyro==1.0.17 einops==0.8.1 datasets==4.7.0 pillow==12.0.0 triton==3.9.0
"$folder/venv/bin/pip" install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'EOF'
import importlib.metadata
import sys
from types import SimpleNamespace

import torch
import torchtitan.models.qwen3 as titan
import transformers
from safetensors.torch import save_file
from torchtitan.components.optimizer.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_flush_denormal(True)
VOCABULARY, WIDTH, EXPERTS, TOP_K, ROWS, LENGTH = 64, 64, 8, 2, 4, 32
ATTENTION = {"head_dim": 16}
config = Qwen3MoeConfig(
    vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    moe_intermediate_size=32, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **ATTENTION,
)
config.save_pretrained(".")
alone = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)  # no parallelism


def settings_of(coefficient):
    settings = titan.qwen3_configs["debugmodel_moe"]("flex", "standard")
    settings.vocab_size = settings.tok_embeddings.num_embeddings = settings.lm_head.out_features = VOCABULARY
    settings.dim = settings.tok_embeddings.embedding_dim = settings.lm_head.in_features = WIDTH
    settings.norm = titan._qwen3_norm(WIDTH)
    settings.layers = titan._build_qwen3_moe_layers(
        n_layers=2, dim=WIDTH, n_heads=4, n_kv_heads=2, moe_hidden_dim=32, num_experts=EXPERTS, top_k=TOP_K,
        attn_backend="flex", moe_comm_backend="standard", **ATTENTION,
        rope=titan.CosSinRoPE.Config(dim=16, max_seq_len=LENGTH, theta=1e6),
    )
    for layer in settings.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # runs on a CPU
        if coefficient != "as shipped":
            layer.moe.load_balance_coeff = coefficient
    return settings


print("torch", torch.__version__, "transformers", transformers.__version__)
print("torchtitan", importlib.metadata.version("torchtitan"))
print("expected: the exported model sends each token to the experts that it had in training, and gives the same logits")
seen = {}
for coefficient in ("as shipped", None):
    torch.manual_seed(0)
    settings = settings_of(coefficient)
    model = settings.build()
    model.init_states()
    with torch.no_grad():  # as in a trained model: a router that prefers some experts, and experts that matter
        for name, parameter in model.named_parameters():
            parameter.mul_(20 if "router" in name else 8 if "inner_experts" in name else 1)
    rows, positions = torch.randint(0, 6, (ROWS, LENGTH)), torch.arange(LENGTH).expand(ROWS, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    register_moe_load_balancing_hook(optimizer, [model], alone)
    for _ in range(60):
        logits = model(rows, positions=positions)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    exported = Qwen3StateDictAdapter(settings, None).to_hf(model.state_dict())
    save_file({name: value.contiguous() for name, value in exported.items()}, "model.safetensors", {"format": "pt"})
    stock, info = Qwen3MoeForCausalLM.from_pretrained(".", dtype=torch.float32, output_loading_info=True)
    chosen = {"trained": [], "exported": []}
    for layer in model.layers.values():
        layer.moe.router.register_forward_hook(lambda _, args, out: chosen["trained"].append(out[1].flatten(0, 1)))
    for layer in stock.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, out: chosen["exported"].append(out[2]))
    with torch.no_grad():
        off = (model.eval()(rows, positions=positions) - stock.eval()(rows).logits).abs().max().item()
    pairs = [(a.sort().values != b.sort().values).any(-1) for a, b in zip(*chosen.values(), strict=True)]
    other = torch.cat(pairs).float().mean().item()
    biases = [value.abs().max().item() for name, value in model.state_dict().items() if "expert_bias" in name]
    print(f"load_balance_coeff {coefficient}: largest bias {max(biases, default=0):.3f}, to_hf has it:", end=" ")
    print(any("bias" in name for name in exported), "missing when loaded:", sorted(info["missing_keys"]))
    print(f"  tokens with other experts in the exported model {other:.0%}, logits differ by {off:.1e}")
    seen[coefficient] = other
sys.exit(0 if seen["as shipped"] > 0.05 and seen[None] == 0 else "changed since this was found")
EOF
