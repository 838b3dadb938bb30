#!/usr/bin/env bash
# transformers 5.23.0: of a tokenizer.model of SentencePiece without a tokenizer.json it makes a tokenizer that orders
# merges by id, not by the model's scores. Mixtral's put runs of spaces last: indentation and double spaces become other
# tokens than the model was trained on. Beside a config.json of Mixtral the space before the first word is lost too. No
# message. 4.57.6 gives SentencePiece's tokens, and so does 5.23.0 with a tokenizer.json that 4.57.6 wrote. Hurts those
# who train or evaluate a checkpoint that was saved with a slow tokenizer, on code above all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.23.0; do
  python3.11 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet \
    "transformers==$version" sentencepiece==0.2.1 protobuf==7.36.2 mistral-common==1.13.1 jinja2==3.1.6
done
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home TRANSFORMERS_VERBOSITY=error
cat >"$folder/look.py" <<'EOF'
import json
import pathlib
import shutil
import sys

import mistral_common
import sentencepiece
import transformers
from transformers import AutoTokenizer

# Mixtral 8x7B's
source = pathlib.Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
model = sentencepiece.SentencePieceProcessor(model_file=str(source))
is_old = transformers.__version__.startswith("4")
print("transformers", transformers.__version__, "expected: the tokens of SentencePiece")
texts = ("Hello world", "a  b", "if x:\n    return 1")
wrong = {}
for model_type in ("mixtral", "llama"):
    folder = pathlib.Path(sys.argv[1], model_type)
    if is_old:
        folder.mkdir()
        shutil.copy(source, folder / "tokenizer.model")
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    folders = {"tokenizer.model alone": folder, "with the tokenizer.json of 4.57.6": folder / "whole"}
    for what, opened in list(folders.items())[: 1 if is_old else 2]:
        tokenizer = AutoTokenizer.from_pretrained(str(opened))
        if is_old:
            tokenizer.save_pretrained(folder / "whole")
            shutil.copy(folder / "config.json", folder / "whole")
        wrong[model_type, what] = 0
        for text in texts:
            tokens, own = tokenizer.tokenize(text), model.encode(text, out_type=str)
            wrong[model_type, what] += tokens != own
            print(f"{model_type}, {what}: {text!r} is {tokens}" + (f", not {own}" if tokens != own else ""))
alone = {model_type: wrong.pop((model_type, "tokenizer.model alone")) for model_type in ("mixtral", "llama")}
as_found = alone == ({"mixtral": 0, "llama": 0} if is_old else {"mixtral": 3, "llama": 2}) and not any(wrong.values())
sys.exit(0 if as_found else "changed since this was found")
EOF
"$folder/4.57.6/bin/python" "$folder/look.py" "$folder"
"$folder/5.23.0/bin/python" "$folder/look.py" "$folder"
