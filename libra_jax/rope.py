"""Rotary position embedding (arXiv 2104.09864), exact for positions of millions, and YaRN (arXiv 2309.00071).

Angles are counted in turns of 2**-32, where whole turns fall off by themselves: in float32 an angle of a million
radians is off by 0.03. Frequencies are worked out in float64 when the model is traced.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_LOW_BITS = 10  # of a position; these and the rest are turned apart, so that neither product loses what counts


@dataclasses.dataclass(frozen=True)
class YaRN:
    """Frequencies for longer contexts than the model was trained on, as Hugging Face's rope type "yarn" has them.

    Frequencies that turn often within the original positions stay as they are, those that turn less than once are
    slowed down by `factor`, in between it is a ramp; cos and sin are scaled by `attention_factor`. Qwen3 documents
    factor = wanted positions / 32,768.
    """

    factor: float
    """Longest context over original_max_positions."""
    original_max_positions: int = 32_768
    """Positions that the model was trained on (original_max_position_embeddings)."""
    beta_fast: float = 32.0
    """Turns within the original positions from which on a frequency stays as it is."""
    beta_slow: float = 1.0
    """Turns within the original positions up to which a frequency is slowed down in full."""
    attention_factor: float | None = None
    """Scale of cos and sin; None: 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"YaRN's factor ({self.factor}) must be at least 1")
        if self.original_max_positions < 1:
            raise ValueError(f"YaRN's original_max_positions ({self.original_max_positions}) must be at least 1")
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"YaRN needs 0 < beta_slow ({self.beta_slow}) < beta_fast ({self.beta_fast})")

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def slowed(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Frequencies of the pairs, (D/2,) float64, from theta ** (-2 i / D)."""
        half = len(frequency)

        def pair_of(turns: float) -> float:
            """The pair that turns so often within the original positions, as a fraction of a whole number."""
            return half * math.log(self.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(pair_of(self.beta_fast)), 0)
        high = min(math.ceil(pair_of(self.beta_slow)), 2 * half - 1)
        ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
        return frequency * (1 - ramp) + frequency / self.factor * ramp


def rotary(
    x: Float[Array, "N S H D"], positions: Int[Array, "N S"], theta: float, scaling: YaRN | None = None
) -> Float[Array, "N S H D"]:
    """Rotary position embedding in the rotate-half convention of Llama and Qwen; D must be even.

    Element i < D/2 is paired with element i + D/2 and the pair turned by positions * theta ** (-2 i / D), which
    `scaling` changes. Products are float32, angles within 2e-6 for positions up to a million; x keeps its dtype.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-np.arange(half, dtype=np.float64) / half)
    scale = 1.0
    if scaling is not None:
        frequency, scale = scaling.slowed(frequency, theta), scaling.scale
    low_turn, high_turn = (_turns(frequency * step)[None, None, None, :] for step in (1, 2**_LOW_BITS))
    place = positions.astype(jnp.uint32)[:, :, None, None]
    turned = (place & np.uint32(2**_LOW_BITS - 1)) * low_turn + (place >> np.uint32(_LOW_BITS)) * high_turn
    angle = turned.astype(jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
    cos, sin = jnp.cos(angle) * np.float32(scale), jnp.sin(angle) * np.float32(scale)
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def _turns(radians: np.ndarray) -> np.ndarray:
    """Angles in 2**-32 of a turn, without whole turns, uint32."""
    return np.rint(radians / (2 * np.pi) % 1.0 * 2**32).astype(np.uint64).astype(np.uint32)
