"""`write_vllm`: export LoRA as an adapter for vLLM (`vllm serve BASE --enable-lora --lora-modules NAME=DIR`).

The layout is that of `moetune.adapters.write` for vLLM: tensors named as in the base checkpoint, one rank, one scale.
"""

from pathlib import Path

from moetune.adapters.base import base_of
from moetune.adapters.write import laid_out
from moetune.errors import UserError
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base
from moetune.exporting.folder import Written
from moetune.exporting.formats.peft import written
from moetune.exporting.formats.trained_adapter import trained_adapter


def write_vllm(run: FinishedRun, out: Path) -> Written:
    """Write the LoRA factors of a run as an adapter for vLLM into the folder `out`.

    Raises:
        UserError: the run has no LoRA, or also trains parameters in full precision; the base is missing or has changed;
            or vLLM has no name for a parameter with LoRA in the form in which the base checkpoint stores it.
    """
    adapted, lora = run.adapted, run.config.adapt.lora
    if lora is None:
        raise UserError(f"{run} has no adapt.lora, so there is no adapter; use --format merged")
    if adapted.selection.full or adapted.selection.experts:
        what = min(adapted.selection.full) if adapted.selection.full else "whole experts"
        raise UserError(f"{run} trains {what} beside LoRA, and vLLM's adapters hold factors only; use --format merged")
    folder = base_folder(run)
    confirmed_base(run, folder)
    model = adapted.run.model
    trained = {name: stored.rows().float() for name, stored in run.trained.items()}
    base = base_of(model.source, model.plain, model.structure, model.source.name)
    laid = laid_out(trained_adapter(adapted, lora, trained), base, "vllm")
    laid.settings["base_model_name_or_path"] = str(folder)
    return written(out, laid)
