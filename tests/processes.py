"""Processes of their own for what tests do: forked from one that has imported everything, so they cost what they do."""

import multiprocessing
import os
from pathlib import Path

processes = multiprocessing.get_context("forkserver")
# There is one server in a test process, and what it starts with is fixed by the first who needs it.
processes.set_forkserver_preload(["tests.preloaded"])
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # the server is given no sys.path before Python 3.13
