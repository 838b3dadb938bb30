#!/usr/bin/env bash
# transformers 5.23.0: Llama 4's block gives every token to every expert, with inputs multiplied by 0 where the token
# chose others, so the experts' operations and their activations grow with num_local_experts, although a token uses one.
# In Scout (16 experts) that is 16 times what num_experts_per_tok says, in Maverick (128) 128 times: 128 copies of the
# hidden states of a layer. The other mixtures of experts with as many experts take the same as with few.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: one expert per token takes the same with 4 experts and with 64, but for the router")
grown = {}
for kind, more in {"mixtral": {}, "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 64}}.items():
    done, saved = [], []
    for experts in (4, 64):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SIZES, **more, num_local_experts=experts)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        bytes_saved = 0

        def keep(tensor):
            global bytes_saved
            bytes_saved += tensor.nbytes * (not isinstance(tensor, torch.nn.Parameter))
            return tensor

        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            # one product a layer and expert, which the counter knows; its grouped product is another operator
            model.set_experts_implementation("eager") if kind == "mixtral" else None
            model(input_ids=torch.arange(3, 35)[None], use_cache=False)
        done.append(counter.get_total_flops())
        saved.append(bytes_saved)
    grown[kind] = round(done[1] / done[0], 1), round(saved[1] / saved[0], 1)
    print(f"{kind}: with 64 experts {grown[kind][0]} times the FLOPs of 4, {grown[kind][1]} times the bytes saved")
sys.exit(0 if grown["mixtral"][0] < 1.5 and grown["llama4_text"][0] > 8 else "changed since this was found")
EOF
