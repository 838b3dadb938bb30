"""Trained models in use: open, evaluate, compare with an export, generate; a run's page."""
