"""The array shapes in public signatures are true: every call of a small pass is checked against them, in a process of
its own, since they are checked nowhere else and refusals by our own messages would be hidden by the checker's."""

import subprocess
import sys

PROGRAM = """
import os
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")
import jaxtyping
jaxtyping.install_import_hook(["libra_jax.attention", "libra_jax.layers", "libra_kernels"], "beartype.beartype")
import jax, jax.numpy as jnp, libra_jax, libra_kernels
from jax.sharding import AxisType

mesh = jax.make_mesh((1, 2, 2), ("pool", "dp", "cp"), axis_types=(AxisType.Auto,) * 3)
spec = libra_jax.PoolSpec(
    seq_len=64, pool_size=2, cp=2, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, block=16, dtype="float32")
plans = libra_jax.stack_plans([libra_jax.plan_pool([[64], [20, 30]], spec)])
q, k, v = (jnp.ones(shape) for shape in ((2, 64, 4, 8), (2, 64, 2, 8), (2, 64, 2, 6)))
segments = jnp.ones((2, 64), jnp.int32)

# Traced only: annotations are checked at every call, and shapes are all that they speak of.
loss = lambda *qkv: libra_jax.libra_attention(*qkv, plans, spec=spec, mesh=mesh).sum()
assert [g.shape for g in jax.eval_shape(jax.grad(loss, (0, 1, 2)), q, k, v)] == [q.shape, k.shape, v.shape]
assert jax.eval_shape(libra_kernels.reference_attention, q, k, v, segments).shape == (2, 64, 4, 6)
with libra_jax.use_plan(plans):
    assert jax.eval_shape(libra_jax.attention_fn(spec, mesh=mesh), q, k, v).shape == (2, 64, 4, 6)

for wrong in (lambda: libra_kernels.reference_attention(q[0], k, v, segments),
              lambda: libra_kernels.reference_attention(q, k, v, jnp.ones((2, 64))),
              lambda: libra_jax.libra_attention(q, k, v[..., None], plans, spec=spec, mesh=mesh)):
    try:
        wrong()
    except jaxtyping.TypeCheckError:
        continue
    raise SystemExit("an array of the wrong shape or dtype was let through: the annotations were not checked")
print("checked")
"""


def test_shapes_in_public_signatures_are_true() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "checked\n"
