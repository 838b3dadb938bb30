#!/usr/bin/env bash
# mlx-lm 0.32.2: the loss of `mlx_lm.lora` counts one target more than a row has, the padding behind its last token: a
# model learns that token 0 comes after the end, and the mean loss, in training and evaluation, has that target in it.
# With --mask-prompt it is one of the few that count. Right for rows that are cut off at max_seq_length. Hurts whoever
# trains on short answers: of an answer of one token and the end, a third of what is trained is token 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 numpy==2.3.5 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys
from importlib.metadata import version

import mlx.core as mx
from mlx_lm.tuner.trainer import default_loss, iterate_batches

END, LIMIT = 2, 40
NEXT = {5: 6, 6: 7, 7: 8, 8: END, 9: 9}  # the token that follows another in every row; nothing follows the end
ROWS = {  # a row: its tokens, and how many of them are the prompt
    "an answer of one token, and the end": ([5, 6, 7, 8, END], 3),
    "the same, every token trained": ([5, 6, 7, 8, END], 1),
    "cut off at max_seq_length": ([9] * 60, 30),
}


def model(ids):
    """Give what follows a token in the rows a logit of 30 and every other token 0: the loss of a target is 0 or 30."""
    return mx.array([[[30.0 * (NEXT.get(i) == token) for token in range(16)] for i in row] for row in ids.tolist()])


print(*(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "transformers")))
print("expected: targets are the tokens behind the prompt up to the last; a model that knows them has a loss of 0")
as_found = True
for name, (tokens, prompt) in ROWS.items():
    ((batch, lengths),) = iterate_batches([(tokens, prompt)], 1, LIMIT)
    loss, targets = default_loss(model, batch, lengths)
    behind = min(len(tokens), LIMIT) - prompt
    print(f"{name}: {behind} tokens behind the prompt, {int(targets)} targets, mean loss {loss.item():.2f}")
    one_more = len(tokens) <= LIMIT
    as_found &= int(targets) == behind + one_more and (loss.item() > 0.1) is one_more
sys.exit(0 if as_found else "changed since this was found")
EOF
