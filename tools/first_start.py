"""The end of set-up: imports what nearly every start imports. So an installation that does not work is found now, and
bytecode is written once and for all, also where PYTHONDONTWRITEBYTECODE is set: without it every start of a process
would compile some 1,400 modules anew, which takes it five seconds more.
"""

import importlib
import sys

MODULES = (
    "flax.linen", "flax.nnx", "grain", "hypothesis", "jax", "jax.experimental.topologies",
    "matplotlib.pyplot", "numpy.testing", "optax", "orbax.checkpoint", "pyarrow.parquet", "pytest", "safetensors",
    "tensorboardX", "tokenizers", "tyro", "xdist.plugin",
    "libra_jax.cli", "libra_jax.preflight.command", "libra_jax.simulate.command", "libra_jax.train.loop",
)  # fmt: skip

for name in (*MODULES, *(("jax_triton", "triton.language") if sys.platform == "linux" else ())):
    importlib.import_module(name)
