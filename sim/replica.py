"""One serving engine in simulated time: the core's drive loop as a simpy process.

The loop says what it waits for; here that becomes simpy's time. A run of steps is tentative: it lasts to its end, or to
the first step boundary at or after something arrives. Arrivals that are known ahead cut it beforehand, without an
event; others call `wake`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator
from typing import Any

import simpy

from engine.core.drive import Inbox, Wait, drive
from engine.core.records import DecisionLog, Recorder
from engine.core.scheduler import Scheduler
from engine.core.types import Finish, StepEvents, StepOutcome, StepPlan
from sim.executor import SimExecutor

__all__ = ["Replica"]


class Replica:
    """A scheduler and an executor that serve what comes through an inbox, from the environment's time on.

    `finished` is called with the request and the time, once for each request that was accepted, when it ends, also by
    an abort. `process` is the simpy process; it ends when the inbox is closed and nothing is left, or at the first
    step at which `stop` says so. `foretold`: all that comes, comes through an inbox that tells its time ahead, `wake`
    is never called, and nobody looks at the requests meanwhile.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        executor: SimExecutor,
        inbox: Inbox,
        recorder: Recorder,
        *,
        finished: Callable[[Finish, int], None] | None = None,
        fast_forward: bool = True,
        log: DecisionLog | None = None,
        check: bool = False,
        stop: Callable[[], bool] | None = None,
        foretold: bool = False,
    ) -> None:
        self._env = env
        self._stop = stop
        self.stopped = False
        """Whether it ended early because `stop` said so."""
        self.killed = False
        """Whether it died, see `kill`."""
        self._wait: Wait | None = None
        """What it waits for now."""
        self._inbox = inbox
        self._executor = executor
        self._finished = finished
        self._interruptible = False
        self._loop = drive(
            scheduler,
            executor,
            inbox,
            recorder,
            _time(env),
            fast_forward=fast_forward,
            log=log,
            on_step=self._on_step if finished is not None else None,
            on_abort=self._on_abort,
            on_finish=finished,
            check=check,
            foretold=foretold,
        )
        self.process = env.process(self._run())

    def wake(self) -> None:
        """Something has arrived now that nobody knew would."""
        if self._interruptible:
            self._interruptible = False
            self.process.interrupt()

    def kill(self) -> None:
        """The engine dies now. Steps that ended before are recorded, the one that runs is lost, and nothing follows.

        What it served is for the caller to forget. Not to be called from within the replica's own process.
        """
        self.killed = True
        if self._wait is not None and self._wait.ends:
            self._loop.send(_time(self._env))  # goes on at the step that runs now
        self._loop.close()
        if self.process.is_alive and self._wait is not None:
            self.process.interrupt()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        try:
            yield from self._serve()
        except simpy.Interrupt:
            if not self.killed:
                raise

    def _serve(self) -> Generator[simpy.Event, Any, None]:
        env = self._env
        loop = self._loop
        try:
            wait = next(loop)
            while True:
                self._wait = wait
                if self._stop is not None and self._stop():
                    self.stopped = True
                    loop.close()
                    return
                if wait.ends or wait.idle:
                    yield from self._tentatively(wait)
                elif wait.until is not None and wait.until > env.now:
                    yield env.timeout(wait.until - env.now)
                wait = loop.send(_time(env))
        except StopIteration:
            return

    def _tentatively(self, wait: Wait) -> Generator[simpy.Event, Any, None]:
        """Wait for the end of a run, or in idleness; whatever arrives ends it early."""
        env = self._env
        until = wait.until
        arrival = self._inbox.next_ns()
        if wait.ends and arrival is not None and arrival < wait.ends[-1]:
            until = wait.ends[bisect_left(wait.ends, arrival)]
        if until is not None and until <= env.now:
            return
        self._interruptible = True
        try:
            yield env.event() if until is None else env.timeout(until - env.now)
            self._interruptible = False
        except simpy.Interrupt:
            if wait.ends and not self.killed:
                cut = wait.ends[bisect_left(wait.ends, _time(env))]
                # Also where that is now: whoever else has something for this moment comes before the step's end.
                yield env.timeout(cut - env.now)

    def _on_step(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        if self._finished is not None:
            for finish in events.finished:
                self._finished(finish, outcome.end)

    def _on_abort(self, finish: Finish) -> None:
        self._executor.forget(finish.request)
        if self._finished is not None:
            self._finished(finish, _time(self._env))


def _time(env: simpy.Environment) -> int:
    """Integer ns. Every delay is an integer, so this drops nothing."""
    return int(env.now)
