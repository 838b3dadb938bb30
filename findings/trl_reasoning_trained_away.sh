#!/usr/bin/env bash
# TRL 1.16.0: get_training_chat_template() gives, for Nemotron 3 and GLM 4 MoE, templates that write the reasoning of
# the last turn only; of earlier turns they write `<think></think>` in its place, inside the part that is trained
# (`assistant_masks`). So assistant_only_loss=True teaches the model not to think in all turns but the last of a chat.
# Hurts SFT on chats of several turns with reasoning. TRL's templates for Qwen3 and later keep all of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
"$folder/venv/bin/python" - <<'EOF'
import sys
from pathlib import Path

import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

CHAT = [
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "reasoning_content": "FIRST", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "reasoning_content": "SECOND", "content": "6."},
]
print("trl", trl.__version__, "transformers", transformers.__version__)
print("expected of every template: FIRST and SECOND are both trained, or the turn without its reasoning is not")
bytes_ = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
backend = Tokenizer(models.BPE(bytes_, []))
backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
as_found = True
for name, keeps in (("qwen3", True), ("nemotron_3_nano", False), ("nemotron_3_super", False), ("glm4moe", False)):
    template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template.read_text())
    training = get_training_chat_template(tokenizer)
    options = {"chat_template": training, "return_dict": True, "return_assistant_tokens_mask": True}
    got = tokenizer.apply_chat_template(CHAT, **options)
    pairs = zip(got["input_ids"], got["assistant_masks"], strict=True)
    trained = tokenizer.decode([token for token, is_trained in pairs if is_trained])
    print(f"{name}: trained is {trained!r}")
    as_found = as_found and "SECOND" in trained and ("FIRST" in trained) == keeps and "4." in trained
    as_found = as_found and ("<think></think>" in trained) != keeps
sys.exit(0 if as_found else "changed since this was found")
EOF
