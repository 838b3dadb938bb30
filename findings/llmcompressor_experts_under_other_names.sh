#!/usr/bin/env bash
# llmcompressor 0.14.0.1: to quantize fused experts it makes each a module with gate_proj, up_proj and down_proj, and
# saves them under these names. Qwen3-MoE and OLMoE have such names in their files; Mixtral (w1, w3, w2), gpt-oss,
# Granite and others have not: the checkpoint is written without a word, and transformers finds the experts missing and
# starts them at random (its load report says so, no error). Without quantization, too. Hurts whoever spent hours of
# calibration on one of these types.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.17.0 llmcompressor==0.14.0.1 numpy==2.4.6
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import importlib.metadata
import sys

import torch
import transformers
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

transformers.logging.disable_progress_bar()
logger.remove()
warned = []
logger.add(lambda line: warned.append(line), level="WARNING")
print("torch", torch.__version__, "transformers", transformers.__version__)
print("llmcompressor", importlib.metadata.version("llmcompressor"))
print("expected: saved and loaded, the model computes what it did quantized")
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": 1}
narrow = {"num_hidden_layers": 1, "intermediate_size": 32, "num_experts_per_tok": 2, "pad_token_id": 0}
rows = torch.arange(2, 34).view(2, 16)
seen = {}
for config in (
    Qwen3MoeConfig(**sizes, **narrow, moe_intermediate_size=32, num_experts=4, head_dim=16),
    OlmoeConfig(**sizes, **narrow, num_experts=4),
    MixtralConfig(**sizes, **narrow, num_local_experts=4),
    GptOssConfig(**sizes, **narrow, num_local_experts=4, head_dim=16),
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)  # so that experts matter
    model.save_pretrained(f"base-{config.model_type}")
    model = AutoModelForCausalLM.from_pretrained(f"base-{config.model_type}")
    linearize_moe(model)
    ignore = ["lm_head", "re:.*gate$", "re:.*router$"]
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=ignore))
    quantized = model(rows).logits
    model.save_pretrained(config.model_type, save_compressed=True)
    names = [name for name in load_file(f"{config.model_type}/model.safetensors") if "experts.0" in name]
    loaded, report = AutoModelForCausalLM.from_pretrained(config.model_type, output_loading_info=True)
    off = ((loaded(rows).logits - quantized).norm() / quantized.norm()).item()
    missing = len(report["missing_keys"])
    seen[config.model_type] = (off, missing)
    print(f"{config.model_type}: saved {sorted(names)[0]}, logits {off:.1%} off, {missing} tensors missing")
print("warnings of llmcompressor about names:", [line for line in warned if "name" in line or "key" in line])
right = [seen[name][0] < 0.1 and seen[name][1] == 0 for name in ("qwen3_moe", "olmoe")]
wrong = [seen[name][0] > 0.2 and seen[name][1] > 0 for name in ("mixtral", "gpt_oss")]
sys.exit(0 if all(right) and all(wrong) else "changed since this was found")
EOF
