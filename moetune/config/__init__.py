"""The run file: its keys as validated types, their values, and reading it from YAML with `--set` overrides."""
