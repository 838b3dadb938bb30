#!/usr/bin/env bash
# nemo-automodel 0.7.0: after each step its recipes move the biases that choose the experts of DeepSeek-V3 by 0.001, in
# LoRA too, which freezes the base. The adapter that it saves has no biases: base and adapter send tokens to other
# experts than the model that was trained, the more so the longer it was. Nothing says so; a learning rate of 0 changes
# the model. Right for GLM-4.5, whose biases stay, and for Qwen3-MoE, which has none. Hurts whoever trains an adapter
# for DeepSeek-V3, V3.2 or what has their architecture, as Kimi K2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 peft==0.21.2 accelerate==1.15.0 \
    torchao==0.18.0 tiktoken==0.14.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { cat errors.txt; exit 1; }
import sys
from importlib.metadata import version

import torch
import transformers

torch.cuda.current_device = lambda: 0  # GLM's constructor asks for it; all is computed on the CPU
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v3.model import DeepseekV3ForCausalLM
from nemo_automodel.components.models.glm4_moe.model import Glm4MoeForCausalLM
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
BACKEND = BackendConfig(attn="sdpa", linear="torch", experts="torch", dispatcher="torch", rope_fusion=False)
SIZES = dict(
    hidden_size=64, num_attention_heads=4, vocab_size=64, num_hidden_layers=3, max_position_embeddings=128,
    moe_intermediate_size=32, intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
    first_k_dense_replace=1,
)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
KINDS = {
    "DeepSeek-V3": (DeepseekV3ForCausalLM, DeepseekV3Config(**SIZES, **LATENT)),
    "GLM-4.5": (Glm4MoeForCausalLM, Glm4MoeConfig(**SIZES, head_dim=16, num_key_value_heads=4)),
}
STEPS = 30
print("torch", torch.__version__, "transformers", transformers.__version__, "nemo-automodel", version("nemo-automodel"))
print("expected: base and adapter are the model that was trained, which is the base where the learning rate is 0")
seen = {}
for kind, (its_class, config) in KINDS.items():
    for rate in (0.0, 1e-2):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(config)
        for parameter in base.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        base.save_pretrained(kind)
        settings = type(config).from_pretrained(kind)
        settings.torch_dtype = torch.float32
        model = its_class(settings, backend=BACKEND)
        for module in model.modules():
            if isinstance(getattr(module, "device", None), torch.device):
                module.device = torch.device("cpu")
        model.load_state_dict(model.state_dict_adapter.from_hf(load_file(f"{kind}/model.safetensors")), strict=False)
        lora = PeftConfig(target_modules=["*.o_proj"], dim=4, alpha=8)
        apply_lora_to_linear_modules(model, lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        rows = torch.randint(2, 60, (4, 64))
        model.train()
        for _ in range(STEPS):  # what the recipe does in a step, recipes/llm/train_ft.py
            logits = model(rows).logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if hasattr(model, "update_moe_gate_bias"):
                model.update_moe_gate_bias()
        model.eval()
        adapter = f"{kind}-{rate}"
        checkpoint = CheckpointingConfig(
            checkpoint_dir=adapter, model_cache_dir=kind, model_repo_id=kind, save_consolidated=False, is_peft=True
        )
        Checkpointer(checkpoint, 0, 0, 0).save_model(model, adapter, peft_config=lora)
        opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(kind), f"{adapter}/model").eval()
        saved = load_file(f"{adapter}/model/adapter_model.safetensors")
        biases = [bias for name, bias in model.named_buffers() if "correction_bias" in name]
        with torch.no_grad():
            trained, loaded = model(rows).logits, opened(rows).logits
            moved = max(bias.abs().max().item() for bias in biases)
            for bias in biases:
                bias.zero_()
            as_saved = model(rows).logits
        off = (trained - loaded).abs().max().item()
        back = (as_saved - loaded).abs().max().item()
        print(f"{kind}, rate {rate}: biases moved by {moved:.3f} in {STEPS} steps, in the adapter: "
              f"{any('bias' in name for name in saved)}; logits of base and adapter differ by {off:.1e} "
              f"({back:.1e} once the biases are put back)")
        seen[kind, rate] = round(moved, 3) == 0.03 and off > 0.5, back < 1e-4
wanted = {(kind, rate): (kind == "DeepSeek-V3", True) for kind in KINDS for rate in (0.0, 1e-2)}
sys.exit(0 if seen == wanted else "changed since this was found")
PY
