"""The run file: keys as validated types, and reading it from YAML with `--set` overrides."""
