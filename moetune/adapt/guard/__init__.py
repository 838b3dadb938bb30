"""Kernels compared with torch's operations before a run on CUDA.

An operator whose kernel differs, raises or does not finish runs torch's operations instead. It is listed in
`hardware.without_kernels` of the resolved run, which training writes to the run folder and predictions read.
"""

from moetune.adapt.guard.check import as_known, checked, compared, compared_as, note_dropped

__all__ = ["as_known", "checked", "compared", "compared_as", "note_dropped"]
