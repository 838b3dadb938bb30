#!/usr/bin/env bash
# mergekit 0.1.5: mergekit-moe with `gate_mode: hidden_avg` makes an expert's router row from the mean of its prompts'
# hidden states, and takes the mean over the padding too. A short prompt beside a longer one then stands mostly for
# padding, and prompts weigh otherwise in company than by themselves. `hidden_last` (and `hidden`, which is the same)
# pads on the left and reads the last position, `cheap_embed` leaves padding out. Hurts whoever routes by prompts of
# different lengths.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  torch==2.13.0 transformers==5.23.0 mergekit==0.1.5 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import importlib.metadata
import sys

import torch
import transformers
from mergekit.moe.config import MoEMergeConfig
from mergekit.options import MergeOptions
from mergekit.scripts.moe import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
print("mergekit", importlib.metadata.version("mergekit"))
print("expected: the row of two prompts lies in the plane of the rows of each")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
config = Qwen3Config(**sizes, num_hidden_layers=2, intermediate_size=32, pad_token_id=0, eos_token_id=1)
words = ["<pad>", "<end>", *(f"w{number}" for number in range(62))]
vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<end>")
for name in ("base", "one", "two"):
    AutoModelForCausalLM.from_config(config).save_pretrained(f"{sys.argv[1]}/{name}")
    tokenizer.save_pretrained(f"{sys.argv[1]}/{name}")


def router_row(mode: str, prompts: list[str]) -> torch.Tensor:
    """Build a mixture of two experts; return the last layer's router row of the one with these prompts."""
    experts = [
        {"source_model": f"{sys.argv[1]}/one", "positive_prompts": prompts},
        {"source_model": f"{sys.argv[1]}/two", "positive_prompts": ["w60 w61"]},
    ]
    recipe = MoEMergeConfig(base_model=f"{sys.argv[1]}/base", experts=experts, gate_mode=mode, dtype="float32")
    build(recipe, f"{sys.argv[1]}/moe", MergeOptions(), device="cpu")
    return AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/moe").model.layers[1].mlp.gate.weight[0].detach()


short, long = "w1 w2 w3", " ".join(f"w{number}" for number in range(20, 44))
off_plane = {}
for mode in ("hidden", "hidden_last", "cheap_embed", "hidden_avg"):
    rows = torch.stack([router_row(mode, [short]), router_row(mode, [long])], 1)
    both = router_row(mode, [short, long])
    weights = torch.linalg.lstsq(rows, both[:, None]).solution
    off_plane[mode] = (rows @ weights - both[:, None]).norm().item()
    print(f"{mode}: {off_plane[mode]:.3f} of the row of both prompts is of neither")
as_found = off_plane.pop("hidden_avg") > 0.5 and max(off_plane.values()) < 0.02
sys.exit(0 if as_found else "changed since this was found")
EOF
