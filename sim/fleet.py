"""Several equal replicas behind one entrance: each request goes to the one with the fewest waiting and running.

Replicas are apart: each has a scheduler, a KV pool and a clock of steps. Where they share experts (`ExpertGroup`) the
batch of one decides how long a step of another takes, so nothing is fast-forwarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from engine.core.drive import Abort, Add
from engine.core.presets import SchedulerConfig
from engine.core.records import Recorder
from engine.core.scheduler import Scheduler
from engine.core.types import Finish
from sim.errors import SimError, StalledError
from sim.executor import SimExecutor
from sim.replica import Replica
from sim.simulate import SimResult, TraceSpecs
from sim.steptime import StepModel
from sim.tabletime import ExpertGroup
from traces import Trace, TraceSource

__all__ = ["FleetResult", "simulate_fleet"]


@dataclass(frozen=True, slots=True)
class FleetResult:
    """A simulation of several replicas."""

    replicas: tuple[SimResult, ...]

    def requests(self) -> dict[str, Any]:
        """One row a request in the order of the trace, as `SimResult.requests`, and `replica`, the one it went to."""
        tables = [result.requests() for result in self.replicas]
        rows = np.concatenate([np.asarray(table["row"], dtype=np.int64) for table in tables])
        order = np.argsort(rows, kind="stable")
        joined: dict[str, Any] = {}
        for name in tables[0]:
            joined[name] = np.concatenate([np.asarray(table[name]) for table in tables])[order]
        joined["replica"] = np.repeat(np.arange(len(tables)), [len(table["row"]) for table in tables])[order]
        return joined


class _Inbox:
    """What one replica is sent (an `Inbox` of the core)."""

    def __init__(self, entrance: _Entrance, index: int) -> None:
        self._entrance = entrance
        self._index = index
        self.queue: deque[tuple[int, int]] = deque()
        self.outstanding = 0
        self._row_of: dict[int, int] = {}

    def drain(self, now: int) -> Iterable[Add | Abort]:
        while self.queue:
            row, arrival = self.queue.popleft()
            yield Add(self._entrance.specs.make(row, arrival), row)

    def accepted(self, row: int, request: int) -> None:
        self._row_of[request] = row

    def rejected(self, row: int, reason: str, now: int) -> None:
        self._left(row, now)

    def finished(self, finish: Finish, now: int) -> None:
        self._left(self._row_of.pop(finish.request), now)

    def _left(self, row: int, now: int) -> None:
        self.outstanding -= 1
        if not self.outstanding and self._entrance.group is not None:
            self._entrance.group.rest(self._index)
        self._entrance.ended(row, now)

    def next_ns(self) -> int | None:
        return None

    def is_open(self) -> bool:
        return bool(self.queue) or self._entrance.source.remaining > 0


class _Entrance:
    """Hands requests out as they arrive."""

    def __init__(
        self, env: simpy.Environment, trace: Trace, config: SchedulerConfig, group: ExpertGroup | None
    ) -> None:
        self.specs = TraceSpecs(trace, config, None)
        self.group = group
        self.source = TraceSource(trace, 1.0)
        self.inboxes: list[_Inbox] = []
        self.replicas: list[Replica] = []
        self._env = env
        self._changed: simpy.Event | None = None

    def ended(self, row: int, now: int) -> None:
        """A request has ended, and may have released others."""
        self.source.finished(row, now)
        if self._changed is not None and not self._changed.triggered:
            self._changed.succeed()

    def run(self) -> Generator[simpy.Event, Any, None]:
        env, source = self._env, self.source
        while source.remaining:
            arrival = source.next_ns()
            if arrival is None or arrival > env.now:
                self._changed = env.event()
                waits = [self._changed] if arrival is None else [self._changed, env.timeout(arrival - env.now)]
                yield env.any_of(waits)
                continue
            for row, at in source.due(int(env.now)):
                least = min(range(len(self.inboxes)), key=lambda i: self.inboxes[i].outstanding)
                self.inboxes[least].outstanding += 1
                self.inboxes[least].queue.append((row, at))
                self.replicas[least].wake()
        for replica in self.replicas:
            replica.wake()


def simulate_fleet(
    trace: Trace,
    config: SchedulerConfig,
    step_times: Sequence[StepModel],
    *,
    group: ExpertGroup | None = None,
    fast_forward: bool = True,
) -> FleetResult:
    """Serve a whole trace on as many replicas as there are step-time models.

    With a `group`, whose ranks the step-time models are, nothing is fast-forwarded.

    Raises:
        SimError: there is no replica.
        StalledError: requests are left and nothing will ever happen; a bug of ours.
    """
    if not step_times:
        raise SimError("A fleet needs one replica or more.")
    env = simpy.Environment(initial_time=0)
    entrance = _Entrance(env, trace, config, group)
    parts = []
    for index, step_time in enumerate(step_times):
        scheduler = Scheduler(config)
        recorder = Recorder(scheduler, None)
        inbox = _Inbox(entrance, index)
        executor = SimExecutor(step_time.with_overlap(config.steps_in_flight))
        replica = Replica(
            env,
            scheduler,
            executor,
            inbox,
            recorder,
            finished=inbox.finished,
            fast_forward=fast_forward and group is None,
        )
        entrance.inboxes.append(inbox)
        entrance.replicas.append(replica)
        parts.append((recorder, scheduler, step_time))
    env.process(entrance.run())
    env.run()
    if any(replica.process.is_alive for replica in entrance.replicas):
        raise StalledError(
            f"The simulation of {len(parts)} replicas stands still at {env.now} ns with {entrance.source.remaining} "
            "requests to come."
        )
    end = int(env.now)
    return FleetResult(tuple(SimResult(recorder, scheduler, step, end) for recorder, scheduler, step in parts))
