"""The loop that joins a scheduler to an executor, the same for the engine, the simulator and the tests.

It is a generator, so that it does not wait itself: it yields what it waits for, and is sent the time at which it goes
on. The engine's clock is real and its executor has waited already; the simulator's is simpy's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, Protocol, cast

from engine.core.errors import InvalidRequest
from engine.core.glide import can_glide, glide, is_plain
from engine.core.records import DecisionLog, Recorder
from engine.core.scheduler import Scheduler
from engine.core.types import NO_LIMIT, Executor, Finish, GlideExecutor, RequestSpec, StepEvents, StepOutcome, StepPlan

__all__ = ["Abort", "Add", "Inbox", "Wait", "drive"]


class Add(NamedTuple):
    """A request arrives."""

    spec: RequestSpec
    row: int
    """The sender's own number for it, for the records."""


class Abort(NamedTuple):
    """The sender does not want it any more."""

    request: int


class Inbox(Protocol):
    """Where requests come from."""

    def drain(self, now: int) -> Iterable[Add | Abort]:
        """Whatever has come up to `now`, in order."""
        ...

    def accepted(self, row: int, request: int) -> None: ...

    def rejected(self, row: int, reason: str, now: int) -> None: ...

    def next_ns(self) -> int | None:
        """When the next one is known to come; None: not known."""
        ...

    def is_open(self) -> bool:
        """Whether more may come. An idle loop ends when not."""
        ...


class Wait(NamedTuple):
    """What the loop waits for."""

    until: int | None
    """A time in ns; None: whenever something arrives."""
    ends: Sequence[int] = ()
    """A run of steps that ends at these times. If something arrives before, go on at the first of them that is not
    earlier than the arrival."""
    idle: bool = False
    """Nothing is running: an arrival ends the wait at once."""


StepHook = Callable[[StepPlan, StepOutcome, StepEvents], None]


def drive(
    scheduler: Scheduler,
    executor: Executor,
    inbox: Inbox,
    recorder: Recorder,
    now: int,
    *,
    fast_forward: bool = False,
    log: DecisionLog | None = None,
    on_step: StepHook | None = None,
    on_abort: Callable[[Finish], None] | None = None,
    on_finish: Callable[[Finish, int], None] | None = None,
    check: bool = False,
    foretold: bool = False,
) -> Generator[Wait, int, None]:
    """Serve until the inbox closes and nothing is left.

    With one step in flight: drain, schedule, run, complete. With two: drain and schedule step N + 1 while step N runs,
    then wait for N and complete it. `fast_forward` needs a FastExecutor; results are the same without, and it is off
    while blocks are recorded, so that every step is. `on_step` is told of every completed step on its own (runs of
    steps in which nothing happens to any request are not told). `check` walks all state after every step.

    `foretold`: with fast_forward, nothing arrives at a time that `next_ns` did not tell before, and nobody looks at the
    requests between two waits. The executor is then a GlideExecutor, and `on_finish` is told who finishes in steps that
    no plan is made for (see glide.py).
    """
    depth = scheduler.config.steps_in_flight
    glides = foretold and fast_forward and log is None and recorder.blocks is None and is_plain(scheduler)
    fast_forward = fast_forward and recorder.blocks is None
    fast = cast(GlideExecutor, executor)
    flight: deque[StepPlan] = deque()
    while True:
        while glides and not flight and can_glide(scheduler):
            due = inbox.next_ns()
            until = NO_LIMIT if due is None else due
            if until <= now:
                break
            end, finished = glide(scheduler, fast, recorder, now, until)
            if end == now:
                break
            if check:
                scheduler.check()
            if on_finish is not None:
                for finish in finished:
                    on_finish(finish, end)
            now = yield Wait(end)
        while len(flight) < depth:
            for command in inbox.drain(now):
                _take_in(command, scheduler, inbox, recorder, log, on_abort, now)
            plan = scheduler.schedule(now)
            recorder.planned(plan)
            if log is not None:
                log.planned(plan)
            for finish in plan.rejected:
                recorder.ended(finish, now)
                if on_abort is not None:
                    on_abort(finish)
            if not plan.runs:
                break
            executor.submit(plan, scheduler, now)
            flight.append(plan)
        if check:
            scheduler.check()
        if not flight:
            if not inbox.is_open() and not scheduler.has_unfinished:
                if recorder.blocks is not None:
                    recorder.blocks.ended()
                return
            now = yield Wait(inbox.next_ns(), idle=True)
            continue
        if fast_forward and flight[-1].steady:
            turns = scheduler.horizon(fast.finish_bound())[0]
            if turns > 0:
                ends = fast.preview(turns + 1)
                ends = up_to(ends, scheduler.stable_until(now))
                now = yield Wait(ends[-1], ends)
                turns = bisect_left(ends, now)
                if turns > 0:
                    before = recorder.advancing(turns)
                    done = ends[:turns]
                    plans = scheduler.advance(done)
                    recorder.advanced(before, done, plans)
                    fast.advance(done, plans)
                    flight = deque(plans)
        outcome = executor.collect()
        now = yield Wait(outcome.end)
        plan = flight.popleft()
        events = scheduler.complete(plan, outcome)
        recorder.completed(plan, outcome.end, events)
        if log is not None:
            log.completed(plan, outcome, events)
        if on_step is not None:
            on_step(plan, outcome, events)
        if check:
            scheduler.check()


def up_to(ends: Sequence[int], limit: int) -> Sequence[int]:
    """The ends of the steps after which a decision is made by `limit`, and of the one step that follows them."""
    return ends if limit >= ends[-1] else ends[: bisect_right(ends, limit) + 1]


def _take_in(
    command: Add | Abort,
    scheduler: Scheduler,
    inbox: Inbox,
    recorder: Recorder,
    log: DecisionLog | None,
    on_abort: Callable[[Finish], None] | None,
    now: int,
) -> None:
    if isinstance(command, Abort):
        for finish in scheduler.abort(command.request):
            recorder.ended(finish, now)
            if log is not None:
                log.aborted(finish.request)
            if on_abort is not None:
                on_abort(finish)
        return
    try:
        id = scheduler.add(command.spec, now)
    except InvalidRequest as error:
        recorder.rejected(command.row, command.spec, now, str(error))
        inbox.rejected(command.row, str(error), now)
        return
    recorder.added(id, command.row, command.spec, now)
    if log is not None:
        log.added(id)
    inbox.accepted(command.row, id)
