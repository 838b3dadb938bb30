"""Data files and folders as rows: a split's files, opened and read record by record."""
