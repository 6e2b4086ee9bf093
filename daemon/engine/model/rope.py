"""Rotary position tables: cos and sin of every position a context can hold.

The formulas are those of `transformers.modeling_rope_utils` (version 5), by the names of `rope_type` in config.json:
`default` (RoFormer, arXiv 2104.09864), `linear` (position interpolation, arXiv 2306.15595), `dynamic` (NTK-aware
scaling), `llama3` (Llama 3.1), `yarn` (arXiv 2309.00071). Frequencies and phases are rounded to float32 where torch
rounds them, because models were trained with those very phases: at position 30,000 exact ones differ by 1e-3.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierd.daemon.models.spec import ModelSpec, RopeSpec

KINDS = frozenset({"default", "linear", "dynamic", "llama3", "yarn"})


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Radians per position of each pair of dimensions, and the factor on cos and sin (`attention_scaling`)."""

    inverse: npt.NDArray[np.float32]  # [head_dim / 2]
    scaling: float

    def describe(self) -> str:
        """A stable digest: pages rotated with other frequencies are other pages."""
        return f"{hashlib.blake2b(self.inverse.tobytes(), digest_size=8).hexdigest()}.{self.scaling!r}"


def max_context(spec: ModelSpec) -> int:
    """The longest context, in tokens, whose positions the model's own scaling covers."""
    rope = spec.rope
    match rope.kind:
        case "yarn" | "llama3" if rope.original_context:
            return max(spec.context, int(rope.original_context * rope.factor))
        case "dynamic":
            return max(spec.context, int(spec.context * rope.factor))
        case _:
            return spec.context


def frequencies(spec: ModelSpec, context: int) -> Frequencies:
    """Frequencies for a context of `context` tokens. Raises ValueError for a kind it does not know.

    `dynamic` rescales with the length of the sequence in transformers. A page must not depend on what follows it, so
    here the length is the context: inside the trained context that is the unscaled rotation, as there.
    """
    rope, dim = spec.rope, spec.head_dim
    base = rope.theta
    scaling = 1.0
    match rope.kind:
        case "default":
            inverse = _inverse(base, dim)
        case "linear":
            inverse = _inverse(base, dim) / np.float32(rope.factor)
        case "dynamic":
            length = max(context, spec.context)
            stretch = rope.factor * length / spec.context - (rope.factor - 1.0)
            inverse = _inverse(base * stretch ** (dim / (dim - 2)), dim)
        case "llama3":
            inverse = _llama3(_inverse(base, dim), rope, rope.original_context or spec.context)
        case "yarn":
            inverse = _yarn(dim, rope, rope.original_context or spec.context)
            scaling = rope.attention_factor if rope.attention_factor is not None else _yarn_scaling(rope.factor)
        case other:
            raise ValueError(f"unknown rope kind {other!r}; known: {', '.join(sorted(KINDS))}")
    return Frequencies(inverse.astype(np.float32), scaling)


def tables(freqs: Frequencies, context: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(cos, sin), each float32 `[context, head_dim / 2]`."""
    positions = np.arange(context, dtype=np.float32)
    phases = np.multiply.outer(positions, freqs.inverse)  # float32, as torch multiplies
    wide = phases.astype(np.float64)
    return (
        (np.cos(wide) * freqs.scaling).astype(np.float32),
        (np.sin(wide) * freqs.scaling).astype(np.float32),
    )


def angles(
    freqs: Frequencies, positions: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(cos, sin) of any positions, each float32 `[positions, head_dim / 2]`.

    For those that no model was trained with: phases are float64, for in float32 neighbours far out would be the same.
    """
    phases = np.multiply.outer(positions.astype(np.float64), freqs.inverse.astype(np.float64))
    return (np.cos(phases) * freqs.scaling).astype(np.float32), (np.sin(phases) * freqs.scaling).astype(np.float32)


def _inverse(base: float, dim: int) -> npt.NDArray[np.float32]:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1.0) / np.power(float(base), exponents.astype(np.float64)).astype(np.float32)


def _llama3(inverse: npt.NDArray[np.float32], rope: RopeSpec, original: int) -> npt.NDArray[np.float32]:
    """Long wavelengths are divided by the factor, short ones stay, between them a straight line."""
    wavelength = 2.0 * math.pi / inverse
    low = original / rope.low_freq_factor
    high = original / rope.high_freq_factor
    scaled = np.where(wavelength > low, inverse / np.float32(rope.factor), inverse)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (original / wavelength - rope.low_freq_factor) / span if span else np.zeros_like(wavelength)
    blended = (1.0 - smooth) * scaled / rope.factor + smooth * scaled
    medium = (wavelength >= high) & (wavelength <= low)
    result: npt.NDArray[np.float32] = np.where(medium, blended, scaled).astype(np.float32)
    return result


def _yarn(dim: int, rope: RopeSpec, original: int) -> npt.NDArray[np.float32]:
    """Interpolated where a dimension turns less than `beta_slow` times in the original context, untouched above
    `beta_fast` turns, a ramp over the dimensions between."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))

    first, last = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    low, high = max(first, 0.0), min(last, dim - 1.0)
    if low == high:
        high += 0.001  # as transformers does: no division by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0).astype(np.float32)
    extrapolated = _inverse(rope.theta, dim)
    interpolated = extrapolated / np.float32(rope.factor)
    result: npt.NDArray[np.float32] = (interpolated * ramp + extrapolated * (np.float32(1.0) - ramp)).astype(np.float32)
    return result


def _yarn_scaling(factor: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
