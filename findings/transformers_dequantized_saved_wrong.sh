#!/usr/bin/env bash
# transformers 5.23.0: a model loaded with dequantize=True and saved by save_pretrained() does not come back. Of gpt-oss
# (MXFP4) the experts are written in full precision under their packed names (`…_blocks`, no scales), and from_pretrained
# makes new random ones. Of an FP8 model every matrix, embeddings too, is written in FP8 with scales, and read without
# them, because config.json no longer says FP8. No error either way, a list of keys in the log (an FP8 model with experts
# raises ValueError as it is saved). Hurts whoever dequantizes to merge an adapter, and publishes the result.
# save_pretrained(…, save_original_format=False) is right for all.
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
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, LlamaConfig, Mxfp4Config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
IDS = torch.arange(8)[None]
SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}


def packed_mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight.clone()}
    experts, inputs, outputs = weight.shape  # as openai/gpt-oss-20b has them: two values a byte, blocks of 32
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(blocks.shape[:3], 121, dtype=torch.uint8)}


def packed_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: weight.clone()}
    return {name: (weight * 4096).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1, 1), 1 / 4096)}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: the saved checkpoint gives the logits of the model that was saved")
as_found = True
for config, packed, about, dequantize in (
    (GptOssConfig(**SIZES, num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
     packed_mxfp4, {"quant_method": "mxfp4"}, Mxfp4Config(dequantize=True)),
    (LlamaConfig(**SIZES),
     packed_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, FineGrainedFP8Config(dequantize=True)),
):  # fmt: skip
    published, tensors = Path(sys.argv[1], config.model_type), {}
    torch.manual_seed(0)
    for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items():
        tensors |= packed(name, weight)
    published.mkdir(parents=True)
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    config.quantization_config = about
    config.save_pretrained(published)
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32, quantization_config=dequantize)
    right = logits(model)
    for options in ({}, {"save_original_format": False}):
        saved = Path(sys.argv[1], f"{config.model_type}-saved-{len(options)}")
        model.save_pretrained(saved, **options)
        dtypes = {name: weight.dtype for name, weight in load_file(saved / "model.safetensors").items() if "down" in name}
        off = (logits(AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)) - right).abs().max().item()
        print(f"{config.model_type}, saved with {options}: logits differ by {off:.3g}; {dtypes}")
        as_found = as_found and (off < 1e-4) == bool(options)
sys.exit(0 if as_found else "changed since this was found")
EOF
