#!/usr/bin/env bash
# Every check that CI runs, in the environment that scripts/setup.sh makes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh dev
bin=.venv/bin

echo "==> ruff"
$bin/ruff check .
$bin/ruff format --check .

# These take a core for less than a minute, and tests that wait for each other leave one: they run beside pytest.
folder=$(mktemp -d)
{
  $bin/mypy && $bin/lint-imports && $bin/mkdocs build --strict --site-dir "$folder/site" && $bin/python scripts/size.py
} >"$folder/checked" 2>&1 &
checks=$!
trap 'kill "$checks" 2>/dev/null || true; rm -rf "$folder"' EXIT

echo "==> pytest"
failed=0
# One thread a worker: two workers then use two cores, and results do not depend on the machine.
OMP_NUM_THREADS=1 $bin/python -m pytest -n "${PYTEST_WORKERS:-2}" --dist worksteal "$@" || failed=$?
echo "==> mypy, import-linter, the site of docs, sizes"
wait "$checks" || failed=$?
cat "$folder/checked"
exit "$failed"
