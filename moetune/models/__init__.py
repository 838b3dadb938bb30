"""Models before adaptation: finding them, their structure and parameter count, what trains in them, catalog,
checkpoints.
"""
