"""The command line: a module for each command, found by its name, and what they share."""
