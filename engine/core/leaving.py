"""Requests leave: the cohort, their blocks when they are preempted, and everything when they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core import groups, tiers
from engine.core.request import FINISHED, RUNNING, WAITING, Request
from engine.core.types import Finish

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["end", "leave_cohort", "num_written", "preempt"]


def leave_cohort(scheduler: Scheduler, request: Request) -> None:
    """The request goes on outside the cohort; it still gets the tokens that plans in flight sample for it."""
    written = num_written(scheduler, request)
    scheduler._catch_up(request)
    scheduler._cohort.leave(request, scheduler._seq, scheduler._done)
    request.written = written
    for flight in scheduler._flight:
        if flight.plan.seq > request.join_seq:
            flight.detached.append(request)


def preempt(scheduler: Scheduler, victim: Request, preempted: list[Request]) -> None:
    """`victim` loses its blocks, and waits in its old place; a beam does as a whole.

    What it had computed goes to the host and comes back, or is computed again where it is not hit, or the request
    is given up: see `preemption_mode`.
    """
    group = victim.group
    members = group.members if group is not None and group.beam else [victim]
    for request in reversed(members):
        if request.state == RUNNING:
            take_blocks_back(scheduler, request, preempted)


def take_blocks_back(scheduler: Scheduler, request: Request, preempted: list[Request]) -> None:
    if scheduler.config.preemption_mode == "reject" and not request.waits:
        scheduler._rejected.append(end(scheduler, request, "no-memory"))
        return
    written = num_written(scheduler, request)
    if request.in_cohort:
        leave_cohort(scheduler, request)
    elif request in scheduler._chunks:
        scheduler._chunks.remove(request)
    scheduler._sched_tokens -= request.sched
    scheduler.num_preempted_tokens += request.sched
    if request.sched > request.computed:
        request.computed = request.sched
    if scheduler.host is not None:
        tiers.swap_out(scheduler, request)
    scheduler.manager.free(request, written, ended=False)
    scheduler._remove_running(request)
    scheduler._seats_kept -= scheduler._seats(request) - 1
    request.state = WAITING
    request.waits = False
    request.written = 0
    if not request.host:
        request.sched = 0
    request.epoch += 1
    scheduler._waiting.push(request)
    preempted.append(request)


def end(scheduler: Scheduler, request: Request, reason: str) -> Finish:
    """The request is finished or aborted: everything it holds goes back, and nothing waits for it any more."""
    outputs = scheduler._known(request) - request.num_prompt
    if request.state == RUNNING:
        written = num_written(scheduler, request)
        if request.in_cohort:
            scheduler._catch_up(request)
            scheduler._cohort.leave(request, scheduler._seq, scheduler._done)
        elif request in scheduler._chunks:
            scheduler._chunks.remove(request)
        scheduler._sched_tokens -= request.sched
        scheduler.manager.free(request, written, ended=True)
        scheduler._remove_running(request)
        scheduler._seats_kept -= scheduler._seats(request) - 1
        scheduler._loading.pop(request.id, None)
    elif request.state == WAITING:
        scheduler._waiting.remove(request)
        if request.host and scheduler.host is not None:
            scheduler.host.release(request.host)
            request.host = []
    request.state = FINISHED
    del scheduler._requests[request.id]
    if request.group is not None:
        groups.ended(scheduler, request.group, request)
    return Finish(request.id, reason, outputs, request.epoch)


def num_written(scheduler: Scheduler, request: Request) -> int:
    """Leading tokens whose blocks the cache may keep when the request gives them up now.

    They are written, or will be by a plan that runs. With same_step `share` that is what was published: at each
    turn what is planned and known, and at each completion what is computed but for the samples still pending. With
    two steps in flight the newest step's input is not known at its turn, so its block is not published yet.
    """
    if not request.in_cohort:
        return request.written
    newest = scheduler._done
    if scheduler._share:
        newest = max(newest, scheduler._seq - scheduler._lag)
    elif newest < request.join_seq:
        return request.written
    return max(request.written, request.base + newest)
