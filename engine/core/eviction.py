"""Policies of eviction, and the free order that follows one.

Least recently used is not among the ranked ones: the queues of pool.py do it in O(1) (`eviction_policy` lru). A policy
here ranks each cached block when it becomes free; blocks without content are given out before any of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from engine.core.errors import CoreError, InvariantError, PolicyError
from engine.core.index import PrefixIndex
from engine.core.policies import BlockFacts, Eviction
from engine.core.pool import FreeOrder
from engine.core.types import BlockHash, BlockId

__all__ = ["EVICTIONS", "LFU", "LRU", "Belady", "ByCost", "ByPriority", "Fifo", "RankedOrder", "TwoQueues"]


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
        return (self._clock + block.num_uses * (30_000 + 16 * block.position),)

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


class RankedOrder(FreeOrder):
    """Blanks first, the last freed first; then cached blocks by rank, in O(log n) each.

    A block that comes up while something cached follows it is put aside, and comes back when the last of that has gone.
    What is given up leaves the index at once, so that the one before it can follow in the same call.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex, policy: Eviction) -> None:
        self.policy = policy
        self._index = index
        self._blank: list[BlockId] = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._heap: list[tuple[tuple[int, ...], int, BlockId]] = []
        self._ticket = [0] * num_blocks
        """Which entry of a free cached block counts; 0: it is not one."""
        self._rank: dict[BlockId, tuple[int, ...]] = {}
        """Of free cached blocks."""
        self._aside: dict[BlockHash, list[BlockId]] = {}
        """Free cached blocks that are needed, by what they hold."""
        self._tickets = 0
        self._uses = 0
        self._num_uses = [0] * num_blocks
        self._first_use = [0] * num_blocks
        self._last_use = [0] * num_blocks
        self._position = [0] * num_blocks
        self._priority = [0] * num_blocks

    def computed(self, block: BlockId) -> None:
        """What the block holds is new; it is in use."""
        self._uses += 1
        self._num_uses[block] = 0
        self._first_use[block] = self._last_use[block] = self._uses

    def published(self, key: BlockHash) -> None:
        """One more block holds this content, so that others that do may not be needed any more."""
        if key in self._aside:
            self._bring_back(key)

    def used(self, table: Sequence[BlockId], priority: int) -> None:
        """A request gives back its blocks, the first one first."""
        for position, block in enumerate(table):
            self._uses += 1
            self._num_uses[block] += 1
            self._last_use[block] = self._uses
            self._position[block] = position
            self._priority[block] = priority

    def put(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            key = self._index.key_of(block)
            if key is None:
                raise InvariantError(f"block {block} is kept, but it is not listed")
            facts = BlockFacts(
                key,
                self._position[block],
                self._num_uses[block],
                self._first_use[block],
                self._last_use[block],
                self._priority[block],
            )
            self._rank[block] = self._ask(facts)
            self._tickets += 1
            self._ticket[block] = self._tickets
            heapq.heappush(self._heap, (self._rank[block], self._tickets, block))

    def _ask(self, facts: BlockFacts) -> tuple[int, ...]:
        policy = self.policy
        try:
            rank = policy.rank(facts)
        except CoreError:
            raise
        except (Exception, SystemExit) as error:
            raise PolicyError(f"policy {policy.name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(rank, tuple) or not all(isinstance(part, int) for part in rank):
            raise PolicyError(f"policy {policy.name}: rank() must give a tuple of whole numbers, and gave {rank!r}")
        return rank

    def put_blank(self, blocks: Sequence[BlockId]) -> None:
        self._blank.extend(reversed(blocks))

    def pop(self, num: int, kept: bytearray) -> tuple[list[BlockId], list[BlockId]]:
        blank = self._blank
        given: list[BlockId] = []
        while len(given) < num and blank:
            given.append(blank.pop())
        evicted: list[BlockId] = []
        while len(given) + len(evicted) < num:
            evicted.append(self._evict())
        return given + evicted, evicted

    def _evict(self) -> BlockId:
        index = self._index
        while self._heap:
            rank, ticket, block = heapq.heappop(self._heap)
            if self._ticket[block] != ticket:
                continue
            if index.is_needed(block):
                key = index.key_of(block)
                assert key is not None
                self._aside.setdefault(key, []).append(block)
                continue
            before = index.parent_key(block)
            index.remove([block])
            if before is not None and before in self._aside:
                self._bring_back(before)
            self._ticket[block] = 0
            del self._rank[block]
            self.policy.evicted(rank)
            return block
        raise InvariantError("no free cached block can be given up: something that follows each is in use")

    def _bring_back(self, key: BlockHash) -> None:
        for block in self._aside.pop(key):
            heapq.heappush(self._heap, (self._rank[block], self._ticket[block], block))

    def remove(self, block: BlockId) -> None:
        self._ticket[block] = 0
        del self._rank[block]
        key = self._index.key_of(block)
        if key is not None and block in self._aside.get(key, ()):
            self._aside[key].remove(block)
            if not self._aside[key]:
                del self._aside[key]

    def __iter__(self) -> Iterator[BlockId]:
        yield from reversed(self._blank)
        yield from sorted(self._rank, key=lambda block: (self._rank[block], self._ticket[block]))
