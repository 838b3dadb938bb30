#!/usr/bin/env bash
# transformers 5.24.0: model code of before, as repositories on the hub have it (`trust_remote_code`), generates other
# tokens. `generate` gives the cache of keys and values under its new name, `cache`; code that takes `past_key_values`
# gets it among its `**kwargs` or not at all, so each new token sees the last one alone. Logged are deprecations, no
# error. Shown with transformers' own Llama of 5.23.0 as such code, which a forward pass without a cache runs rightly.
# Hurts whoever generates with such a model, evaluates it so, or trains it on its own completions (GRPO).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/generate.py" <<'EOF'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

root, expected = Path(sys.argv[1]), sys.argv[2] == "right"
print(*(f"{name} {version(name)}" for name in ("torch", "transformers")))
if not (root / "model").exists():  # in the run with 5.23.0, whose code this is
    code = (Path(transformers.__file__).parent / "models/llama/modeling_llama.py").read_text()
    code = code.replace("from .configuration_llama", "from transformers").replace("from ... import", "from transformers import")
    code = code.replace("from ...", "from transformers.")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.3}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(root / "model")
    (root / "model/modeling_before.py").write_text(code)
    settings = json.loads((root / "model/config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "modeling_before.LlamaForCausalLM"}
    (root / "model/config.json").write_text(json.dumps(settings))
asked = torch.randint(3, 96, (1, 6), generator=torch.Generator().manual_seed(0))
seen = []
for trusted in (False, True):
    model = AutoModelForCausalLM.from_pretrained(root / "model", trust_remote_code=trusted).eval()
    rows = asked
    with torch.no_grad():
        for _ in range(8):  # the most probable token of a pass over all tokens, again and again
            rows = torch.cat([rows, model(input_ids=rows).logits[:, -1:].argmax(-1)], 1)
        generated = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=8, do_sample=False)
    print(f"{type(model).__module__.split('.')[-1]}: expected {rows[0, 6:].tolist()}, generated {generated[0, 6:].tolist()}")
    seen.append(torch.equal(generated, rows))
sys.exit(0 if seen == [True, expected] else "changed since this was found")
EOF
run() {  # version of transformers; whether the model's own code generates what its forward pass says
  python3.11 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet torch==2.13.0 "transformers==$1" numpy==2.3.5
  HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1 "$folder/$1/bin/python" "$folder/generate.py" "$folder" "$2" \
    2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
}
run 5.23.0 right
run 5.24.0 wrong
