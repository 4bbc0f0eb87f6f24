"""Other planners as policies (`libra_jax.planner.Policy`), and an exact solver, for benchmarks/planner_others.py."""
