#!/usr/bin/env bash
# transformers 5.24.0: a tokenizer that was called with `truncation=True` or `padding` is saved so: `save_pretrained`,
# Trainer's too, writes the last call's length into tokenizer.json. AutoTokenizer does not go by it; whatever else reads
# that file by the tokenizers library (servers and tools in Rust, Python and JavaScript) cuts every text to it, or pads
# it, in silence. `tokenizer.model_max_length` shows nothing. Right if the last call before saving had neither. Hurts
# whoever serves a fine-tuned model, or counts tokens, by another program than the one that trained it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home TRANSFORMERS_VERBOSITY=error
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import json
import sys

import tokenizers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, "w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
texts = {length: " ".join(["w1"] * length) for length in (4, 40)}
CALLS = {
    "no call": [],
    "truncation": [{"truncation": True, "max_length": 16}],
    "padding": [{"padding": "max_length", "max_length": 16}],
    "truncation, then a plain call": [{"truncation": True, "max_length": 16}, {}],
}
print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
print("expected: texts of 4 and 40 words have 4 and 40 tokens, whatever was called before the tokenizer was saved")
seen = {}
for name, calls in CALLS.items():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0")
    for options in calls:
        tokenizer(texts[40], **options)
    tokenizer.save_pretrained("saved")
    saved = json.load(open("saved/tokenizer.json"))
    by_transformers, by_tokenizers = AutoTokenizer.from_pretrained("saved"), Tokenizer.from_file("saved/tokenizer.json")
    seen[name] = (
        [len(by_transformers(text)["input_ids"]) for text in texts.values()],
        [len(by_tokenizers.encode(text).ids) for text in texts.values()],
    )
    print(f"{name}: AutoTokenizer {seen[name][0]} tokens, tokenizers {seen[name][1]}")
    print("  in tokenizer.json:", {part: bool(saved[part]) for part in ("truncation", "padding")})
as_found = {by_transformers == [4, 40] for by_transformers, _ in seen.values()} == {True}
found = [[4, 40], [4, 16], [16, 40], [4, 40]]
sys.exit(0 if as_found and [ids for _, ids in seen.values()] == found else "changed since this was found")
EOF
