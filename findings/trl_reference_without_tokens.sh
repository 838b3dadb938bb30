#!/usr/bin/env bash
# TRL 1.16.0 with peft 0.21.2: given an adapter that is to be trained further, DPOTrainer (GRPO, KTO and RLOO have the
# same lines) copies it as its reference: parameters with `.default.` in their names. Those of LoRA on `embed_tokens`
# and of `trainable_token_indices` end with `.default`, and are left out: the reference is a model without the new
# tokens' embeddings. Rewards and KL begin away from 0, and pull the training back to it. Right for other layers, for
# fused experts and `modules_to_save`. Hurts whoever added tokens in SFT and goes on with preferences or rewards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 trl==1.16.0 datasets==5.2.0 \
  accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1 TRL_EXPERIMENTAL_SILENCE=1
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys

import peft
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig
from trl import DPOConfig, DPOTrainer

transformers.logging.set_verbosity_error()
words = {word: index for index, word in enumerate(["<pad>", "<eos>", *(f"w{number}" for number in range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
pairs = Dataset.from_list([{"prompt": "w1 w2 w3 ", "chosen": "w4 w5", "rejected": "w6 w7 w8"}] * 4)
ADAPTERS = {
    "LoRA on q_proj": {},
    "and on experts": {"target_parameters": ["mlp.experts.down_proj"]},
    "and lm_head whole": {"modules_to_save": ["lm_head"]},
    "and on embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
    "and rows of embed_tokens": {"trainable_token_indices": [5, 6, 7]},
}
print("torch", torch.__version__, "transformers", transformers.__version__)
print("trl", trl.__version__, "peft", peft.__version__)
print("expected: before anything is learned, the reference is the model: all rewards are 0")
away = set()
for name, settings in ADAPTERS.items():
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64, num_hidden_layers=1,
        moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
    ))
    model = get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **settings}))
    with torch.no_grad():  # as if it had been trained
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    settings = DPOConfig(
        output_dir="run", use_cpu=True, bf16=False, report_to=[], max_steps=1, logging_steps=1, learning_rate=0.0,
        per_device_train_batch_size=4, disable_tqdm=True,
    )
    trainer = DPOTrainer(model, args=settings, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    rewards = [trainer.state.log_history[0][f"rewards/{which}"] for which in ("chosen", "rejected")]
    print(f"{name}: rewards of the first step: chosen {rewards[0]:.4f}, rejected {rewards[1]:.4f}")
    if max(map(abs, rewards)) > 1e-4:
        away.add(name)
as_found = away == {"and on embed_tokens", "and rows of embed_tokens"}
sys.exit(0 if as_found else "changed since this was found")
EOF
