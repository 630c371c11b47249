"""Walks over all state of a scheduler: every promise checked from scratch, and a fingerprint. For tests, and for a run
that wants to stop at the first fault. Slow, and apart from the code that is fast."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from engine.core import leaving
from engine.core.cohort import by_key
from engine.core.errors import InvariantError
from engine.core.extents import ExtentPool
from engine.core.identity import TokenIdentity
from engine.core.request import RUNNING, WAITING, Request
from engine.core.types import BlockId, Usage

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["check", "digest"]


def _sched(scheduler: Scheduler, request: Request) -> int:
    return request.base + scheduler._seq if request.in_cohort else request.sched


def digest(scheduler: Scheduler) -> str:
    """A fingerprint of everything that decides what happens next: equal states, equal futures."""
    running = [
        (r.id, r.epoch, scheduler._known(r), _sched(scheduler, r), r.waits, leaving.num_written(scheduler, r))
        for r in scheduler._running
    ]
    waiting = [(r.id, r.epoch, r.known, r.pending, r.sched, r.host) for r in scheduler._waiting.ordered()]
    chunks = [r.id for r in scheduler._chunks]
    blocks = scheduler.manager.digest(scheduler._running)
    state = [scheduler._seq, scheduler._done, running, waiting, chunks, blocks]
    if scheduler.host is not None:
        state.append(scheduler.host.digest())
    if scheduler.transfers is not None:
        state.append(sorted(scheduler.transfers.open))
    return blake2b(repr(state).encode(), digest_size=16).hexdigest()


def check(scheduler: Scheduler) -> None:
    """Check every promise about requests and blocks.

    Raises:
        InvariantError: with the state that breaks it.
    """
    requests = list(scheduler._requests.values())
    transfers = scheduler.transfers
    scheduler.manager.check(requests, transfers.device_refs if transfers is not None else None)
    if scheduler.host is not None:
        owners = [r.host for r in requests]
        if transfers is not None:
            for entry in transfers.open.values():
                copies = entry.transfer.copies
                owners.append([copy.src if entry.transfer.load else copy.dst for copy in copies])
        scheduler.host.check(owners)
    _check_lists(scheduler, requests)
    config = scheduler.config
    size = config.block_size
    usage = scheduler.usage()
    slots = sum(usage) - usage.shared
    _demand(slots == config.num_blocks * size, f"usage sums to {slots} slots: {usage}", requests)
    _demand(min(usage) >= 0, f"a part of usage is negative: {usage}", requests)
    found = _usage(scheduler)
    _demand(usage == found, f"usage is counted as {usage}, and a walk finds {found}", requests)
    for r in scheduler._running:
        sched, known = _sched(scheduler, r), scheduler._known(r)
        pending = scheduler._seq - max(scheduler._done, r.floor) if r.in_cohort else r.pending
        _demand(0 <= sched <= len(r.table) * size, f"request {r.id} has no slot for each of its tokens", requests)
        _demand(sched <= known + pending, f"request {r.id} has more tokens planned than it has", requests)
        _demand(0 <= pending <= len(scheduler._flight), f"request {r.id} waits for {pending} tokens", requests)
        _demand(leaving.num_written(scheduler, r) <= sched, f"request {r.id} has more written than planned", requests)
        _demand(known - r.num_prompt <= r.cap, f"request {r.id} has more outputs than it may", requests)
        if scheduler._sampled and isinstance(r.identity, TokenIdentity) and not r.is_beam:
            told = r.base + max(min(r.told, scheduler._done), r.floor) + 1 if r.in_cohort else known
            _demand(len(r.identity.tokens) == told, f"the identity of request {r.id} knows other tokens", requests)
        most = min(r.num_prompt + r.cap + config.num_lookahead_tokens, config.max_model_len)
        _demand(len(r.table) <= -(-most // size), f"the table of request {r.id} is too long", requests)


def _usage(scheduler: Scheduler) -> Usage:
    """What `Scheduler.usage` promises, by a look at every block."""
    manager, size = scheduler.manager, scheduler.config.block_size
    pool = manager.pool
    filled: dict[int, int] = {}
    logical = may = cannot = 0
    for r in scheduler._running:
        sched = _sched(scheduler, r)
        logical += sched
        for i, block in enumerate(manager.owned(r)):
            tokens = min(size, max(0, sched - i * size))
            filled[block] = max(filled.get(block, 0), tokens)
            if not tokens:
                reachable = min(size, max(0, r.num_prompt + r.cap - i * size))
                may += reachable
                cannot += size - reachable
    held = sum(filled.values())
    tail = sum(size - tokens for tokens in filled.values() if tokens)
    kept = external = free = transfer = 0
    for i in range(pool.num_blocks):
        block = BlockId(i)
        if pool.refs(block):
            transfer += i not in filled
        elif pool.is_kept(block):
            kept += 1
        else:
            free += 1
    if scheduler._waiting and isinstance(pool, ExtentPool):
        need = manager.need(scheduler._waiting.peek(), (), 1)
        external = sum(num for _, num in pool.holes() if num < need)
    free -= external
    return Usage(held, tail, may, cannot, external * size, transfer * size, kept * size, free * size, logical - held)


def _check_lists(scheduler: Scheduler, requests: list[Request]) -> None:
    """Each request is where its state says, in order, and the sums over them are right."""
    running = sorted((r for r in requests if r.state == RUNNING), key=by_key)
    waiting = sorted((r for r in requests if r.state == WAITING), key=by_key)
    cohort = scheduler._cohort
    members = [r for r in running if r.in_cohort]
    chunks = [r for r in running if not r.in_cohort and not r.waits]
    context = sum(_sched(scheduler, r) for r in members)
    tokens = sum(_sched(scheduler, r) for r in running)
    _demand(running == scheduler._running, "the running requests are not all listed in order", requests)
    _demand(waiting == scheduler._waiting.ordered(), "the waiting requests are not all queued in order", requests)
    _demand(len(waiting) == len(scheduler._waiting), "the waiting requests are miscounted", requests)
    _demand(sorted(cohort.members(), key=by_key) == members, "the cohort lists others than its members", requests)
    _demand(len(members) == cohort.num, "the cohort is miscounted", requests)
    _demand(context == cohort.context_tokens, "the cohort's tokens are miscounted", requests)
    _demand(chunks == scheduler._chunks, "prefills are not all listed in order", requests)
    _demand(tokens == scheduler._sched_tokens, "planned tokens are miscounted", requests)
    seats = sum(r.spec.n if r.unforked else 1 for r in running)
    kept = seats - len(running)
    _demand(kept == scheduler._seats_kept, "seats for sequences to come are miscounted", requests)
    _demand(seats <= scheduler.config.max_num_seqs, "more sequences run than max_num_seqs", requests)
    for r in waiting:
        swapped = -(-r.sched // scheduler.config.block_size)
        _demand(len(r.host) == swapped, f"request {r.id} has {r.sched} tokens on {len(r.host)} host blocks", requests)
    loading = {r.id: r for r in running if r.id in scheduler._loading}
    _demand(loading == scheduler._loading, "requests that do not run wait for loads", requests)
    _demand(all(r.waits for r in loading.values()), "a request waits for a load and has rows", requests)
    groups = {r.root_id: r.group for r in requests if r.group is not None}
    _demand(groups == scheduler._groups, "requests with several sequences are not all listed", requests)
    for group in groups.values():
        states = {r.state for r in group.members}
        _demand(not group.beam or len(states) == 1, "a beam runs in part", requests)


def _demand(holds: bool, promise: str, requests: list[Request]) -> None:
    if not holds:
        raise InvariantError(promise, "\n".join(map(repr, requests)))
