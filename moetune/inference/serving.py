"""`moetune serve`: commands with which vLLM or llama.cpp serves a run or export."""

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from typing import Literal

import torch

from moetune.adapters.check import MIXED_FORMAT
from moetune.adapters.files import CHAT_TEMPLATE_FILE, CONFIG_FILE, open_adapter
from moetune.errors import DoesNotFit, UserError
from moetune.exporting.adapter import check_adapter
from moetune.exporting.export import export
from moetune.files import expanded
from moetune.inference.memory import predict_generate
from moetune.inference.opened import Opened, find
from moetune.json_files import Answer
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu
from moetune.planning.fit import last_that_fits
from moetune.report.units import gib
from moetune.training.folder.run_folder import RUN_FILE

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `--max-lora-rank` (0.32)."""
_HOST = "127.0.0.1"
_STEP = 256
"""Lengths of context are multiples of this."""
_GGUF: dict[object, str] = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True)
class Serving(Answer):
    """How a program serves a model.

    Attributes:
        commands: to be called in this order; the last one is the server, the others end with the file that they write.
        context: tokens of each of `requests` requests at once for which the card has room beside the weights, no more
            than the model has positions; None without a card to predict for.
        missing: names of programs of `commands` that are not installed here.
        notes: messages for the user.
    """

    program: str
    commands: list[list[str]]
    port: int
    requests: int
    context: int | None
    missing: list[str]
    notes: list[str]

    def text(self) -> str:
        """Return the commands, as a shell takes them."""
        return "\n".join(map(shlex.join, self.commands))

    def start(self) -> None:
        """Call the commands; the last one takes the place of this process. Raise `UserError` if one fails, or the port
        is taken."""
        try:
            create_server((_HOST, self.port)).close()
        except OSError as error:
            raise UserError(f"port {self.port} of {_HOST}: {error.strerror}; give another --port") from None
        for *command, file in self.commands[:-1]:
            unfinished = f"{file}.unfinished"  # what is there under the file's own name is not made again
            if code := subprocess.run([*command, unfinished], check=False).returncode:
                raise UserError(f"{command[0]} ended with exit code {code}")
            os.replace(unfinished, file)
        os.execvp(self.commands[-1][0], self.commands[-1])


def serving(
    what: str,
    program: Literal["vllm", "llama.cpp"],
    *,
    name: str = "mine",
    requests: int = 8,
    port: int = 8000,
    gpu: str | Gpu | None = None,
) -> Serving:
    """Find the commands with which a program serves a model. A run is exported as an adapter first, to `WHAT-served`.

    Args:
        what: a run folder, the folder of an adapter or a checkpoint, a catalog name or a hub id.
        name: the name by which requests choose the adapter.
        requests: how many requests are answered at once, each with the whole context.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry; None for no prediction.

    Raises:
        UserError: the program does not read the adapter or the run's LoRA, with the remedy; or there is no such model.
        DoesNotFit: the card has no room for this many requests.
    """
    folder, notes = expanded(what), list[str]()
    if folder.name in ("", ".."):
        folder = folder.resolve()
    if (folder / RUN_FILE).is_file():
        run, folder = folder, folder.with_name(f"{folder.name}-served")
        if not folder.exists():
            notes += export(run, "vllm", folder).notes
        else:  # the run may have gone on since
            notes.append(f"{folder} is served as it was exported before, not the run's newest checkpoint")
        notes.append(f"the run's adapter is in {folder}; remove it to export again")
    adapter = folder if (folder / CONFIG_FILE).is_file() else None
    more, base, slot = ([], what, 0) if adapter is None else _with_adapter(adapter, program, name, on_cpu=gpu is None)
    opened = find(base, device="cpu" if gpu is None else "cuda")
    context = None if gpu is None else _context(opened, program, requests, gpu, slot)
    source = opened.resolved.source
    if source.quantized_base is not None:
        raise UserError(f"{program} does not read moetune's quantized bases; give {source.quantized_base.source}")
    dtype, conversions = source.config.dtype, list[list[str]]()
    if program == "vllm":
        command = ["vllm", "serve", source.folder or base, "--max-num-seqs", str(requests), *more]
        command += ["--dtype", "auto" if dtype is None else str(dtype).removeprefix("torch.")]
        command += [] if context is None else ["--max-model-len", str(context)]
    else:
        if (local := source.local_folder()) is None:
            raise UserError(f"llama.cpp converts a folder; download it first: hf download {source.folder}")
        to = ["--outtype", _GGUF.get(dtype, "auto"), "--outfile"]
        # nothing is written where the hub's cache or the catalog has a base
        model = f"{folder if folder.is_dir() else folder.name}{'' if adapter is None else '-base'}.gguf"
        conversions.append(["convert_hf_to_gguf.py", str(local), *to, model])
        command = ["llama-server", "--model", model, "--parallel", str(requests)]
        command += ["--ctx-size", str(0 if context is None else requests * context)]
        if adapter is not None:
            conversions.append(["convert_lora_to_gguf.py", str(adapter), "--base", str(local), *to, f"{adapter}.gguf"])
            command += ["--lora", f"{adapter}.gguf"]
    if adapter is not None and (template := adapter / CHAT_TEMPLATE_FILE).is_file():  # else the base's own
        command += ["--chat-template" if program == "vllm" else "--chat-template-file", str(template)]
    made = [conversion[-1] for conversion in conversions if Path(conversion[-1]).exists()]
    notes += [f"{file} is not converted again; remove it if what it was made from has changed" for file in made]
    commands = [conversion for conversion in conversions if conversion[-1] not in made]
    commands.append([*command, "--host", _HOST, "--port", str(port)])
    missing = sorted({command[0] for command in commands if shutil.which(command[0]) is None})
    return Serving(program, commands, port, requests, context, missing, notes)


def _with_adapter(adapter: Path, program: str, name: str, *, on_cpu: bool) -> tuple[list[str], str, int]:
    """Return vLLM's options for an adapter, the base that it names, and the bytes of its factors in the server;
    `UserError` if the program would misread it."""
    stored = open_adapter(adapter)
    base = stored.settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{stored} names no base; write base_model_name_or_path into its adapter_config.json")
    told = check_adapter(base, adapter, program=program).programs[program]
    is_mixed = told is not None and MIXED_FORMAT in told
    if told is not None and not is_mixed:
        raise UserError(f"{stored}: {told}")
    size = 2 * sum(tensor.numel() for tensor in stored.tensors.values())
    if program != "vllm":
        return [], base, size
    most = max(stored.scales.r, *(stored.scales.rank_pattern or {}).values(), 1)
    if most > _RANKS[-1]:
        raise UserError(f"{stored} has rank {most}, and vLLM takes {_RANKS[-1]} at most; merge it")
    rank = next(rank for rank in _RANKS if rank >= most)
    options = ["--enable-lora", "--max-lora-rank", str(rank)]
    if on_cpu:
        options += ["--max-loras", "2"]  # on a CPU the last slot's factors also act on requests of the base
    module = {"name": name, "path": str(adapter)} | ({"is_3d_lora_weight": True} if is_mixed else {})
    options += [*[MIXED_FORMAT] * is_mixed, "--lora-modules", json.dumps(module)]
    return options, base, size * rank // most


def _context(opened: Opened, program: str, requests: int, gpu: str | Gpu, slot: int) -> int:
    """Return the longest context of this many requests for which a card has room beside the weights and an adapter's
    `slot` bytes."""
    most = int(getattr(opened.settings.get_text_config(), "max_position_embeddings", 0) or 1 << 17)

    def predict(number: int) -> MemoryReport:
        return predict_generate(opened, 1, (number + 1) * _STEP - 1, batch=requests, gpu=gpu)

    def left(report: MemoryReport) -> int:
        """vLLM takes nine tenths of a card (`--gpu-memory-utilization`)."""
        assert report.gpu is not None
        free = report.gpu.usable_bytes * (9 if program == "vllm" else 10) // 10
        return free - report.required - slot

    count = max(most // _STEP, 1)
    last, reports = last_that_fits(count, predict, left, count - 1)
    if last < 0:
        report = reports[min(reports)]
        raise DoesNotFit(
            f"{requests} requests of {_STEP} tokens, with weights of "
            f"{gib(report.fullest.parts.frozen_weights + slot)}, need {gib(-left(report))} more than {program} has of "
            "this card; give fewer --requests, or a larger --gpu",
            report.to_json(),
        )
    return min((last + 1) * _STEP, most)
