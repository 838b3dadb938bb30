"""`processes`: a multiprocessing context whose processes are forked from a server that has imported everything."""

import multiprocessing
import os
from pathlib import Path

processes = multiprocessing.get_context("forkserver")
# A test process has a single server, whose imports are fixed when the first of its users starts it.
processes.set_forkserver_preload(["tests.preloaded"])
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # before Python 3.13 the server does not get sys.path
