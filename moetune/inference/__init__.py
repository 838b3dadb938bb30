"""What was trained, or is to be, in use: evaluated, asked, compared."""
