"""Programs by construction rather than by chance: aborts at every point (P9), and other rare meetings."""

from __future__ import annotations

import pytest
from core_kit import aborts_everywhere, decodes_behind_chunks, followers_everywhere
from shadow import play
from test_fast_forward import same_both_ways


def test_an_abort_at_any_point_harms_nobody() -> None:
    """P9: one job is aborted between any two calls; all reads stay right, the others end as usual, no block is lost."""
    programs = aborts_everywhere()
    assert len(programs) > 1000
    for case in programs:
        finished = play(case).finished
        aborted = [i for i, job in enumerate(case.jobs) if job.abort_at is not None]
        for i, reason in finished.items():
            usual = "stop" if case.jobs[i].out < case.jobs[i].cap else "length"
            assert reason == usual or (reason == "abort" and i in aborted)


@pytest.mark.parametrize(
    ("same_step", "depth"),
    [
        ("share", 1),
        ("share", 2),
        ("off", 1),
        ("off", 2),
        ("defer", 1),
        ("defer", 2),
    ],
)
def test_decodes_behind_chunks_wait_and_go_on(same_step: str, depth: int) -> None:
    """Where a prompt's chunks leave no budget for decodes behind it, these are put off, and lose no token."""
    programs = [
        case
        for case in decodes_behind_chunks()
        if case.config.same_step == same_step and case.config.steps_in_flight == depth
    ]
    assert len(programs) == 24
    for case in programs:
        played = play(case)
        assert set(played.finished.values()) == {"length"}
        assert played.preemptions == 0


def test_followers_of_a_running_request_are_not_skipped() -> None:
    """A request that could start once a running one has filled a block starts then, also in a run of steps."""
    cut = 0
    for case in followers_everywhere():
        fast = same_both_ways(case)
        assert set(fast.recorder.requests()["outcome"]) == {"length"}
        cut += bool(fast.runs)
    assert cut > 400, "hardly anything was fast-forwarded"
