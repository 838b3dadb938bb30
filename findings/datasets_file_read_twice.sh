#!/usr/bin/env bash
# datasets 5.2.0: load_dataset(FOLDER) finds splits by words in names, and reads a file once for every pattern that it
# matches: sft_training_data_train.jsonl, with "training" and "train", is in the split twice, and so is what lies in
# eval/test/. Nothing is said. Hurts whoever trains (an epoch is two) or reports numbers of records.
# train/train-00000.jsonl is read once: words in folders and words in files are looked at apart.
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


def texts(*names: str) -> dict[str, list[str]]:
    """Load a folder of these files, each with the records "one" and "two"; return split -> texts."""
    folder = Path(tempfile.mkdtemp())
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    return {split: rows["text"][:] for split, rows in datasets.load_dataset(str(folder)).items()}


once, twice = ["one", "two"], ["one", "two"] * 2
print("datasets", datasets.__version__, f"\nexpected of every split: {once}")
found = []
for names, seen in (
    (("train.jsonl",), {"train": once}),
    (("train/train-00000.jsonl",), {"train": once}),
    (("sft_training_data_train.jsonl",), {"train": twice}),
    (("train.jsonl", "eval_test.jsonl"), {"train": once, "test": twice}),
    (("train/a.jsonl", "eval/test/a.jsonl"), {"train": once, "test": twice}),
):
    result = texts(*names)
    print(f"{', '.join(names)}: {result}")
    found.append(result == seen)
sys.exit(0 if all(found) else "changed since this was found")
EOF
