#!/usr/bin/env bash
# nemo-automodel 0.7.0: ColumnMappedTextInstructionDataset ends the prompt with a space, and counts as prompt the token
# which that space is by itself. In the whole text the space is part of the answer's first token, so this token has no
# loss. A row whose answer is one token (a class, yes or no) has none at all: the next row that has is given in its place.
# No warning. Right with the chat template. Hurts whoever trains on questions and answers: the first word is what decides.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 accelerate==1.15.0 torchao==0.18.0 \
    tiktoken==0.14.0 numpy==2.3.5 datasets==5.2.0 jinja2==3.1.6 pillow==13.0.0
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { tail -n 15 errors.txt; exit 1; }
import json
import sys
from importlib.metadata import version
from pathlib import Path

from nemo_automodel import NeMoAutoTokenizer
from nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset import (
    ColumnMappedTextInstructionDataset,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROWS = [
    ("Is water wet?", "yes"),
    ("What is the capital of France?", "Paris"),
    ("Is fire cold?", "no, it is hot"),
    ("Is ice warm?", "no, it is cold"),
]
TEMPLATE = (
    "{% for message in messages if message['content'] %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
tokens = Tokenizer(models.BPE())  # as GPT-2's, Llama 3's and Qwen's: a space belongs to the word that follows
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
tokens.train_from_iterator(
    [f"{question} {answer} {answer.capitalize()}" for question, answer in ROWS] * 50,
    trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
)
saved = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE)
saved.save_pretrained("tokenizer")
Path("tokenizer/config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
Path("rows.jsonl").write_text("\n".join(json.dumps({"ask": ask, "answer": answer}) for ask, answer in ROWS))
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "nemo-automodel", "datasets")))
print("expected: of each row the whole answer has loss")
seen = {}
for how in ("default", "use_hf_chat_template"):
    tokenizer = NeMoAutoTokenizer.from_pretrained("tokenizer")
    dataset = ColumnMappedTextInstructionDataset(
        "rows.jsonl", {"question": "ask", "answer": "answer"}, tokenizer, use_hf_chat_template=how != "default"
    )
    seen[how] = []
    for index, (question, answer) in enumerate(ROWS):
        sample = dataset[index]
        same = question in tokenizer.decode(sample["input_ids"])
        trained = tokenizer.decode([label for label in sample["labels"] if label != -100])
        print(f"{how}, row {index} ({question!r}, {answer!r}): {'this row' if same else 'another row'}, trained: {trained!r}")
        seen[how].append((same, answer in trained))
        if how == "default" and same:
            assert answer.startswith("no") and trained == answer.removeprefix("no"), trained
as_found = seen == {
    "default": [(False, False), (False, False), (True, False), (True, False)],
    "use_hf_chat_template": [(True, True)] * 4,
}
sys.exit(0 if as_found else "changed since this was found")
PY
