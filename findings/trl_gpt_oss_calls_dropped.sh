#!/usr/bin/env bash
# TRL 1.16.0: add_response_schema() gives gpt-oss a response template that knows a call of a tool only as the chat
# template writes it (`to=functions.f<|channel|>commentary json<|message|>`). gpt-oss itself names the recipient in the
# channel, `<|channel|>commentary to=functions.f <|constrain|>json<|message|>`, as in the documentation of its format
# (openai/harmony) and of transformers (chat_response_parsing). Such a call is dropped: the message has no tool_calls,
# and nobody is told. Of two thoughts in a turn only the last is kept. Hurts GRPO with tools: these are not run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
"$folder/venv/bin/python" - <<'EOF'
import sys
from pathlib import Path

import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import add_response_schema, parse_response

THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
ARGUMENTS = '<|message|>{"city": "Oslo"}<|call|>'
TURNS = {
    "a call as the template writes it": " to=functions.weather<|channel|>commentary json" + ARGUMENTS,
    "a call as gpt-oss writes it": "<|channel|>commentary to=functions.weather <|constrain|>json" + ARGUMENTS,
    "two thoughts": THOUGHT.format("SECOND") + "<|channel|>final<|message|>Hi<|return|>",
}
bytes_ = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
backend = Tokenizer(models.BPE(bytes_, []))
backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
template = Path(trl.__file__).parent / "chat_templates" / "gptoss.jinja"
control = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call")]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend,
    chat_template=template.read_text(),
    eos_token="<|return|>",
    additional_special_tokens=control,
)
add_response_schema(tokenizer)
asked = [{"role": "user", "content": "How is the weather in Oslo?"}]
prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]

print("trl", trl.__version__, "transformers", transformers.__version__)
print("expected: both calls under tool_calls, and of two thoughts FIRST and SECOND")
parsed = {}
for name, turn in TURNS.items():
    ids = tokenizer(THOUGHT.format("FIRST") + turn, add_special_tokens=False)["input_ids"]
    parsed[name] = parse_response(tokenizer, ids, prefix=prompt)
    print(f"seen, {name}: {parsed[name]}")
written, own, thoughts = parsed.values()
is_as_found = [call["function"]["name"] for call in written["tool_calls"]] == ["weather"] and "tool_calls" not in own
is_as_found = is_as_found and own["content"] == "" and thoughts["thinking"] == "SECOND"
sys.exit(0 if is_as_found else "changed since this was found")
EOF
