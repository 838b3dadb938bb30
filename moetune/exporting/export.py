"""`moetune.export`: write a trained model as delta, adapter or merged checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from moetune.adapt.build import Adapted
from moetune.adapters.files import CHAT_TEMPLATE_FILE
from moetune.atomic import new_folder
from moetune.errors import UserError, shown
from moetune.exporting.finished_run import FinishedRun, base_folder, in_memory, open_run
from moetune.exporting.folder import keep_apart
from moetune.exporting.writers.delta import write_delta
from moetune.exporting.writers.merged import bytes_needed, write_merged
from moetune.exporting.writers.rounded import Into, Survival, write_rounded
from moetune.files import expanded
from moetune.json_files import Answer
from moetune.training.data.chats.stop_tokens import end_notes, stop_tokens
from moetune.training.data.chats.template_arguments import with_arguments
from moetune.training.data.load import chat_template, tokenizer_of


@dataclass(frozen=True)
class ExportResult(Answer):
    """The result of `export`.

    Attributes:
        format: `delta`, `peft`, `merged` or `vllm`.
        step: the step of the exported checkpoint; None for a model in memory.
        tensors: the number of tensors that hold trained values. Unchanged tensors of a merged checkpoint do not count.
        bytes: the size of these tensors.
        notes: messages for the user.
        into: the quantized format of a merged checkpoint; None for the base's 16 bits.
        survival: what rounding to that format leaves of the change, by layer, and last of all layers together; empty
            without rounding.
    """

    format: str
    out: str
    step: int | None
    tensors: int
    bytes: int
    notes: tuple[str, ...]
    into: str | None = None
    survival: tuple[Survival, ...] = ()


def export(
    trained: Adapted | FinishedRun | Path | str,
    format: Literal["delta", "peft", "merged", "vllm", "sglang"],
    out: Path | str,
    *,
    overwrite: bool = False,
    into: Into | None = None,
) -> ExportResult:
    """Write the trained model of a run to the folder `out`, in one of five formats.

    If the run file sets `data.chat_template` or `data.template`, all formats but `delta` also hold the template with
    its arguments, as `chat_template.jinja`.

    Args:
        trained: a run folder, of which `open_run` chooses the checkpoint; what it opened; or an adapted model in
            memory, whose base is what its `model.path` holds now.
        format: `delta`: only the tensors that trained in full precision. `peft`: a PEFT adapter. `merged`: a whole
            checkpoint. `vllm`, `sglang`: an adapter for vLLM or SGLang.
        out: the folder to write. It appears only when it is complete.
        into: `fp8`, `mxfp8`, `nvfp4`, `mxfp4` or `int4`, the quantized format to round a merged checkpoint to; None
            for no rounding.
        overwrite: replace an earlier export in `out`, which must be new or empty otherwise.

    Raises:
        UserError: there is no such format or run, or the run has no checkpoint; what was trained cannot be written in
            this format; `out` is occupied, or holds the run or its base. In all these cases nothing is written.
    """
    from moetune.exporting.writers.adapter import write_for_server, write_peft

    if into is not None and format != "merged":
        raise UserError(f"--into {into} rounds a whole checkpoint; use it with --format merged, not {format}")
    writers = {"delta": write_delta, "peft": write_peft, "merged": write_merged}
    writers |= {program: partial(write_for_server, program) for program in ("vllm", "sglang")}
    if format not in writers:
        raise UserError(f"format {shown(format)}: not one of {', '.join(writers)}")
    out = Path(out)
    if isinstance(trained, FinishedRun):
        run = trained
    else:
        run = in_memory(trained) if isinstance(trained, Adapted) else open_run(expanded(trained))
    kept = [expanded(run.config.model.path), *(() if run.path is None else (run.path,))]
    if (quantized := run.adapted.run.model.source.quantized_base) is not None:
        kept.append(quantized.source)
    if run.config.model.weights == "pretrained" and format != "peft":  # a PEFT adapter may need no base
        kept.append(base_folder(run))
    keep_apart(out, "exported", *kept)
    template = _chat_template(run)
    with new_folder(out, overwrite, bytes_needed(run) if format == "merged" else 0) as folder:
        survival: tuple[Survival, ...] = ()
        if into is None:
            written = writers[format](run, folder)
        else:
            written, survival = write_rounded(run, folder, into)
        if template is not None and format != "delta":
            (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    notes = (*run.notes, *written.notes, *_end_warnings(run), *_rounding_warnings(run, into))
    return ExportResult(format, str(out), run.step, written.tensors, written.bytes, notes, into, survival)


def _chat_template(run: FinishedRun) -> str | None:
    """Return the chat template that the run file gives, with its arguments as defaults; None if it gives neither."""
    data, source = run.config.data, run.adapted.run.model.source
    if data is None or (data.chat_template is None and not data.template):
        return None
    if data.chat_template is not None:
        return with_arguments(chat_template(data.chat_template), data.template)
    return with_arguments(tokenizer_of(source.name, source.folder).get_chat_template(), data.template)


def _rounding_warnings(run: FinishedRun, into: Into | None) -> Iterator[str]:
    """Yield a warning if the run was trained with weights rounded otherwise than in this export."""
    trained_for = run.config.train.merge_into
    if trained_for not in (None, into):
        yield (
            f"warning: it was trained to be merged into {trained_for} (train.merge_into), and computes otherwise in "
            f"this export; --format merged --into {trained_for} writes what was trained"
        )


def _end_warnings(run: FinishedRun) -> Iterator[str]:
    """Yield a warning for each end of the turns that the run was trained on at which its base does not stop."""
    inputs, model = None if run.folder is None else run.folder.inputs(), run.adapted.run.model
    if inputs is not None and inputs.ends:
        tokenizer = tokenizer_of(model.source.name, model.source.folder)
        notes = end_notes(inputs.ends, stop_tokens(tokenizer, model.settings, model.source.folder))
        yield from (note for note in notes if note.startswith("warning"))
