#!/usr/bin/env bash
# datasets 5.2.0: a folder that pandas or Spark partitioned by a column (split=train/…, split=test/…) is one split,
# train, with the records of all partitions, and the column is gone: `=` separates no words, and partitions are not
# read. pandas reads the same folder with the column; folders named train/ and test/ are two splits. Hurts whoever
# writes df.to_parquet(folder, partition_cols=["split"]): held-out records are trained on, without a message.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys
from pathlib import Path

import datasets
import pandas as pd
import pyarrow

datasets.disable_progress_bars()
frame = pd.DataFrame({"text": ["seen", "held out"], "split": ["train", "test"]})
partitioned, plain = Path(sys.argv[1], "partitioned"), Path(sys.argv[1], "plain")
frame.to_parquet(partitioned, partition_cols=["split"])
for name, part in frame.groupby("split"):
    (plain / name).mkdir(parents=True)
    part[["text"]].to_parquet(plain / name / "part.parquet", index=False)


def read(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Load a folder, print the names of its files, and return the rows of each split."""
    splits = {name: rows.to_list() for name, rows in datasets.load_dataset(str(folder)).items()}
    print(folder.name, sorted(str(file.parent.relative_to(folder)) for file in folder.rglob("*.parquet")), splits)
    return splits


print("datasets", datasets.__version__, "pandas", pd.__version__, "pyarrow", pyarrow.__version__)
print("expected: the record of the test partition is not among those to train on, or says that it is of it")
as_written = pd.read_parquet(partitioned).astype(str).sort_values("text").to_dict("records")
print("pandas reads", as_written)
joined = {"train": [{"text": "held out"}, {"text": "seen"}]}
apart = {"train": [{"text": "seen"}], "test": [{"text": "held out"}]}
as_found = read(partitioned) == joined and read(plain) == apart and "split" in as_written[0]
sys.exit(0 if as_found else "changed since this was found")
EOF
