#!/usr/bin/env bash
# transformers 5.23.0: where tokenizer_config.json names a class such as GPT2Tokenizer or Qwen2Tokenizer, AutoTokenizer
# takes only vocabulary and merges of tokenizer.json. How text is normalized and split comes from the class: numbers and
# contractions are other tokens than those that the model was trained on, without a message. PreTrainedTokenizerFast
# reads the file, as AutoTokenizer of 4.57.6 did whatever the class. Hurts fine-tuning, evaluation and serving of such
# models: OLMo 2 (transformers#45920), Granite (#45812), DeepSeek (#45488) were found one by one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.23.0; do
  python3.11 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version" jinja2==3.1.6
done
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
cat >"$folder/ids.py" <<'EOF'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXT = "In 2023 it wasn't 1234567."
PATTERN = r"\p{N}{1,3}| ?[\p{L}']+| ?[^\s\p{L}\p{N}]+|\s+"  # three digits, as Llama 3, OLMo 2 and Granite 4 split

folder = Path(sys.argv[1], transformers.__version__ + "-tokenizer")
folder.mkdir()
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
tokenizer.train_from_iterator([TEXT] * 9, trainer)
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "config.json").write_text('{"model_type": "qwen3_moe"}')

expected = tokenizer.encode(TEXT).tokens
print("transformers", transformers.__version__, "\nexpected: the tokens of tokenizer.json,", expected)
right = []
for name in ("GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"):
    settings = {"tokenizer_class": name, "eos_token": "</s>", "unk_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = AutoTokenizer.from_pretrained(folder)
    tokens = loaded.convert_ids_to_tokens(loaded.encode(TEXT, add_special_tokens=False))
    right.append(tokens == expected)
    print(f"tokenizer_class {name}: {type(loaded).__name__}, {'the same' if right[-1] else tokens}")
as_file = PreTrainedTokenizerFast.from_pretrained(folder)
right.append(as_file.convert_ids_to_tokens(as_file.encode(TEXT, add_special_tokens=False)) == expected)
as_found = [True] * 4 if transformers.__version__.startswith("4.") else [False, False, True, True]
sys.exit(0 if right == as_found else "changed since this was found")
EOF
for version in 4.57.6 5.23.0; do
  "$folder/$version/bin/python" "$folder/ids.py" "$folder" 2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
done
