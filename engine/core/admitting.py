"""Waiting requests start, in the order of the policy, while there is room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.core import groups, tiers
from engine.core.request import RUNNING, Request
from engine.core.types import FOR_KV, FOR_NOTHING, FOR_POLICY, FOR_SEQUENCES, FOR_TOKENS, NO_LIMIT, BlockId, PlanItem

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["admit", "head_fits", "start_running"]


def head_fits(scheduler: Scheduler, now: int) -> bool:
    """Whether the next waiting request could be admitted with its whole prompt, but for the step's budget."""
    if not scheduler._waiting:
        return False
    request = next_waiting(scheduler, now)
    if len(scheduler._running) + scheduler._seats_kept + scheduler._seats(request) > scheduler.config.max_num_seqs:
        scheduler.waits_for = FOR_SEQUENCES
        return False
    hits = scheduler.manager.lookup(request)
    if request.host:
        hits = tiers.hits_of_swapped(scheduler, request, hits)
        if request.known + request.pending == request.sched:
            scheduler.waits_for = FOR_KV
            return False
    elif scheduler._defer and scheduler._is_being_written(request, len(hits)):
        return False
    return has_room(scheduler, request, hits, scheduler._with_lookahead(max(request.known, request.sched)), now)


def admit(
    scheduler: Scheduler, now: int, budget: int, whole_prompts: bool, items: list[PlanItem], admitted: list[int]
) -> bool:
    """Waiting requests start, in order, while there is room. Returns whether the next was left for lack of it."""
    config = scheduler.config
    manager = scheduler.manager
    scheduler.waits_for = FOR_TOKENS
    while scheduler._waiting and budget > 0:
        request = next_waiting(scheduler, now)
        if len(scheduler._running) + scheduler._seats_kept + scheduler._seats(request) > config.max_num_seqs:
            scheduler.waits_for = FOR_SEQUENCES
            return True
        if request.group is not None and request.group.beam and request.group.forked:
            spent = groups.admit_beam(scheduler, request.group, budget, items, admitted)
            if not spent:
                return True
            budget -= spent
            continue
        hits = manager.lookup(request)
        if scheduler._defer and not request.host and scheduler._is_being_written(request, len(hits)):
            scheduler.waits_for = FOR_POLICY
            return False
        start = len(hits) * config.block_size
        remaining = request.known - start
        sources: list[BlockId] = []
        if request.host:
            hits = tiers.hits_of_swapped(scheduler, request, hits)
            start = request.sched
            remaining = request.known + request.pending - start
            if not remaining:
                scheduler.waits_for = FOR_KV
                return True  # the token that ends it is in flight
        elif scheduler.transfers is not None:
            sources = tiers.host_hits(scheduler, request, len(hits))
            start += len(sources) * config.block_size
            remaining = 0 if sources else remaining
        num = remaining
        if 0 < scheduler._threshold < num:
            num = scheduler._threshold
        if num > budget:
            if whole_prompts and budget < config.max_num_batched_tokens:
                return True  # it waits for a step of its own
            num = budget
        tokens = scheduler._with_lookahead(start + num) if num else start
        if whole_prompts:
            tokens = max(tokens, scheduler._with_lookahead(request.known))
        if not has_room(scheduler, request, hits, tokens, now):
            return True
        if scheduler.prefix_stats is not None:
            scheduler.prefix_stats.admitted(request, len(hits), len(sources))  # before anything is evicted for it
        manager.allocate(request, hits, tokens)
        if request.host:
            tiers.swap_in(scheduler, request, len(hits))
        start_running(scheduler, request, start, len(hits) * config.block_size)
        if sources:
            tiers.start_load(scheduler, request, len(hits), sources, now)
            continue
        admitted.append(request.id)
        scheduler._plan_item(request, num, scheduler._seq + 1, items)
        if request.sched < request.known + request.pending:
            scheduler._insert_chunk(request)
        budget -= num
    if not scheduler._waiting:
        scheduler.waits_for = FOR_NOTHING
    return budget <= 0


def start_running(scheduler: Scheduler, request: Request, start: int, written: int) -> None:
    """A waiting request has its blocks, `start` tokens in them, of which the first `written` are published."""
    scheduler._waiting.remove(request)
    if scheduler._keeps_account:
        scheduler._policies.started(scheduler.view_of(request, scheduler._policies.order.oracle))
    scheduler._seats_kept += scheduler._seats(request) - 1
    request.state = RUNNING
    request.sched = start
    request.written = written
    scheduler._sched_tokens += start
    scheduler._insert_running(request)


def next_waiting(scheduler: Scheduler, now: int) -> Request:
    """Who is to be admitted next; somebody must be waiting."""
    if not scheduler._dynamic:
        return scheduler._waiting.peek()
    told = (scheduler._waiting.changes, scheduler.manager.index.changes)
    if scheduler._chosen is not None and told == scheduler._chosen_of and now <= scheduler._chosen_until:
        return scheduler._chosen
    window = scheduler._waiting.first(scheduler._window)
    oracle = scheduler._policies.order.oracle
    views = [scheduler.view_of(request, oracle) for request in window]
    size = scheduler.config.block_size
    cached = [len(scheduler.manager.lookup(request)) * size for request in window]
    scheduler._chosen = window[scheduler._policies.next(views, cached, now)]
    scheduler._chosen_of, scheduler._chosen_until = told, scheduler._policies.stable_until(now)
    return scheduler._chosen


def has_room(scheduler: Scheduler, request: Request, hits: Sequence[BlockId], tokens: int, now: int) -> bool:
    """Whether a waiting request may have `tokens` slots, of which its hits are the first."""
    config = scheduler.config
    manager = scheduler.manager
    whole = max(tokens, request.known) if config.scheduler_reserve_full_isl else tokens
    spare = config.watermark_blocks if scheduler._running else 0
    if scheduler._reserve:
        whole = scheduler._most_tokens(request.num_prompt, request.cap)
        spare += promised_blocks(scheduler)
    elif scheduler._loading:
        spare += tiers.promised(scheduler)
    if not manager.fits(request, hits, whole, spare):
        scheduler.waits_for = FOR_KV
        return False
    if not scheduler._running or scheduler._plain_admission:
        return True
    need = manager.need(request, hits, whole)
    view = scheduler.view_of(request, scheduler._policies.admission.oracle)
    if scheduler._policies.admits(view, need, manager.pool.num_free, len(scheduler._running), now):
        return True
    scheduler.waits_for = FOR_POLICY
    if not scheduler._reserve and manager.num_growth_blocks < NO_LIMIT:
        scheduler.headroom = manager.pool.num_free - need - spare
    return False


def promised_blocks(scheduler: Scheduler) -> int:
    """Blocks that running requests will still take, up to prompt + max_tokens (admission_reserve `max_tokens`)."""
    size = scheduler.config.block_size
    return sum(-(-scheduler._most_tokens(r.num_prompt, r.cap) // size) - len(r.table) for r in scheduler._running)
