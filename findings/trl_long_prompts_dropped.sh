#!/usr/bin/env bash
# trl 1.16.0: SFTTrainer cuts rows at max_length (1,024 unless set), and drops those of which nothing that is trained is
# left: all whose prompt alone is that long. A progress bar, “Dropping fully masked examples”, passes; no warning, and no
# number of what went. Hurts data with long prompts, of retrieved documents say: the hardest records are those that go, and
# steps are fewer than planned.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  trl==1.16.0 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/out" <<'EOF'
import io
import logging
import sys
import warnings

import datasets
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

datasets.disable_progress_bars()
SYMBOLS = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
backend = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(SYMBOLS)}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
config = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
print("trl", trl.__version__, "transformers", transformers.__version__, "datasets", datasets.__version__)
print("expected: four rows of four, or a warning that names how many are dropped")
rows = [{"prompt": "Q" * length, "completion": "A" * 4} for length in (4, 14, 16, 40)]
arguments = trl.SFTConfig(sys.argv[1], use_cpu=True, bf16=False, report_to=[], max_length=16, max_steps=1)
log = io.StringIO()
logging.getLogger().addHandler(logging.StreamHandler(log))
logging.getLogger("trl").setLevel(logging.INFO)
with warnings.catch_warnings(record=True) as raised:
    warnings.simplefilter("always")
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
said = log.getvalue().splitlines() + [str(warning.message) for warning in raised]
said = [line for line in said if any(word in line.lower() for word in ("truncat", "dropp", "remov", "max_length"))]
trained = [sum(label != -100 for label in row["labels"]) for row in trainer.train_dataset]
print(f"prompts of {[len(row['prompt']) for row in rows]} tokens, answers of 5, max_length 16")
print(f"{len(trained)} rows are left, with {trained} tokens that are trained; said about it: {said}")
sys.exit(0 if trained == [5, 2] and not said else "changed since this was found")
EOF
