"""`llama-server` by xllamacpp, whose wheel has llama.cpp's server but no program of that name: the options that
`moetune serve --with llama.cpp` gives, in float32 on one thread. Serves until it is ended.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from xllamacpp import CommonAdapterLoraInfo, CommonParams, Server, ggml_type, llama_flash_attn_type

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--lora", action="append", default=[])
parser.add_argument("--parallel", type=int)
parser.add_argument("--ctx-size", type=int)
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--chat-template-file", type=Path)
arguments = parser.parse_args()

params = CommonParams()
params.model.path = arguments.model
params.lora_adapters = [CommonAdapterLoraInfo(path, 1.0) for path in arguments.lora]
params.n_parallel, params.n_ctx, params.warmup = arguments.parallel, arguments.ctx_size, False
params.hostnames, params.port = [arguments.host], arguments.port
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = ggml_type.GGML_TYPE_F32
params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if arguments.chat_template_file is not None:
    params.use_jinja, params.chat_template = True, arguments.chat_template_file.read_text(encoding="utf-8")
server = Server(params)
signal.pause()
