"""Data files and folders as rows: which files a folder's split has, how each is opened, and its records one by one."""
