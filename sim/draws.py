"""Random numbers that depend on what they are for, and on nothing that was drawn before."""

from __future__ import annotations

import math

__all__ = ["exponential", "mixed", "uniform"]

_MASK = (1 << 64) - 1


def mixed(seed: int, *parts: int) -> int:
    """64 bits that depend on all arguments (splitmix64 over them, one after another)."""
    z = seed & _MASK
    for part in (0, *parts):
        z = (z + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


def uniform(seed: int, *parts: int) -> float:
    """A number from 0 up to 1, 1 excluded."""
    return (mixed(seed, *parts) >> 11) * 2.0**-53


def exponential(seed: int, *parts: int) -> float:
    """A number with an exponential distribution of mean 1."""
    return -math.log(1.0 - uniform(seed, *parts))
