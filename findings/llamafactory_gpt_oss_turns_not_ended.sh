#!/usr/bin/env bash
# llamafactory 0.9.5: what its template `gpt_oss` trains on has no `<|end|>` between an answer and the next user's turn.
# A system message takes the place of the model's own, which names its channels and reasoning effort, where the model
# has it as a developer's; every answer has an empty thought before it. The model was made, and is served, with another
# format. Right for DeepSeek-V3 and Qwen3 Instruct 2507; of GLM-4.5 newlines differ. Hurts whoever fine-tunes gpt-oss
# there on conversations. (Copies of the models' own templates are in TRL's wheel.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.6.0 datasets==4.0.0 peft==0.18.1 \
  accelerate==1.11.0 numpy==2.3.5 omegaconf==2.3.0
"$folder/venv/bin/pip" install --quiet --no-deps llamafactory==0.9.5 trl==1.16.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import importlib.metadata
import sys
import types
from types import SimpleNamespace

import peft  # noqa: F401 - before the stand-in below
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.modules["torchaudio"] = types.ModuleType("torchaudio")  # imported for sounds alone
from llamafactory.data.template import get_template_and_fix_tokenizer  # noqa: E402

KINDS = {  # LLaMA-Factory's name, TRL's file, special tokens, end of text
    "gpt_oss": ("gptoss", "<|start|> <|end|> <|message|> <|channel|> <|return|>", "<|return|>"),
    "deepseek3": (
        "deepseekv3",
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "qwen3_nothink": ("qwen3_instruct_2507", "<|im_start|> <|im_end|> <|endoftext|>", "<|im_end|>"),
}
SYSTEM = "Be short."
chat = [
    {"role": role, "content": content}
    for role, content in (("user", "One?"), ("assistant", "1."), ("user", "Two?"), ("assistant", "2."))
]
templates = importlib.metadata.distribution("trl").locate_file("trl/chat_templates")
print("transformers", transformers.__version__, "llamafactory", importlib.metadata.version("llamafactory"))
print("expected: the text of the model's own template")
seen = {}
for name, (file, special, end) in KINDS.items():
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_bytes = Tokenizer(models.BPE(alphabet, []))
    by_bytes.pre_tokenizer, by_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    by_bytes.add_special_tokens(special.split())
    begin = special.split()[0] if name == "deepseek3" else None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_bytes, bos_token=begin, eos_token=end, pad_token=end)
    own_template = (templates / f"{file}.jinja").read_text()
    own = tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM}, *chat], tokenize=False, chat_template=own_template
    )
    arguments = SimpleNamespace(
        template=name, train_on_prompt=False, tool_format=None, default_system=None, enable_thinking=True,
        preserve_thinking=False,  # the defaults
    )
    template = get_template_and_fix_tokenizer(tokenizer, arguments)
    turns = template.encode_multiturn(tokenizer, chat, SYSTEM)
    ids = [token for prompt, answer in turns for token in prompt + answer]
    ids += [tokenizer.eos_token_id] * template.efficient_eos  # as its processor for SFT does
    text = tokenizer.decode(ids)
    print(f"{name}\n  model's own:    {own!r}\n  LLaMA-Factory's: {text!r}")
    seen[name] = own == text
    if name == "gpt_oss":
        ends = [written.count("<|end|><|start|>user<|message|>Two?") for written in (own, text)]
        developer = ["<|start|>developer" in written for written in (own, text)]
as_found = seen == {"gpt_oss": False, "deepseek3": True, "qwen3_nothink": True}
sys.exit(0 if as_found and ends == [1, 0] and developer == [True, False] else "changed since this was found")
EOF
