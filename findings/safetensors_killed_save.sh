#!/usr/bin/env bash
# safetensors 0.8.0: save_file writes a hidden file `.tmpXXXXXX` beside the target and renames it. The target is never
# half a file, but a process that is killed while it saves leaves the whole size behind under a new random name each
# time, and nothing removes it: not the next save_file into the folder, and `*.safetensors` does not match it.
# Hurts jobs that are killed and started again (out of memory, a spot machine taken away): the disk fills up unseen.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'EOF'
import subprocess
import sys
import time
from pathlib import Path

import numpy
import safetensors
from safetensors.numpy import save_file

SAVE = """
import sys, numpy
from safetensors.numpy import save_file
save_file({"weight": numpy.ones(1 << 25, numpy.float32)}, sys.argv[1])
"""
folder = Path(sys.argv[1], "checkpoint")
folder.mkdir()
target = folder / "model.safetensors"
print("safetensors", safetensors.__version__, "numpy", numpy.__version__)
print("expected after a killed save and a whole one: model.safetensors and nothing else")
for _ in range(3):
    before = set(folder.iterdir())
    child = subprocess.Popen([sys.executable, "-c", SAVE, str(target)])
    while child.poll() is None and not any(file.stat().st_size for file in folder.iterdir() if file not in before):
        time.sleep(0.001)
    child.kill()
    child.wait()
save_file({"weight": numpy.ones(4, numpy.float32)}, target)
left = sorted(file.name for file in folder.iterdir())
for file in sorted(folder.iterdir()):
    print(f"{file.name}: {file.stat().st_size} bytes")
as_found = left[-1] == target.name and len(left) > 1 and all(name.startswith(".tmp") for name in left[:-1])
sys.exit(0 if as_found else "changed since this was found")
EOF
