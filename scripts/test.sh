#!/usr/bin/env bash
# Every check that CI runs, in the environment that scripts/setup.sh makes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh dev
bin=.venv/bin

echo "==> ruff"
$bin/ruff check .
$bin/ruff format --check .

# These two take a core for less than a minute, and tests that wait for each other leave one: they run beside pytest.
checked=$(mktemp)
{ $bin/mypy && $bin/lint-imports; } >"$checked" 2>&1 &
checks=$!
trap 'kill "$checks" 2>/dev/null || true; rm -f "$checked"' EXIT

echo "==> pytest"
failed=0
# One thread a worker: two workers then use two cores, and results do not depend on the machine.
OMP_NUM_THREADS=1 $bin/python -m pytest -n "${PYTEST_WORKERS:-2}" --dist worksteal "$@" || failed=$?
echo "==> mypy and import-linter"
wait "$checks" || failed=$?
cat "$checked"
exit "$failed"
