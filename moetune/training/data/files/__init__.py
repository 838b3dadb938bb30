"""Data files and folders as rows: files of a split, read record by record."""
