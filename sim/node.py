"""A replica of a cluster: an engine that may die, and that comes back as a new one with an empty cache.

Each life has a scheduler, an executor and a recorder of its own, so that each is a simulation by itself, with records
that no crash has mixed up. The core that decides is the one that a single replica and the real engine run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import simpy

from engine.core.drive import Abort, Add
from engine.core.presets import SchedulerConfig
from engine.core.records import Recorder
from engine.core.scheduler import Scheduler
from engine.core.types import Finish
from sim.errors import SimError
from sim.executor import SimExecutor
from sim.faults import NEVER
from sim.handover import KvLink, ReceivingExecutor
from sim.moves import FREE_MOVES, MoveTime
from sim.replica import Replica
from sim.simulate import SimResult, TraceSpecs
from sim.steptime import StepModel

__all__ = ["Life", "Node", "NodeSpec"]

Answer = Callable[[int, str, str], None]
"""Called with a ticket, how its request ended (`length`, `stop`, `rejected`, `no-memory`), and a reason."""


@dataclass(frozen=True)
class NodeSpec:
    """One replica."""

    config: SchedulerConfig
    step_time: StepModel
    moves: MoveTime = FREE_MOVES
    name: str = ""
    restart_ns: int = NEVER
    """From a crash until it serves again; NEVER: it does not come back."""
    weight: float = 1.0
    """Its speed beside the others', for routers that look at load."""
    role: str = "both"
    """`prefill`: it computes prompts alone. `decode`: it generates the outputs of prompts that others have computed."""
    link: KvLink = field(default_factory=KvLink)
    """Over which a replica that decodes receives prompts."""

    def __post_init__(self) -> None:
        if self.role not in ("both", "prefill", "decode"):
            raise SimError(f"A replica's role must be both, prefill or decode, not '{self.role}'.")


class Life:
    """One engine, from its start to its end (an `Inbox` of the core). A request is known by a ticket of the sender."""

    def __init__(
        self,
        env: simpy.Environment,
        spec: NodeSpec,
        specs: TraceSpecs,
        answer: Answer,
        fast_forward: bool,
        check: bool,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.started_ns = int(env.now)
        self.ended_ns = NEVER
        """When it died; NEVER: it did not."""
        self.tickets: list[int] = []
        """Of each row of its table of requests."""
        self.scheduler = Scheduler(spec.config)
        self.recorder = Recorder(self.scheduler, None)
        self._env = env
        self._spec = spec
        self._specs = specs
        self._answer = answer
        self._open = True
        self._commands: deque[tuple[int, int, int]] = deque()
        """(ticket, row, time) of those sent, (ticket, -1, time) of those taken back, in order."""
        self._sent: dict[int, None] = {}
        """Tickets that the core has not taken in yet."""
        self._request_of: dict[int, int] = {}
        self._ticket_of: dict[int, int] = {}
        """Ticket to request, and back, of those that the core has."""
        executor = SimExecutor(spec.step_time.with_overlap(spec.config.steps_in_flight), moves=spec.moves)
        self._receiving = ReceivingExecutor(executor) if spec.role == "decode" else None
        self.replica = Replica(
            env,
            self.scheduler,
            # The same in all that a replica asks of it; a class of the compiled build has no subclasses.
            executor if self._receiving is None else cast(SimExecutor, self._receiving),
            self,
            self.recorder,
            finished=self.finished,
            fast_forward=fast_forward,
            check=check,
            stop=stop,
        )

    # ---- for the gateway ----

    def send(self, ticket: int, row: int) -> None:
        self._sent[ticket] = None
        self._commands.append((ticket, row, int(self._env.now)))
        self.replica.wake()

    def take_back(self, ticket: int) -> None:
        """The sender does not want it any more; nothing is answered."""
        if ticket in self._sent:
            del self._sent[ticket]
        elif ticket in self._request_of:
            self._commands.append((ticket, -1, int(self._env.now)))
            self.replica.wake()

    def close(self) -> None:
        """Nothing more comes."""
        self._open = False
        self.replica.wake()

    def die(self) -> None:
        """All that it serves is lost, and nothing of it is answered; the records say that it was aborted."""
        now = self.ended_ns = int(self._env.now)
        self.replica.kill()
        for request in list(self._ticket_of):
            for finish in self.scheduler.abort(request):
                self.recorder.ended(finish, now)
        self._ticket_of.clear()
        self._request_of.clear()

    def result(self) -> SimResult:
        """What it did; `end_ns` is when it died, or now."""
        end = int(self._env.now) if self.ended_ns == NEVER else self.ended_ns
        spec = self._spec
        return SimResult(self.recorder, self.scheduler, spec.step_time, end, not self.replica.stopped, spec.moves)

    # ---- the core's inbox ----

    def drain(self, now: int) -> Iterable[Add | Abort]:
        commands = self._commands
        while commands:
            ticket, row, at = commands.popleft()
            if row < 0:
                request = self._request_of.get(ticket)
                if request is not None:
                    yield Abort(request)
            elif ticket in self._sent:
                del self._sent[ticket]
                self.tickets.append(ticket)
                spec = self._specs.make(row, at)
                if self._spec.role == "prefill":
                    spec = spec._replace(max_tokens=1, oracle_tokens=min(1, spec.oracle_tokens))
                yield Add(spec, row)

    def accepted(self, row: int, request: int) -> None:
        ticket = self.tickets[-1]
        self._request_of[ticket] = request
        self._ticket_of[request] = ticket
        if self._receiving is not None:
            self._receiving.received.add(request)

    def rejected(self, row: int, reason: str, now: int) -> None:
        self._answer(self.tickets[-1], "rejected", reason)

    def finished(self, finish: Finish, now: int) -> None:
        ticket = self._ticket_of.pop(finish.request)
        del self._request_of[ticket]
        self._answer(ticket, finish.reason, "")

    def next_ns(self) -> int | None:
        return None

    def is_open(self) -> bool:
        return self._open or bool(self._commands)


class Node:
    """A place where one engine after another lives."""

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        spec: NodeSpec,
        specs: TraceSpecs,
        answer: Answer,
        *,
        fast_forward: bool = True,
        check: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.index = index
        self.spec = spec
        self.lives: list[Life] = []
        self.up = False
        self._env = env
        self._link_free_at = 0
        """When the last prompt that is on the way has come."""
        self._make = partial(Life, env, spec, specs, answer, fast_forward, check, stop)

    @property
    def life(self) -> Life:
        """The newest."""
        return self.lives[-1]

    def start(self) -> None:
        self.lives.append(self._make())
        self.up = True

    def crash(self) -> None:
        self.up = False
        self.life.die()

    def receive(self, prompt_tokens: int) -> int:
        """ns from now until a prompt's keys and values have come: whole blocks, one prompt after another."""
        spec = self.spec
        num_bytes = -(-prompt_tokens // spec.config.block_size) * spec.moves.block_bytes
        now = int(self._env.now)
        self._link_free_at = max(self._link_free_at, now) + spec.link.sending_ns(num_bytes)
        return self._link_free_at + spec.link.latency_ns - now

    def close(self) -> None:
        if self.up:
            self.life.close()

    @property
    def is_serving(self) -> bool:
        """Whether its engine's loop goes on."""
        return self.up and bool(self.life.replica.process.is_alive)
