#!/usr/bin/env bash
# nemo-automodel 0.7.0: with `attn: sdpa`, its default where Transformer Engine is not installed, DeepSeek-V3.2 is not
# causal: the mask of the tokens that the indexer chooses takes the place of the causal one, so each token sees those
# that it is trained to predict. A mask of padding changes nothing. No warning. Right for DeepSeek-V3, by the same call.
# Hurts whoever fine-tunes V3.2 so: the loss falls, and what is trained reads its targets.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 accelerate==1.15.0 torchao==0.18.0 \
    tiktoken==0.14.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { cat errors.txt; exit 1; }
import sys
from importlib.metadata import version

import torch
import transformers
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v3.model import DeepseekV3ForCausalLM
from nemo_automodel.components.models.deepseek_v32.model import DeepseekV32ForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV32Config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=64, num_hidden_layers=2,
    max_position_embeddings=128, moe_intermediate_size=32, intermediate_size=48, n_routed_experts=8,
    num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
)
KINDS = {
    "DeepSeek-V3.2": (DeepseekV32ForCausalLM, DeepseekV32Config(
        **SIZES, index_n_heads=8, index_head_dim=32, index_topk=16
    )),
    "DeepSeek-V3": (DeepseekV3ForCausalLM, DeepseekV3Config(**SIZES)),
}
backend = BackendConfig()  # as it is without Transformer Engine
print("torch", torch.__version__, "transformers", transformers.__version__, "nemo-automodel", version("nemo-automodel"))
print(f"expected: logits do not depend on later tokens (attn: {backend.attn})")
seen = {}
for kind, (its_class, config) in KINDS.items():
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).eval()
    for parameter in base.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    base.save_pretrained(kind)
    settings = type(config).from_pretrained(kind)
    settings.torch_dtype = torch.float32
    model = its_class(settings, backend=backend).float().eval()
    model.load_state_dict(model.state_dict_adapter.from_hf(load_file(f"{kind}/model.safetensors")), strict=False)
    row = torch.randint(2, 60, (1, 40))
    other = row.clone()
    other[0, -1] = (other[0, -1] + 7) % 60
    mask = torch.ones_like(row, dtype=torch.bool)
    with torch.no_grad():
        ahead = {
            how: (network(row, **options).logits - network(other, **options).logits)[0, :-1].abs().max().item()
            for how, network, options in (
                ("nemo-automodel", model, {}),
                ("with a mask of padding", model, {"attention_mask": mask}),
                ("transformers", base, {}),
            )
        }
    print(f"{kind}: logits before the last token change with it by "
          + ", ".join(f"{value:.1e} ({how})" for how, value in ahead.items()))
    seen[kind] = [value > 1e-2 for value in ahead.values()]
as_found = {"DeepSeek-V3.2": [True, True, False], "DeepSeek-V3": [False, False, False]}
sys.exit(0 if backend.attn == "sdpa" and seen == as_found else "changed since this was found")
PY
