"""The entrance of a cluster: it lets requests in, holds them, sends them to replicas, and answers for those that fail.

A request is a row of the trace. What is sent for it is an attempt; a client whose attempt was refused, lost or too slow
makes another one after a pause, up to `retries` times. The request ends exactly once: with the answer of a replica, or
with the failure of its last attempt.

    rate limit   429   more requests than the token bucket has tokens
    queue        503   no replica can take it, and the queue is full, or no replica will ever be back
    replica      502   it died while it served the request, or was dead when it was sent one
    timeout      504   no answer in time; the replica is told to forget the request

Where some replicas compute prompts and others outputs, an attempt has two legs: a replica of the first kind computes
the prompt, its keys and values go over a link to one of the second, and that generates the whole output.

What clients and the gateway do at a time comes before the steps that end at that time, and what follows from the end of
a request comes 1 ns after it: so the order of events does not depend on how steps are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import simpy
from simpy.events import URGENT

from sim.attempts import ANSWERS, CODE, DECODE, PREFILL, WHOLE, Attempts
from sim.draws import uniform
from sim.errors import SimError
from sim.node import Node
from sim.routers import ReplicaView, RoutedRequest, Router
from traces import Trace

__all__ = ["Gateway", "GatewayOptions", "call_at"]


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

    __slots__ = ("attempt", "deadline", "leg", "node", "request", "row", "source", "ticket")

    def __init__(self, row: int) -> None:
        self.row = row
        self.attempt = 0
        self.ticket = -1
        """Of the attempt, or its leg, that is under way; -1: it pauses."""
        self.leg = WHOLE
        self.deadline = 0
        """When its client gives up; 0: never."""
        self.source = -1
        """The replica whose cache has its prompt, while that is on the way; -1: it is not."""
        self.node = -1
        """Where that is; -1: in the queue."""
        self.request: RoutedRequest | None = None


class _Pool:
    """Replicas that do the same, and those that wait for one of them."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.views: list[ReplicaView] = []
        self.queue: dict[int, _Call] = {}
        """By ticket, in order."""
        self.gone = 0
        """Replicas that will not be back."""


class Gateway:
    """Between clients and replicas."""

    def __init__(
        self,
        env: simpy.Environment,
        options: GatewayOptions,
        routers: Sequence[Router],
        trace: Trace,
        sessions: Sequence[int],
        ended: Callable[[int, int], None],
        on_ends: Callable[[], None],
    ) -> None:
        """`routers`: one, or one for prompts and one for outputs. `ended` is called with a row and the time when its
        request has ended; `on_ends` when what follows from ends is to happen."""
        self.attempts = Attempts()
        self.outcome: dict[int, str] = {}
        """How each request that has ended did."""
        self.reasons: dict[int, str] = {}
        """Why replicas rejected requests, by row."""
        self.nodes: Sequence[Node] = ()
        self.views: list[ReplicaView] = []
        self._env = env
        self._options = options
        self._pools = [_Pool(router) for router in routers]
        self._trace = trace
        self._sessions = sessions
        self._ended = ended
        self._on_ends = on_ends
        self._follows = False
        """Whether something is due that follows from ends."""
        self._calls: dict[int, _Call] = {}
        """By ticket: attempts under way."""
        # The token bucket as the time at which it would be full again: whole ns, so that nothing drifts.
        self._token_ns = round(1e9 / options.rate_per_s) if options.rate_per_s else 0
        self._full_at = 0

    def begin(self, nodes: Sequence[Node]) -> None:
        """The replicas, all of them healthy."""
        self.nodes = nodes
        limit = self._options.max_outstanding
        for node in nodes:
            config = node.spec.config
            view = ReplicaView(node.index, config.num_blocks * config.block_size, limit, node.spec.weight)
            self.views.append(view)
            self._pool_of(node).views.append(view)
        for pool in self._pools:
            pool.router.start(pool.views, self._options.seed)

    def _pool_of(self, node: Node) -> _Pool:
        return self._pools[-1] if node.spec.role == "decode" else self._pools[0]

    def _pool_for(self, call: _Call) -> _Pool:
        return self._pools[-1] if call.leg == DECODE else self._pools[0]

    @property
    def num_waiting(self) -> int:
        """Attempts in a queue."""
        return sum(len(pool.queue) for pool in self._pools)

    # ---- clients ----

    def arrive(self, row: int) -> None:
        """A client sends a request for the first time."""
        self._attempt(_Call(row))

    def _attempt(self, call: _Call) -> None:
        now = int(self._env.now)
        call.attempt += 1
        call.request = RoutedRequest(self._trace, call.row, call.attempt, self._sessions[call.row])
        call.deadline = now + self._options.timeout_ns if self._options.timeout_ns else 0
        self._begin_leg(call, WHOLE if len(self._pools) == 1 else PREFILL)
        if not self._has_token(now):
            self._over(call, "rate-limited")
            return
        limit = self._options.max_queue
        self._enqueue(call)
        pool = self._pools[0]
        if call.ticket in pool.queue and limit is not None and len(pool.queue) > limit:
            self._over(call, "queue-full")

    def _begin_leg(self, call: _Call, leg: int) -> None:
        call.leg = leg
        call.node = -1
        call.ticket = ticket = self.attempts.add(call.row, call.attempt, int(self._env.now), leg)
        self._calls[ticket] = call
        if call.deadline:
            call_at(self._env, call.deadline, partial(self._timed_out, ticket))

    def _enqueue(self, call: _Call) -> None:
        """The attempt waits for a replica, if only for a moment; without any left it has failed."""
        pool = self._pool_for(call)
        pool.queue[call.ticket] = call
        self._dispatch(pool)
        if call.ticket in pool.queue and pool.gone == len(pool.views):
            self._over(call, "no-replica")

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
        self._dispatch_all()

    def _end_leg(self, call: _Call, outcome: str) -> None:
        ticket = call.ticket
        del self._calls[ticket]
        self._pool_for(call).queue.pop(ticket, None)
        self.attempts.end_ns[ticket] = int(self._env.now)
        self.attempts.outcome[ticket] = CODE[outcome]
        call.source = -1
        if call.node >= 0:
            view = self.views[call.node]
            view.outstanding -= 1
            assert call.request is not None  # it was sent
            view.outstanding_tokens -= call.request.prompt_tokens + call.request.max_tokens

    def _over(self, call: _Call, outcome: str) -> None:
        """The attempt under way has ended: its client has the answer, tries again, or gives up."""
        now = int(self._env.now)
        self._end_leg(call, outcome)
        call.ticket = -1
        options = self._options
        if outcome in ANSWERS or call.attempt > options.retries:
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
        self._dispatch_all()

    def _dispatch_all(self) -> None:
        for pool in self._pools:
            self._dispatch(pool)

    def _dispatch(self, pool: _Pool) -> None:
        """Sends those that wait to replicas that can take them, first come, first served."""
        while pool.queue:
            ready = [
                view
                for view in pool.views
                if view.healthy and (view.max_outstanding is None or view.outstanding < view.max_outstanding)
            ]
            if not ready:
                return
            call = pool.queue.pop(next(iter(pool.queue)))
            assert call.request is not None  # of its attempt
            self._send(call, call.request, self._choose(pool.router, call.request, ready))

    def _choose(self, router: Router, request: RoutedRequest, ready: Sequence[ReplicaView]) -> int:
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
        self._pool_for(call).router.sent(request, index, now)
        node = self.nodes[index]
        if not node.up:  # dead, and no health check has told yet
            self._over(call, "refused")
        elif call.leg == DECODE:
            # The replica waits for the prompt's keys and values, and is counted as busy with them.
            took = node.receive(request.prompt_tokens)
            call_at(self._env, now + took, partial(self._received, call.ticket))
        else:
            node.life.send(call.ticket, call.row)

    def _received(self, ticket: int) -> None:
        """A prompt's keys and values are where its output will be generated; nobody may want them any more."""
        call = self._calls.get(ticket)
        if call is not None:
            call.source = -1
            self.nodes[call.node].life.send(ticket, call.row)

    def answered(self, ticket: int, outcome: str, reason: str) -> None:
        """A replica has ended a request; nobody may want the answer any more."""
        call = self._calls.get(ticket)
        if call is None:
            return
        if reason:
            self.reasons[call.row] = reason
        if call.leg != PREFILL or outcome not in ("length", "stop"):
            self._over(call, outcome)
            return
        source = call.node
        self._end_leg(call, "handed-over")
        self._begin_leg(call, DECODE)
        call.source = source
        call_at(self._env, int(self._env.now) + 1, partial(self._hand_over, call, call.ticket))

    def _hand_over(self, call: _Call, ticket: int) -> None:
        if ticket in self._calls:
            self._enqueue(call)
        self._dispatch(self._pools[0])  # the replica that has computed the prompt can take another

    def died(self, node: Node) -> None:
        """A replica has died: what it served is lost, and its clients see that at once. So are the prompts in its cache
        that have not been received elsewhere."""
        index = node.index
        for call in [call for call in self._calls.values() if index in (call.node, call.source)]:
            self._over(call, "crashed")

    def noticed(self, node: Node) -> None:
        """A health check finds the replica dead or alive."""
        view = self.views[node.index]
        pool = self._pool_of(node)
        if view.healthy and not node.up:
            pool.router.lost(node.index)
        view.healthy = node.up
        self._dispatch(pool)

    def gone(self, node: Node) -> None:
        """The replica will not be back; without any left that does the same, nobody waits for one."""
        pool = self._pool_of(node)
        pool.gone += 1
        if pool.gone == len(pool.views):
            for call in list(pool.queue.values()):
                self._over(call, "no-replica")
