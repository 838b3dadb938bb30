"""Output for people: a command's answer as a view (view.py), printed on a terminal or as an HTML page.

One folder, because all of it is presentation: views of each subject, the charts of two, and the three ways to show
them (terminal.py, page.py, progress.py). Nothing else formats bytes or times.
"""
