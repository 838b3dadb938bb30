"""Writes the table of docs/reference/parallel.md: runs every layout against one process, as the tests do.

python scripts/make_parallel_table.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench._common import write_table  # noqa: E402
from tests import small  # noqa: E402
from tests.parallel import layouts, world  # noqa: E402
from tests.processes import start_server  # noqa: E402


def main() -> None:
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        model = small.write_model(Path(folder) / "model")
        alone = world.run(1, layouts.every_case, {}, model)[0]
        rows = []
        for name, parallel in (layouts.LAYOUTS | layouts.DEEPSPEED).items():
            ranks = layouts.config_of(parallel, layouts.CASES[0], model).parallel.ranks
            found = world.run(ranks, layouts.every_case, parallel, model)
            rows.append(layouts.row(name, found, alone))
            print(rows[-1], flush=True)
    write_table([layouts.HEADER, *rows], ROOT / "docs/reference/parallel.md")


if __name__ == "__main__":
    main()
