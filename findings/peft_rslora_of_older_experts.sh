#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: of an adapter with an entry for each expert, as PEFT saved it on transformers 4,
# gate and up become one adapter of twice the rank, with twice the alpha, which keeps alpha / rank. With use_rslora the
# scale is alpha / sqrt(rank): what was trained comes back 1.41 times as strong, in gate and up alone, unsaid. Right
# without use_rslora, and for down and attention. Hurts whoever serves such an adapter, or trains it further.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from peft import PeftModel
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
RANK, ALPHA, EXPERTS, WIDTH, INNER = 4, 8, 4, 32, 64
CONFIG = MixtralConfig(
    vocab_size=64, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, num_local_experts=EXPERTS,
)
OLD = "model.layers.0.block_sparse_moe.experts"
SIZES = {"model.layers.0.self_attn.q_proj": (WIDTH, WIDTH)}
for expert in range(EXPERTS):
    for part in ("w1", "w2", "w3"):
        SIZES[f"{OLD}.{expert}.{part}"] = (WIDTH, INNER) if part != "w2" else (INNER, WIDTH)
NEW = {"self_attn.q_proj.weight": None, "mlp.experts.gate_up_proj": ("w1", "w3"), "mlp.experts.down_proj": ("w2",)}

torch.manual_seed(0)
base = MixtralForCausalLM(CONFIG)
base.save_pretrained(path := Path(sys.argv[1]) / "base")
factors = {
    name: (torch.randn(RANK, inputs), torch.randn(outputs, RANK) * 0.05) for name, (inputs, outputs) in SIZES.items()
}
products = {name: B @ A for name, (A, B) in factors.items()}
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print(f"expected: B A is added times alpha / rank = {ALPHA / RANK:.2f}, "
      f"with use_rslora times alpha / sqrt(rank) = {ALPHA / RANK**0.5:.2f}")
seen = {}
for rslora in (False, True):
    adapter = Path(sys.argv[1]) / f"adapter-{rslora}"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "use_rslora": rslora}
    settings["target_modules"] = ["q_proj", "w1", "w2", "w3"]
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    save_file(
        {
            f"base_model.model.{name}.lora_{which}.weight": factor
            for name, pair in factors.items()
            for which, factor in zip("AB", pair, strict=True)
        },
        adapter / "adapter_model.safetensors",
    )
    merged = PeftModel.from_pretrained(MixtralForCausalLM.from_pretrained(path), adapter).merge_and_unload()
    for name, parts in NEW.items():
        weights = [model.get_parameter(f"model.layers.0.{name}").detach() for model in (merged, base)]
        product = products["model.layers.0.self_attn.q_proj"] if parts is None else torch.stack(
            [torch.cat([products[f"{OLD}.{expert}.{part}"] for part in parts]) for expert in range(EXPERTS)]
        )
        added = weights[0] - weights[1]
        scale = (added * product).sum() / (product * product).sum()
        if not torch.allclose(added, scale * product, atol=1e-5):
            sys.exit("changed since this was found")
        seen[rslora, name] = round(scale.item(), 2)
        print(f"use_rslora={rslora}, {name}: added times {scale:.2f}")
wanted = {(rslora, name): 4.0 if rslora else 2.0 for rslora in (False, True) for name in NEW}
sys.exit(0 if seen == wanted | {(True, "mlp.experts.gate_up_proj"): 5.66} else "changed since this was found")
EOF
