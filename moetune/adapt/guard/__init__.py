"""The guard of a run on CUDA: its kernels are compared with torch's operations on this machine, at the run's own sizes.

An operator whose kernel differs, raises or does not finish runs torch's operations instead. It is listed in
`hardware.without_kernels` of the resolved run, which training writes to the run folder and predictions read.
"""

from moetune.adapt.guard.check import as_known, checked, note_dropped
from moetune.adapt.guard.comparison import compare
from moetune.adapt.guard.verdicts import Key

__all__ = ["Key", "as_known", "checked", "compare", "note_dropped"]
