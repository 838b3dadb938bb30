#!/usr/bin/env bash
# Runs what needs a CUDA build of torch on a machine without a card: tests/nullcuda and the tests marked gpu that need no
# values, on a device that computes nothing (tests/nullcuda/device.c), and tests/ptx, which executes kernels itself.
#
#     bash scripts/test_cuda.sh [--all] [OPTIONS OF PYTEST]
#
# Makes .venv-cuda beside .venv: Python 3.12 and torch 2.11, the oldest that moetune supports (CUDA_TORCH: another, as
# 2.15.0, the newest); two minutes and 5.5 GB. Does nothing when the same was installed before. CUDA_VENV names another
# environment, which is taken as it is.
# --all: every combination and every full-size case instead of a sample, the kernels by other versions of Triton, and the
# ordinary tests on these versions too.
set -euo pipefail
cd "$(dirname "$0")/.."

all=
if [ "${1:-}" = --all ]; then
  all=1
  shift
fi

if ! command -v cc >/dev/null; then
  echo "test_cuda.sh: there is no C compiler (cc), which builds the null device; install gcc" >&2
  exit 1
fi

venv=${CUDA_VENV:-.venv-cuda} torch=${CUDA_TORCH:-2.11.0}
if [ -z "${CUDA_VENV:-}" ]; then
  wanted=$(cat pyproject.toml scripts/constraints.txt; echo "torch: $torch")
  stamp=$venv/installed
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    . scripts/find_python.sh
    python=$(find_python "sys.version_info[:2] == (3, 12)" \
      "${PYTHON_CUDA:-python3.12}" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python)
    if [ -z "$python" ]; then
      echo "test_cuda.sh: there is no Python 3.12; install it, or set PYTHON_CUDA to one" >&2
      exit 1
    fi
    echo "==> installing into $venv (two minutes, 5.5 GB)"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    # torch for CUDA asks for a Triton of its own
    sed "s/^torch==.*/torch==$torch/; /^triton==/d" scripts/constraints.txt >"$venv/constraints.txt"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt" \
      --editable . pytest pytest-xdist hypothesis lomo-optim tensorboard trl
    echo "$wanted" >"$stamp"
  fi
fi
python=$venv/bin/python

# The driver's name, so that it also is the libcuda.so.1 that other libraries ask for; and it is NVML.
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
headers=$("$python" -c 'import nvidia.cu13, pathlib; print(pathlib.Path(nvidia.cu13.__path__[0]) / "include")')
cc -O2 -shared -fPIC -Wall -I"$headers" -Itests/nullcuda -Wl,-soname,libcuda.so.1 \
  -o "$folder/libcuda.so.1" tests/nullcuda/device.c -ldl -lpthread
ln -s libcuda.so.1 "$folder/libnvidia-ml.so.1"

workers=${PYTEST_WORKERS:-2}
options=(-n "$workers" --dist worksteal ${all:+--all})
# Triton compiles for the card that is described, links with the driver here, and keeps what it has compiled.
export TRITON_LIBCUDA_PATH=$folder TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(realpath "$venv")/triton}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD TORCH_CUBLAS_WORKSPACE_CACHE=1
echo "==> pytest on the null device"
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True LD_PRELOAD=$folder/libcuda.so.1 LD_LIBRARY_PATH=$folder \
  "$python" -m pytest "${options[@]}" -m "gpu or nullcuda or ptx" tests/gpu tests/nullcuda tests/ptx "$@"
if [ -n "$all" ]; then
  for version in 3.8.0 3.9.0; do
    echo "==> the kernels' PTX by Triton $version"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder/$version" "triton==$version"
    # every kernel on every capability
    PYTHONPATH=$folder/$version:$PWD "$python" -m pytest -n "$workers" --dist worksteal --all -m ptx \
      -k "self_check or bfloat16 or 37-29" tests/ptx "$@"
  done
  echo "==> pytest on the CPU"
  "$python" -m pytest -n "$workers" --dist worksteal -m "not ptx" "$@"
fi
