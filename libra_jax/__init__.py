"""Libra for JAX: attention over packed sequences, balanced inside small fixed pools of them.

The names below are the public surface. They are imported on first use, so that `import libra_jax` and the host-side
modules (`spec`, `links`, `workload`, `placement`, `planner`, `modelled`, `plan`) stay cheap and never import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "Capacity": "spec",
    "PoolSpec": "spec",
    "Links": "links",
    "CostModel": "workload",
    "lengths_from_segment_ids": "workload",
    "place": "placement",
    "Plan": "plan",
    "PlanTables": "tables",
    "plan_seconds": "modelled",
    "check_batch": "plan",
    "plan_pool": "plan",
    "plans_from_segment_ids": "plan",
    "stack_plans": "plan",
    "libra_attention": "attention",
    "LibraAttention": "layers",
    "attention_fn": "layers",
    "use_plan": "layers",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from libra_jax.attention import libra_attention as libra_attention
    from libra_jax.layers import LibraAttention as LibraAttention
    from libra_jax.layers import attention_fn as attention_fn
    from libra_jax.layers import use_plan as use_plan
    from libra_jax.links import Links as Links
    from libra_jax.modelled import plan_seconds as plan_seconds
    from libra_jax.placement import place as place
    from libra_jax.plan import Plan as Plan
    from libra_jax.plan import check_batch as check_batch
    from libra_jax.plan import plan_pool as plan_pool
    from libra_jax.plan import plans_from_segment_ids as plans_from_segment_ids
    from libra_jax.plan import stack_plans as stack_plans
    from libra_jax.spec import Capacity as Capacity
    from libra_jax.spec import PoolSpec as PoolSpec
    from libra_jax.tables import PlanTables as PlanTables
    from libra_jax.workload import CostModel as CostModel
    from libra_jax.workload import lengths_from_segment_ids as lengths_from_segment_ids


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'libra_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"libra_jax.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
