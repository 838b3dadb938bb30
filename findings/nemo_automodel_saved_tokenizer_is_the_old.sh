#!/usr/bin/env bash
# nemo-automodel 0.7.0: `save_pretrained` of its tokenizer puts the files that it was read from over what it has just
# written. Tokens that were added for the training are in no file: where the saved folder is opened, they are cut into
# pieces whose embeddings were never trained for it. No warning. Right with tokenizer_backend="transformers_auto". Hurts
# whoever adds tokens for tools or thoughts and serves what was saved: the weights have their rows, the text never does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 accelerate==1.15.0 torchao==0.18.0 \
    tiktoken==0.14.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { tail -n 15 errors.txt; exit 1; }
import json
import sys
from importlib.metadata import version
from pathlib import Path

from nemo_automodel import NeMoAutoTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokens = Tokenizer(models.BPE(vocab=letters, merges=[]))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>", pad_token="<|pad|>").save_pretrained("base")
Path("base/config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
TEXT = "<|call|>add"
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "nemo-automodel")))
print("expected: what was saved is what was used in training")
seen = []
for backend in ("transformers_auto", "nemo_auto"):
    tokenizer = NeMoAutoTokenizer.from_pretrained("base", tokenizer_backend=backend)
    added = tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    used = tokenizer(TEXT)["input_ids"]
    tokenizer.save_pretrained(backend)
    opened = AutoTokenizer.from_pretrained(backend)
    found = opened(TEXT)["input_ids"]
    same = Path(backend, "tokenizer.json").read_bytes() == Path("base/tokenizer.json").read_bytes()
    print(f"{backend}: {added} token added; {TEXT!r} is {len(used)} tokens in training and {len(found)} when opened again "
          f"({len(tokenizer)} and {len(opened)} tokens in all); the saved tokenizer.json is the base's: {same}")
    seen.append((used == found, len(tokenizer) - len(opened), same))
sys.exit(0 if seen == [(True, 0, False), (False, 1, True)] else "changed since this was found")
PY
