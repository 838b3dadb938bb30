"""Output for people: each command's answer as a view (view.py), printed on a terminal or written as an HTML page."""
