"""Contiguous runs of blocks: how KV memory was given out before it was paged.

A run has one owner from `take_run` until `drop_run`. What lies between runs is holes; which hole a run is cut from is
the placement. `first-fit` and `best-fit` keep holes of any size, merged with their neighbours at once. `buddy` is the
binary buddy system (Knowlton, 1965): runs are powers of two, aligned to their own size, and a free one merges only with
the one that it was split from. The rest of a power of two belongs to the run and serves nobody.

A placement costs O(log blocks), and moves within lists that are as long as there are holes, of which there are at most
one more than runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from engine.core.errors import InvariantError, NoFreeBlocks
from engine.core.pool import BlockPool
from engine.core.types import BlockId

__all__ = ["PLACEMENTS", "BestFit", "Buddy", "ExtentPool", "FirstFit", "Holes", "Run"]


class Run(NamedTuple):
    """Blocks `first`, `first` + 1, ..., of which `num_blocks` were asked for, and `size` are held."""

    first: int
    num_blocks: int
    size: int


class Holes:
    """The free blocks of a pool, as maximal runs. Subclasses say which of them a new run is cut from."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._size_at: dict[int, int] = {}
        """Size of each hole by its first block."""
        self._first_before: dict[int, int] = {}
        """First block of the hole that ends before this block."""
        self._by_size: list[tuple[int, int]] = []
        """(size, first) of each hole, sorted."""

    def rounded(self, num: int) -> int:
        """How many blocks a run of `num` holds."""
        return num

    def longest(self) -> int:
        """The longest run that an empty pool has room for."""
        return self._num_blocks

    def largest(self) -> int:
        """Blocks of the largest hole; 0: there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    def cut(self, num: int) -> int:
        """Take a run of `num` blocks out of the holes; returns its first block. There must be room for it."""
        first = self._choose(num)
        size = self._remove(first)
        if size > num:
            self._insert(first + num, size - num)
        return first

    def give_back(self, first: int, size: int) -> None:
        """These blocks are free again."""
        before = self._first_before.get(first)
        if before is not None:
            size += self._remove(before)
            first = before
        if first + size in self._size_at:
            size += self._remove(first + size)
        self._insert(first, size)

    def too_small_for(self, num: int) -> int:
        """Free blocks in holes that have no room for a run of `num`."""
        stop = bisect_left(self._by_size, (self.rounded(num), 0))
        return sum(size for size, _ in self._by_size[:stop])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(first, size) of each hole, by place."""
        return iter(sorted(self._size_at.items()))

    def check(self) -> None:
        """Neighbours are merged, and the ways to find a hole agree. Raises InvariantError."""
        end = -1
        for first, size in self:
            if first <= end:
                raise InvariantError(f"the hole at {first} is not apart from the one that ends before {end}")
            end = first + size
        sizes = sorted((size, first) for first, size in self._size_at.items())
        ends = {first + size: first for first, size in self._size_at.items()}
        if sizes != self._by_size or ends != self._first_before:
            raise InvariantError("the lists of holes differ", f"{sizes} {self._by_size} {self._first_before}")

    def _choose(self, num: int) -> int:
        raise NotImplementedError

    def _insert(self, first: int, size: int) -> None:
        self._size_at[first] = size
        self._first_before[first + size] = first
        insort(self._by_size, (size, first))

    def _remove(self, first: int) -> int:
        size = self._size_at.pop(first)
        del self._first_before[first + size]
        del self._by_size[bisect_left(self._by_size, (size, first))]
        return size


class BestFit(Holes):
    """The smallest hole with room, and of equal ones the one in front."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._insert(0, num_blocks)

    def _choose(self, num: int) -> int:
        return self._by_size[bisect_left(self._by_size, (num, 0))][1]


class FirstFit(Holes):
    """The hole with room that is nearest to the front: found in a tree of the largest hole in each half."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._leaves = 1 << (num_blocks - 1).bit_length()
        self._tree = [0] * (2 * self._leaves)
        self._insert(0, num_blocks)

    def _choose(self, num: int) -> int:
        tree = self._tree
        node = 1
        while node < self._leaves:
            node *= 2
            if tree[node] < num:
                node += 1
        return node - self._leaves

    def _insert(self, first: int, size: int) -> None:
        super()._insert(first, size)
        self._set(first, size)

    def _remove(self, first: int) -> int:
        self._set(first, 0)
        return super()._remove(first)

    def _set(self, first: int, size: int) -> None:
        tree = self._tree
        node = first + self._leaves
        tree[node] = size
        node //= 2
        while node:
            larger = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == larger:
                break
            tree[node] = larger
            node //= 2

    def check(self) -> None:
        super().check()
        tree, leaves = self._tree, self._leaves
        if tree[leaves:] != [self._size_at.get(first, 0) for first in range(leaves)]:
            raise InvariantError("the tree of holes has other holes", str(self._size_at))
        if any(tree[node] != max(tree[2 * node], tree[2 * node + 1]) for node in range(1, leaves)):
            raise InvariantError("the tree of holes does not have the largest of each half", str(tree))


class Buddy(Holes):
    """The smallest power of two with room, the one in front, halved until it is no larger than asked.

    A pool whose size is no power of two begins as one hole for each binary digit of it, the largest in front; so each
    lies at a multiple of its own size, and none ever merges with another.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        first = 0
        for order in range(num_blocks.bit_length() - 1, -1, -1):
            if num_blocks >> order & 1:
                self._insert(first, 1 << order)
                first += 1 << order

    def rounded(self, num: int) -> int:
        return 1 << (num - 1).bit_length()

    def longest(self) -> int:
        return 1 << (self._num_blocks.bit_length() - 1)

    def cut(self, num: int) -> int:
        wanted = self.rounded(num)
        size, first = self._by_size[bisect_left(self._by_size, (wanted, 0))]
        self._remove(first)
        while size > wanted:
            size //= 2
            self._insert(first + size, size)
        return first

    def give_back(self, first: int, size: int) -> None:
        while self._size_at.get(first ^ size) == size:
            self._remove(first ^ size)
            first &= ~size
            size *= 2
        self._insert(first, size)

    def check(self) -> None:
        for first, size in self:
            if size & (size - 1) or first % size:
                raise InvariantError(f"the hole of {size} at {first} is no buddy")
            if self._size_at.get(first ^ size) == size:
                raise InvariantError(f"the hole of {size} at {first} is not merged with its buddy")
        if sorted((size, first) for first, size in self._size_at.items()) != self._by_size:
            raise InvariantError("the lists of holes differ", f"{self._size_at} {self._by_size}")


PLACEMENTS: dict[str, type[FirstFit] | type[BestFit] | type[Buddy]] = {
    "first-fit": FirstFit,
    "best-fit": BestFit,
    "buddy": Buddy,
}


class ExtentPool(BlockPool):
    """A pool that gives out contiguous runs. Each block has one owner or none; nothing is shared, and nothing kept.

    `take` and `drop` are those of a BlockPool, for whole runs; `take_run` and `drop_run` are the same without lists.
    """

    def __init__(self, num_blocks: int, placement: str = "first-fit") -> None:
        super().__init__(0)  # its references and its queue stay empty
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._holes: Holes = PLACEMENTS[placement](num_blocks)
        self._runs: dict[int, Run] = {}
        """By first block."""
        self._used = bytearray(num_blocks)

    @property
    def largest_hole(self) -> int:
        """The longest run that could be had now, in blocks."""
        return self._holes.largest()

    @property
    def longest_run(self) -> int:
        """The longest run that could be had if nothing else were there, in blocks."""
        return self._holes.longest()

    def rounded(self, num: int) -> int:
        """How many blocks a run of `num` takes from the pool."""
        return self._holes.rounded(num)

    def has_room(self, num: int) -> bool:
        """Whether a run of `num` blocks can be had now."""
        return self._holes.rounded(num) <= self._holes.largest()

    def too_small_for(self, num: int) -> int:
        """Free blocks in holes that have no room for a run of `num`."""
        return self._holes.too_small_for(num)

    def take_run(self, num: int) -> Run:
        """`num` blocks in a row. All or nothing.

        Raises:
            NoFreeBlocks: no hole has room for them.
        """
        if num < 1:
            raise InvariantError(f"a run of {num} blocks was asked for")
        if not self.has_room(num):
            raise NoFreeBlocks(
                f"{num} blocks in a row were asked for, and the largest hole of {self.num_free} free ones has "
                f"{self.largest_hole}"
            )
        first = self._holes.cut(num)
        run = Run(first, num, self._holes.rounded(num))
        self._runs[first] = run
        self._used[first : first + run.size] = b"\1" * run.size
        self.num_free -= run.size
        return run

    def drop_run(self, first: int) -> None:
        """Give back the run that begins with block `first`.

        Raises:
            InvariantError: nobody holds such a run.
        """
        run = self._runs.pop(first, None)
        if run is None:
            raise InvariantError(f"the run at block {first} is given back, but nobody holds it")
        self._used[first : first + run.size] = bytes(run.size)
        self.num_free += run.size
        self._holes.give_back(first, run.size)

    def take(self, num: int) -> tuple[list[BlockId], list[BlockId]]:
        run = self.take_run(num)
        return [BlockId(i) for i in range(run.first, run.first + num)], []

    def drop(self, blocks: Sequence[BlockId], keep: Sequence[BlockId] = ()) -> None:
        """Give back a whole run, in any order."""
        run = self._runs.get(min(blocks, default=-1))
        if run is None or sorted(blocks) != list(range(run.first, run.first + run.num_blocks)) or keep:
            raise InvariantError(f"blocks {list(blocks)} are given back, which are no run that somebody holds")
        self.drop_run(run.first)

    def share(self, blocks: Sequence[BlockId]) -> None:
        if blocks:
            raise InvariantError(f"blocks {list(blocks)} are shared, but a contiguous run has one owner")

    def keep(self, blocks: Sequence[BlockId]) -> None:
        if blocks:
            raise InvariantError(f"blocks {list(blocks)} are to be kept, but a contiguous run leaves nothing behind")

    def refs(self, block: BlockId) -> int:
        return self._used[block]

    def all_refs(self) -> list[int]:
        return list(self._used)

    def kept_flags(self) -> bytes:
        return bytes(self.num_blocks)

    def is_kept(self, block: BlockId) -> bool:
        return False

    def free_order(self) -> list[BlockId]:
        """All free blocks by place (for checks; O(pool))."""
        return [BlockId(i) for first, size in self._holes for i in range(first, first + size)]

    def runs(self) -> list[Run]:
        """All runs that somebody holds, by place."""
        return sorted(self._runs.values())

    def holes(self) -> list[tuple[int, int]]:
        """(first block, size) of all holes, by place."""
        return list(self._holes)

    def digest(self) -> str:
        """A fingerprint of all runs and holes."""
        return blake2b(repr((self.runs(), list(self._holes))).encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        """Runs and holes cover the pool, each block once, and the counter equals a walk. Raises InvariantError."""
        self._holes.check()
        parts = sorted([*((run.first, run.size) for run in self._runs.values()), *self._holes])
        end = 0
        for first, size in parts:
            if first != end or size < 1:
                raise InvariantError(f"block {end} is in no run and no hole, or in two", str(parts))
            end += size
        free = sum(size for _, size in self._holes)
        if end != self.num_blocks or free != self.num_free:
            raise InvariantError(f"free blocks are miscounted: {self.num_free} counted, {free} found", str(parts))
        used = bytearray(self.num_blocks)
        for run in self._runs.values():
            if run.size != self._holes.rounded(run.num_blocks):
                raise InvariantError(f"the run at {run.first} has not the size that was asked for", str(run))
            used[run.first : run.first + run.size] = b"\1" * run.size
        if used != self._used:
            raise InvariantError("blocks in use are marked wrongly", str(parts))
