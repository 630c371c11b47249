"""What others read of a scheduler: the rows of its newest plan, and where every slot is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core import groups
from engine.core.types import PlanItem, StepPlan

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["decode_rows", "scheduled_order", "usage_row"]


def decode_rows(scheduler: Scheduler, seq: int) -> list[PlanItem]:
    """The cohort rows of plan `seq`, in order. Only right after `schedule` made that plan."""
    rows = []
    for request in scheduler._running:
        if request.in_cohort:
            if request.join_seq < seq:
                rows.append(PlanItem(request.id, request.epoch, request.base + seq - 1, 1, True))
        elif request.row_seq == seq:
            rows.append(PlanItem(request.id, request.epoch, request.sched - 1, 1, True))
    return rows


def scheduled_order(scheduler: Scheduler, plan: StepPlan) -> list[PlanItem]:
    """All rows in the order in which they got their place. Only right after `schedule` made that plan."""
    admitted = set(plan.admitted)
    rows = plan.decodes.rows() + [item for item in plan.prefills if item.request not in admitted]
    rows.sort(key=lambda item: (scheduler._turns.get(item.request, 0), scheduler._requests[item.request].key))
    return rows + [item for item in plan.prefills if item.request in admitted]


def usage_row(scheduler: Scheduler) -> tuple[int, ...]:
    """The same as a plain tuple, in the order of Usage."""
    manager = scheduler.manager
    pool = manager.pool
    size = scheduler.config.block_size
    reserved = manager.num_reserved_blocks * size
    unused = scheduler.manager.num_table_blocks * size - scheduler._sched_tokens
    if scheduler.manager.cow:
        unused -= groups.unused_twice(scheduler)
    transfer = 0
    if scheduler.transfers is not None and scheduler.transfers.open:
        transfer = scheduler.transfers.blocks_held_alone() * size
    held = (pool.num_blocks - pool.num_free) * size - unused - transfer - reserved
    may = cannot = 0
    if scheduler.config.num_lookahead_tokens or scheduler._num_beams or not scheduler._plain_batching:
        for request in scheduler._running:
            sched = request.base + scheduler._seq if request.in_cohort else request.sched
            first = -(-sched // size) * size
            slots = len(request.table) * size
            limit = min(max(request.num_prompt + request.cap, first), slots)
            may += limit - first
            cannot += slots - limit
    external = manager.external_blocks(scheduler._waiting.peek()) * size if scheduler._waiting else 0
    cached = pool.num_kept_free * size
    free = pool.num_free * size - cached - external
    tail = unused - may - cannot
    beyond = manager.reserved_cannot
    may += reserved - beyond
    cannot += beyond
    return held, tail, may, cannot, external, transfer, cached, free, scheduler._sched_tokens - held
