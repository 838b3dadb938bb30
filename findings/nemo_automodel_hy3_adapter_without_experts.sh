#!/usr/bin/env bash
# nemo-automodel 0.7.0: an adapter on experts of Hunyuan 3 (`hy_v3`) has an entry for each of them, where transformers 5
# has one weight of all. PEFT opens it without a word and passes over these entries: the model is the one that was trained
# without what its experts learned. Right for its attention and shared experts, and for Qwen3-MoE, whose experts are saved
# as PEFT has them. Hurts whoever trains experts there and serves or merges with PEFT.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 peft==0.21.2 accelerate==1.15.0 \
    torchao==0.18.0 tiktoken==0.14.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { tail -n 15 errors.txt; exit 1; }
import sys
import warnings
from importlib.metadata import version

import torch
import transformers

torch.cuda.current_device = lambda: 0  # constructors ask for it; all is computed on the CPU
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.hy_v3.model import HYV3ForCausalLM
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, HYV3Config, Qwen3MoeConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
BACKEND = BackendConfig(attn="sdpa", linear="torch", experts="torch", dispatcher="torch", rope_fusion=False)
SIZES = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64, num_hidden_layers=3,
    max_position_embeddings=128, moe_intermediate_size=32, intermediate_size=48, num_experts=8, num_experts_per_tok=2,
)
PUBLISHED = dict(route_norm=True, moe_router_enable_expert_bias=True)  # what the published config.json has
KINDS = {
    "Hunyuan 3": (HYV3ForCausalLM, HYV3Config(**SIZES, **PUBLISHED, first_k_dense_replace=1)),
    "Qwen3-MoE": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES)),
}
PARTS = {
    "attention": ["*o_proj"],
    "attention and experts": ["*o_proj", "*mlp.experts"],
    "attention and shared experts": ["*o_proj", "*shared_experts.*_proj"],
}
print("torch", torch.__version__, "transformers", transformers.__version__, "nemo-automodel", version("nemo-automodel"),
      "peft", version("peft"))
print("expected: base and adapter are the model that was trained")
as_found = True
for kind, (its_class, config) in KINDS.items():
    for part, names in PARTS.items():
        if kind == "Qwen3-MoE" and "shared" in part:
            continue
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(config)
        for parameter in base.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.12)
        base.save_pretrained(kind)
        settings = type(config).from_pretrained(kind)
        settings.torch_dtype = torch.float32
        model = its_class(settings, backend=BACKEND).float()
        model.model.rotary_emb.device = torch.device("cpu")
        model.load_state_dict(model.state_dict_adapter.from_hf(load_file(f"{kind}/model.safetensors")))
        rows = torch.randint(2, 60, (4, 32))
        with torch.no_grad():
            untrained = model.eval()(rows).logits
            off_base = (untrained - AutoModelForCausalLM.from_pretrained(kind)(rows).logits).abs().max().item()
        lora = PeftConfig(target_modules=names, dim=4, alpha=8)
        apply_lora_to_linear_modules(model, lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model.train()
        for _ in range(10):
            logits = model(rows).logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        adapter = f"{kind}, {part}"
        checkpoint = CheckpointingConfig(
            checkpoint_dir=adapter, model_cache_dir=kind, model_repo_id=kind, save_consolidated=False, is_peft=True
        )
        Checkpointer(checkpoint, 0, 0, 0).save_model(model, adapter, peft_config=lora)
        with warnings.catch_warnings(record=True) as raised, torch.no_grad():
            warnings.simplefilter("always")
            opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(kind), f"{adapter}/model").eval()
            loaded = opened(rows).logits
            trained = model(rows).logits
            for name, parameter in model.named_parameters():
                if ".mlp.experts.lora_" in name:
                    parameter.zero_()
            without = model(rows).logits
        said = {str(warning.message) for warning in raised if issubclass(warning.category, UserWarning)}
        off, off_without = ((loaded - other).abs().max().item() for other in (trained, without))
        print(f"{adapter}: of the base logits differ by {off_base:.1e}, of base and adapter by {off:.1e}, from those "
              f"without what experts learned by {off_without:.1e} (training moved them by "
              f"{(trained - untrained).abs().max():.1e}); said: {said}")
        lost = kind == "Hunyuan 3" and part == "attention and experts"
        as_found &= off_base < 1e-4 and not said and (off > 0.2 and off_without < 1e-4 if lost else off < 1e-4)
sys.exit(0 if as_found else "changed since this was found")
PY
