"""What a mixture-of-experts model is made of, read off the model on the meta device."""
