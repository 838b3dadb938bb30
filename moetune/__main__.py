"""`python -m moetune`, the same program as the `moetune` script."""

from moetune.cli.main import main

main()
