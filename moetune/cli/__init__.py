"""The command line: one module for each command, found by the command's name, and what the commands share.

One folder, because a command is looked for by its name.
"""
