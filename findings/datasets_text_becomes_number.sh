#!/usr/bin/env bash
# datasets 5.2.0: where values of one key differ in type, the "json" loader makes a Json() column, which keeps text that
# happens to be JSON as what it says: the answers "42", "true" and "null" come back as 42, True and None. Whether this
# happens depends on *other* records: one message whose content is a list of parts changes the texts of all.
# Hurts chats with short answers: a template writes True or None, fails on a number, or takes None for no content.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
"$folder/venv/bin/python" - "$folder" <<'EOF'
import json
import sys
from pathlib import Path

import datasets

datasets.disable_progress_bars()


def read(name: str, contents: list[object]) -> list[object]:
    """Write a chat of one message for each of `contents`, load the file, and return the contents."""
    file = Path(sys.argv[1], name)
    chats = [{"messages": [{"role": "assistant", "content": content}]} for content in contents]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    rows = datasets.load_dataset("json", data_files=str(file), split="train")
    print(f"{contents!r} is read as\n    {[row['messages'][0]['content'] for row in rows]!r}, {rows.features}")
    return [row["messages"][0]["content"] for row in rows]


print("datasets", datasets.__version__, "\nexpected: what was written")
answers = ["42", "true", "null", "1e3", "yes"]
parts = [{"type": "text", "text": "no"}]
alone = read("alone.jsonl", answers)
mixed = read("mixed.jsonl", [*answers, parts])
numbers = read("numbers.jsonl", ["7", 7])
as_found = alone == answers and mixed == [42, True, None, 1000.0, "yes", parts] and numbers == [7, 7]
sys.exit(0 if as_found else "changed since this was found")
EOF
