"""The experts' operators, in torch and in Triton."""
