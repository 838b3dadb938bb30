#!/usr/bin/env bash
# transformers 5.23.0: router_jitter_noise, "noise to add to the router logits", multiplies in place what the whole
# layer of experts was given: experts compute with the noise too, and so does the residual of MiniMax. So in Mixtral,
# MiniMax and MiniMax-M2, and, at its default of 0.01, in Switch Transformers in float32. Right in Switch Transformers
# in bf16, whose router works on a copy in float32. Hurts whoever adds noise to routers: all of training has it.
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
from transformers import MiniMaxConfig, MiniMaxM2Config, MixtralConfig, SwitchTransformersConfig
from transformers.models.minimax.modeling_minimax import MiniMaxSparseMoeBlock
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
SWITCH = {"d_model": 32, "d_ff": 48, "num_experts": 4, "dropout_rate": 0.0}
NOISE = 0.1
CASES = (  # the layer, its configuration, the type of numbers, whether the noise was seen to reach experts
    (MixtralSparseMoeBlock, MixtralConfig(**SIZES, router_jitter_noise=NOISE), torch.float32, True),
    (MixtralSparseMoeBlock, MixtralConfig(**SIZES, router_jitter_noise=NOISE), torch.bfloat16, True),
    (MiniMaxSparseMoeBlock, MiniMaxConfig(**SIZES, router_jitter_noise=NOISE), torch.float32, True),
    (MiniMaxM2SparseMoeBlock, MiniMaxM2Config(**SIZES, router_jitter_noise=NOISE), torch.float32, True),
    (SwitchTransformersSparseMLP, SwitchTransformersConfig(**SWITCH), torch.float32, True),
    (SwitchTransformersSparseMLP, SwitchTransformersConfig(**SWITCH), torch.bfloat16, False),
)
transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
documented = next(line.strip() for line in MixtralConfig.__doc__.splitlines() if "noise to add" in line)
print(f"the documentation: {documented}")
print("expected: in training, experts are given what their layer is given, and routers something else")
as_found = "router logits" in documented
for layer, config, dtype, reached in CASES:
    torch.manual_seed(0)
    block = layer(config).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    given, seen = torch.randn(2, 8, 32).to(dtype), []
    block.experts.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone().view_as(given)))
    for training in (False, True):
        passed = given.clone()
        block.train(training)(passed)
    evaluated, trained = ((of_experts - given).abs().max().item() for of_experts in seen)
    changed = not torch.equal(passed, given)
    print(f"{layer.__name__}, {dtype}, noise {config.router_jitter_noise}: experts' input differs from the layer's by "
          f"{evaluated:.3f} in evaluation, {trained:.3f} in training; the layer's own was changed: {changed}")
    as_found &= evaluated == 0 and (trained > 0) is reached and changed is reached
sys.exit(0 if as_found else "changed since this was found")
EOF
