"""Patches of other libraries and uses of their private interfaces, a file per library.

`tests/compat` fails when a release of a library makes a patch unnecessary or impossible.
"""
