#!/usr/bin/env bash
# ms-swift 4.6.0: `reasoning_content` of a message is dropped as data are read, where `tool_calls` beside it are kept. The
# templates of Qwen3 and GLM-4.5 then write an empty thought, which is trained: rows with thoughts, as transformers'
# templates and servers have them, teach the model not to think. gpt-oss is trained without its analysis. No warning.
# Right where the thought is in the content, between <think> and </think>. Hurts whoever tunes on answers with thoughts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 accelerate==1.15.0 peft==0.20.0 numpy==2.3.5 \
    datasets==4.8.4 modelscope==1.40.2 json-repair==0.64.6 aiohttp==3.13.2 jinja2==3.1.6 pillow==13.0.0
"$folder/venv/bin/pip" install --quiet --no-deps ms-swift==4.6.0 trl==1.16.0  # of trl: chat templates of models
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home MODELSCOPE_CACHE=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { tail -n 15 errors.txt; exit 1; }
import json
import sys
from importlib.metadata import files, version
from pathlib import Path

from swift.dataset import load_dataset
from swift.model import get_processor
from swift.template import get_template
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

THOUGHT = "Count the apples."
KINDS = {  # model type and template of ms-swift, TRL's file, special tokens, end of text, key of the thought
    "Qwen3": ("qwen3_moe", "qwen3", "qwen3", "<|im_start|> <|im_end|>", "<|im_end|>", "reasoning_content"),
    "GLM-4.5": (
        "glm4_moe", "glm4_5", "glm4moe", "[gMASK] <sop> <|user|> <|assistant|> <|observation|> <|system|>", "<|endoftext|>",
        "reasoning_content",
    ),
    "gpt-oss": (
        "gpt_oss", "gpt_oss", "gptoss", "<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|>", "<|return|>",
        "thinking",
    ),
}
USER = {"role": "user", "content": "Two apples and two?"}
ROWS = {
    "a field": [USER, {"role": "assistant", "reasoning_content": THOUGHT, "content": "4"}],
    "the content": [USER, {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n4"}],
}
letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokens = Tokenizer(models.BPE(vocab=letters, merges=[]))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
templates = {file.name: file.locate() for file in files("trl") if file.suffix == ".jinja"}
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "ms-swift", "trl", "datasets")))
print("expected: the thought is trained, or a message that it is not")
seen = {}
for kind, (model_type, template, file, special, end, key) in KINDS.items():
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=end, pad_token="<|pad|>", extra_special_tokens=special.split(),
        chat_template=Path(templates[f"{file}.jinja"]).read_text(),
    )
    own.save_pretrained(model_type)
    Path(model_type, "config.json").write_text(json.dumps({"model_type": model_type, "dtype": "bfloat16"}))
    processor = get_processor(model_type, model_type=model_type, template_type=template)
    as_written = [USER, {"role": "assistant", key: THOUGHT, "content": "4"}]
    print(f"{kind}, its own template: …{own.apply_chat_template(as_written, tokenize=False)[-90:]!r}")
    for where, messages in ROWS.items():
        if kind == "gpt-oss" and where == "the content":
            continue  # whose template has no <think>
        Path("rows.jsonl").write_text(json.dumps({"messages": messages}))
        rows, _ = load_dataset(["rows.jsonl"])
        encoder = get_template(processor, template_type=template)
        encoder.set_mode("train")
        encoded = encoder.encode(rows[0])
        trained = own.decode([label for label in encoded["labels"] if label != -100])
        print(f"{kind}, thought in {where}: read {rows[0]['messages'][1]}, trained: {trained!r}")
        seen[kind, where] = THOUGHT in trained, "think>" in trained
said = [line for line in Path("errors.txt").read_text().splitlines() if "reasoning" in line]
print("said of it:", said)
as_found = seen == {
    ("Qwen3", "a field"): (False, True), ("Qwen3", "the content"): (True, True), ("GLM-4.5", "a field"): (False, True),
    ("GLM-4.5", "the content"): (True, True), ("gpt-oss", "a field"): (False, False),
}
sys.exit(0 if as_found and not said else "changed since this was found")
PY
