#!/usr/bin/env bash
# auto-round 0.16.1: round-to-nearest (`iters=0`) of gpt-oss in 16 bits takes its experts for [out, in], where they are
# stored as [in, out] with gate and up in turns. As "gate" it saves the first half of the inputs, as "up" the other, and
# `down_proj` transposed, which no shape betrays in the published models, whose experts are square. It says only that it
# splits them. Right for Qwen3-MoE, and for gpt-oss with `disable_model_free=True`. Hurts whoever quantizes a gpt-oss
# that was fine-tuned: what is saved has no expert of the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 auto-round==0.16.1 \
    datasets==5.2.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
cat > run.py <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from auto_round import AutoRound
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=64)
KINDS = {
    "gpt-oss": GptOssConfig(
        **SIZES, num_hidden_layers=1, intermediate_size=64, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=8192,
    ),
    "Qwen3-MoE": Qwen3MoeConfig(
        **SIZES, num_hidden_layers=1, moe_intermediate_size=64, num_experts=2, num_experts_per_tok=1
    ),
}


def experts(model: torch.nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """Return the parts of the first expert as [out, in]."""
    both, down = (getattr(model.model.layers[0].mlp.experts, f"{part}_proj")[0].float() for part in ("gate_up", "down"))
    gate, up = (both[:, ::2].T, both[:, 1::2].T) if kind == "gpt-oss" else both.chunk(2)
    return {"gate_proj": gate, "up_proj": up, "down_proj": down.T if kind == "gpt-oss" else down}


def saved(folder: Path, part: str) -> torch.Tensor:
    """Return what was saved as this part of the first expert, with its scales of 32 values applied."""
    tensors = {name: tensor for file in folder.rglob("*.safetensors") for name, tensor in load_file(file).items()}
    name = f"model.layers.0.mlp.experts.0.{part}.weight"
    scales = torch.exp2(tensors[f"{name}_scale"].float() - 127)
    return tensors[name].float() * scales.repeat_interleave(32, 1)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative distance, infinite if the shapes differ."""
    return ((found - wanted).norm() / wanted.norm()).item() if found.shape == wanted.shape else float("inf")


def main() -> None:
    report = open(3, "w", buffering=1)  # the package logs to the standard output
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")), eos_token="w1"
    )
    print("torch", torch.__version__, "transformers", transformers.__version__, "auto-round", version("auto-round"),
          file=report)
    print("expected: each part of an expert is saved as it was, but for the rounding to 8 bits", file=report)
    seen = {}
    for kind, config in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(kind)
        tokenizer.save_pretrained(kind)
        parts = experts(model, kind)
        for way, options in (("by default", {}), ("disable_model_free", {"disable_model_free": True})):
            out = Path(f"{kind} {way}")
            options |= {"iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
            rounding = AutoRound(kind, tokenizer, scheme="MXFP8", **options)
            rounding.quantize_and_save(str(out), format="auto_round")
            found = {part: saved(out, part) for part in parts}
            distances = {part: off(found[part], wanted) for part, wanted in parts.items()}
            seen[kind, way] = all(distance < 0.1 for distance in distances.values())
            print(f"{kind}, {way}: " + ", ".join(f"{part} {tuple(found[part].shape)} is {distances[part]:.2f} from "
                  "that of the model" for part in parts), file=report)
            if not seen[kind, way]:
                both = model.model.layers[0].mlp.experts.gate_up_proj[0].float()
                guesses = off(found["gate_proj"], both[:32]), off(found["down_proj"], parts["down_proj"].T)
                print(f"  gate is {guesses[0]:.2f} from the first inputs of gate and up, down is {guesses[1]:.2f} from "
                      "down transposed", file=report)
                seen["as said"] = max(guesses) < 0.1
    wanted = {("gpt-oss", "by default"): False, ("gpt-oss", "disable_model_free"): True, "as said": True}
    wanted |= {("Qwen3-MoE", way): True for way in ("by default", "disable_model_free")}
    sys.exit(0 if seen == wanted else "changed since this was found")


if __name__ == "__main__":
    main()
PY
"$folder/venv/bin/python" run.py 3>&1 >log.txt 2>&1 || { tail -n 20 log.txt; exit 1; }
