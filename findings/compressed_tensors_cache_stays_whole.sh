#!/usr/bin/env bash
# compressed-tensors 0.20.1 with transformers 5.24.0: `kv_cache_scheme` quantizes nothing. An attention layer is known by an
# argument `past_key_values` of its forward pass, which transformers now calls `cache`; there is no scale and no warning,
# keys and values stay as they are. Right with transformers 5.23.0. Hurts whoever calibrates or evaluates a checkpoint
# with a quantized cache (llm-compressor, lm-eval): what is measured is not what a server computes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/quantize.py" <<'EOF'
import sys
from importlib.metadata import version

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "initializer_range": 0.3}
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "compressed-tensors")))
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
ids = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    plain = model(input_ids=ids, use_cache=True).logits
    scheme = QuantizationArgs(num_bits=4, type="int", strategy="tensor", symmetric=True, dynamic=False)
    settings = QuantizationConfig(config_groups={}, kv_cache_scheme=scheme, quantization_status="frozen")
    apply_quantization_config(model, settings)
    scales = [parameter for name, parameter in model.named_parameters() if name.endswith(("k_scale", "v_scale"))]
    for scale in scales:
        scale.fill_(1.0)
    quantized = model(input_ids=ids, use_cache=True).logits
print(f"expected: 4 scales of 2 layers, other logits; seen: {len(scales)} scales, logits differ by {(quantized - plain).abs().max():.3f}")
seen = [len(scales), not torch.equal(quantized, plain)]
sys.exit(0 if seen == ([4, True] if sys.argv[1] == "right" else [0, False]) else "changed since this was found")
EOF
run() {  # version of transformers; whether keys and values are quantized
  python3.11 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet torch==2.13.0 "transformers==$1" compressed-tensors==0.20.1 numpy==2.3.5
  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$folder/$1/bin/python" "$folder/quantize.py" "$2" 2>"$folder/log" ||
    { tail -n 15 "$folder/log" >&2; exit 1; }
}
run 5.23.0 right
run 5.24.0 wrong
