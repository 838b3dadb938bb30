#!/usr/bin/env bash
# transformers 5.23.0: DeepSeek-V4 compresses padding on the left of a row like tokens, into keys that no mask leaves
# out: what it says to a prompt depends on how long the longest prompt of its batch is. No warning. Right without
# padding, with padding on the right, in layers with a sliding window alone, and in DeepSeek-V3.2. Hurts whoever
# generates, evaluates or does reinforcement learning in batches, where tokenizers pad on the left.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV32Config

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "n_shared_experts": 1, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 128,
    "max_position_embeddings": 256, "initializer_range": 0.3,
}
V4 = {"o_groups": 2, "o_lora_rank": 16, "sliding_window": 16, "num_key_value_heads": 1}
V4 |= {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}}
V32 = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1}
PADDING, NEW, PAD = 8, 6, 0
CASES = (  # the configuration, and whether padding on the left changes what is computed
    ("DeepSeek-V3.2", DeepseekV32Config(**SIZES | V32), False),
    ("DeepSeek-V4, windows alone", DeepseekV4Config(**SIZES | V4, layer_types=["sliding_attention"] * 2), False),
    *(
        (f"DeepSeek-V4, {kind}", DeepseekV4Config(**SIZES | V4, layer_types=[kind] * 2), True)
        for kind in ("heavily_compressed_attention", "compressed_sparse_attention")
    ),
)
prompt = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(0))
padding, token = torch.full((1, PADDING), PAD), torch.ones_like(prompt)
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: padding that the attention mask leaves out changes nothing")
as_found = True
for name, config, wrong in CASES:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    left = {"input_ids": torch.cat((padding, prompt), 1), "attention_mask": torch.cat((padding * 0, token), 1)}
    right = {"input_ids": torch.cat((prompt, padding), 1), "attention_mask": torch.cat((token, padding * 0), 1)}
    positions = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    greedy = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    with torch.no_grad():
        alone = model(prompt).logits
        beside = model(**left, position_ids=positions).logits[:, PADDING:]
        before = model(**right).logits[:, : prompt.shape[1]]
        written = model.generate(prompt, attention_mask=token, **greedy)[0, prompt.shape[1] :].tolist()
        written_beside = model.generate(**left, **greedy)[0, PADDING + prompt.shape[1] :].tolist()
    on_left, on_right = ((logits - alone).abs().max().item() for logits in (beside, before))
    print(f"{name}: {PADDING} of padding change logits by {on_left:.1e} on the left, {on_right:.1e} on the right; written "
          f"without {written}, with padding on the left {written_beside}")
    as_found &= (on_left > 0.1) is wrong and (written != written_beside) is wrong and on_right < 1e-3
sys.exit(0 if as_found else "changed since this was found")
EOF
