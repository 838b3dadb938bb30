"""Prediction of a run's GPU memory and step time, and their measurement.

A *trace* runs the trainer's step on fake tensors and records each storage (trace/).

The files beside these packages are one layer each between a record and a report: what is assumed (assumed_routing,
unknowns), what a record does not hold (allocator, rank_memory, host), and the report and its words (report, about).
measurement/ takes real steps; commands/ predicts other commands than `moetune train`.
"""
