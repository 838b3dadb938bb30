"""From files to rows of tokens."""
