#!/usr/bin/env bash
# llama.cpp (of xllamacpp 2026.10.11549, llama-cpp-python 0.3.36): an adapter on q_a_proj, q_b_proj or
# kv_a_proj_with_mqa of DeepSeek-V3's latent attention is converted and loaded without a message, and not applied: the
# server answers as the base does. On o_proj it is applied. Hurts adapters of DeepSeek-V3 and of what is built like it,
# whose attention then is that of the base; the merged model is served rightly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" --quiet "$@"; }
pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5 sentencepiece==0.2.2 \
  xllamacpp==2026.10.11549
pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 --dest "$folder"  # has the converters
tar --extract --gzip --file "$folder"/llama_cpp_python-*.tar.gz --directory "$folder"
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF' 2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
import json
import runpy
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedTokenizerFast
from xllamacpp import CommonAdapterLoraInfo, CommonParams, Server, ggml_type, llama_flash_attn_type

folder = Path(sys.argv[1])
llama = next(folder.glob("llama_cpp_python-*")) / "vendor/llama.cpp"
sys.path[:0] = [str(llama), str(llama / "gguf-py")]
import conversion.base

# the converter knows tokenizers by a hash, which a toy's is not among; prompts are ids here
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
BYTES = sorted(name for name in pre_tokenizers.ByteLevel.alphabet() if ord(name) < 127 or name == "Ġ")
NAMES = ["<unk>", "<s>", "</s>", *BYTES, "Ġt"]
PROMPT = [5, 20, 33, 47, 9, 61]


def save(model, path):
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.BPE({name: id for id, name in enumerate(NAMES)}, [("Ġ", "t")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(NAMES[:3])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)


def convert(script, *arguments):
    sys.argv = [script, *map(str, arguments), "--outtype", "f32"]
    runpy.run_path(str(llama / script), run_name="__main__")


def serve(model, *adapters):
    params = CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(model), 64, 1, False
    params.lora_adapters = [CommonAdapterLoraInfo(str(path), 1.0) for path in adapters]
    params.cache_type_k = params.cache_type_v = ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return Server(params)


def post(server, path, body):
    request = Request(server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urlopen(request))


def served(server, **more):
    """The log-probabilities of the next token after PROMPT."""
    body = {"prompt": PROMPT, "n_predict": 1, "n_probs": len(NAMES), "temperature": 0, "ignore_eos": True, **more}
    tokens = post(server, "/completion", body)["completion_probabilities"][0]["top_logprobs"]
    return torch.tensor([token["logprob"] for token in sorted(tokens, key=lambda token: token["id"])])


@torch.no_grad()
def computed(model):
    return torch.log_softmax(model.eval()(torch.tensor([PROMPT])).logits[0, -1], -1)


def difference(one, other):
    return (one - other).abs().max().item()


CONFIG = DeepseekV3Config(
    vocab_size=len(NAMES), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=64, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
    first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64,
    head_dim=64, initializer_range=0.1,
)
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("xllamacpp 2026.10.11549")
print("expected: what PEFT computes, whichever layer has the factors")
torch.manual_seed(0)
save(AutoModelForCausalLM.from_config(CONFIG), folder / "base")
config = json.loads((folder / "base/config.json").read_text())
(folder / "base/config.json").write_text(json.dumps(config | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
convert("convert_hf_to_gguf.py", folder / "base", "--outfile", folder / "base.gguf")
off = {}
for target in ("o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"):
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    alone = computed(base)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=[target]))
    for name, factor in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(factor, std=0.3)
    model.save_pretrained(path := folder / target)
    convert("convert_lora_to_gguf.py", path, "--base", folder / "base", "--outfile", f"{path}.gguf")
    answer, own = served(serve(folder / "base.gguf", f"{path}.gguf")), computed(model)
    off[target] = difference(answer, own)
    print(f"{target}: the adapter changes log-probabilities by {difference(own, alone):.2f}; served they differ by "
          f"{off[target]:.1e} from PEFT, by {difference(answer, alone):.1e} from the base")
sys.exit(0 if off["o_proj"] < 1e-2 < 1 < off["kv_a_proj_with_mqa"] else "changed since this was found")
EOF
