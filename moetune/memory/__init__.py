"""Prediction of a run's GPU memory and step time, by tracing it or by closed form, and its measurement."""
