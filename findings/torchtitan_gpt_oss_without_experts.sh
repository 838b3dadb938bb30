#!/usr/bin/env bash
# torchtitan 0.3.0: a published gpt-oss is read, and a trained one written, without its experts. They are called
# `mlp1_weight_EGD` and the like in the model and `mlp1_weight` in the table of names, and `to_hf`, which also says what
# is to be read, drops what the table has not; loading is not strict. So fine-tuning begins with random experts, in
# silence, and what `last_save_in_hf` writes has none. All else is read; with the four names mended the experts are too.
# Hurts whoever fine-tunes gpt-oss there: the loss begins where that of an untrained model does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 tyro==1.0.17 einops==0.8.1 datasets==4.7.0 \
  pillow==12.0.0 triton==3.9.0 tokenizers==0.22.2 safetensors==0.8.0
"$folder/venv/bin/pip" install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'EOF'
import importlib.metadata
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.models.gpt_oss import gptoss_configs
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

settings = gptoss_configs["debugmodel"](moe_comm_backend="standard", attn_backend="flex")
settings.layers = settings.layers[:1]
torch.manual_seed(0)
model = settings.build()
model.init_states()
before = {name: value.clone() for name, value in model.state_dict().items()}
adapter = GptOssStateDictAdapter(settings, None)

# A checkpoint with every name of its table, and 1 for every value.
suffixes = {"mlp1_weight": "EGD", "mlp1_bias": "EG", "mlp2_weight": "EDF", "mlp2_bias": "ED"}
published = {name: torch.ones_like(value) for name, value in adapter.to_hf(before).items()}
for stored, name in adapter.from_hf_map.items():
    if (last := name.rpartition(".")[2]) in suffixes:
        published[stored.format(0)] = torch.ones_like(before[f"{name.format(0)}_{suffixes[last]}"])
save_file(published, "model.safetensors", {"format": "pt"})

print("torch", torch.__version__, "torchtitan", importlib.metadata.version("torchtitan"))
print("expected: every parameter of the model is read from the checkpoint, where each is 1")


def left_after_loading():
    """What its checkpoint manager does with `initial_load_in_hf`; the parameters that are not read."""
    model.load_state_dict(before)
    wrapper = ModelWrapper(model)
    wanted = adapter.to_hf(wrapper.state_dict())
    dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader("."))
    wrapper.load_state_dict(adapter.from_hf(wanted))
    read = model.state_dict()
    return [name for name, _ in model.named_parameters() if name in read and not (read[name] == 1).all()], wanted


left, wanted = left_after_loading()
print("as shipped, not read:", [name.removeprefix("layers.0.moe.") for name in left])
print("  experts in what it would write:", [name for name in wanted if ".experts." in name])
for stored, name in adapter.from_hf_map.items():
    if (last := name.rpartition(".")[2]) in suffixes:
        adapter.from_hf_map[stored] = f"{name}_{suffixes[last]}"
left_mended, _ = left_after_loading()
print("with the names mended, not read:", left_mended)
as_found = len(left) == 4 and all("inner_experts" in name for name in left) and left_mended == []
sys.exit(0 if as_found and not any(".experts." in name for name in wanted) else "changed since this was found")
EOF
