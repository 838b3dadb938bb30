#!/usr/bin/env bash
# Every check that CI runs, in the environment that scripts/setup.sh makes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh dev
bin=.venv/bin

echo "==> ruff"
$bin/ruff check .
$bin/ruff format --check .
echo "==> mypy"
$bin/mypy
echo "==> import-linter"
$bin/lint-imports
echo "==> pytest"
# One thread a worker: two workers then use two cores, and results do not depend on the machine.
OMP_NUM_THREADS=1 $bin/python -m pytest -n "${PYTEST_WORKERS:-2}" --dist worksteal "$@"
