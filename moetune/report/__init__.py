"""Output for people: a command's answer as a view (view.py), printed on a terminal or as an HTML page."""
