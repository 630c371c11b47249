"""Tens of thousands of random programs for fork, copy-on-write and the order of swaps (`make test-long`)."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from core_kit import Case
from hypothesis import HealthCheck, Phase, given, seed, settings
from shadow import play
from strategies import cases

PROGRAMS = 500
"""Of each kind and seed: 3 x 14 x 500 = 21,000 programs in all."""

MUST_HAPPEN = {
    "forks": ("copies", "preemptions"),
    "swaps": ("swap_out", "swap_in", "copies", "preemptions"),
    "tiers": ("store", "load", "failed", "swap_out", "swap_in", "copies", "preemptions"),
}
"""What a batch of programs of a kind must have met, or it would show nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), list(product(MUST_HAPPEN, range(14))))
def test_many_programs(kind: str, number: int) -> None:
    """Reads, writes, copies, swaps and transfers are right in 500 programs of a kind, all of which really happen."""
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=PROGRAMS,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(of=kind))
    def check(case: Case) -> None:
        played = play(case)
        seen.update(played.moved)
        seen["preemptions"] += played.preemptions
        seen["programs"] += 1
        seen["with several sequences"] += any(job.n > 1 for job in case.jobs)
        seen["with a beam"] += any(job.beam for job in case.jobs)

    check()
    assert seen["programs"] >= PROGRAMS
    for what in (*MUST_HAPPEN[kind], "with several sequences", "with a beam"):
        assert seen[what] >= 10, (what, seen)
