"""Many steps in one go: a run of decode steps in which no decision can change, with the results of taking them one by
one.

`horizon` says how long such a run may be, `advance` takes it. Both know the scheduler from the inside; its cohort's
arithmetic (cohort.py) holds for skipped steps as for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.core.flight import CohortRows, InFlight
from engine.core.request import Request
from engine.core.types import StepPlan

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["Horizon", "advance", "horizon"]

Horizon = tuple[int, str]
"""How many completions decide nothing, and the term that ends them: `steady` (0 of them: the newest plans are not
plain decode steps), `finish`, `max_tokens`, `max_model_len` or `blocks`."""


def horizon(scheduler: Scheduler, finish_bound: int) -> Horizon:
    """See Scheduler.horizon."""
    flight = scheduler._flight
    # With nobody left in the cohort (the last ones stopped while the newest plan was in flight) nothing repeats.
    if not flight or not scheduler._cohort.num or not all(entry.plan.steady for entry in flight):
        return 0, "steady"
    oldest = flight[0].plan.seq
    turns, term = finish_bound, "finish"
    for entry in flight:
        if entry.detached:
            if entry.plan.seq - oldest < turns:
                turns, term = entry.plan.seq - oldest, _cap_term(entry.detached)
            break
    cap_seq = scheduler._cohort.next_cap()
    if cap_seq - scheduler._seq < turns:
        turns, term = cap_seq - scheduler._seq, _cap_term(scheduler._cohort.capped(cap_seq))
    free = scheduler.manager.num_growth_blocks
    if scheduler.headroom < free:
        # Once these are taken, the head of the queue waits for blocks and not for the policy that refused it.
        free = max(0, scheduler.headroom)
    within = scheduler._cohort.turns_within(scheduler._seq, free)
    if within < turns:
        turns, term = within, "blocks"
    return turns, term


def _cap_term(requests: Sequence[Request]) -> str:
    return "max_tokens" if any(r.cap == r.spec.max_tokens for r in requests) else "max_model_len"


def advance(scheduler: Scheduler, ends: Sequence[int]) -> list[StepPlan]:
    """See Scheduler.advance."""
    turns = len(ends)
    cohort = scheduler._cohort
    manager = scheduler.manager
    flight = scheduler._flight
    lag = len(flight) - 1
    first = scheduler._seq + 1
    last = scheduler._seq + turns
    crossing: list[Request] = []
    marks: list[int] = []
    for seq in range(first, last + 1):
        crossing += cohort.crossing(seq)
        marks.append(len(crossing))
    scheduler.run_kept_free = manager.append_block_each(crossing, marks)
    scheduler.run_unreachable = manager.run_unreachable
    if cohort.num_sharing:
        # Taking blocks and publishing do not touch each other, so all takes may come before all fills.
        if scheduler._share:
            scheduler._publish_fills(last - lag)
        else:
            for done in range(first - 1 - lag, last - lag):
                for request in cohort.filling(done):
                    scheduler._catch_up(request)
                    manager.publish(request, request.base + done)
    scheduler._filled = last - lag
    scheduler._lag = lag
    context = cohort.context_tokens
    cohort.advance(turns)
    scheduler._sched_tokens += cohort.num * turns
    for _ in range(min(turns, len(flight))):
        flight.popleft()
    for seq in range(max(first, last - lag), last + 1):
        rows = CohortRows(scheduler, seq, cohort.num, context + (seq - first) * cohort.num)
        flight.append(InFlight(StepPlan(seq, ends[seq - first], (), rows, (), (), (), True)))
    scheduler._seq = last
    scheduler._done += turns
    scheduler._retire_capped(last)
    return [entry.plan for entry in flight]
