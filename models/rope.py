"""Rotary position embeddings as transformers computes them: default, linear, dynamic NTK, llama3 and YaRN."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tca_jax.errors import require
from tca_jax.models.json_object import Entries

# Type -> its entries of config.json beside the base and the original context.
_ENTRIES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}
ROPE_TYPES = tuple(_ENTRIES)
_MOST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Frequencies of the rotary embedding."""

    type: str = "default"  # one of ROPE_TYPES
    theta: float = 10_000.0  # base of the geometric series of wavelengths
    original_max_positions: int = 0  # context of the unscaled frequencies (all but default)
    factor: float = 1.0  # how far the context is stretched (all but default)
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / this are stretched in full
    high_freq_factor: float = 4.0  # llama3: wavelengths below original / this stay as they are
    beta_fast: float = 32.0  # yarn: dimensions with more turns than this over the original context stay as they are
    beta_slow: float = 1.0  # yarn: dimensions with fewer turns than this are stretched in full
    truncate: bool = True  # yarn: round the bounds of the ramp between the two outwards to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin

    @classmethod
    def from_hf(cls, parameters: Mapping[str, Any], *, max_positions: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` put into it (4.x).

        Absent entries get the defaults of transformers. ValueError where a type, option or number is not supported.
        """
        entries = Entries(parameters, "rope_parameters[{!r}]")
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        unsupported = f"RoPE {dict(parameters)} is not supported"
        is_known = rope_type in ROPE_TYPES and not any(isinstance(value, Mapping) for value in parameters.values())
        require(is_known, f"{unsupported}: rope_type must be one of {list(ROPE_TYPES)}")
        if parameters.get("partial_rotary_factor") not in (None, 1):
            entries.refuse("partial_rotary_factor", "1.0")
        fields: dict[str, Any] = {"theta": entries.number("rope_theta", 10_000.0)}
        if rope_type != "default":
            fields["original_max_positions"] = max_positions
        if rope_type in ("llama3", "yarn"):
            original = entries.number("original_max_position_embeddings", float(max_positions))
            fields["original_max_positions"] = max(1, int(original))
        if rope_type == "yarn":
            fields |= _yarn_fields(entries, max_positions / fields["original_max_positions"])
        else:
            fields |= {key: entries.number(key) for key in _ENTRIES[rope_type]}
        rope = cls(type=rope_type, **fields)
        # Beyond these, frequencies are no finite numbers of float32.
        if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
            entries.refuse("low_freq_factor", f"below high_freq_factor = {rope.high_freq_factor:g}")
        if not (1 if rope_type == "yarn" else 0) < rope.theta <= _MOST:
            entries.refuse("rope_theta", "a number of float32, above 1 for YaRN")
        largest = max(v for v in vars(rope).values() if isinstance(v, float))
        require(largest <= _MOST, f"{unsupported}: numbers must fit into float32")
        return rope

    def to_hf(self) -> dict[str, Any]:
        """The entries of `rope_scaling` in config.json; empty for the default type."""
        if self.type == "default":
            return {}
        entries = {"rope_type": self.type} | {key: getattr(self, key) for key in _ENTRIES[self.type]}
        if self.type in ("llama3", "yarn"):
            entries["original_max_position_embeddings"] = self.original_max_positions
        return entries


def rope_cos_sin(
    positions: Int[Array, "B L"], head_dim: int, rope: RopeConfig
) -> tuple[Float[Array, "B L half"], Float[Array, "B L half"]]:
    """Cosine and sine of every token's rotation, float32, multiplied by YaRN's attention factor.

    Dynamic RoPE takes the last position of a row in the call for its length so far, as transformers does.
    """
    inv_freq = jnp.asarray(inverse_frequencies(head_dim, rope))
    if rope.type == "dynamic":
        inv_freq = inv_freq * _dynamic_growth(positions, head_dim, rope)
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def apply_rope(
    x: Float[Array, "*tokens H d"], cos: Float[Array, "*tokens half"], sin: Float[Array, "*tokens half"]
) -> Float[Array, "*tokens H d"]:
    """Rotate each head's dimension pairs (i, i + d / 2), in float32; the result has the dtype of x."""
    halves, sign = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2), np.array([[-1], [1]], np.float32)
    cos, sin = cos[..., None, None, :], sin[..., None, None, :]
    # Of halves put together again, XLA would write an entry at a time.
    return (halves * cos + halves[..., ::-1, :] * (sign * sin)).astype(x.dtype).reshape(x.shape)


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """Radians per position of each dimension pair: float32 `[d / 2]`; for dynamic, those of a short row.

    Float32 in the order of transformers, as one bit moves a rotation by 0.01 at position 100,000.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)  # over 2 pi
    if rope.type in ("llama3", "yarn"):
        scaled = _llama3_frequencies if rope.type == "llama3" else _yarn_frequencies
        return scaled(wavelengths, rope).astype(np.float32)
    return 1 / wavelengths / np.float32(rope.factor if rope.type == "linear" else 1)


@functools.lru_cache
def fixed_frequencies(head_dim: int, rope: RopeConfig) -> tuple[float, ...] | None:
    """`inverse_frequencies` as numbers; None for dynamic RoPE, whose frequencies change with a row's length."""
    return None if rope.type == "dynamic" else tuple(inverse_frequencies(head_dim, rope).tolist())


def _dynamic_growth(positions: Int[Array, "B L"], head_dim: int, rope: RopeConfig) -> Float[Array, "B 1 half"]:
    """Factors of dynamic NTK: s^(-2 i / (d - 2)) for pair i, so the fastest stays and the slowest is divided by s."""
    length = jnp.maximum(jnp.max(positions, axis=1) + 1, rope.original_max_positions).astype(jnp.float32)
    stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)  # s [B]
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / (head_dim - 2)
    return stretch[:, None, None] ** -exponents


def _llama3_frequencies(wavelengths: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Stretch the slow pairs in full, leave the fast ones, interpolate between (LLaMA 3.1)."""
    inv_freq = 1 / wavelengths
    turns = rope.original_max_positions / (2 * math.pi / inv_freq)  # over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn_frequencies(wavelengths: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """NTK by parts (arXiv 2309.00071, section 3.2): a linear ramp from no stretch to the full one."""
    head_dim = 2 * len(wavelengths)

    def pair_that_turns(turns: float) -> float:
        return (head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0  # as transformers does, against a division by zero
    keep = 1 - np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return 1 / (rope.factor * wavelengths) * (1 - keep) + 1 / wavelengths * keep


def _yarn_fields(entries: Entries, implied_factor: float) -> dict[str, Any]:
    """YaRN's options with the defaults of transformers, the attention factor worked out."""
    fields: dict[str, Any] = {
        "factor": entries.number("factor", implied_factor),
        "beta_fast": entries.number("beta_fast", 32.0),
        "beta_slow": entries.number("beta_slow", 1.0),
        "truncate": entries.flag("truncate", True),
    }

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(fields["factor"]) + 1.0 if fields["factor"] > 1 else 1.0

    inferred = mscale(1.0)
    if entries.values.get("mscale") and entries.values.get("mscale_all_dim"):
        inferred = mscale(entries.number("mscale")) / mscale(entries.number("mscale_all_dim"))
    fields["attention_factor"] = entries.number("attention_factor", inferred)
    return fields
