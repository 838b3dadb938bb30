#!/usr/bin/env bash
# datasets 5.2.0: `map` with a function that is imported from one's own file gives the records of before after that file
# was edited, and `from_generator` those of before after a file that the generator reads was: both are kept on disk by
# the function's name and arguments, not by its code or by what it reads. The next run trains on the old records, with
# nothing said. Right for a function of the script that is run, and for a file that `load_dataset` reads. Hurts whoever
# keeps the formatting of chats in a module and mends it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home HF_DATASETS_DISABLE_PROGRESS_BARS=1
cd "$folder"
cat > run.py <<'EOF'
import json
import sys

from chats import formatted  # a module beside this script
from datasets import Dataset, load_dataset


def rows(path):
    with open(path) as lines:
        yield from map(json.loads, lines)


def formatted_here(row):
    return {"text": "SIGN: " + row["question"].removeprefix("before: ")}


loaded = load_dataset("json", data_files="loaded.jsonl", split="train")
generated = Dataset.from_generator(rows, gen_kwargs={"path": "generated.jsonl"})
seen = {
    "map, imported function": loaded.map(formatted)["text"][0],
    "map, function of the script": loaded.map(formatted_here)["text"][0],
    "from_generator": generated["question"][0],
    "load_dataset": load_dataset("json", data_files="other.jsonl", split="train")["question"][0],
}
json.dump(seen, sys.stdout)
EOF
cat > chats.py <<'EOF'
def formatted(row):
    return {"text": "SIGN: " + row["question"].removeprefix("before: ")}
EOF
sed -i s/SIGN/before/ chats.py run.py
for name in loaded generated other; do echo '{"question": "before: a row"}' > "$name.jsonl"; done
"$folder/venv/bin/python" run.py > before.json
sed -i 's/"before: " +/"after: " +/' chats.py run.py
for name in generated other; do echo '{"question": "after: a row"}' > "$name.jsonl"; done
"$folder/venv/bin/python" run.py > after.json
"$folder/venv/bin/python" - <<'EOF'
import json
import sys

import datasets

print("datasets", datasets.__version__)
print("expected: after an edit of the code or of the file read, what the edited code makes of the edited file")
before, after = (json.load(open(f"{name}.json")) for name in ("before", "after"))
old = {how for how in before if after[how].startswith("before")}
for how in before:
    print(f"{how}: {before[how]!r}, after the edit {after[how]!r}")
as_found = old == {"map, imported function", "from_generator"}
as_found &= all(text.startswith("before") for text in before.values())
sys.exit(0 if as_found else "changed since this was found")
EOF
