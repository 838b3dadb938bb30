"""Prediction of a run's memory and step time, by trace or by closed form, and the reports of both."""
