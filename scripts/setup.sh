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
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint scripts/constraints.txt --editable ".${extras:+[$extras]}"
  if [ "$extras" = dev ]; then
    # Its build asks for the torch that is there by now, and compiles nothing if it is told so.
    DS_BUILD_OPS=0 .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
      --no-compile --constraint scripts/constraints.txt --editable ".[deepspeed]"
  fi
  # pip would compile on one core. A file that is not for this version of Python does not compile, and is not imported.
  .venv/bin/python -m compileall -qq -j 0 .venv/lib moetune tests || true
  echo "$wanted" >"$stamp"
fi
