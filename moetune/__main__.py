"""Entry point of `python -m moetune`, the same program as the `moetune` script."""

from moetune.cli.main import main

if __name__ == "__main__":  # the worker processes of `moetune plan` import this module and must not start the program
    main()
