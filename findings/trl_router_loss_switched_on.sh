#!/usr/bin/env bash
# trl 1.16.0 with transformers 5.23.0: SFTTrainer sets output_router_logits=True on a mixture of experts whose config says
# False, and so adds its router loss, with the coefficient of the architecture (Mixtral's 0.001, others' up to 0.02), to
# what is trained and logged. Only router_aux_loss_coef=0.0 in SFTConfig turns it off. Hurts whoever left it off by the
# config, as transformers documents it, and compares losses with another trainer's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  trl==1.16.0 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/out" <<'EOF'
import sys

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

transformers.logging.set_verbosity_error()
SYMBOLS = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
backend = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(SYMBOLS)}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
ids = torch.arange(8)[None]
print("trl", trl.__version__, "transformers", transformers.__version__)
print("expected: output_router_logits stays False, and the loss with it")
seen = {}
for options in ({}, {"router_aux_loss_coef": 0.0}):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=False, router_aux_loss_coef=0.02,
    )
    model = MixtralForCausalLM(config)
    before = model(ids, labels=ids).loss.item()
    arguments = trl.SFTConfig(sys.argv[1], use_cpu=True, bf16=False, report_to=[], max_steps=1, **options)
    rows = Dataset.from_list([{"text": "some text"}])
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    loss = trainer.model(ids, labels=ids).loss.item()
    seen[str(options)] = (trainer.model.config.output_router_logits, loss > before + 0.01)
    print(f"SFTConfig {options}: output_router_logits {seen[str(options)][0]}, loss {before:.4f} before, {loss:.4f} after")
sys.exit(0 if list(seen.values()) == [(True, True), (False, False)] else "changed since this was found")
EOF
