"""The free order that follows an eviction policy: a heap of ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from engine.core.errors import CoreError, InvariantError, PolicyError
from engine.core.index import PrefixIndex
from engine.core.policies import BlockFacts, Eviction
from engine.core.pool import FreeOrder
from engine.core.types import BlockHash, BlockId

__all__ = ["RankedOrder"]


class RankedOrder(FreeOrder):
    """Blanks first, the last freed first; then cached blocks by rank, in O(log n) each.

    A block that something cached follows is put aside, when it becomes free or else when it comes up, and comes back
    when the last of that has gone: so the heap holds little more than the ends of what is cached. What is given up
    leaves the index at once, so that the one before it can follow in the same call.
    """

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex, policy: Eviction) -> None:
        self.policy = policy
        self.block_size = block_size
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
                self._position[block] * self.block_size,
                self._num_uses[block],
                self._first_use[block],
                self._last_use[block],
                self._priority[block],
            )
            self._rank[block] = self._ask(facts)
            self._tickets += 1
            self._ticket[block] = self._tickets
            if self._index.is_needed(block):
                self._aside.setdefault(key, []).append(block)
            else:
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

    def pop(self, num: int, kept: list[bool]) -> tuple[list[BlockId], list[BlockId]]:
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
