#!/usr/bin/env bash
# openrlhf 0.11.2: SFTDataset cuts rows at max_length and writes the end-of-sequence token over the last token that is
# left. It has loss: where answers are long, the model is trained to stop in the middle of a sentence, at one length.
# No warning, no count. Right where a row fits, with a chat template or without; a prompt that fills max_length is left
# out. Hurts whoever trains on long answers or thoughts, and finds that the model breaks off.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.15.0 datasets==5.2.0 numpy==2.3.5 jinja2==3.1.6 \
    pylatexenc==2.10 sympy==1.14.0
"$folder/venv/bin/pip" install --quiet --no-deps openrlhf==0.11.2
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { tail -n 15 errors.txt; exit 1; }
import sys
from importlib.metadata import version
from types import SimpleNamespace

from datasets import Dataset
from openrlhf.datasets import SFTDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ANSWER = "one, two, three, four, five, six, seven"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokens = Tokenizer(models.BPE(vocab=letters, merges=[]))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokens, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE,
    extra_special_tokens=["<|user|>", "<|assistant|>"],
)
rows = Dataset.from_list([{"question": "Count.", "answer": ANSWER}])
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "openrlhf", "datasets")))
print("expected: where the answer is cut, its end is not trained")
seen = {}
for with_template in (True, False):
    for length in (100, 36):
        settings = SimpleNamespace(input_key="question", output_key="answer", apply_chat_template=with_template)
        strategy = SimpleNamespace(args=SimpleNamespace(data=settings))
        form = None if with_template else "Question: {} Answer: "
        dataset = SFTDataset(rows, tokenizer, length, strategy, input_template=form, num_processors=1)
        ids, _, loss = dataset[0]
        trained = tokenizer.decode([id for id, weight in zip(ids[0, 1:].tolist(), loss[0].tolist()) if weight])
        print(f"chat template {with_template}, max_length {length}: {ids.shape[1]} tokens, trained: {trained!r}")
        text = trained.removesuffix("<|end|>").rstrip()
        seen[with_template, length] = trained.endswith("<|end|>"), ANSWER.startswith(text) and text != "", text == ANSWER
as_found = seen == {key: (True, True, key[1] == 100) for key in seen}
sys.exit(0 if as_found else "changed since this was found")
PY
