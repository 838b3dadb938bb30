"""Output for people: an answer as a view, on a terminal or as an HTML page.

One folder, because all of it is presentation: the view of each subject, charts of memory and of runs, and what writes
to a terminal (terminal.py), a page (page.py) and stderr (console.py, progress.py). Only units.py formats bytes.
"""
