#!/usr/bin/env bash
# Everything that wants a CUDA device, in one command: the tests marked gpu, then every benchmark on CUDA.
#
#     bash scripts/bench/gpu.sh [FOLDER]
#
# Logs and JSON go to FOLDER (docs/benchmarks/ by default). PYTHON names the interpreter; else .venv/bin/python if there
# is one, else python3. CAP is the card to stand for (44GiB by default; empty: the whole card).
# A part that fails does not stop the next one. Exit code 0: all passed; 1: some failed; 2: no CUDA device.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(realpath -m "${1:-$root/docs/benchmarks}")
python=${PYTHON:-}
if [[ -z $python && -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
elif [[ $python == */* ]]; then
  python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")  # stays the same from the root
fi
python=${python:-python3}
cd "$root"
cap=${CAP-44GiB}

describe='
import platform, sys
import torch
if not torch.cuda.is_available():
    sys.exit(2)
card = torch.cuda.get_device_properties(0)
print(f"device: {card.name}, {card.total_memory / 2**30:.2f} GiB, compute capability {card.major}.{card.minor}")
print(f"python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
'
status=0
"$python" -c "$describe" || status=$?
if ((status == 2)); then
  echo "gpu.sh: there is no CUDA device: nothing was run" >&2
  exit 2
elif ((status != 0)); then
  echo "gpu.sh: $python cannot import torch (PYTHON names another interpreter)" >&2
  exit 1
fi

mkdir -p "$out"
failed=()
part() {  # part NAME COMMAND...: runs it, with its output on the terminal and in FOLDER/NAME.log
  local name=$1
  shift
  echo "==> $name"
  "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

if "$python" -c "import pytest" 2>/dev/null; then
  # Only the files that have such tests: others may import what a bare machine lacks.
  mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort)
  part gpu_tests "$python" -m pytest -m gpu -p no:cacheprovider "${files[@]}"
else
  echo "gpu.sh: pytest is not installed: the tests are left out" >&2
  failed+=("gpu_tests (no pytest)")
fi
part predict_vs_measured_cuda "$python" scripts/bench/predict_vs_measured.py --device cuda \
  ${cap:+--cap "$cap"} --json "$out/predict_vs_measured_cuda.json"
part optimizers_cuda "$python" scripts/bench/optimizers.py --device cuda --json "$out/optimizers_cuda.json"

if ((${#failed[@]})); then
  printf 'gpu.sh: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "gpu.sh: all passed; logs and numbers are in $out"
