"""Answers for people: one view of each (view.py), printed on a terminal and as a page, with charts."""
