"""`write_delta`: only the tensors that trained in full precision, under the base's names.

A tensor that trained is written even if its values equal the base's. models/hub/delta_folder.py describes the files.
"""

from collections import defaultdict
from pathlib import Path

import torch

from moetune.errors import UserError
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base, manifest_entries
from moetune.exporting.folder import Written, write_export_manifest
from moetune.exporting.writers.updates import new_rows, placed, updates
from moetune.formats.checkpoint import open_checkpoint
from moetune.models.hub.delta_folder import DELTA_FILE, FORMAT
from moetune.models.hub.fingerprint import digest
from moetune.tensor_files import create_file


def write_delta(run: FinishedRun, out: Path) -> Written:
    """Write the tensors of a run that trained in full precision to `delta.safetensors` and `manifest.json` in `out`.

    Each tensor has the name and shape that it has in the base checkpoint, and the dtype that it was trained in. Of a
    tensor that stacks the experts of a layer, only the rows of the trained experts are written; `slices` in the
    manifest lists them. LoRA factors are left out, with a note. The base is read once, for its fingerprint.

    Raises:
        UserError: the run trained nothing but LoRA; it began with random weights; the base is missing, has changed
            since the run, or has no tensor for a trained parameter.
    """
    every = updates(run)
    full = [update for update in every if not update.is_added]
    if not full:
        raise UserError(
            f"{run} trained only LoRA, and a delta holds full-precision changes; use "
            "--format peft for the adapter, or --format merged"
        )
    folder = base_folder(run)
    of_base = confirmed_base(run, folder)
    base = open_checkpoint(folder)
    targets = placed(run.adapted.run.model, full, base)
    dtypes: dict[str, torch.dtype] = {}
    experts: defaultdict[str, list[int]] = defaultdict(list)  # tensor that stacks a layer's experts -> trained experts
    for update, mapping in targets:
        for key in mapping.every_key():
            dtypes[key] = update.dtype
            if update.expert is not None and not mapping.has_experts_apart:
                experts[key].append(update.expert)
    slices = {key: sorted(ids) for key, ids in experts.items() if len(ids) < base[key].num_rows}
    shapes = {key: (len(slices[key]), *base[key].shape[1:]) if key in slices else base[key].shape for key in dtypes}
    written = create_file(out / DELTA_FILE, {key: (dtype, shapes[key]) for key, dtype in dtypes.items()})
    for update, mapping in targets:
        for key, start, rows in new_rows(update, mapping, base):
            written[key].write(rows, slices[key].index(start) if key in slices else start)
    manifest = {"format": FORMAT, "base": of_base.to_json(), "sha256": digest(out / DELTA_FILE), "slices": slices}
    write_export_manifest(out, manifest_entries(run) | manifest)
    notes = () if len(full) == len(every) else ("LoRA factors are not in the delta; --format peft or merged has them",)
    return Written(len(written), sum(tensor.nbytes for tensor in written.values()), notes)
