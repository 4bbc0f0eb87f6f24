"""Attention kernels of Libra for JAX: blocks of queries against pages of keys and values, joined by tables.

Needs jax alone and knows nothing of pools, plans or exchanges.
"""

from libra_kernels.api import check_implementation, tile_backward, tile_forward, why_not_triton
from libra_kernels.launch import Launch
from libra_kernels.reference import reference_attention
from libra_kernels.tiles import PADDING, TileOptions, Tiles
from libra_kernels.triton import compute_capability_of

__all__ = [
    "PADDING",
    "Launch",
    "TileOptions",
    "Tiles",
    "check_implementation",
    "compute_capability_of",
    "reference_attention",
    "tile_backward",
    "tile_forward",
    "why_not_triton",
]
