"""The wires between ranks: how many bytes a second they carry, inside a node and between nodes.

With `workload.CostModel`, which prices kernels, this is all that modelled time knows of a machine (`modelled`). Host
side: NumPy-free, JAX-free.
"""

from __future__ import annotations

import dataclasses
import math
import numbers


@dataclasses.dataclass(frozen=True)
class Links:
    """What one rank sends in a second, and receives in the same second, to ranks of its node and to all others.

    The two kinds work side by side: a rank's traffic inside its node takes nothing from its traffic across nodes.

    ranks_per_node: neighbouring ranks that share a node. Pools begin with a node, so rank r of a pool is in node
        r // ranks_per_node; a pool of fewer ranks lies within one node.
    inside, across: bytes a second of one rank, one way. The defaults are an H100 host's: an all-gather of 1 GiB over
        its 8 GPUs runs at about 360 GB/s (NCCL's bus bandwidth), and a GPU has a 400 Gb/s port of its own, 50 GB/s.
        Of such a port NCCL gets 46 to 48 GB/s (its maintainers' figure, nccl-tests thread 290): give that for caution.
    inside_latency, across_latency: seconds that an exchange costs besides, however little it carries, where all its
        ranks share a node and where they do not. The defaults are round figures for a collective of sends and
        receives; beside exchanges of tens of MiB they hardly count.

    Raises ValueError where a rate is not finite and above 0, a latency not finite and 0 or more, or ranks_per_node
    not a whole number of at least 1.
    """

    ranks_per_node: int = 8
    """Neighbouring ranks that share a node (a host)."""
    inside: float = 360e9
    """Bytes a second of one rank inside a node, one way."""
    across: float = 50e9
    """Bytes a second of one rank between nodes, one way."""
    inside_latency: float = 10e-6
    """Seconds that an exchange inside a node costs besides."""
    across_latency: float = 25e-6
    """Seconds that an exchange between nodes costs besides."""

    def __post_init__(self) -> None:
        for name, given in dataclasses.asdict(self).items():
            try:
                value = float(given) if isinstance(given, numbers.Real) and not isinstance(given, bool) else math.nan
            except OverflowError:
                value = math.inf
            if name == "ranks_per_node":
                if not 1 <= value < 2**31 or not value.is_integer():
                    raise ValueError(f"links: {name} ({given!r}) must be a whole number of at least 1, below 2**31")
                object.__setattr__(self, name, int(value))
                continue
            if not math.isfinite(value):
                raise ValueError(f"links: {name} ({given!r}) must be a finite number")
            if value < 0 or (value == 0 and not name.endswith("_latency")):
                rule = "0 or more" if name.endswith("_latency") else "above 0"
                raise ValueError(f"links: {name} ({given!r}) must be {rule}")
            object.__setattr__(self, name, value)
