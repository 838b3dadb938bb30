#!/usr/bin/env bash
# nemo-automodel 0.7.0: every layer of gpt-oss and Qwen3-MoE adds the gradient of its router loss, times the
# configuration's `router_aux_loss_coef`, also where `output_router_logits` is false, which is off in transformers.
# Published configurations of gpt-oss say false, beside a coefficient of 0.9. The logged loss has nothing of it, and it is
# summed over layers, not averaged. Right for GLM-4.5, which has none. Hurts whoever trains routers of gpt-oss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 accelerate==1.15.0 torchao==0.18.0 \
    tiktoken==0.14.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { cat errors.txt; exit 1; }
import sys
from importlib.metadata import version

import torch
import transformers

torch.cuda.current_device = lambda: 0  # constructors ask for it; all is computed on the CPU
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.glm4_moe.model import Glm4MoeForCausalLM
from nemo_automodel.components.models.gpt_oss.model import GptOssForCausalLM
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig

SIZES = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=64, vocab_size=64, num_hidden_layers=1,
    num_experts_per_tok=2, intermediate_size=32,
)
KINDS = {
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(
        **SIZES, num_local_experts=8, router_aux_loss_coef=0.9, output_router_logits=False
    )),
    "Qwen3-MoE": (Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **SIZES, num_experts=8, moe_intermediate_size=32, router_aux_loss_coef=0.001, output_router_logits=False
    )),
    "GLM-4.5": (Glm4MoeForCausalLM, Glm4MoeConfig(
        **SIZES, n_routed_experts=8, moe_intermediate_size=32, n_group=1, topk_group=1, first_k_dense_replace=0
    )),
}
print("torch", torch.__version__, "transformers", transformers.__version__, "nemo-automodel", version("nemo-automodel"))
print("expected: where the configuration has no router loss, a loss that is zero gives routers no gradient")
seen = {}
for kind, (its_class, config) in KINDS.items():
    torch.manual_seed(0)
    tokens = torch.randn(1, 256, 64)
    config.torch_dtype = torch.float32
    backend = BackendConfig(
        attn="flex" if kind == "gpt-oss" else "sdpa", linear="torch", experts="torch", dispatcher="torch",
        rope_fusion=False,
    )
    norms = []
    for model in (its_class(config, backend=backend), AutoModelForCausalLM.from_config(config)):
        layer = next(iter(model.model.layers.values() if its_class is type(model) else model.model.layers)).mlp.float()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        layer.train()
        out = layer(tokens, torch.zeros(1, 256, dtype=torch.bool)) if its_class is type(model) else layer(tokens)
        out = out[0] if isinstance(out, tuple) else out
        (0 * out.sum()).backward()
        router = next(
            value for name, value in layer.named_parameters() if name in ("gate.weight", "router.weight")
        )
        norms.append(router.grad.norm().item() if router.grad is not None else 0.0)
    print(f"{kind}: gradient of the router {norms[0]:.1e} in nemo-automodel, {norms[1]:.1e} in transformers")
    seen[kind] = norms[0] > 1e-5, norms[1] == 0.0
wanted = {"gpt-oss": (True, True), "Qwen3-MoE": (True, True), "GLM-4.5": (False, True)}
sys.exit(0 if seen == wanted else "changed since this was found")
PY
