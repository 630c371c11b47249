"""Running requests get their place in a step: tokens, blocks, and victims where blocks run out."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from engine.core import groups, leaving
from engine.core.cohort import by_key
from engine.core.policies import MIXED, Batch
from engine.core.request import RUNNING, Request
from engine.core.types import PlanItem

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["choose_victim", "dissolve", "loads_behind", "place_running"]

_NO_TURN = 2


def place_running(
    scheduler: Scheduler, seq: int, batch: Batch, items: list[PlanItem], preempted: list[Request]
) -> None:
    """Running requests get their tokens and blocks, in order; the last ones lose theirs if blocks run out.

    Those that `batch` leaves out keep their blocks, unless somebody with a place needs them.
    """
    budget = scheduler.config.max_num_batched_tokens
    if not batch.decodes:
        dissolve(scheduler, 0)
    elif scheduler._chunks and batch.prefills and not batch.decodes_first:
        dissolve_behind_chunks(scheduler, budget)
    scheduler._batch = batch
    scheduler._turns = {}
    cohort = scheduler._cohort
    crossing = cohort.crossing(seq)
    fills_upto = seq - len(scheduler._flight)
    publishes = scheduler._share and cohort.num_sharing > 0
    if (
        not scheduler._chunks
        and scheduler.manager.fits_each(len(crossing))
        and not scheduler.config.num_lookahead_tokens
    ):
        if crossing:
            scheduler.manager.append_block_each(crossing)
        if publishes:
            scheduler._publish_fills(fills_upto)
        return
    turns = {request.id: request for request in crossing}
    filled: dict[int, int] = {}
    if publishes:
        for fill_seq in range(scheduler._filled + 1, fills_upto + 1):
            for request in cohort.filling(fill_seq):
                turns[request.id] = request
                filled[request.id] = request.base + fill_seq
    for request in scheduler._chunks:
        turns[request.id] = request
    threshold = scheduler._threshold
    spent = 0
    placed = sorted(turns.values(), key=by_key)
    if batch is not MIXED:
        scheduler._turns = {request.id: turn(scheduler, request) for request in scheduler._running}
        placed = [request for request in placed if scheduler._turns[request.id] < _NO_TURN]
        placed.sort(key=lambda request: scheduler._turns[request.id])
    for request in placed:
        if request.state != RUNNING:
            continue  # it was a victim in this very step
        if request.in_cohort:
            if make_room(scheduler, request, request.base + seq, preempted) and request.id in filled:
                scheduler._catch_up(request)
                scheduler.manager.publish(request, filled[request.id])
            continue
        if request.group is not None and request.group.beam and request.group.forked:
            if request.group.turn != seq:
                spent += groups.place_beam(scheduler, request.group, budget - cohort.num - spent, items, preempted)
            continue
        num = min(request.known + request.pending - request.sched, budget - cohort.num - spent)
        if 0 < threshold < num:
            num = threshold
        if num > 0 and make_room(scheduler, request, request.sched + num, preempted):
            spent += num
            scheduler._plan_item(request, num, seq, items)


def make_room(scheduler: Scheduler, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
    """Blocks for `num_tokens` tokens (and the lookahead) of a running request, at the expense of those behind it.

    Returns whether the request still runs.
    """
    manager = scheduler.manager
    if scheduler.config.num_lookahead_tokens:
        num_tokens = scheduler._with_lookahead(num_tokens)
    while not manager.fits(request, (), num_tokens):
        victim = choose_victim(scheduler, request)
        if victim is request and loads_behind(scheduler, request):
            pause(scheduler, request)
            return False
        leaving.preempt(scheduler, victim, preempted)
        if request.state != RUNNING:
            return False
    manager.append_slots(request, num_tokens)
    return True


def loads_behind(scheduler: Scheduler, request: Request) -> bool:
    """Whether blocks will come free without `request` losing its own: those of a load behind it that ends."""
    return any(loading.key > request.key for loading in scheduler._loading.values())


def pause(scheduler: Scheduler, request: Request) -> None:
    """It keeps its blocks and gets no row in this step."""
    if request.in_cohort:
        leaving.leave_cohort(scheduler, request)
        scheduler._insert_chunk(request)


def turn(scheduler: Scheduler, request: Request) -> int:
    """Whether a running request has its place in the step before others (0), after them (1), or none."""
    batch = scheduler._batch
    decodes = request.in_cohort or request.known + request.pending - request.sched <= 1
    if not (batch.decodes if decodes else batch.prefills):
        return _NO_TURN
    return 0 if decodes or not batch.decodes_first else 1


def choose_victim(scheduler: Scheduler, request: Request) -> Request:
    """One of the running requests from `request` on: those before it have their place in this step.

    Not one that waits for a load: what it would give up is not free before the load has ended. The first of all is
    spared, unless nobody else can be chosen: whatever the policy, it goes on until it ends.
    """
    loading = scheduler._loading
    if scheduler._plain_victim and not scheduler._turns:
        last = len(scheduler._running) - 1
        while loading and scheduler._running[last].id in loading:
            last -= 1
        return scheduler._running[last]
    candidates = without_place(scheduler, request)
    if len(candidates) > 1 and is_first(scheduler, request):
        del candidates[0]
    policies = scheduler._policies
    oracle = policies.victim.oracle
    return candidates[policies.choose([scheduler.view_of(candidate, oracle) for candidate in candidates])]


def without_place(scheduler: Scheduler, request: Request) -> list[Request]:
    """`request` and those that have their place after it, or none: in the order of their places."""
    turns = scheduler._turns
    loading = scheduler._loading
    mine = (turns.get(request.id, 0), request.key)
    found = [
        other for other in scheduler._running if (turns.get(other.id, 0), other.key) >= mine and other.id not in loading
    ]
    if turns:
        found.sort(key=lambda other: turns[other.id])
    return found


def is_first(scheduler: Scheduler, request: Request) -> bool:
    """Whether nobody but its own beam has its place before it."""
    turns = scheduler._turns
    mine = (turns.get(request.id, 0), request.key)
    for other in scheduler._running:
        own = request.is_beam and other.group is request.group
        if (turns.get(other.id, 0), other.key) < mine and other.id not in scheduler._loading and not own:
            return False
    return True


def dissolve_behind_chunks(scheduler: Scheduler, budget: int) -> None:
    """If prefill chunks may leave no budget for decodes behind them, those decodes are placed one by one."""
    demand = scheduler._cohort.num
    threshold = scheduler._threshold or budget
    for request in scheduler._chunks:
        demand += min(request.known + request.pending - request.sched, threshold)
    if demand <= budget:
        return
    dissolve(scheduler, bisect_left(scheduler._running, scheduler._chunks[0].key, key=by_key))


def dissolve(scheduler: Scheduler, first: int) -> None:
    """The members from place `first` of the running on leave the cohort: each of their tokens is to be planned."""
    for request in scheduler._running[first:]:
        if request.in_cohort:
            leaving.leave_cohort(scheduler, request)
            scheduler._insert_chunk(request)
