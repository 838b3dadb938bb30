"""moetune: fine-tune a mixture-of-experts model on one GPU, and know before starting that it fits."""

__version__ = "0.1.0"
