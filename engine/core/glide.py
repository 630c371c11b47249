"""Decode steps with nobody waiting, across finishes, in one go: the results are those of taking them one by one.

A run (fastforward.py) ends where a request finishes, since a finish may let somebody in. With nobody waiting it lets
nobody in: the next plan is the same again without those who have finished. So the loop need not make plans for such
steps at all, from the end of one step to the next arrival. This is for an inbox that tells arrivals ahead, and one step
in flight; everything else goes by runs and by single steps.
"""

from __future__ import annotations

from engine.core import leaving
from engine.core.records import Recorder
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.types import Finish, GlideExecutor

__all__ = ["can_glide", "glide", "is_plain"]


def is_plain(scheduler: Scheduler) -> bool:
    """Whether a scheduler's options leave nothing to be decided while nobody waits: no policy of a user's, no blocks
    that are reserved, ranked, looked ahead for or moved."""
    config = scheduler.config
    return (
        config.steps_in_flight == 1
        and config.allocator == "paged"
        and not config.policies
        and not config.num_lookahead_tokens
        and not config.num_host_blocks
        and scheduler.manager.ranked is None
        and scheduler._plain_batching
    )


def can_glide(scheduler: Scheduler) -> bool:
    """Whether every running request decodes, and no other is there; no step may be in flight. See `is_plain`."""
    num = scheduler._cohort.num
    return num > 0 and num == len(scheduler._running) and num == len(scheduler._requests) and not scheduler._groups


def glide(
    scheduler: Scheduler, executor: GlideExecutor, recorder: Recorder, now: int, until: int
) -> tuple[int, list[Finish]]:
    """Steps from `now` on, to the first end of one at or after `until`, to the first finish, or until blocks run out.

    Returns when the last of them ended, and who finished in it; (now, []) where not one step was possible.
    """
    cohort = scheduler._cohort
    manager = scheduler.manager
    before = scheduler._seq
    first = before + 1
    cap_seq = cohort.next_cap()
    stop_seq = executor.next_stop()
    most = (cap_seq if cap_seq < stop_seq else stop_seq) - before
    num = cohort.num
    if num * (most // cohort.block_size + 1) > manager.pool.num_free:  # or else they suffice without counting
        within = cohort.turns_within(before, manager.pool.num_free)
        if within < most:
            most = within
            if not most:
                return now, []
    context = cohort.context_tokens
    ends = executor.glide(num, context, most, first, now, until)
    turns = len(ends)
    last = before + turns
    usage = scheduler.usage_row()
    crossing: list[Request] = []
    marks: list[int] = []
    for seq in range(first, last + 1):
        cohort.cross(seq, crossing)
        marks.append(len(crossing))
    kept = manager.append_block_each(crossing, marks)
    cohort.advance(turns)
    scheduler._sched_tokens += num * turns
    scheduler._seq = last
    scheduler._lag = 0
    sharing = cohort.num_sharing > 0
    if sharing and scheduler._share:
        scheduler._done = last - 1
        scheduler._publish_fills(last)
    scheduler._filled = last
    scheduler._done = last
    recorder.glided(first, now, ends, num, context, usage, marks, kept)
    now = ends[-1]
    if last < cap_seq and last < stop_seq:
        if sharing and not scheduler._share:
            _publish(scheduler, first, last, [])
        return now, []
    capped = cohort.capped(last) if last == cap_seq else []
    if sharing and not scheduler._share:
        _publish(scheduler, first, last, capped)
    reasons = {request.id: "length" for request in capped}
    if last == stop_seq:
        for finish in executor.stops_in(last):
            reasons[finish.request] = finish.reason
    ending = capped
    if len(reasons) > len(capped):
        ending = sorted([scheduler._requests[id] for id in reasons], key=_key)
    finished = [leaving.end(scheduler, request, reasons[request.id]) for request in ending]
    recorder.finished_in(last, finished, now)
    return now, finished


def _publish(scheduler: Scheduler, first: int, last: int, capped: list[Request]) -> None:
    """What the steps first .. last filled may be hit; of those that end in the last step, `_end` sees to it."""
    for seq in range(first, last + 1):
        for request in scheduler._cohort.filling(seq):
            if seq < last or request not in capped:
                scheduler._catch_up(request)
                scheduler.manager.publish(request, request.base + seq)


def _key(request: Request) -> tuple[int, ...]:
    return request.key
