#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.13.0: under bf16 autocast (`bf16=True` of Trainer, `mixed_precision` of Accelerate) a
# model with float32 weights computes its experts in float32, forward and backward: autocast does not know `grouped_mm`,
# the default, and transformers casts the experts' inputs back to the weights' dtype. So most of a mixture's operations
# run at float32's speed, and what they keep for the backward pass has twice the bytes. Loss and log show nothing. Right
# with experts_implementation "eager" and "batched_mm". Hurts whoever keeps float32 weights to train in bf16.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys
from collections import Counter

import accelerate
import torch
import transformers
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

EXPERTS, TOP_K, WIDTH, INNER = 4, 2, 64, 48


class Products(TorchDispatchMode):
    """Multiplications of matrices by the dtype in which they run, those with an expert's 48 inner features apart."""

    def __init__(self):
        super().__init__()
        self.seen = {"experts": Counter(), "others": Counter()}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten._grouped_mm):
            of_expert = any({INNER, 2 * INNER} & {*tensor.shape} for tensor in (args[0], args[1], result))
            self.seen["experts" if of_expert else "others"][str(args[0].dtype).removeprefix("torch.")] += 1
        return result


print("torch", torch.__version__, "transformers", transformers.__version__, "accelerate", accelerate.__version__)
print("expected: matrices are multiplied in bfloat16, those of experts too")
seen = {}
for implementation in (None, "batched_mm", "eager"):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP_K, vocab_size=64,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )
    chosen = {"experts_implementation": implementation} if implementation else {}
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(AutoModelForCausalLM.from_config(config, **chosen))
    rows = torch.arange(2, 34).view(2, 16)
    with Products() as products:
        model(input_ids=rows, labels=rows).loss.backward()
    seen[implementation] = {part: {*dtypes} for part, dtypes in products.seen.items()}
    name = implementation or f"default ({model.config._experts_implementation})"
    print(f"{name}: " + ", ".join(f"{part} {dict(dtypes)}" for part, dtypes in products.seen.items()))
right = {"experts": {"bfloat16"}, "others": {"bfloat16"}}
as_found = seen[None] == {**right, "experts": {"float32"}} and seen["batched_mm"] == seen["eager"] == right
sys.exit(0 if as_found else "changed since this was found")
EOF
