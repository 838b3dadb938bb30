#!/usr/bin/env bash
# mergekit 0.1.5: mergekit-moe sets its tokenizer to pad on the left with the first token (bos), or with the end token
# where there is none (Qwen), for the prompts of its routers, and saves that one with the new model. A base with a token
# for padding of its own loses it: labels of the end are then masked as padding (DataCollatorForLanguageModeling), and
# training no longer teaches to stop. mergekit-yaml keeps the tokenizer. Hurts whoever trains what mergekit-moe made.
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
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.moe.config import MoEMergeConfig
from mergekit.options import MergeOptions
from mergekit.scripts.moe import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import PreTrainedTokenizerFast, Qwen3Config

transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
print("mergekit", importlib.metadata.version("mergekit"))
print("expected: the tokenizer of the base, whose end has a label")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
config = Qwen3Config(**sizes, num_hidden_layers=1, intermediate_size=32, pad_token_id=0, eos_token_id=1)
words = ["<pad>", "<end>", *(f"w{number}" for number in range(62))]
vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<end>")
for name in ("base", "one", "two"):
    AutoModelForCausalLM.from_config(config).save_pretrained(f"{sys.argv[1]}/{name}")
    tokenizer.save_pretrained(f"{sys.argv[1]}/{name}")
sources = [f"{sys.argv[1]}/one", f"{sys.argv[1]}/two"]
prompts = ("w1 w2", "w3")
experts = [{"source_model": sources[number], "positive_prompts": [prompts[number]]} for number in range(2)]
recipe = MoEMergeConfig(base_model=f"{sys.argv[1]}/base", experts=experts, gate_mode="hidden")
build(recipe, f"{sys.argv[1]}/moe", MergeOptions(), device="cpu")
models = [{"model": source, "parameters": {"weight": 0.5}} for source in sources]
linear = MergeConfiguration(merge_method="linear", models=models)
run_merge(linear, f"{sys.argv[1]}/linear", MergeOptions(write_model_card=False))
seen = {}
for name in ("base", "linear", "moe"):
    saved = AutoTokenizer.from_pretrained(f"{sys.argv[1]}/{name}")
    collate = DataCollatorForLanguageModeling(saved, mlm=False)
    rows = [{"input_ids": saved(text)["input_ids"]} for text in ("w1 w2 <end>", "w1 <end>")]
    labels = collate(rows)["labels"].tolist()
    seen[name] = (saved.pad_token, saved.padding_side, labels)
    print(f"{name}: pad_token {saved.pad_token}, padding_side {saved.padding_side}, labels {labels}")
right = ("<pad>", "right", [[3, 4, 1], [3, 1, -100]])
as_found = seen == {"base": right, "linear": right, "moe": ("<end>", "left", [[3, 4, -100], [-100, 3, -100]])}
sys.exit(0 if as_found else "changed since this was found")
EOF
