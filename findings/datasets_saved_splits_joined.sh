#!/usr/bin/env bash
# datasets 5.2.0: load_dataset(FOLDER) of a folder that DatasetDict.save_to_disk wrote looks for names of splits like
# any other folder's: splits with other names are dropped where one is called train, and joined into one split, in the
# order of the alphabet, where none is. (A folder that Dataset.save_to_disk wrote raises an error, which names
# load_from_disk.) Hurts whoever saves splits of their own, "sft" and "preferences" or "easy" and "hard".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home TMPDIR=$folder
"$folder/venv/bin/python" - <<'EOF'
import sys
import tempfile

import datasets
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

datasets.disable_progress_bars()
print("datasets", datasets.__version__, "\nexpected: the splits that were saved, or an error")
as_found = True
for saved, seen in (
    ({"train": ["a"], "test": ["b"]}, {"train": ["a"], "test": ["b"]}),
    ({"train": ["a"], "validation": ["b"], "held_out": ["c"]}, {"train": ["a"], "validation": ["b"]}),
    ({"sft": ["a", "b"], "preferences": ["c"]}, {"train": ["c", "a", "b"]}),
):
    folder = tempfile.mkdtemp()
    DatasetDict({split: Dataset.from_dict({"text": texts}) for split, texts in saved.items()}).save_to_disk(folder)
    loaded = {split: rows["text"][:] for split, rows in load_dataset(folder).items()}
    right = {split: rows["text"][:] for split, rows in load_from_disk(folder).items()}
    print(f"saved {saved}\n    load_dataset {loaded}")
    as_found = as_found and loaded == seen and right == saved
sys.exit(0 if as_found else "changed since this was found")
EOF
