"""Trained models in use: open, evaluate, compare with an export, generate text; a run as a page."""
