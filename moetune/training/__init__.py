"""Training: loop, metrics, run folders and checkpoints; the packages below have data, steps and optimizers.

One folder, because the loop uses each of its files once: what it writes (run folder, checkpoint, manifest, state,
metrics), what it checks before (same_run, isolation) and what it reacts to (interrupt, run_warnings).
"""
