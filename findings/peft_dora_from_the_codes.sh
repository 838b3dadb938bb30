#!/usr/bin/env bash
# peft 0.21.2 with compressed-tensors 0.20.1 and transformers 5.24.0: DoRA on a W8A8 model takes the norms of the int8
# codes for magnitudes, 127 / (largest weight of the row) times too large, so the adapted model is another from the
# first step on. PEFT knows no weights of compressed-tensors, which are codes until the first forward pass. No warning.
# Right after one forward pass, and with dequantize=True. Hurts whoever trains DoRA on such a model: it starts
# from another, and the magnitudes that are saved fit no base in 16 bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 \
    compressed-tensors==0.20.1 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF' 2> >(grep -v "%|" >&2)
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3Config, Qwen3ForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
path = Path(sys.argv[1]) / "w8a8"
torch.manual_seed(0)
Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, initializer_range=0.1,
    )
).save_pretrained(path)
tensors, norms = {}, {}
for name, weight in load_file(path / "model.safetensors").items():
    tensors[name] = weight
    if name.endswith("proj.weight"):
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[name.replace(".weight", ".weight_scale")] = scale
        norms[name.removesuffix(".weight")] = (tensors[name] * scale).norm(dim=1)
save_file(tensors, path / "model.safetensors", {"format": "pt"})
eight = {"num_bits": 8, "type": "int", "symmetric": True}
settings = json.loads((path / "config.json").read_text())
settings["quantization_config"] = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": eight | {"strategy": "channel", "dynamic": False},
            "input_activations": eight | {"strategy": "token", "dynamic": True},
        }
    },
}
(path / "config.json").write_text(json.dumps(settings))

ids = torch.randint(0, 64, (4, 32))
CASES = ("as it is read", "after a forward pass", "dequantize=True")
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "compressed-tensors")))
print("expected: DoRA's magnitudes are the norms of the weights, and the untrained adapter changes nothing")
times, moved, said = [], [], []
for case in CASES:
    more = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if case == CASES[2] else {}
    with torch.no_grad(), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more).eval()(ids).logits
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more).eval()
        if case == CASES[1]:
            model(ids)
        kind = model.model.layers[0].self_attn.o_proj.weight.dtype
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["v_proj", "o_proj"], use_dora=True)).eval()
        found = {name.removeprefix("base_model.model."): module.lora_magnitude_vector["default"].weight
                 for name, module in model.named_modules() if hasattr(module, "lora_magnitude_vector")}
        adapted = model(ids).logits
    times.append(max((found[name] / norms[name]).mean().item() for name in found))
    moved.append(((adapted - base).norm() / base.norm()).item())
    said += [str(one.message) for one in raised if "DoRA" in str(one.message) or "int8" in str(one.message)]
    print(f"{case}, weights {kind}: magnitudes {times[-1]:.1f} times the norms; logits moved by {moved[-1]:.3f} of theirs")
print("warnings about it:", said)
right = all(abs(one - 1) < 1e-3 for one in times[1:]) and all(one < 1e-3 for one in moved[1:])
sys.exit(0 if times[0] > 100 and moved[0] > 0.1 and right and not said else "changed since this was found")
EOF
