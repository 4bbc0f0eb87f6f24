"""The trainer: from a config to weights.

config.py states a run, mesh.py lays out its devices, step.py is the compiled optimizer step, loop.py runs it,
checkpoint.py saves and restores it, metrics.py and report.py say what happened.
"""
