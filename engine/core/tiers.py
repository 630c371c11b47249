"""What the scheduler does with the host: swaps, stores and loads.

A swap is part of its plan and needs no more than that: plans run in order, so a block that a preemption gives up can be
given to somebody else at once, and is copied before that one writes to it. Stores and loads run beside steps; they hold
their blocks until they end.

These functions are the scheduler's own, apart for the sake of its length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.request import RUNNING, Request
from engine.core.types import BlockCopy, BlockHash, BlockId, StepPlan

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = [
    "begin_step",
    "end_step",
    "hits_of_swapped",
    "host_hits",
    "is_busy",
    "must_run",
    "promised",
    "start_load",
    "swap_in",
    "swap_out",
    "transfer_ended",
]


def begin_step(scheduler: Scheduler, now: int) -> None:
    """A plan is going to be made."""
    host = scheduler.host
    assert host is not None
    host.begin_step()
    transfers = scheduler.transfers
    if transfers is not None:
        for id in transfers.expired(now):
            scheduler._revoked.append(id)
            transfer_ended(scheduler, id, False)
        # What was published until now is written by plans that were made before this one.
        scheduler._ripe += scheduler.manager.new_keys or []
        scheduler.manager.new_keys = []


def end_step(scheduler: Scheduler, plan: StepPlan) -> None:
    """The plan is made: it gets the copies, and the transfers that begin with it."""
    host, transfers = scheduler.host, scheduler.transfers
    assert host is not None
    plan.swap_out = host.plan_out()
    if scheduler._swap_in:
        plan.swap_in = tuple(scheduler._swap_in)
        scheduler._swap_in = []
    if transfers is None:
        return
    plan.transfers = tuple(scheduler._new_transfers)
    plan.revoked = tuple(scheduler._revoked)
    plan.loading = tuple(scheduler._plan_loads)
    scheduler._new_transfers = []
    scheduler._revoked = []
    scheduler._plan_loads = []


def must_run(scheduler: Scheduler, has_rows: bool, now: int) -> bool:
    """Begin what stores there are to begin. Returns whether a plan without rows is to run, too: a transfer begins with
    it, or all that is left is to wait for one."""
    transfers = scheduler.transfers
    assert transfers is not None
    runs = has_rows or bool(scheduler._new_transfers)
    if scheduler._ripe and (runs or not scheduler._requests):
        key_of = scheduler.manager.index.key_of
        # A block may have been given to another, which writes the same content to it in this very plan.
        new = {block for _, block in scheduler.manager.new_keys or ()}
        ripe = [(key, block) for key, block in scheduler._ripe if key_of(block) == key and block not in new]
        scheduler._ripe = []
        store = transfers.store(ripe, scheduler.manager.index, now)
        if store is not None:
            scheduler._new_transfers.append(store)
            runs = True
    return runs or (bool(transfers.open) and not scheduler._flight)


def is_busy(scheduler: Scheduler) -> bool:
    """Whether transfers are open or about to begin, or the decode cohort will publish something to be stored."""
    transfers = scheduler.transfers
    return transfers is not None and bool(
        transfers.open or scheduler._ripe or scheduler.manager.new_keys or scheduler._cohort.num_sharing
    )


# ---- swaps


def _wants_swap(scheduler: Scheduler, request: Request) -> bool:
    config = scheduler.config
    mode = config.preemption_mode
    if mode == "swap-groups":
        return request.group is not None and len(request.group.members) > 1
    if mode == "auto" and config.cost_model is not None:
        blocks = -(-request.sched // config.block_size)
        return config.cost_model.swap_ns(blocks) < config.cost_model.recompute_ns(request.sched)
    return mode == "swap"


def swap_out(scheduler: Scheduler, request: Request) -> None:
    """Give `request`, which is about to lose its device blocks, host blocks with their content, if that is wanted and
    there is room. Otherwise it will compute its tokens again."""
    host = scheduler.host
    if host is None or request.sched == 0 or not _wants_swap(scheduler, request):
        return
    size = scheduler.config.block_size
    num = -(-request.sched // size)
    named = min(min(request.sched, request.known) // size, request.key_blocks)
    keys: list[BlockHash | None] = [request.block_key(i) if i < named else None for i in range(num)]
    table = host.swap_out(request.table[:num], keys)
    if table is not None:
        request.host = table
        if scheduler.prefix_stats is not None and scheduler.transfers is not None:
            scheduler.prefix_stats.stored(request, named)


def hits_of_swapped(scheduler: Scheduler, request: Request, hits: list[BlockId]) -> list[BlockId]:
    """The leading device blocks that a swapped request can have back without a copy."""
    return hits[: request.sched // scheduler.config.block_size]


def swap_in(scheduler: Scheduler, request: Request, num_hits: int) -> None:
    """`request` has device blocks again: what is not hit there comes from its host blocks, which it gives up."""
    host = scheduler.host
    assert host is not None
    sources = host.swap_in(request.host, num_hits)
    for source, target in zip(sources, request.table[num_hits:], strict=False):
        scheduler._swap_in.append(BlockCopy(source, target))
    request.host = []


# ---- the host tier


def host_hits(scheduler: Scheduler, request: Request, num_hits: int) -> list[BlockId]:
    """Host blocks that continue the device's hits of a waiting request."""
    host = scheduler.host
    assert host is not None
    stop = min((request.known - 1) // scheduler.config.block_size, request.key_blocks)
    return host.match(request.block_key, num_hits, stop)


def promised(scheduler: Scheduler) -> int:
    """Free blocks that the rest of the prompts will take whose beginning is being loaded."""
    need = scheduler.manager.need
    return sum(need(request, (), request.known) for request in scheduler._loading.values())


def start_load(scheduler: Scheduler, request: Request, num_hits: int, sources: list[BlockId], now: int) -> None:
    """`request` waits until these host blocks are in its table behind its hits."""
    transfers = scheduler.transfers
    assert transfers is not None
    targets = request.table[num_hits : num_hits + len(sources)]
    scheduler._new_transfers.append(transfers.load(request.id, request.epoch, sources, targets, now))
    scheduler._plan_loads.append((request.id, request.sched))
    scheduler._loading[request.id] = request
    request.waits = True


def transfer_ended(scheduler: Scheduler, id: int, ok: bool) -> None:
    """A transfer is done or has failed; whoever has waited for it goes on, from what is there."""
    transfers = scheduler.transfers
    assert transfers is not None
    entry = transfers.end(id, ok)
    if entry is None or not entry.transfer.load:
        return
    request = scheduler._loading.get(entry.request)
    if request is None or request.epoch != entry.epoch:
        return
    assert request.state == RUNNING
    del scheduler._loading[request.id]
    request.waits = False
    if ok:
        request.written = request.sched
        scheduler.manager.publish(request, request.sched)
    else:
        scheduler._sched_tokens -= request.sched - request.written
        request.sched = request.written
        scheduler.manager.truncate(request, request.sched)
    scheduler._insert_chunk(request)
