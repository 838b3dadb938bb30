"""Prediction of a run's GPU memory and step time, and their measurement.

A *trace* runs the trainer's step on fake tensors and records each storage (trace/). A *closed form* is such a record
with each storage's bytes as a formula of the run's sizes (closed_form/), so that other sizes need no new trace.
"""
