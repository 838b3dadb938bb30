#!/usr/bin/env bash
# nemo-automodel 0.7.0: ChatDataset makes text of the arguments of tool calls, which a chat template expects as an object.
# Templates that write them as JSON, as those of gpt-oss, Llama 3.1 and Qwen2.5 do, then write that text as a JSON string:
# the model is trained to call tools with one quoted string for its arguments. No warning. Right for Qwen3, whose template
# asks first whether it is text. Hurts whoever tunes for tools with the records that transformers documents.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 accelerate==1.15.0 torchao==0.18.0 \
    tiktoken==0.14.0 numpy==2.3.5 datasets==5.2.0 jinja2==3.1.6 pillow==13.0.0
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0 trl==1.16.0  # of trl: chat templates of models
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { tail -n 15 errors.txt; exit 1; }
import json
import re
import sys
from importlib.metadata import files, version
from pathlib import Path

from nemo_automodel import NeMoAutoTokenizer
from nemo_automodel.components.datasets.llm.chat_dataset import ChatDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = {"gpt-oss": "gptoss", "Llama 3.1": "llama3_1", "Qwen2.5": "qwen2_5", "Qwen3": "qwen3_instruct_2507"}
CALL = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CHAT = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
Path("chats.jsonl").write_text(json.dumps({"messages": CHAT}))
letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokens = Tokenizer(models.BPE(vocab=letters, merges=[]))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
found = {file.name: file.locate() for file in files("trl") if file.suffix == ".jinja"}
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "nemo-automodel", "trl")))
print("expected: the arguments as the template writes them for the same record")
seen = {}
for kind, name in TEMPLATES.items():
    template = Path(found[f"{name}.jinja"]).read_text()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="<|end|>", chat_template=template)
    saved.save_pretrained(name)
    Path(name, "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    tokenizer = NeMoAutoTokenizer.from_pretrained(name)
    sample = ChatDataset("chats.jsonl", tokenizer)[0]
    texts = (
        tokenizer.apply_chat_template(CHAT, tokenize=False),
        tokenizer.decode([label for label in sample["labels"] if label != -100]),
    )
    own, trained = (re.search(r'"?\{\\?"city.*?\}"?', text).group() for text in texts)
    read = [type(json.loads(text)).__name__ for text in (own, trained)]
    print(f"{kind}: {own} ({read[0]}), trained: {trained} ({read[1]})")
    seen[kind] = read
as_found = {kind: ["dict", "dict" if kind == "Qwen3" else "str"] for kind in TEMPLATES}
sys.exit(0 if seen == as_found else "changed since this was found")
PY
