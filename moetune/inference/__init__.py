"""Models in use: opened, evaluated, compared, generating text; a run folder as a page."""
