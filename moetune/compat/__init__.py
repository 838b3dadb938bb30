"""What is changed of other libraries, or used of them without being public: a file for each, with the reasons.

`tests/compat` fails when a release makes one unnecessary, or impossible.
"""
