#!/usr/bin/env bash
# Everything that wants a CUDA device, in parts that each take less than nine minutes, most telling first.
#
#     bash scripts/bench/gpu.sh [PART...]        by default all, in this order:
#
#     kernels         every kernel beside torch's operations, under compute-sanitizer too where it is there; GB/s of each;
#                     two equal steps, bit for bit
#     mixtral         Mixtral LoRA, experts and router, predicted and measured
#     qwen3           Qwen3-30B-A3B LoRA, predicted and measured
#     tests           the tests marked gpu: imports, gradients against the CPU, a run in bfloat16
#     host-time       micro-steps of 4k and 16k tokens of Qwen3-30B-A3B and Mixtral-8x7B, and of layers of two hybrids
#     throughput      tokens a second of a few layers, beside PEFT and experts4bit-qlora
#     mixtral-more    other batches, LOMO, and one that must not fit
#     near-the-line   two that are to fit CAP, barely
#     others, newer, large, mixtral-8x22b
#
# Logs and JSON go to OUT (docs/benchmarks/ by default). PYTHON names the interpreter; else .venv/bin/python if there
# is one, else python3. CAP is the card to stand for (44GiB by default; empty: the whole card).
# A part that fails does not stop the next one. Exit code 0: all passed; 1: some failed; 2: no CUDA device, or no such
# part.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(realpath -m "${OUT:-$root/docs/benchmarks}")
all=(kernels mixtral qwen3 tests host-time throughput mixtral-more near-the-line others newer large mixtral-8x22b)
parts=("${@:-${all[@]}}")
for name in "${parts[@]}"; do
  if [[ " ${all[*]} " != *" $name "* ]]; then
    echo "gpu.sh: there is no part '$name'; there are ${all[*]}" >&2
    exit 2
  fi
done
python=${PYTHON:-}
if [[ -z $python && -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
elif [[ $python == */* ]]; then
  python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")  # stays the same from the root
fi
python=${python:-python3}
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
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
run() {  # run NAME COMMAND...: with its output on the terminal and in OUT/NAME.log
  local name=$1
  shift
  echo "==> $name"
  "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

for name in "${parts[@]}"; do
  case $name in
    tests)
      if "$python" -c "import pytest" 2>/dev/null; then
        run gpu_tests "$python" -m pytest -m gpu -p no:cacheprovider tests/gpu
      else
        echo "gpu.sh: pytest is not installed: the tests are left out" >&2
        failed+=("gpu_tests (no pytest)")
      fi
      ;;
    kernels)
      if sanitizer=$(command -v compute-sanitizer); then
        # racecheck watches only our kernels: it reports races in those of cuBLAS and CUTLASS on 9.0
        for tool in memcheck "racecheck --kernel-regex kne=^_[a-z]"; do
          # shellcheck disable=SC2086
          run "kernels_${tool%% *}" "$sanitizer" --tool $tool --error-exitcode 1 "$python" scripts/bench/card.py check --tokens 8
        done
      else
        echo "gpu.sh: compute-sanitizer is not on the path: memcheck and racecheck are left out" >&2
      fi
      run kernels_check "$python" scripts/bench/card.py check
      run kernels_bandwidth "$python" scripts/bench/card.py bandwidth --json "$out/kernels_bandwidth.json"
      run equal_steps "$python" scripts/bench/card.py repeat
      ;;
    host-time)
      run host_time_cuda "$python" scripts/bench/host_time.py --json "$out/host_time_cuda.json"
      run host_time_16k "$python" scripts/bench/host_time.py --rows 8 --json "$out/host_time_16k.json"
      run hybrids_cuda "$python" scripts/bench/host_time.py --models qwen3-next-80b-a3b kimi-linear-48b-a3b --layers 8 \
        --rows 4 --json "$out/hybrids_cuda.json"
      ;;
    throughput)
      run throughput_peers "$python" scripts/bench/throughput.py --seconds 35 --json "$out/throughput_peers.json"
      ;;
    *)
      run "predict_vs_measured_cuda_$name" "$python" scripts/bench/predict_vs_measured.py --cases "$name" \
        ${cap:+--cap "$cap"} --json "$out/predict_vs_measured_cuda_$name.json"
      ;;
  esac
done

if ((${#failed[@]})); then
  printf 'gpu.sh: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "gpu.sh: all passed; logs and numbers are in $out"
