"""`python -m moetune`, the same program as the `moetune` script."""

from moetune.cli.main import main

if __name__ == "__main__":  # a plan's workers import it
    main()
