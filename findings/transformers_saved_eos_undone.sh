#!/usr/bin/env bash
# transformers 5.23.0: save_pretrained of a tokenizer writes tokenizer_config.json alone, and leaves the
# special_tokens_map.json that transformers 4 wrote beside it. from_pretrained then reads that file over the new one: an
# end-of-sequence or padding token that was changed comes back as it was, without a message. In an empty folder, and in
# transformers 4.57.6, it is kept. Hurts whoever sets eos_token to <|im_end|>, or a pad_token of its own, in the folder
# of a model from before: documents end with the old token, and generation does not stop at the new one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.23.0; do
  python3.11 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version" jinja2==3.1.6
done
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
cat >"$folder/write.py" <<'EOF'
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

backend = Tokenizer(models.BPE({name: id for id, name in enumerate(["<s>", "</s>", "<|im_end|>", "<pad>", "a"])}, []))
PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(sys.argv[1])
EOF
cat >"$folder/change.py" <<'EOF'
import sys
from pathlib import Path

import transformers
from transformers import AutoTokenizer


def saved(old: str, new: str) -> tuple[str, str]:
    """Change the tokenizer in `old`, save it in `new`, load it, and return its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(old)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<pad>"
    tokenizer.save_pretrained(new)
    loaded = AutoTokenizer.from_pretrained(new)
    print(f"saved in {Path(new).name}, with {sorted(file.name for file in Path(new).iterdir())}: {loaded.eos_token}")
    return loaded.eos_token, loaded.pad_token


expected = ("<|im_end|>", "<pad>")
print("transformers", transformers.__version__, "\nexpected: the eos_token that was saved,", expected[0])
is_old = transformers.__version__.startswith("4.")
elsewhere, in_place = saved(sys.argv[1], sys.argv[1] + "-copy"), saved(sys.argv[1], sys.argv[1])
as_found = elsewhere == expected and in_place == (expected if is_old else ("</s>", "<pad>"))
sys.exit(0 if as_found else "changed since this was found")
EOF
for version in 4.57.6 5.23.0; do
  "$folder/4.57.6/bin/python" "$folder/write.py" "$folder/model-$version" 2>"$folder/log"
  "$folder/$version/bin/python" "$folder/change.py" "$folder/model-$version" 2>"$folder/log" ||
    { tail -n 15 "$folder/log" >&2; exit 1; }
done
