"""What is shown: on a terminal, as figures and as pages."""
