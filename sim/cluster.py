"""Replicas behind a gateway: a trace served by several engines, of which some may die.

    result = simulate_cluster(trace, [NodeSpec(config, step_time)] * 4, LeastLoaded(), GatewayOptions(max_queue=100))
    result.requests(), result.attempts(), result.lives

Each replica runs the core that a single one runs, in the same simulated time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import simpy

from sim.attempts import FAILED, OUTCOMES, SHED, STATUS
from sim.errors import SimError, StalledError
from sim.faults import NEVER, Faults
from sim.gateway import Gateway, GatewayOptions, call_at
from sim.node import Life, Node, NodeSpec
from sim.routers import LeastLoaded, RoundRobin, Router
from sim.simulate import TraceSpecs, uncollected
from traces import Trace, TraceSource

__all__ = ["ClusterResult", "LifeRecord", "sessions_of", "simulate_cluster"]

_ASK_STOP = 2000
"""Events between two questions whether to leave off."""


@dataclass(frozen=True, slots=True)
class LifeRecord:
    """One life of a replica."""

    replica: int
    number: int
    """From 0."""
    started_ns: int
    ended_ns: int
    """When it died; NEVER: it served to the end."""
    life: Life


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """A simulation that has run until every request had ended, or was stopped before."""

    trace: Trace
    gateway: Gateway
    lives: tuple[LifeRecord, ...]
    """By replica, then by number."""
    end_ns: int
    """When the last request ended."""
    complete: bool = True

    def attempts(self) -> dict[str, Any]:
        """One row an attempt, in the order in which they were sent; two where prompts are handed over, one a `leg` (0
        whole, 1 prompt, 2 output).

        `row`, `attempt` (from 1), `sent_ns`, `routed_ns` (to a replica; -1: to none), `replica`, `life`, `end_ns` (as
        its client sees it; -1: it has not), `outcome` and `status`; and what the replica's core recorded of it:
        `queued_ns`, `admitted_ns`, `first_token_ns`, `output_tokens`, `cached_tokens`, `num_preemptions`.
        """
        kept = self.gateway.attempts
        names = ("row", "attempt", "leg", "sent_ns", "routed_ns", "replica", "end_ns")
        table: dict[str, Any] = {name: np.array(getattr(kept, name), dtype=np.int64) for name in names}
        count = len(table["row"])
        table["life"] = np.full(count, -1, dtype=np.int64)
        for name, default in _FROM_CORE.items():
            table[name] = np.full(count, default, dtype=np.int64)
        for record in self.lives:
            tickets = np.array(record.life.tickets, dtype=np.int64)
            requests = record.life.recorder.requests()
            table["life"][tickets] = record.number
            for name in _FROM_CORE:
                table[name][tickets] = requests[name]
        codes = np.array(kept.outcome, dtype=np.int64)
        table["outcome"] = [OUTCOMES[code] for code in codes.tolist()]
        table["status"] = np.array([STATUS.get(name, 0) for name in OUTCOMES], dtype=np.int64)[codes]
        return table

    def requests(self) -> dict[str, Any]:
        """One row a request of the trace that was sent, in the trace's order: the columns of a single replica's table,
        from the attempt that ended it, and `replica` (-1: none), `retries`, `ended_ns`, `status`.

        `outcome` is `length` or `stop` where it was served, `rejected` or `no-memory` where a replica refused it,
        `shed`, `timeout` or `failed` where it was lost. One that was lost has neither first token nor finish, and no
        output.
        """
        attempts = self.attempts()
        rows = attempts["row"]
        # The last attempt of each row: attempts are in the order in which they were sent.
        last = np.full(len(self.trace), -1, dtype=np.int64)
        last[rows] = np.arange(len(rows))
        first = np.full(len(self.trace), -1, dtype=np.int64)
        first[rows[::-1]] = np.arange(len(rows))[::-1]
        sent = np.flatnonzero(last >= 0)
        last, first = last[sent], first[sent]
        outcome = [_of_attempt(attempts["outcome"][at]) for at in last.tolist()]
        served = np.array([name in ("length", "stop") for name in outcome], dtype=bool)
        trace = self.trace
        table: dict[str, Any] = {
            "request": np.arange(len(sent), dtype=np.int64),
            "row": sent,
            "arrival_ns": attempts["sent_ns"][first],
            "queued_ns": attempts["queued_ns"][last],
            "admitted_ns": attempts["admitted_ns"][last],
            "first_token_ns": np.where(served, attempts["first_token_ns"][last], -1),
            "finish_ns": np.where(served, attempts["end_ns"][last], -1),
            "prompt_tokens": trace.prompt_tokens[sent].astype(np.int64),
            "output_tokens": np.where(served, attempts["output_tokens"][last], 0),
            "max_tokens": trace.output_tokens[sent].astype(np.int64),
            "cached_tokens": attempts["cached_tokens"][last],
            "num_preemptions": attempts["num_preemptions"][last],
            "priority": trace.priority[sent],
            "tenant": trace.tenant[sent],
            "outcome": outcome,
            "reason": [self.gateway.reasons.get(row, "") for row in sent.tolist()],
            "replica": attempts["replica"][last],
            "retries": attempts["attempt"][last] - 1,
            "ended_ns": attempts["end_ns"][last],
            "status": attempts["status"][last],
        }
        return table


_FROM_CORE = {
    "queued_ns": -1,
    "admitted_ns": -1,
    "first_token_ns": -1,
    "output_tokens": 0,
    "cached_tokens": 0,
    "num_preemptions": 0,
}
"""Columns that the core records, and what they are where it never saw the attempt."""


def _of_attempt(outcome: str) -> str:
    """How a request ended whose last attempt ended so."""
    return "shed" if outcome in SHED else "failed" if outcome in FAILED else outcome


def sessions_of(trace: Trace) -> list[int]:
    """Of each row, the row of the conversation's first turn."""
    roots: list[int] = []
    for row, before in enumerate(trace.after.tolist()):
        roots.append(row if before < 0 else roots[before])
    return roots


class _Cluster:
    """All processes of a simulation."""

    def __init__(
        self,
        trace: Trace,
        specs: Sequence[NodeSpec],
        routers: Sequence[Router],
        options: GatewayOptions,
        faults: Faults,
        time_scale: float,
        fast_forward: bool,
        check: bool,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.source = TraceSource(trace, time_scale)
        self.left = len(trace)
        """Requests that have not ended."""
        self._faults = faults
        self._handing = False
        self._timer_at = -1
        """When the newest timer for arrivals goes off."""
        self.gateway = Gateway(self.env, options, routers, trace, sessions_of(trace), self._ended, self._arrive)
        made: dict[int, TraceSpecs] = {}
        for spec in specs:
            if id(spec.config) not in made:
                made[id(spec.config)] = TraceSpecs(trace, spec.config, None)
        self.nodes = [
            Node(
                self.env,
                index,
                spec,
                made[id(spec.config)],
                self.gateway.answered,
                fast_forward=fast_forward,
                check=check,
                stop=stop,
            )
            for index, spec in enumerate(specs)
        ]
        for replica, at in sorted(faults.crashes, key=lambda crash: crash[1]):
            call_at(self.env, at, partial(self._crash, self.nodes[replica], NEVER))
        for node in self.nodes:
            self._start(node)
        self.gateway.begin(self.nodes)
        call_at(self.env, 0, self._arrive)

    # ---- requests come and go ----

    def _arrive(self) -> None:
        """Hands over all that has arrived; what ends meanwhile may release more."""
        if self._handing:
            return
        self._handing = True
        now = int(self.env.now)
        while due := self.source.due(now):
            for row, _ in due:
                self.gateway.arrive(row)
        self._handing = False
        following = self.source.next_ns()
        if following is not None and not now < self._timer_at <= following:
            self._timer_at = following
            call_at(self.env, following, self._arrive)

    def _ended(self, row: int, now: int) -> None:
        self.left -= 1
        self.source.finished(row, now)

    # ---- replicas die and come back ----

    def _start(self, node: Node) -> None:
        node.start()
        life = len(node.lives) - 1
        lives_ns = self._faults.lives_ns(node.index, life)
        if lives_ns != NEVER:
            call_at(self.env, int(self.env.now) + lives_ns, partial(self._crash, node, life))

    def _crash(self, node: Node, life: int) -> None:
        """`life`: the life that is meant; NEVER: whichever it is."""
        number = len(node.lives) - 1
        if not self.left or not node.up or life not in (NEVER, number):
            return
        now = int(self.env.now)
        node.crash()
        self._notice(node)
        self.gateway.died(node)
        down = self._faults.down_ns(node.index, number, node.spec.restart_ns)
        if down == NEVER:
            self.gateway.gone(node)
        else:
            call_at(self.env, now + down, partial(self._restart, node))

    def _restart(self, node: Node) -> None:
        if self.left:
            self._start(node)
            self._notice(node)

    def _notice(self, node: Node) -> None:
        now = int(self.env.now)
        at = self._faults.noticed_at(now)
        if at == now:
            self.gateway.noticed(node)
        else:
            call_at(self.env, at, partial(self.gateway.noticed, node))

    # ---- the run ----

    def run(self, stop: Callable[[], bool] | None) -> bool:
        """Until every request has ended and every replica rests; False: it was stopped before."""
        env = self.env
        events = 0
        while self.left:
            if env.peek() == float("inf"):
                raise StalledError(
                    f"The cluster stands still at {env.now} ns with {self.source.remaining} requests to come, "
                    f"{self.left - self.source.remaining} on the way and {self.gateway.num_waiting} in the queue."
                )
            env.step()
            events += 1
            if stop is not None and events % _ASK_STOP == 0 and stop():
                return False
        self.end_ns = int(env.now)
        for node in self.nodes:
            node.close()
        while any(node.is_serving for node in self.nodes):
            env.step()
        return not any(node.life.replica.stopped for node in self.nodes)

    end_ns = 0


def _check_roles(replicas: Sequence[NodeSpec]) -> None:
    roles = {spec.role for spec in replicas}
    if len(roles) > 1 and "both" in roles:
        raise SimError("Replicas either all do both, or each computes prompts or decodes; give each a role or none.")
    if roles != {"both"} and len(roles) == 1:
        missing = "decode" if roles == {"prefill"} else "prefill"
        raise SimError(f"All replicas have the role {roles.pop()}; one or more must have the role {missing}.")


def simulate_cluster(
    trace: Trace,
    replicas: Sequence[NodeSpec],
    router: Router | None = None,
    options: GatewayOptions | None = None,
    faults: Faults | None = None,
    *,
    decode_router: Router | None = None,
    time_scale: float = 1.0,
    fast_forward: bool = True,
    check: bool = False,
    stop: Callable[[], bool] | None = None,
) -> ClusterResult:
    """Serve a whole trace on a cluster, in simulated time.

    Args:
        router: default: one after another. Where some replicas compute prompts and others decode, for the former.
        decode_router: for the latter; default: the least loaded.
        options: of the gateway and its clients; default: no limits, no retries.
        faults: default: none.
        fast_forward: changes the speed and nothing else.
        check: walk the state of each core at each step.
        stop: asked now and then whether to leave off.

    Raises:
        SimError: there is no replica, none to compute prompts or none to decode, or a fault or a router names none.
        StalledError: requests are left and nothing will ever happen; a bug of ours.
    """
    if not replicas:
        raise SimError("A cluster needs one replica or more.")
    _check_roles(replicas)
    faults = faults or Faults()
    routers = [router or RoundRobin()]
    if any(spec.role != "both" for spec in replicas):
        routers.append(decode_router or LeastLoaded())
    faults.check(len(replicas))
    with uncollected():
        cluster = _Cluster(
            trace,
            replicas,
            routers,
            options or GatewayOptions(),
            faults,
            time_scale,
            fast_forward,
            check,
            stop,
        )
        complete = cluster.run(stop)
    lives = tuple(
        LifeRecord(node.index, number, life.started_ns, life.ended_ns, life)
        for node in cluster.nodes
        for number, life in enumerate(node.lives)
    )
    return ClusterResult(trace, cluster.gateway, lives, cluster.end_ns or int(cluster.env.now), complete)
