#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: of an adapter that PEFT trained on transformers 4 on gate_proj, up_proj and
# down_proj, what shared experts and dense layers learned is not read for DeepSeek-V3, GLM-4.5 and ERNIE 4.5, as these
# names are taken for the routed experts alone; for Qwen2-MoE and Phi-3.5-MoE, which its table of types lacks, what routed
# experts learned is not. Nothing says so. Right for Qwen3-MoE and Mixtral. Hurts whoever serves, merges or trains further
# an adapter from before: it computes something else than it did.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cat >"$folder/adapters.py" <<'EOF'
import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, Ernie4_5_MoeConfig, Glm4MoeConfig, MixtralConfig
from transformers import PhimoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

transformers.logging.set_verbosity_error()
SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=48, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False,
    num_experts=8, num_local_experts=8, num_experts_per_tok=2,
)
DEEP = dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
ERNIE = dict(moe_num_experts=8, moe_k=2, moe_layer_start_index=1)
KINDS = {  # the type's settings, the names of its projections, and whether its other layers or its experts are lost
    "DeepSeek-V3": (DeepseekV3Config(**SIZES, **DEEP, **LATENT), "gate_proj up_proj down_proj", "shared and dense"),
    "GLM-4.5": (Glm4MoeConfig(**SIZES, **DEEP), "gate_proj up_proj down_proj", "shared and dense"),
    "ERNIE 4.5": (Ernie4_5_MoeConfig(**SIZES, **ERNIE), "gate_proj up_proj down_proj", "shared and dense"),
    "Qwen2-MoE": (
        Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=32), "gate_proj up_proj down_proj", "routed experts"
    ),
    "Phi-3.5-MoE": (PhimoeConfig(**SIZES), "w1 w2 w3", "routed experts"),
    "Qwen3-MoE": (Qwen3MoeConfig(**SIZES), "gate_proj up_proj down_proj", "nothing"),
    "Mixtral": (MixtralConfig(**SIZES), "w1 w2 w3", "nothing"),
}
ROWS = torch.randint(2, 64, (4, 32), generator=torch.Generator().manual_seed(1))
before = torch.load("seen.pt") if sys.argv[1] == "open" else {}
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
as_found = True


@torch.no_grad()
def logits(model):
    return model.eval()(ROWS).logits


for kind, (config, names, lost) in KINDS.items():
    path, adapter = Path(kind), Path(kind) / "adapter"
    if sys.argv[1] == "train":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.12)
        model.save_pretrained(path)
        base = logits(model)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["o_proj", *names.split()])).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(8):
            model(ROWS, labels=ROWS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = logits(model)
        model.save_pretrained(adapter)
        for name, parameter in model.named_parameters():
            part = "attention" if ".self_attn." in name else "routed experts" if ".experts." in name else "shared and dense"
            if "lora_B" in name and part == lost:
                parameter.data.zero_()
        before[kind] = base, trained, logits(model)
        continue
    base, trained, without = before[kind]
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        model = AutoModelForCausalLM.from_pretrained(path)
        off_base = (logits(model) - base).abs().max().item()
        opened = logits(PeftModel.from_pretrained(model, adapter))
    said = {str(warning.message) for warning in raised if issubclass(warning.category, UserWarning)}
    said = {text for text in said if "_pattern keys" not in text}  # see peft_rank_pattern_not_ignored.sh
    off, off_without = ((opened - other).abs().max().item() for other in (trained, without))
    print(f"{kind}: logits of the base differ by {off_base:.1e}, with the adapter by {off:.1e}, from those of the adapter "
          f"without {lost} by {off_without:.1e} (training moved them by {(trained - base).abs().max():.1e}); said: {said}")
    as_found &= off_base < 1e-4 and off_without < 1e-4 and (off > 0.3) is (lost != "nothing") and not said
torch.save(before, "seen.pt")
sys.exit(0 if as_found else "changed since this was found")
EOF
cd "$folder"
for version in 4.57.6 5.24.0; do
    python3.11 -m venv "$version"
    "$version/bin/pip" install --quiet torch==2.13.0 "transformers==$version" peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
done
4.57.6/bin/python adapters.py train 2>errors.txt || { cat errors.txt; exit 1; }
echo "expected: what is opened computes what was trained"
5.24.0/bin/python adapters.py open 2>errors.txt || { tail -n 15 errors.txt; exit 1; }
