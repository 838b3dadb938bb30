"""The command line: one module for each command, found by the command's name, and what the commands share."""
