"""Preflight: what a training step will ask of a cluster, read from the step compiled for it on a machine without a GPU.

program.py compiles, memory.py says what the memory of a device is for, kernels.py what the Triton kernels need,
report.py puts it together, as a table, as JSON and as a page.
"""
