"""What Prometheus computes from a counter's or a histogram's samples, as far as the ledger's alerts need it.

After the documentation of `rate` and `histogram_quantile` (prometheus.io/docs/prometheus/latest/querying/functions) and
the extrapolation in promql/functions.go of Prometheus 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["histogram_quantile", "rate"]

Sample = tuple[float, float]
"""(time in s, value)."""


def rate(samples: Sequence[Sample], at_s: float, window_s: float) -> float | None:
    """`rate(series[window])` at `at_s`, per second. Each fall is taken for a restart from zero, since rate is meant for
    counters. None where fewer than two samples lie in the window.
    """
    inside = [sample for sample in samples if at_s - window_s < sample[0] <= at_s]
    if len(inside) < 2:
        return None
    (first_s, first), (last_s, last) = inside[0], inside[-1]
    increase = last - first
    for (_, before), (_, after) in pairwise(inside):
        if after < before:
            increase += before
    covered = last_s - first_s
    gap = covered / (len(inside) - 1)
    to_start, to_end = first_s - (at_s - window_s), at_s - last_s
    if to_start >= 1.1 * gap:
        to_start = gap / 2
    if increase > 0 and first >= 0:
        to_start = min(to_start, covered * first / increase)  # a counter was not below zero
    if to_end >= 1.1 * gap:
        to_end = gap / 2
    return increase * (covered + to_start + to_end) / covered / window_s


def histogram_quantile(quantile: float, buckets: Sequence[tuple[float, float]]) -> float:
    """`histogram_quantile` over cumulative buckets (upper bound, count or rate), ascending, the last one infinite:
    linear between the bounds of the bucket in which the quantile lies.
    """
    rank = quantile * buckets[-1][1]
    at = next(i for i, (_, count) in enumerate(buckets) if count >= rank)
    if at == len(buckets) - 1:
        return buckets[-2][0]
    low, below = (0.0, 0.0) if at == 0 else buckets[at - 1]
    high, count = buckets[at]
    return low + (high - low) * (rank - below) / (count - below)
