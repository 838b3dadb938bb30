#!/usr/bin/env bash
# Makes .venv with moetune and the extras given ("", "dev"), at the versions of scripts/constraints.txt.
# Does nothing when the same was installed before. Needs Python 3.11 or newer, and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}

. scripts/find_python.sh
python=$(find_python "sys.version_info >= (3, 11)" "${PYTHON:-python3}" python3.13 python3.12 python3.11)
if [ -z "$python" ]; then
  echo "moetune needs Python 3.11 or newer; set PYTHON to one" >&2
  exit 1
fi

wanted=$(cat pyproject.toml scripts/constraints.txt; echo "extras: $extras")
stamp=.venv/installed-${extras:-run}
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  echo "==> installing into .venv (a minute or two; longer if the packages must be downloaded)"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check install --constraint scripts/constraints.txt)
  "${pip[@]}" --upgrade pip  # the one that Python brings takes three times as long to find the packages
  [ "$extras" != dev ] || extras=dev,deepspeed
  DS_BUILD_OPS=0 "${pip[@]}" --no-compile --editable ".${extras:+[$extras]}"  # DeepSpeed's build compiles nothing
  # pip would compile on one core, and what nothing imports. A file for another version of Python does not compile.
  unused='/(tests|testing|pip|setuptools|mypyc?|networkx|fontTools|onnx|physics|lexers|_inductor)/'
  unused+='|/transformers/models/.*/(image|video|feature|modular|convert|processing|tokenization)'
  .venv/bin/python -m compileall -qq -j 0 -x "$unused" .venv/lib moetune || true
  echo "$wanted" >"$stamp"
fi
