"""Requests with several sequences: parallel sampling and beam search.

Until its first token is sampled such a request is one sequence, its root, which computes the prompt. Then it forks: the
n sequences share all blocks, and whoever writes to a shared block gets a copy first (BlockManager.append_slots). From
there on the sequences of parallel sampling are requests like any other. Those of a beam stay together: all of them
sample in a step or none, all lose their blocks or none, and the outcome of a step says who continues whose tokens.

These functions are the scheduler's own, apart for the sake of its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.core import admitting, leaving, placing, tiers
from engine.core.errors import InvariantError
from engine.core.request import RUNNING, WAITING, Group, Request
from engine.core.types import FOR_KV, FOR_SEQUENCES, FOR_TOKENS, BlockId, PlanItem

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["admit_beam", "begin", "ended", "fork", "go_on", "place_beam", "reorder", "unused_twice"]


def begin(scheduler: Scheduler, root: Request) -> None:
    """`root` stands for n sequences: its prompt's full blocks have keys, so that all of them can find these."""
    spec = root.spec
    prompt_blocks = root.num_prompt // scheduler.config.block_size
    root.group = Group(root, spec.beam)
    root.root_blocks = prompt_blocks
    if spec.beam:
        root.identity_blocks = min(root.identity_blocks, prompt_blocks)
        root.shared_blocks = root.key_blocks = prompt_blocks
    elif root.shared_blocks < prompt_blocks:
        root.shared_blocks = prompt_blocks
    scheduler._groups[root.id] = root.group
    scheduler._num_beams += spec.beam


def fork(scheduler: Scheduler, group: Group) -> list[Request]:
    """The root has sampled for the first time: the others begin, with its blocks. Returns them."""
    root = group.members[0]
    if root.state == RUNNING:
        scheduler._seats_kept -= root.spec.n - 1
    group.forked = True
    children: list[Request] = []
    for id in range(root.id + 1, root.id + root.spec.n):
        child = Request(id, root.spec, root.cap, root.shared_blocks, (*root.key[:-1], id))
        child.identity_blocks = root.identity_blocks
        child.key_blocks = root.key_blocks
        child.publishes_output = root.publishes_output
        child.root_id, child.root_blocks = root.root_id, root.root_blocks
        child.group = group
        if root.identity is not None and not group.beam:
            child.identity = root.identity.fork()
            child.identity_blocks = child.identity.shared_tokens // scheduler.config.block_size
            child.publishes_output = child.identity.shares_output or scheduler._indexes_all
        child.state, child.sched, child.written = root.state, root.sched, root.written
        child.known, child.sample_seq = root.known, root.sample_seq
        scheduler._requests[id] = child
        group.members.append(child)
        if root.state == RUNNING:
            scheduler.manager.fork(root, child)
            scheduler._sched_tokens += child.sched
            scheduler._insert_running(child)
        else:
            if root.host and scheduler.host is not None:
                scheduler.host.pool.share(root.host)
                child.host = list(root.host)
            scheduler._waiting.push(child)
        children.append(child)
    return children


def reorder(scheduler: Scheduler, group: Group, parents: Mapping[int, int] | None) -> None:
    """A beam has taken a step: each sequence continues the one that `parents` names for it."""
    if not parents:
        return
    members = group.members
    by_id = {member.id: member for member in members}
    sources: list[Request] = []
    for member in members:
        source = by_id.get(parents.get(member.id, member.id))
        if source is None:
            raise InvariantError(f"sequence {member.id} is to continue {parents[member.id]}, which is not of its beam")
        sources.append(source)
    if members[0].state == RUNNING:
        scheduler.manager.reorder(members, sources)
    elif scheduler.host is not None:
        swapped = [(list(source.host), source.sched) for source in sources]
        for table, _ in swapped:
            scheduler.host.pool.share(table)
        for member, (table, sched) in zip(members, swapped, strict=True):
            scheduler.host.release(member.host)
            member.host, member.sched = table, sched


def go_on(scheduler: Scheduler, group: Group, ends: Mapping[int, tuple[Request, str]]) -> None:
    """The step that the sequences have waited for is complete: those that run and have not ended get their next row."""
    for member in group.members:
        if member.state == RUNNING and member.id not in ends:
            member.waits = False
            scheduler._insert_chunk(member)


def ended(scheduler: Scheduler, group: Group, request: Request) -> None:
    """One sequence of a group is no more."""
    group.members.remove(request)
    if not group.members:
        del scheduler._groups[request.root_id]
        scheduler._num_beams -= group.beam


def place_beam(scheduler: Scheduler, group: Group, budget: int, items: list[PlanItem], preempted: list[Request]) -> int:
    """The running sequences of a beam get their tokens and blocks, all or none. Returns how many tokens.

    They sample only all in one step; what some of them have to compute again first, they do as far as `budget` goes.
    """
    group.turn = seq = scheduler._seq + 1
    manager = scheduler.manager
    members = [member for member in group.members if not member.waits]
    if not members:
        return 0
    counts = _tokens_each(scheduler, members, budget)
    last = group.members[-1]
    while _need(scheduler, members, counts) > manager.pool.num_free:
        victim = placing.choose_victim(scheduler, last)
        if victim is last and placing.loads_behind(scheduler, last):
            return 0
        leaving.preempt(scheduler, victim, preempted)
        if last.state != RUNNING:
            return 0
    for member, count in zip(members, counts, strict=True):
        if count:
            manager.append_slots(member, _slots(scheduler, member, count))
            scheduler._plan_item(member, count, seq, items)
    return sum(counts)


def _slots(scheduler: Scheduler, member: Request, count: int) -> int:
    config = scheduler.config
    return min(member.sched + count + config.num_lookahead_tokens, config.max_model_len)


def _tokens_each(scheduler: Scheduler, members: list[Request], budget: int) -> list[int]:
    """How many tokens each member computes in this step: all that are left, or at least one less for everybody."""
    threshold = scheduler._threshold or budget
    left = [member.known + member.pending - member.sched for member in members]
    if sum(left) <= budget and max(left) <= threshold:
        return left
    counts: list[int] = []
    for tokens in left:
        count = min(tokens - 1, threshold, budget)
        counts.append(count)
        budget -= count
    return counts


def _need(scheduler: Scheduler, members: list[Request], counts: list[int]) -> int:
    """Free blocks that it takes until all members have slots for so many more tokens. The last of those that share a
    block writes to it in place."""
    manager = scheduler.manager
    size = scheduler.config.block_size
    sharers: dict[BlockId, int] = {}
    need = 0
    for member, count in zip(members, counts, strict=True):
        if not count:
            continue
        need += max(0, -(-_slots(scheduler, member, count) // size) - len(member.table))
        place = member.sched // size
        if member.id in manager.cow and place < len(member.table):
            block = member.table[place]
            sharers[block] = left = sharers.get(block, manager.pool.refs(block)) - 1
            need += left > 0
    return need


def admit_beam(scheduler: Scheduler, group: Group, budget: int, items: list[PlanItem], admitted: list[int]) -> int:
    """A beam that has lost its blocks starts again, if there is room for all of it. Returns its tokens, 0 if not.

    Each sequence gets blocks for all its known tokens at once: one that waited for its last blocks could wait for those
    that the others hold.
    """
    config = scheduler.config
    manager = scheduler.manager
    members = list(group.members)
    if any(member.state != WAITING for member in members):
        raise InvariantError("a beam runs in part", repr(members))
    seats = len(scheduler._running) + scheduler._seats_kept + len(members)
    whole = min(members[0].known + config.num_lookahead_tokens, config.max_model_len)
    need = len(members) * -(-whole // config.block_size)
    spare = config.watermark_blocks if scheduler._running else 0
    if scheduler._loading:
        spare += tiers.promised(scheduler)
    if seats > config.max_num_seqs:
        scheduler.waits_for = FOR_SEQUENCES
        return 0
    scheduler.waits_for = FOR_KV
    if need + spare > manager.pool.num_free:
        return 0
    if any(member.pending for member in members):
        return 0  # the step in flight says who continues whom
    for member in members:
        hits = manager.lookup(member)
        if member.host:
            hits = tiers.hits_of_swapped(scheduler, member, hits)
        elif len(hits) * config.block_size == member.known - 1:
            del hits[-1:]  # it may have to wait for the others, and then it still needs a row
        start = member.sched if member.host else len(hits) * config.block_size
        manager.allocate(member, hits, whole)
        if member.host:
            tiers.swap_in(scheduler, member, len(hits))
        admitting.start_running(scheduler, member, start, len(hits) * config.block_size)
    counts = _tokens_each(scheduler, members, budget)
    scheduler.waits_for = FOR_TOKENS
    for member, count in zip(members, counts, strict=True):
        admitted.append(member.id)
        if count:
            scheduler._plan_item(member, count, scheduler._seq + 1, items)
        if not count or member.sched < member.known:
            scheduler._insert_chunk(member)
    return sum(counts)


def unused_twice(scheduler: Scheduler) -> int:
    """Slots at the end of shared, partly filled blocks, counted once for each further sequence that lists the block."""
    size = scheduler.config.block_size
    seen: set[BlockId] = set()
    twice = 0
    for request in scheduler.manager.cow.values():
        place = request.sched // size
        if request.sched % size and place < len(request.table):
            block = request.table[place]
            if block in seen:
                twice += size - request.sched % size
            seen.add(block)
    return twice
