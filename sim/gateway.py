"""The entrance of a cluster: it lets requests in, holds them, sends them to replicas, and answers for those that fail.

A request is a row of the trace. What is sent for it is an attempt; a client whose attempt was refused, lost or too slow
makes another one after a pause, up to `retries` times. The request ends exactly once: with the answer of a replica, or
with the failure of its last attempt.

    rate limit   429   more requests than the token bucket has tokens
    queue        503   no replica can take it, and the queue is full, or no replica will ever be back
    replica      502   it died while it served the request, or was dead when it was sent one
    timeout      504   no answer in time; the replica is told to forget the request

What clients and the gateway do at a time comes before the steps that end at that time, and what follows from the end of
a request comes 1 ns after it: so the order of events does not depend on how steps are simulated.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import simpy
from simpy.events import URGENT

from sim.draws import uniform
from sim.errors import SimError
from sim.node import Node
from sim.routers import ReplicaView, RoutedRequest, Router
from traces import Trace

__all__ = ["FAILED", "OUTCOMES", "SHED", "STATUS", "Gateway", "GatewayOptions", "call_at"]

STATUS = {
    "length": 200,
    "stop": 200,
    "rejected": 400,
    "no-memory": 500,
    "rate-limited": 429,
    "queue-full": 503,
    "no-replica": 503,
    "crashed": 502,
    "refused": 502,
    "timeout": 504,
}
"""How an attempt can end, and what its client is told, as HTTP says it."""
OUTCOMES = ("unfinished", *STATUS)
"""By number, in the records."""
_CODE = {name: code for code, name in enumerate(OUTCOMES)}
_ANSWERS = ("length", "stop", "rejected", "no-memory")
"""Ends that a replica gives: asking again would give the same."""
SHED = ("rate-limited", "queue-full", "no-replica")
FAILED = ("crashed", "refused")


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What the gateway and its clients do. Times in ns. The pauses are those of OpenAI's Python client."""

    rate_per_s: float = 0.0
    """Requests let in on average; 0: no limit."""
    burst: int = 1
    """Requests that may come at once after a rest: the tokens that the bucket holds."""
    max_queue: int | None = None
    """Requests that may wait for a replica; None: no limit."""
    max_outstanding: int | None = None
    """Requests that a replica is sent at most before it answers; None: no limit, they wait in the replica."""
    timeout_ns: int = 0
    """How long a client waits for the end of an attempt; 0: for ever."""
    retries: int = 0
    """Further attempts after one that failed."""
    backoff_ns: int = 500_000_000
    """Before the first of them; twice as long before each that follows."""
    backoff_most_ns: int = 8_000_000_000
    jitter: float = 0.25
    """A pause is shorter by a share drawn from 0 to this."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("burst", 1), ("timeout_ns", 0), ("retries", 0), ("backoff_ns", 0), ("backoff_most_ns", 0)):
            if getattr(self, name) < least:
                raise SimError(f"Gateway: {name} must be {least} or more, not {getattr(self, name)}.")
        if not 0 <= self.rate_per_s < float("inf"):
            raise SimError(f"Gateway: rate_per_s must be 0 or more, not {self.rate_per_s}.")
        if self.max_queue is not None and self.max_queue < 0:
            raise SimError(f"Gateway: max_queue must be 0 or more, not {self.max_queue}.")
        if self.max_outstanding is not None and self.max_outstanding < 1:
            raise SimError(f"Gateway: max_outstanding must be 1 or more, not {self.max_outstanding}.")
        if not 0 <= self.jitter <= 1:
            raise SimError(f"Gateway: jitter must be from 0 to 1, not {self.jitter}.")


def call_at(env: simpy.Environment, at: int, what: Callable[[], None]) -> None:
    """`what` at that time in ns, before all else that happens then."""
    event = simpy.Event(env)
    event._ok = True
    event._value = None
    event.callbacks.append(lambda _: what())
    env.schedule(event, priority=URGENT, delay=at - int(env.now))


class _Call:
    """A request that has not ended."""

    __slots__ = ("attempt", "node", "request", "row", "ticket")

    def __init__(self, row: int) -> None:
        self.row = row
        self.attempt = 0
        self.ticket = -1
        """Of the attempt that is under way; -1: it pauses."""
        self.node = -1
        """Where that is; -1: in the queue."""
        self.request: RoutedRequest | None = None


class _Attempts:
    """A row an attempt, by ticket."""

    def __init__(self) -> None:
        self.row = array("q")
        self.attempt = array("q")
        self.sent_ns = array("q")
        """When the client sent it."""
        self.routed_ns = array("q")
        """When a replica was sent it; -1: none was."""
        self.replica = array("q")
        self.end_ns = array("q")
        self.outcome = array("q")

    def add(self, row: int, attempt: int, now: int) -> int:
        for column, value in zip(
            (self.row, self.attempt, self.sent_ns, self.routed_ns, self.replica, self.end_ns, self.outcome),
            (row, attempt, now, -1, -1, -1, 0),
            strict=True,
        ):
            column.append(value)
        return len(self.row) - 1


class Gateway:
    """Between clients and replicas."""

    def __init__(
        self,
        env: simpy.Environment,
        options: GatewayOptions,
        router: Router,
        trace: Trace,
        sessions: Sequence[int],
        ended: Callable[[int, int], None],
        on_ends: Callable[[], None],
    ) -> None:
        """`ended` is called with a row and the time when its request has ended; `on_ends` when what follows from
        ends is to happen."""
        self.attempts = _Attempts()
        self.outcome: dict[int, str] = {}
        """How each request that has ended did."""
        self.reasons: dict[int, str] = {}
        """Why replicas rejected requests, by row."""
        self.nodes: Sequence[Node] = ()
        self.views: list[ReplicaView] = []
        self._env = env
        self._options = options
        self._router = router
        self._trace = trace
        self._sessions = sessions
        self._ended = ended
        self._on_ends = on_ends
        self._follows = False
        """Whether something is due that follows from ends."""
        self._calls: dict[int, _Call] = {}
        """By ticket: attempts under way."""
        self._queue: dict[int, _Call] = {}
        """By ticket, in order: attempts that wait for a replica."""
        self._gone: set[int] = set()
        """Replicas that will not be back."""
        # The token bucket as the time at which it would be full again: whole ns, so that nothing drifts.
        self._token_ns = round(1e9 / options.rate_per_s) if options.rate_per_s else 0
        self._full_at = 0

    def begin(self, nodes: Sequence[Node]) -> None:
        """The replicas, all of them healthy."""
        self.nodes = nodes
        limit = self._options.max_outstanding
        for node in nodes:
            config = node.spec.config
            self.views.append(ReplicaView(node.index, config.num_blocks * config.block_size, limit, node.spec.weight))
        self._router.start(self.views, self._options.seed)

    @property
    def num_waiting(self) -> int:
        """Attempts in the queue."""
        return len(self._queue)

    # ---- clients ----

    def arrive(self, row: int) -> None:
        """A client sends a request for the first time."""
        self._attempt(_Call(row))

    def _attempt(self, call: _Call) -> None:
        now = int(self._env.now)
        call.attempt += 1
        call.ticket = ticket = self.attempts.add(call.row, call.attempt, now)
        call.node = -1
        call.request = RoutedRequest(self._trace, call.row, call.attempt, self._sessions[call.row])
        self._calls[ticket] = call
        if self._options.timeout_ns:
            call_at(self._env, now + self._options.timeout_ns, partial(self._timed_out, ticket))
        if not self._has_token(now):
            self._over(call, "rate-limited")
            return
        self._queue[ticket] = call
        self._dispatch()
        if ticket in self._queue:
            if len(self._gone) == len(self.nodes):
                self._over(call, "no-replica")
            elif self._options.max_queue is not None and len(self._queue) > self._options.max_queue:
                self._over(call, "queue-full")

    def _has_token(self, now: int) -> bool:
        if not self._token_ns:
            return True
        full_at = max(self._full_at, now)
        if full_at - now > (self._options.burst - 1) * self._token_ns:
            return False
        self._full_at = full_at + self._token_ns
        return True

    def _timed_out(self, ticket: int) -> None:
        call = self._calls.get(ticket)
        if call is None:
            return
        if call.node >= 0:
            self.nodes[call.node].life.take_back(ticket)
        self._over(call, "timeout")
        self._dispatch()

    def _over(self, call: _Call, outcome: str) -> None:
        """The attempt under way has ended: its client has the answer, tries again, or gives up."""
        now = int(self._env.now)
        ticket = call.ticket
        del self._calls[ticket]
        self._queue.pop(ticket, None)
        self.attempts.end_ns[ticket] = now
        self.attempts.outcome[ticket] = _CODE[outcome]
        if call.node >= 0:
            view = self.views[call.node]
            view.outstanding -= 1
            assert call.request is not None  # it was sent
            view.outstanding_tokens -= call.request.prompt_tokens + call.request.max_tokens
        call.ticket = -1
        options = self._options
        if outcome in _ANSWERS or call.attempt > options.retries:
            self.outcome[call.row] = outcome
            self._ended(call.row, now)
            if not self._follows:
                self._follows = True
                call_at(self._env, now + 1, self._after_ends)
            return
        pause = min(options.backoff_most_ns, options.backoff_ns << min(call.attempt - 1, 40))
        pause = int(pause * (1.0 - options.jitter * uniform(options.seed, 3, call.row, call.attempt)))
        call_at(self._env, now + pause, partial(self._attempt, call))

    # ---- replicas ----

    def _after_ends(self) -> None:
        self._follows = False
        self._on_ends()
        self._dispatch()

    def _dispatch(self) -> None:
        """Sends those that wait to replicas that can take them, first come, first served."""
        while self._queue:
            ready = [
                view
                for view in self.views
                if view.healthy and (view.max_outstanding is None or view.outstanding < view.max_outstanding)
            ]
            if not ready:
                return
            call = self._queue.pop(next(iter(self._queue)))
            assert call.request is not None  # of its attempt
            index = self._choose(call.request, ready)
            self._send(call, call.request, index)

    def _choose(self, request: RoutedRequest, ready: Sequence[ReplicaView]) -> int:
        router = self._router
        try:
            index = router.choose(request, ready, int(self._env.now))
        except SimError:
            raise
        except Exception as error:
            name = type(router).__name__
            raise SimError(f"Router {name} fails on request {request.row}: {type(error).__name__}: {error}.") from error
        if not any(view.index == index for view in ready):
            offered = ", ".join(str(view.index) for view in ready)
            raise SimError(
                f"Router {type(router).__name__} chose {index!r} for request {request.row}, which is none of the "
                f"replicas it was offered ({offered})."
            )
        return index

    def _send(self, call: _Call, request: RoutedRequest, index: int) -> None:
        now = int(self._env.now)
        self.attempts.routed_ns[call.ticket] = now
        self.attempts.replica[call.ticket] = call.node = index
        view = self.views[index]
        view.outstanding += 1
        view.outstanding_tokens += request.prompt_tokens + request.max_tokens
        self._router.sent(request, index, now)
        if self.nodes[index].up:
            self.nodes[index].life.send(call.ticket, call.row)
        else:  # dead, and no health check has told yet
            self._over(call, "refused")

    def answered(self, ticket: int, outcome: str, reason: str) -> None:
        """A replica has ended a request; nobody may want the answer any more."""
        call = self._calls.get(ticket)
        if call is None:
            return
        if reason:
            self.reasons[call.row] = reason
        self._over(call, outcome)

    def died(self, node: Node) -> None:
        """A replica has died: what it served is lost, and its clients see that at once."""
        for call in [call for call in self._calls.values() if call.node == node.index]:
            self._over(call, "crashed")

    def noticed(self, node: Node) -> None:
        """A health check finds the replica dead or alive."""
        view = self.views[node.index]
        if view.healthy and not node.up:
            self._router.lost(node.index)
        view.healthy = node.up
        self._dispatch()

    def gone(self, node: Node) -> None:
        """The replica will not be back; without any left, nobody waits for one."""
        self._gone.add(node.index)
        if len(self._gone) == len(self.nodes):
            for call in list(self._queue.values()):
                self._over(call, "no-replica")
