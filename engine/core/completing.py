"""A step has run: tokens become known, blocks are published, and whoever is done ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine.core import groups, leaving, tiers
from engine.core.errors import InvariantError
from engine.core.request import FINISHED, RUNNING, WAITING, Group, Request
from engine.core.types import Finish, StepEvents, StepOutcome, StepPlan

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["complete"]


def complete(scheduler: Scheduler, plan: StepPlan, outcome: StepOutcome) -> StepEvents:
    """The oldest plan in flight has run.

    Raises:
        InvariantError: another plan is older.
    """
    if not scheduler._flight or scheduler._flight[0].plan is not plan:
        raise InvariantError(f"plan {plan.seq} is completed out of order")
    flight = scheduler._flight.popleft()
    scheduler._done = seq = plan.seq
    requests = scheduler._requests
    if outcome.transfers and scheduler.transfers is not None:
        for end in outcome.transfers:
            tiers.transfer_ended(scheduler, end.id, end.ok)
    tokens = outcome.tokens
    if tokens is not None:
        scheduler._sampled[seq] = tokens
        scheduler._sampled.pop(seq - 2 * scheduler.config.block_size - 2, None)
    ends: dict[int, tuple[Request, str]] = {}
    first: list[int] = []
    forked: list[tuple[int, int]] = []
    stepped: list[Group] = []
    for item in plan.prefills:
        request = requests.get(item.request)
        if request is None:
            continue
        if item.samples:
            if not request.in_cohort:
                got_token(scheduler, request, ends)
            if scheduler._known(request) == request.num_prompt + 1:
                first.append(request.id)
        if not scheduler._share and request.state == RUNNING and request.epoch == item.epoch:
            request.written = max(request.written, item.start + item.num_tokens)
            scheduler.manager.publish(request, request.written)
        group = request.group
        if group is not None and item.samples and (group.beam or not group.forked) and group not in stepped:
            stepped.append(group)
    for group in stepped:
        if group.forked:
            groups.reorder(scheduler, group, outcome.parents)
        else:
            for child in groups.fork(scheduler, group):
                forked.append((group.members[0].id, child.id))
                first.append(child.id)
                if child.known - child.num_prompt >= child.cap:
                    ends[child.id] = (child, "length")
        groups.go_on(scheduler, group, ends)
    for request in flight.detached:
        if request.state != FINISHED and not request.in_cohort:
            got_token(scheduler, request, ends)
    if tokens:
        apart = [item.request for item in plan.prefills if item.samples]
        apart += [request.id for request in flight.detached]
        apart += [child for _, child in forked]
        tell_apart(scheduler, apart, tokens)
    for key in flight.pending_keys:
        if scheduler._writing[key] == 1:
            del scheduler._writing[key]
        else:
            scheduler._writing[key] -= 1
    if not scheduler._share and scheduler._cohort.num_sharing:
        for request in scheduler._cohort.filling(seq):
            if request.join_seq < seq:
                scheduler._catch_up(request)
                scheduler.manager.publish(request, request.base + seq)
    for finish in outcome.finished:
        request = requests.get(finish.request)
        if request is not None:
            ends[request.id] = (request, finish.reason)
    finished: list[Finish] = []
    for request, reason in sorted(ends.values(), key=lambda end: end[0].key):
        finished.append(leaving.end(scheduler, request, reason))
    resumed = tuple((id, before) for id, before in flight.resumed if id in requests or id in ends)
    return StepEvents(tuple(first), resumed, tuple(finished), tuple(forked))


def tell_apart(scheduler: Scheduler, ids: Sequence[int], tokens: Mapping[int, int]) -> None:
    """Tell the identities of requests that were not cohort rows, or are not any more, what a step sampled."""
    for id in ids:
        request = scheduler._requests.get(id)
        if request is not None and request.identity is not None and id in tokens and not request.is_beam:
            request.identity.append(tokens[id])


def got_token(scheduler: Scheduler, request: Request, ends: dict[int, tuple[Request, str]]) -> None:
    """A step has sampled a token for a request outside the cohort."""
    request.known += 1
    request.pending -= 1
    if request.state == RUNNING:
        request.written = max(request.written, request.sched - request.pending)
    elif request.state == WAITING:
        scheduler._waiting.changes += 1  # it may ask for one block more
    if request.known - request.num_prompt >= request.cap:
        ends[request.id] = (request, "length")
