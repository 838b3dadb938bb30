#!/usr/bin/env bash
# torchao 0.18.0 with transformers 5.24.0 and peft 0.21.2: layers of Int8DynamicActivationInt8WeightConfig, of which
# transformers says that they can be trained and for which PEFT has a layer of its own, hand no gradient to their
# inputs. LoRA on query, key, value, gate and up gets zeros in the first step, later what comes through other factors,
# and the loss stays high. No warning. Right for Int8WeightOnlyConfig, whose codes are the same. Hurts whoever trains
# adapters on such a model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 \
    torchao==0.18.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/base" <<'EOF' 2> >(grep -v "Failed to load\|Enum" >&2)
import sys
import warnings
from importlib.metadata import version

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, TorchAoConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
PARTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 20
torch.manual_seed(0)
Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, initializer_range=0.1,
    )
).save_pretrained(sys.argv[1])
ids = torch.randint(0, 64, (4, 32))


def read(kind):
    settings = {"quantization_config": TorchAoConfig(kind())} if kind else {}
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **settings)


print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "torchao")))
print(f"expected: a gradient for each of {PARTS} and about the same losses, or a model that says it is not trainable")
reached, last, trainable, said = {}, {}, {}, []
for kind in (None, Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        model = read(kind)
        trainable[kind] = kind is None or model.hf_quantizer.is_trainable
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=PARTS))
        factors = {name: one for name, one in model.named_parameters() if one.requires_grad}
        optimizer = torch.optim.AdamW(factors.values(), lr=1e-2, weight_decay=0)
        losses = []
        for step in range(STEPS):
            loss = model(ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                begun = [name for name, one in factors.items() if ".lora_B." in name and one.grad.abs().max() > 0]
                reached[kind] = [part for part in PARTS if any(f".{part}." in name for name in begun)]
            optimizer.step()
            optimizer.zero_grad()
        last[kind] = losses[-1]
    said += [str(one.message) for one in raised if " gradient" in str(one.message) or "trainable" in str(one.message)]
    name = kind.__name__ if kind else "float32"
    print(f"{name}, is_trainable {trainable[kind]}: first gradients {reached[kind]}")
    print(f"  loss {losses[0]:.3f}, in step {STEPS} {last[kind]:.3f}")
print("warnings about it:", said)
dynamic = Int8DynamicActivationInt8WeightConfig
lost = reached.pop(dynamic) == ["o_proj", "down_proj"]
behind = last.pop(dynamic) - max(last.values()) > 0.5
right = all(parts == PARTS for parts in reached.values())
sys.exit(0 if lost and behind and right and all(trainable.values()) and not said else "changed since this was found")
EOF
