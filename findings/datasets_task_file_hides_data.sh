#!/usr/bin/env bash
# datasets 5.2.0: a file called task.toml or instruction.md, at any depth of a local folder, makes load_dataset(FOLDER)
# look at files of these names only: train.jsonl beside them is dropped, without a word where both are there, and
# the only split is then "test"; with instruction.md alone, the error says that no instruction.md was found.
# Hurts whoever keeps notes for annotators, or prompts, beside the records. A way out: data_files="*.jsonl".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home TMPDIR=$folder
"$folder/venv/bin/python" - <<'EOF'
import sys
import tempfile
from pathlib import Path

import datasets

datasets.disable_progress_bars()


def splits(*others: str, **options: str) -> object:
    """Load a folder of train.jsonl, with two records, and `others`; split -> number of records, or the error."""
    folder = Path(tempfile.mkdtemp())
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('version = "1"\n' if name.endswith(".toml") else "Write politely.\n")
    try:
        return {split: len(rows) for split, rows in datasets.load_dataset(str(folder), **options).items()}
    except Exception as error:
        return f"{type(error).__name__}: {str(error).replace(str(folder), 'FOLDER')}"


print("datasets", datasets.__version__, "\nexpected of every folder: {'train': 2}")
found = {
    "train.jsonl, notes.md": splits("notes.md"),
    "train.jsonl, instruction.md": splits("instruction.md"),
    "train.jsonl, guide/instruction.md": splits("guide/instruction.md"),
    "train.jsonl, task.toml": splits("task.toml"),
    "train.jsonl, task.toml, instruction.md": splits("task.toml", "instruction.md"),
    "the same, data_files='*.jsonl'": splits("task.toml", "instruction.md", data_files="*.jsonl"),
}
for names, result in found.items():
    print(f"{names}: {result}")
notes, *hidden, both, named = found.values()
as_found = notes == named == {"train": 2} and all(isinstance(result, str) for result in hidden) and both == {"test": 1}
sys.exit(0 if as_found else "changed since this was found")
EOF
