"""What two sides differ by: differences of paired runs, with intervals, and whether a simulation had their sign.

Run i of side A and run i of side B are a pair, taken one after the other on the same trace, so that a slow drift of the
machine is in both. The interval is Student's t over the differences of the pairs: mean +- t(0.975, n - 1) s / sqrt(n),
95 %. One pair has no interval. A simulation repeats itself exactly, so it has one difference and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["METRICS", "agreement", "difference", "interval", "t_quantile", "value_of"]

METRICS = {
    "ttft_s.mean": ("TTFT mean", "s", 1.0),
    "ttft_s.p99": ("TTFT p99", "s", 1.0),
    "tpot_s.mean": ("TPOT mean", "ms", 1e3),
    "tpot_s.p99": ("TPOT p99", "ms", 1e3),
    "e2e_s.mean": ("end to end mean", "s", 1.0),
    "e2e_s.p99": ("end to end p99", "s", 1.0),
    "output_tokens_per_s": ("output tokens per s", "", 1.0),
    "num_preemptions": ("preemptions", "", 1.0),
    "hit_share": ("prompt tokens hit", "%", 100.0),
}
"""Metric -> (title, unit, factor from a summary's value to the unit)."""


def value_of(summary: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a run's summary.json; None where it has none."""
    if metric == "hit_share":
        prompt = summary["prompt_tokens"]
        return summary["prefix_hit_tokens"] / prompt if prompt else None
    value: Any = summary
    for part in metric.split("."):
        value = value[part]
    return None if value is None else float(value)


def t_quantile(dof: int) -> float:
    """t(0.975) with `dof` degrees of freedom, by bisection of the distribution's own integral; exact to 1e-9."""
    if dof < 1:
        raise ValueError(f"dof is {dof}; it must be at least 1")
    low, high = 0.0, 13.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if _t_tail(middle, dof) > 0.025:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_tail(t: float, dof: int) -> float:
    """P(T > t): the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(dof))
    cosine = math.cos(theta)
    if dof % 2:
        term = total = cosine if dof > 1 else 0.0
        for k in range(3, dof - 1, 2):
            term *= (k - 1) / k * cosine * cosine
            total += term
        inside = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        term = total = 1.0
        for k in range(2, dof - 1, 2):
            term *= (k - 1) / k * cosine * cosine
            total += term
        inside = math.sin(theta) * total
    return (1 - inside) / 2


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % t-interval of the mean of `values`; None for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = t_quantile(n - 1) * spread / math.sqrt(n)
    return mean - half, mean + half


def difference(
    real: Sequence[tuple[float | None, float | None]], simulated: tuple[float | None, float | None] | None
) -> dict[str, Any]:
    """One metric of both sides: means, B - A with its interval, and what the simulation says of it.

    Args:
        real: (A, B) of each pair of real runs; empty where there are none.
        simulated: (A, B) of the simulation; None where there is none.
    """
    pairs = [(a, b) for a, b in real if a is not None and b is not None]
    found: dict[str, Any] = {"pairs": len(pairs), "real": None, "simulated": None, "verdict": None}
    if pairs:
        deltas = [after - before for before, after in pairs]
        mean_a = sum(before for before, _ in pairs) / len(pairs)
        limits = interval(deltas)
        found["real"] = {
            "a": mean_a,
            "b": sum(after for _, after in pairs) / len(pairs),
            "difference": sum(deltas) / len(deltas),
            "interval": None if limits is None else list(limits),
            "difference_pct": sum(deltas) / len(deltas) / mean_a * 100 if mean_a else None,
            "interval_pct": None if limits is None or not mean_a else [limit / mean_a * 100 for limit in limits],
        }
    if simulated is not None:
        a, b = simulated
        if a is None or b is None:
            return found
        found["simulated"] = {
            "a": a,
            "b": b,
            "difference": b - a,
            "difference_pct": (b - a) / a * 100 if a else None,
        }
    found["verdict"] = agreement(found["real"], found["simulated"])
    return found


def agreement(real: Mapping[str, Any] | None, simulated: Mapping[str, Any] | None) -> str | None:
    """`same sign`, `other sign`, or `not clear` where the real interval includes 0 (or is not known); None without
    both sides."""
    if real is None or simulated is None:
        return None
    limits = real["interval"]
    if limits is None or limits[0] <= 0 <= limits[1]:
        return "not clear"
    return "same sign" if real["difference"] * simulated["difference"] > 0 else "other sign"
