"""The experiment `fork`: what is counted as saved, and the churn that simulated beams are drawn with."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.fork import _churn_of, compared, saved_share
from experiments.metrics import Tables
from sim.executor import beam_parents


def test_the_saved_share_is_taken_over_time():
    """Shared blocks over what sequences would take alone, tails and all, each step weighted by how long it took."""
    steps = {
        "start_ns": np.array([0, 100]),
        "end_ns": np.array([100, 400]),
        "held": np.array([10, 20]),
        "shared": np.array([10, 0]),
        "tail": np.array([0, 5]),
        "reserved_may": np.array([1, 0]),
        "reserved_cannot": np.array([0, 2]),
    }
    tables = Tables({}, steps, np.array([]), 1, 16)
    assert saved_share(tables) == pytest.approx(1000 / (1000 + 1100 + 300 * 27))


def test_the_churn_gives_the_share_of_sequences_that_real_beams_keep():
    """No churn where every sequence goes on; in between, simulated beams of four keep what was asked for."""
    assert _churn_of(1.0) == 0.0
    churn = _churn_of(0.8)
    kept = np.mean([len(set(beam_parents(9, 3, step, 4, churn))) / 4 for step in range(4000)])
    assert kept == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("ours", "lies"),
    [((0.06, 0.1), "within"), ((0.05, 0.07), "overlaps"), ((0.11, 0.2), "above"), ((0.01, 0.02), "below")],
)
def test_a_range_is_compared_with_the_papers(ours: tuple[float, float], lies: str):
    """Ours lies within theirs, overlaps it, or is apart, and on which side."""
    assert compared(ours, (0.06, 0.1)) == lies
