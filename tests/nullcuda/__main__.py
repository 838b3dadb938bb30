"""`python -m tests.nullcuda train run.yaml`: the program, where the null device finds its answers."""

from moetune.cli.main import main
from tests.nullcuda import device

with device.answering(compares=True):
    main()
