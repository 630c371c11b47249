"""The policies of one scheduler, and how they are asked: an answer that cannot be is the policy's error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from engine.core.batching import BATCHINGS, Mixed
from engine.core.errors import CoreError, PolicyError
from engine.core.orders import ORDERS
from engine.core.policies import (
    Admission,
    Batch,
    Batching,
    DynamicOrder,
    Order,
    Policy,
    RequestView,
    StepView,
    Victim,
    WholePrompt,
)
from engine.core.presets import SchedulerConfig
from engine.core.types import NO_LIMIT
from engine.core.victims import VICTIMS, LastIn

__all__ = ["Policies"]

_T = TypeVar("_T")


class Policies:
    """One policy of each kind: a copy of the user's, or the built-in one that the options name."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Raises PolicyError: a policy of the user's cannot be copied."""
        self.order: Order = ORDERS[config.scheduling_policy]()
        self.admission: Admission = WholePrompt()
        self.victim: Victim = VICTIMS[config.victim_policy]()
        self.batching: Batching = BATCHINGS[config.batching]()
        for given in config.policies:
            # What a policy remembers must not pass from one run to the next.
            policy = _ask(given, partial(copy.deepcopy, given))
            if isinstance(policy, Order):
                self.order = policy
            if isinstance(policy, Admission):
                self.admission = policy
            if isinstance(policy, Victim):
                self.victim = policy
            if isinstance(policy, Batching):
                self.batching = policy
        self.dynamic: DynamicOrder | None = self.order if isinstance(self.order, DynamicOrder) else None
        self.plain_admission = type(self.admission) is WholePrompt
        self.plain_victim = type(self.victim) is LastIn
        self.plain_batching = type(self.batching) is Mixed
        self.keeps_account = type(self.order).started is not Order.started
        self._stable = not config.policies

    def key(self, request: RequestView) -> tuple[int, ...]:
        order = self.order
        return _ask(order, lambda: _whole_numbers(order.key(request)))

    def started(self, request: RequestView) -> None:
        order = self.order
        _ask(order, lambda: order.started(request))

    def next(self, waiting: Sequence[RequestView], cached_tokens: Sequence[int], now: int) -> int:
        """The position in `waiting` of the request to be admitted next."""
        order = self.order
        assert isinstance(order, DynamicOrder)  # nobody else is asked
        chosen = _ask(order, lambda: order.next(waiting, cached_tokens, now))
        for place, view in enumerate(waiting):
            if view.id == chosen:
                return place
        raise PolicyError(f"policy {order.name} chose {chosen!r} as next, which is not one of the waiting it was shown")

    def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
        admission = self.admission
        return bool(_ask(admission, lambda: admission.admits(request, need_blocks, free_blocks, num_running, now)))

    def choose(self, candidates: Sequence[RequestView]) -> int:
        """The position in `candidates` of the victim."""
        victim = self.victim
        chosen = _ask(victim, lambda: victim.choose(candidates))
        for place, view in enumerate(candidates):
            if view.id == chosen:
                return place
        raise PolicyError(f"policy {victim.name} chose {chosen!r} as victim, which is not one of the candidates")

    def step(self, state: StepView) -> Batch:
        batching = self.batching
        answer = _ask(batching, lambda: batching.step(state))
        if not isinstance(answer, Batch):
            raise PolicyError(f"policy {batching.name}: step() must give a Batch, and gave {answer!r}")
        return answer

    def stable_until(self, now: int) -> int:
        """The time in ns up to which all promise to answer as they did."""
        limit = NO_LIMIT
        if self._stable:
            return limit  # the built-in ones always promise it
        for policy in (self.order, self.admission, self.victim, self.batching):
            answer = _ask(policy, partial(policy.stable_until, now))
            if not isinstance(answer, int):
                raise PolicyError(f"policy {policy.name}: stable_until() must give a time in ns, and gave {answer!r}")
            limit = min(limit, answer)
        return limit


def _ask(policy: Policy, question: Callable[[], _T]) -> _T:
    """Ask a policy, which may be a user's: whatever it raises is named as its own."""
    try:
        return question()
    except CoreError:
        raise
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy {policy.name} failed: {type(error).__name__}: {error}") from error


def _whole_numbers(key: tuple[int, ...]) -> tuple[int, ...]:
    """What an order policy answered, if requests can be sorted by it."""
    if not isinstance(key, tuple) or not all(isinstance(part, int) for part in key):
        raise TypeError(f"key() must give a tuple of whole numbers, and gave {key!r}")
    return key
