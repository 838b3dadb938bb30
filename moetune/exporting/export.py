"""`moetune.export`: what was trained, in a format that other programs read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from moetune.adapt.build import Adapted
from moetune.exporting.delta import write_delta
from moetune.exporting.finished_run import base_folder, in_memory, open_run
from moetune.exporting.folder import keep_apart, new_folder
from moetune.exporting.merged import bytes_needed, write_merged
from moetune.files import expanded
from moetune.training.data.load import chat_template


@dataclass(frozen=True)
class ExportResult:
    """What was written where; `tensors` and `bytes` of what trained."""

    format: str
    out: str
    step: int | None
    tensors: int
    bytes: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}


def export(
    trained: Adapted | Path | str,
    format: Literal["delta", "peft", "merged", "vllm"],
    out: Path | str,
    *,
    overwrite: bool = False,
) -> ExportResult:
    """Export what was trained to the folder `out`.

    Args:
        trained: a run folder, whose newest checkpoint is exported; or a model in memory, however it was trained, whose
            base is what its `model.path` holds now.
        format: changed tensors only, a PEFT adapter, a whole checkpoint, or an adapter for vLLM.
        overwrite: replace an earlier export.

    Raises:
        UserError: no such run, no checkpoint, nothing for this format, `out` is occupied. Nothing is written then.
    """
    from moetune.exporting.peft import write_peft
    from moetune.exporting.vllm import write_vllm

    writers = {"delta": write_delta, "peft": write_peft, "merged": write_merged, "vllm": write_vllm}
    out = Path(out)
    run = in_memory(trained) if isinstance(trained, Adapted) else open_run(Path(trained))
    kept = [expanded(run.config.model.path), *(() if run.path is None else (run.path,))]
    if run.config.model.weights == "pretrained" and format != "peft":  # an adapter may do without the base
        kept.append(base_folder(run))
    keep_apart(out, "exported", *kept)
    data = run.config.data
    template = None if data is None or data.chat_template is None else chat_template(data.chat_template)
    with new_folder(out, overwrite, bytes_needed(run) if format == "merged" else 0) as folder:
        written = writers[format](run, folder)
        if template is not None and format != "delta":
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ExportResult(format, str(out), run.step, written.tensors, written.bytes, (*run.notes, *written.notes))
