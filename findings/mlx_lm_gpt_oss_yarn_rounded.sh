#!/usr/bin/env bash
# mlx-lm 0.32.2: YaRN's bounds are rounded to whole dimensions also where the settings say `truncate: false`, as those of
# gpt-oss do: one of its frequencies is 1.76 times what the model was trained with. attention_factor is not read either.
# No warning. Right where truncate is true, which is the default. Hurts whoever serves gpt-oss, or a model that was
# trained with either setting: attention is not what it was in training.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.3.5 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys
from importlib.metadata import version

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.gpt_oss import AttentionBlock, ModelArgs
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

PUBLISHED = {  # of openai/gpt-oss-20b and gpt-oss-120b
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False,
}
SMALL = {"num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 2, "hidden_size": 64}
SMALL |= {"intermediate_size": 64, "vocab_size": 96, "head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
POSITIONS = 64


def turned(rotary, turns):
    """Return what two rotary embeddings make of the same queries at positions from 0 on, as arrays."""
    queries = np.random.default_rng(0).normal(size=(1, 1, POSITIONS, 64)).astype(np.float32)
    cosines, sines = (part.numpy() for part in rotary(torch.tensor(queries), torch.arange(POSITIONS)[None]))
    first, second = queries[..., :32], queries[..., 32:]
    reference = np.concatenate((first * cosines - second * sines, second * cosines + first * sines), -1)
    return reference, np.array(turns(mx.array(queries)))


print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
print("expected: the frequencies, and the scale of queries and keys, of transformers, or an error")
as_found = True
for named, changed, right in (
    ("truncate: true", {"truncate": True}, True),
    ("truncate: false, as published", {}, False),
    ("truncate: true, attention_factor: 1", {"truncate": True, "attention_factor": 1.0}, False),
):
    rope = PUBLISHED | changed
    rotary = GptOssRotaryEmbedding(GptOssConfig(**SMALL, rope_parameters=rope | {"rope_theta": 150000.0}))
    turns = AttentionBlock(ModelArgs(**SMALL, rope_theta=150000, rope_scaling=rope)).rope
    ratios = 1 / np.array(turns._freqs) / rotary.inv_freq.numpy()
    reference, computed = turned(rotary, turns)
    apart = abs(computed - reference).max()
    print(f"{named}: frequencies {ratios.min():.2f} to {ratios.max():.2f} times those of transformers, scale "
          f"{turns.mscale:.2f} and {rotary.attention_scaling:.2f}; queries differ by {apart:.1e}")
    as_found &= (apart < 1e-3) == right
    as_found &= (ratios.max() > 1.7) == (not changed)
sys.exit(0 if as_found else "changed since this was found")
EOF
