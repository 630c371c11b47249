"""In which order requests are served: what `--scheduling-policy` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from engine.core.errors import InvalidRequest
from engine.core.policies import DynamicOrder, Order, RequestView
from engine.core.types import NO_LIMIT

__all__ = [
    "FCFS",
    "ORDERS",
    "Aging",
    "EarliestDeadline",
    "FairShare",
    "LongestPrefix",
    "Priority",
    "ShortestByMaxTokens",
    "ShortestByOracle",
    "ShortestByPrediction",
]


class FCFS(Order):
    """First come, first served."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        return ()


class Priority(Order):
    """The lowest priority value first, as in vLLM."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        return (request.priority,)


class ShortestByMaxTokens(Order):
    """Shortest job first, where the sender's max_tokens is all that is known of its length."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        return (request.max_tokens,)


class ShortestByPrediction(Order):
    """Shortest job first by the predicted length of the output; by max_tokens where nobody predicted one."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        return (min(request.predicted_tokens, request.max_tokens) or request.max_tokens,)


class ShortestByOracle(Order):
    """Shortest job first by the true length of the output: what a perfect prediction would give."""

    oracle: ClassVar[bool] = True

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        if not request.oracle_tokens:
            raise InvalidRequest(
                "scheduling_policy 'sjf-oracle' needs the true output length of each request, and this one has none; "
                "use sjf-predicted or sjf"
            )
        return (request.oracle_tokens,)


class EarliestDeadline(Order):
    """Earliest deadline first; requests without one come last."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        return (request.deadline,)


class FairShare(Order):
    """Start-time fair queueing among tenants, in tokens: a tenant that asks much waits behind one that asks little.

    A request costs prompt + max_tokens. It gets a start tag, the larger of the virtual time and the tenant's last
    finish tag, and moves that finish tag on by its cost; the smallest start tag is served first. The virtual time is
    the largest start tag that was admitted so far, so an idle tenant saves up nothing.

    P. Goyal, H. Vin, H. Cheng, Start-time Fair Queueing, SIGCOMM 1996. (Sheng et al., Fairness in Serving Large
    Language Models, OSDI 2024, count tokens as they are served instead: VTC.)
    """

    def __init__(self) -> None:
        self._virtual = 0
        self._finish: dict[int, int] = {}
        """By tenant: the finish tag of its last request."""
        self._start: dict[int, int] = {}
        """By request that was not admitted yet: its start tag."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        start = max(self._virtual, self._finish.get(request.tenant, 0))
        self._finish[request.tenant] = start + request.num_prompt_tokens + request.max_tokens
        self._start[request.id] = start
        return (start,)

    def started(self, request: RequestView) -> None:
        self._virtual = max(self._virtual, self._start.pop(request.id, 0))


class Aging(Order):
    """Priority that rises with waiting: one level for every second.

    At time t a request counts as priority - (t - arrival) / STEP. Who of two is first does not depend on t, so
    arrival + priority x STEP is a key that never changes. Nobody waits for ever: a request is overtaken only by those
    that come within STEP for each level that they are above it.
    """

    STEP_NS: ClassVar[int] = 1_000_000_000

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        return (request.arrival + request.priority * self.STEP_NS,)


class LongestPrefix(DynamicOrder):
    """Of the first 128 waiting, the one of which the prefix cache holds most tokens; the first of equals.

    SGLang's `lpm`, which sorts the whole queue so, and serves it first come, first served while more than 128 wait.
    """

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def next(self, waiting: Sequence[RequestView], cached_tokens: Sequence[int], now: int) -> int:
        return waiting[max(range(len(waiting)), key=cached_tokens.__getitem__)].id


ORDERS: dict[str, type[Order]] = {
    "fcfs": FCFS,
    "priority": Priority,
    "sjf": ShortestByMaxTokens,
    "sjf-predicted": ShortestByPrediction,
    "sjf-oracle": ShortestByOracle,
    "edf": EarliestDeadline,
    "fair": FairShare,
    "lpm": LongestPrefix,
    "aging": Aging,
}
"""The orders by name."""
