"""Training data: read files and data sets, tokenize their records, lay the tokens out in sequences."""
