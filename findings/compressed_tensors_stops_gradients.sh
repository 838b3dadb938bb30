#!/usr/bin/env bash
# compressed-tensors 0.20.1 with transformers 5.24.0 and peft 0.21.2: a checkpoint that quantizes activations (W8A8,
# FP8-dynamic) is read as a model that says it can be trained. Its layers round their inputs where no gradient is
# recorded, so none goes back through them but by LoRA's own factors: query, key, value, gate and up get zeros at first,
# then gradients of another function, and the loss stays high. No warning. Right for weights alone, and with
# dequantize=True. Hurts whoever trains adapters on such a model.
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
PARTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
folder = Path(sys.argv[1])
torch.manual_seed(0)
Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, initializer_range=0.1,
    )
).save_pretrained(folder / "base")
ids = torch.randint(0, 64, (4, 32))


def write(kind, rounds_inputs):
    """Write the base with weights in 8 bits, one scale a row, as its own folder."""
    path = folder / f"{kind}-{rounds_inputs}"
    path.mkdir()
    tensors = {}
    for name, weight in load_file(folder / "base/model.safetensors").items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / (127 if kind == "int" else 448)
            codes = weight / scale
            tensors[name] = codes.round().to(torch.int8) if kind == "int" else codes.to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale")] = scale
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "base/config.json").read_text())
    eight = {"num_bits": 8, "type": kind, "symmetric": True}
    settings["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": eight | {"strategy": "channel", "dynamic": False},
                "input_activations": eight | {"strategy": "token", "dynamic": True} if rounds_inputs else None,
            }
        },
    }
    (path / "config.json").write_text(json.dumps(settings))
    return path


def train(path, **more):
    """Return which projections have a gradient in the first step, and the losses of the first step and the last."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more)
    assert more or model.hf_quantizer.is_trainable
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=PARTS))
    factors = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = torch.optim.AdamW(factors.values(), lr=1e-2, weight_decay=0)
    losses, reached = [], set()
    for step in range(20):
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            reached = {name.split(".lora_B")[0].rpartition(".")[2] for name, one in factors.items()
                       if ".lora_B." in name and one.grad.abs().max() > 0}
        optimizer.step()
        optimizer.zero_grad()
    return [part for part in PARTS if part in reached], losses[0], losses[-1]


print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "compressed-tensors")))
print(f"expected: a gradient for each of {PARTS}, and about the same losses, or an error")
dense = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
seen = []
with warnings.catch_warnings(record=True) as raised:
    warnings.simplefilter("always")
    for case, path, more in (
        ("int8, inputs rounded (W8A8)", whole := write("int", True), {}),
        ("FP8, inputs rounded (FP8-dynamic)", write("float", True), {}),
        ("FP8, weights alone", write("float", False), {}),
        ("W8A8, dequantize=True", whole, dense),
    ):
        reached, first, last = train(path, **more)
        seen.append((reached, last))
        print(f"{case}: first gradients {reached}; loss {first:.3f}, in step 20 {last:.3f}")
said = [str(one.message) for one in raised if "gradient" in str(one.message) and "deprecated" not in str(one.message)]
print("warnings about gradients:", said)
lost = all(reached == ["o_proj", "down_proj"] for reached, _ in seen[:2])
right = all(reached == PARTS for reached, _ in seen[2:])
behind = min(last for _, last in seen[:2]) - max(last for _, last in seen[2:]) > 0.5
sys.exit(0 if lost and right and behind and not said else "changed since this was found")
EOF
