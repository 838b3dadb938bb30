"""Training data: read files and data sets, tokenize records, lay tokens out in sequences."""
