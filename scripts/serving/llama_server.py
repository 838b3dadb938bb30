"""`llama-server` by xllamacpp, whose wheel has llama.cpp's server but no program of that name: the options that
`moetune serve --with llama.cpp` gives, in float32 on one thread. Serves until it is ended.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xllamacpp import CommonAdapterLoraInfo, CommonParams, Server, ggml_type, llama_flash_attn_type


def serve(model: str, adapters: Sequence[str], scale: float, **options: Any) -> Server:
    """Start a server of a model and adapters; `options` are further fields of CommonParams."""
    params = CommonParams()
    params.model.path = model
    params.lora_adapters = [CommonAdapterLoraInfo(path, scale) for path in adapters]
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = ggml_type.GGML_TYPE_F32  # the default, float16, costs three digits
    params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for name, value in options.items():
        setattr(params, name, value)
    return Server(params)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("--parallel", type=int, dest="n_parallel")
    parser.add_argument("--ctx-size", type=int, dest="n_ctx")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--chat-template-file", type=Path, dest="template")
    given = parser.parse_args()
    options = {"n_parallel": given.n_parallel, "n_ctx": given.n_ctx, "hostnames": [given.host], "port": given.port}
    if given.template is not None:
        options |= {"use_jinja": True, "chat_template": given.template.read_text(encoding="utf-8")}
    server = serve(given.model, given.lora, 1.0, **options)
    signal.pause()
