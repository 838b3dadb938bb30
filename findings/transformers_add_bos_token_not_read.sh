#!/usr/bin/env bash
# transformers 5.23.0: beside tokenizer.json, add_bos_token and add_eos_token of tokenizer_config.json are dropped before
# the tokenizer is made. LlamaTokenizerFast of 4.57.6 followed them. Where they say something else than tokenizer.json,
# the same folder gives other tokens in 5: texts begin without <s>, or `add_bos_token: false` takes none away, without a
# message. Hurts training and evaluation on plain text, and losses that are compared between versions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.23.0; do
  python3.11 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version" jinja2==3.1.6
done
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
cat >"$folder/begins.py" <<'EOF'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

folder = Path(sys.argv[1], transformers.__version__ + "-tokenizer")
folder.mkdir()
tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
tokenizer.add_special_tokens(tokens[:2])
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
(folder / "config.json").write_text('{"model_type": "deepseek_v3"}')

print("transformers", transformers.__version__)
print("expected: a text begins with <s> where tokenizer_config.json says add_bos_token: true, and only there")
right = []
for says, file_has in ((True, False), (False, True)):
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = bos if file_has else processors.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": says}))
    ids = AutoTokenizer.from_pretrained(folder)("a")["input_ids"]
    right.append((ids[0] == 0) is says)
    print(f"seen: add_bos_token {says}, tokenizer.json {'with' if file_has else 'without'} <s>:", [tokens[i] for i in ids])
as_found = [transformers.__version__.startswith("4.")] * 2
sys.exit(0 if right == as_found else "changed since this was found")
EOF
for version in 4.57.6 5.23.0; do
  "$folder/$version/bin/python" "$folder/begins.py" "$folder" 2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
done
