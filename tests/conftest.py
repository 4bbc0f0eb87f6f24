"""Eight CPU devices and strict array rules for every test that uses jax. Must run before jax starts a backend."""

import importlib.util
import os

# Triton has wheels for Linux alone. Elsewhere these are left out whole; on Linux nothing is.
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_triton_*.py", "test_compile_gpu.py", "test_kernel_report.py", "test_page_readers.py"]
    collect_ignore_glob += ["test_exchange.py", "test_gpu_check.py", "test_implementations.py", "test_memory.py"]
    collect_ignore_glob += ["test_overlap.py", "test_preflight.py", "test_relays.py", "test_schedule.py"]

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",  # a busy machine is not a hung one
])  # fmt: skip
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
