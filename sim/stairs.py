"""The piecewise-linear form of the step time: two rising tables in n, for steps with a prefill and without.

    gpu = D(n) + a3 K                      without a prefill
    gpu = M(n) + (a3 + a4) K + a5 F        with one

D and M are linear between knots and never fall. Only worth its many numbers where an engine's times have stairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sim.calibration import _Batches

__all__ = ["Knots", "choose_knots", "stairs_design", "unpack"]

_MOST_KNOTS = 12
_BATCHES_A_KNOT = 3

Knots = tuple[np.ndarray, np.ndarray]
"""Ascending n at which D and M may bend."""


def choose_knots(batches: _Batches) -> Knots:
    """Knots at numbers of tokens that were measured, evenly spread over them."""
    prefill = batches.work > 0
    found = []
    for mask in (~prefill, prefill):
        sizes = np.unique(batches.n[mask])
        count = int(min(_MOST_KNOTS, len(sizes), max(2, mask.sum() // _BATCHES_A_KNOT)))
        found.append(sizes[np.unique(np.linspace(0, len(sizes) - 1, count).round().astype(int))])
    return found[0], found[1]


def _rises(n: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """A column of ones, and one a segment that rises from 0 to 1 over it (the last goes on): float64[n, knots]."""
    columns = [np.ones(len(n))]
    for j in range(len(knots) - 1):
        share = (n - knots[j]) / (knots[j + 1] - knots[j])
        columns.append(np.clip(share, 0.0, None if j == len(knots) - 2 else 1.0))
    return np.column_stack(columns)


def stairs_design(batches: _Batches, knots: Knots) -> np.ndarray:
    """The columns of the form: those of D, those of M, then K, K P and F. Coefficients that are not negative make D
    and M rise."""
    prefill = batches.work > 0
    decode = _rises(batches.n, knots[0]) * ~prefill[:, None]
    mixed = _rises(batches.n, knots[1]) * prefill[:, None]
    return np.column_stack([decode, mixed, batches.context, batches.context * prefill, batches.work])


def unpack(values: np.ndarray, knots: Knots) -> tuple[dict[str, float], dict[str, list[list[float]]]]:
    """(coefficients, tables) by the names that StepTime has for them."""
    first, second = len(knots[0]), len(knots[1])
    tables = {}
    for name, ns, rises in (("table", knots[0], values[:first]), ("table_mixed", knots[1], values[first:][:second])):
        points = list(zip(ns.tolist(), np.cumsum(rises).tolist(), strict=True))
        # Fewer tokens than were measured take as long as the fewest that were.
        tables[name] = [[points[0][0] - 1.0, points[0][1]], *(list(point) for point in points)]
    context, mixed, work = (float(value) for value in values[first + second :])
    return {"context": context, "context_mixed": mixed, "work": work, "ridge": 0.0}, tables
