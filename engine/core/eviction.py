"""Policies of eviction; ranked.py has the free order that follows one.

Least recently used is not among the ranked ones: the queues of pool.py do it in O(1) (`eviction_policy` lru). A policy
here ranks each cached block when it becomes free; blocks without content are given out before any of them.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.errors import PolicyError
from engine.core.policies import BlockFacts, Eviction
from engine.core.types import BlockHash

__all__ = ["EVICTIONS", "LFU", "LRU", "Belady", "ByCost", "ByPriority", "Fifo", "TwoQueues"]


class LRU(Eviction):
    """The one that was used longest ago: the same as the queues, ranked."""

    def rank(self, block: BlockFacts) -> tuple[int, ...]:
        return ()  # blocks become free in the order of their last use


class Fifo(Eviction):
    """The one that was computed first."""

    def rank(self, block: BlockFacts) -> tuple[int, ...]:
        return (block.first_use,)


class LFU(Eviction):
    """The one that fewest requests have had; of those, the one that was used longest ago."""

    def rank(self, block: BlockFacts) -> tuple[int, ...]:
        return (block.num_uses,)


class TwoQueues(Eviction):
    """2Q: what only one request has had goes before all else, first in first out; the rest by last use.

    Without the two queues' limits of size, and without a memory of what was lost (Johnson and Shasha, 1994, have both).
    """

    def rank(self, block: BlockFacts) -> tuple[int, ...]:
        return (0, block.first_use) if block.num_uses == 1 else (1, block.last_use)


class ByCost(Eviction):
    """What is cheapest to compute again for how often it is used, with ageing (GreedyDual-Size-Frequency).

    A block's cost is that of its tokens, in units of a token without context: 1 + context / 30,000, since a model of 8B
    does as much for attention over 30,000 tokens as for everything else. All blocks have one size. Its rank is the
    clock + uses x cost, and the clock is the rank of the last block that went.
    """

    def __init__(self) -> None:
        self._clock = 0

    def rank(self, block: BlockFacts) -> tuple[int, ...]:
        return (self._clock + block.num_uses * (30_000 + block.position_tokens),)

    def evicted(self, rank: tuple[int, ...]) -> None:
        self._clock = rank[0]


class ByPriority(Eviction):
    """That of the least important last user (the largest priority value); of those, the one unused the longest."""

    def rank(self, block: BlockFacts) -> tuple[int, ...]:
        return (-block.priority,)


class Belady(Eviction):
    """The one that will be asked for last: an upper bound, for who knows the future (`BlockManager.next_use`)."""

    def __init__(self) -> None:
        self.next_use: Callable[[BlockHash], int] | None = None

    def rank(self, block: BlockFacts) -> tuple[int, ...]:
        if self.next_use is None:
            raise PolicyError("eviction_policy belady needs to know the future, and only an offline replay tells it")
        return (-self.next_use(block.key),)


EVICTIONS: dict[str, type[Eviction]] = {
    "fifo": Fifo,
    "lfu": LFU,
    "2q": TwoQueues,
    "cost-aware": ByCost,
    "priority": ByPriority,
    "belady": Belady,
}
"""The policies that `eviction_policy` names, beside lru."""
