#!/usr/bin/env bash
# transformers 5.23.0: AutoTokenizer.from_pretrained(FOLDER) of a folder with config.json and no file of a tokenizer
# returns a tokenizer for some types of model (qwen2, qwen3, qwen3_moe, gpt2): it knows only <|endoftext|>, and every
# text has no tokens. No error, no warning. Other types (llama, mixtral) raise ValueError, which says what is missing.
# Hurts whoever saved or copied a model and forgot its tokenizer: batches are empty long after the cause.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home TMPDIR=$folder
"$folder/venv/bin/python" - <<'EOF'
import sys
import tempfile
import warnings

import tokenizers
import transformers
from transformers import AutoConfig, AutoTokenizer

warnings.simplefilter("error")
print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
print("expected of every type: an error that says that there is no tokenizer")
found = {}
for kind in ("qwen2", "qwen3", "qwen3_moe", "gpt2", "llama", "mixtral"):
    folder = tempfile.mkdtemp()
    AutoConfig.for_model(kind).save_pretrained(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found[kind] = (len(tokenizer), tokenizer("Hello, world")["input_ids"])
        print(f"{kind}: {type(tokenizer).__name__} of {len(tokenizer)} token, 'Hello, world' is {found[kind][1]}")
    except ValueError as error:
        found[kind] = None
        print(f"{kind}: ValueError: {str(error).splitlines()[0][:100]}")
as_found = all(found[kind] == (1, []) for kind in ("qwen2", "qwen3", "qwen3_moe", "gpt2"))
as_found = as_found and found["llama"] is None and found["mixtral"] is None
sys.exit(0 if as_found else "changed since this was found")
EOF
