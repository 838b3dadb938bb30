#!/usr/bin/env bash
# transformers 5.23.0: a gpt-oss checkpoint loaded with Mxfp4Config(dequantize=True) and saved again does not load: the
# experts are written in full precision but under their packed names (`…_blocks`, no scales, no quantization_config), and
# from_pretrained makes new random experts. No error; a list of missing and unexpected keys in the log. Hurts whoever
# dequantizes gpt-oss to merge an adapter, and publishes the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
published, saved = Path(sys.argv[1], "published"), Path(sys.argv[1], "saved")
published.mkdir()
config = GptOssConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"],
)
torch.manual_seed(0)
tensors = {}
for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items():
    if name.endswith(("gate_up_proj", "down_proj")):  # as openai/gpt-oss-20b has them: two values a byte, blocks of 32
        experts, inputs, outputs = weight.shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 121, dtype=torch.uint8)
    else:
        tensors[name] = weight.clone()
save_file(tensors, published / "model.safetensors", {"format": "pt"})
config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
config.save_pretrained(published)
ids = torch.arange(8)[None]


def logits(folder: Path, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)(ids).logits


dequantize = {"quantization_config": Mxfp4Config(dequantize=True)}
right = logits(published, **dequantize)
AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32, **dequantize).save_pretrained(saved)
names = sorted(name.rpartition(".")[2] for name in load_file(saved / "model.safetensors") if ".experts." in name)
once, twice = logits(saved), logits(saved)
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: the saved checkpoint gives the logits of the model that was saved")
print("names of the experts' tensors in it:", *names)
print(f"logits differ by {(once - right).abs().max():.2f}, and between two loads by {(once - twice).abs().max():.2f}")
is_as_found = "down_proj_blocks" in names and not torch.allclose(once, right) and not torch.equal(once, twice)
sys.exit(0 if is_as_found else "changed since this was found")
EOF
