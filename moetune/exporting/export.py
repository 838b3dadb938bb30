"""The export command's work: everything that can be wrong is found before a folder is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from moetune.adapt.build import Adapted
from moetune.exporting.delta import export_delta
from moetune.exporting.finished_run import FinishedRun, base_folder, in_memory, open_run
from moetune.exporting.folder import keep_apart, new_folder
from moetune.exporting.merged import bytes_needed, export_merged
from moetune.files import expanded
from moetune.training.data.load import chat_template


@dataclass(frozen=True)
class ExportResult:
    """What was written where."""

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
    """Exports what was trained to the folder `out`.

    Args:
        trained: a run folder, whose newest checkpoint is taken; or a model in memory, however it was trained. What that
            one began with is taken to be what its `model.path` holds now.
        format: changed tensors only, a PEFT adapter, a whole checkpoint, or an adapter for vLLM.
        overwrite: replace an earlier export.

    Raises:
        UserError: no such run, no checkpoint, nothing for this format, `out` is occupied. Nothing is written then.
    """
    out = Path(out)
    run = in_memory(trained) if isinstance(trained, Adapted) else open_run(Path(trained))
    _keep_apart(run, out, format)
    data = run.config.data
    template = None if data is None or data.chat_template is None else chat_template(data.chat_template)
    with new_folder(out, overwrite, bytes_needed(run) if format == "merged" else 0) as folder:
        if format == "merged":
            exported = export_merged(run, folder)
        elif format == "delta":
            exported = export_delta(run, folder)
        elif format == "vllm":
            from moetune.exporting.vllm import export_vllm

            exported = export_vllm(run, folder)
        else:
            from moetune.exporting.peft import export_peft

            exported = export_peft(run, folder)
        if template is not None and format != "delta":
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ExportResult(
        exported.format,
        str(out),
        exported.step,
        exported.tensors,
        exported.bytes,
        (*run.notes, *exported.notes),
    )


def _keep_apart(run: FinishedRun, out: Path, format: str) -> None:
    """Refuses to write over the run or its base, whatever `--overwrite` says."""
    kept = [expanded(run.config.model.path)]
    if run.path is not None:
        kept.append(run.path)
    if run.config.model.weights == "pretrained" and format != "peft":  # an adapter may do without
        kept.append(base_folder(run))
    keep_apart(out, "exported", *kept)
