"""Blocks by reference: who may write where is decided by counts, not by names.

The pool knows neither requests nor keys. A block is free when nobody refers to it. A free block may still be *kept*:
its content could serve a prefix hit, until the block is given to somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.core.errors import InvariantError, NoFreeBlocks
from engine.core.types import BlockId

__all__ = ["FREE_ORDERS", "BlankFirst", "BlockPool", "FreeOrder", "SingleQueue"]


class FreeOrder:
    """In which order free blocks are given out. Every operation is O(1) a block, whatever the size of the pool."""

    def put(self, blocks: Sequence[BlockId]) -> None:
        """Kept blocks became free, in this order."""
        raise NotImplementedError

    def put_blank(self, blocks: Sequence[BlockId]) -> None:
        """Blocks without content became free, in this order."""
        raise NotImplementedError

    def pop(self, num: int, kept: list[bool]) -> tuple[list[BlockId], list[BlockId]]:
        """Give out `num` blocks (the caller knows that there are as many), and say which of them are kept.

        `kept[block]` tells which blocks are.
        """
        raise NotImplementedError

    def remove(self, block: BlockId) -> None:
        """A kept free block is in use again."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[BlockId]:
        """All free blocks, in the order in which they would be given out now."""
        raise NotImplementedError


class LazyQueue:
    """A queue of blocks from which one can be taken out of the middle: its entry is skipped when it comes up.

    A block that left and came back has an old entry and a new one, and the old ones come up first; so the number of
    entries to skip is all that is to be remembered of a block. Entries to skip never outnumber the others for long.
    """

    def __init__(self, blocks: Iterable[BlockId], num_blocks: int) -> None:
        self._queue: list[BlockId] = list(blocks)
        self._head = 0
        """Entries before this one are gone."""
        self._skip: list[int] = [0] * num_blocks
        self._num_skip = 0

    def put(self, blocks: Sequence[BlockId]) -> None:
        self._queue.extend(blocks)

    def pop(self, num: int) -> list[BlockId]:
        queue = self._queue
        head = self._head
        if not self._num_skip:
            given = queue[head : head + num]
            head += num
        else:
            skip = self._skip
            given = []
            left = num
            while left:
                block = queue[head]
                head += 1
                if skip[block]:
                    skip[block] -= 1
                    self._num_skip -= 1
                else:
                    given.append(block)
                    left -= 1
        if head > 1024 and 2 * head > len(queue):
            del queue[:head]
            head = 0
        self._head = head
        return given

    def remove(self, block: BlockId) -> None:
        self._skip[block] += 1
        self._num_skip += 1
        if 2 * self._num_skip > len(self._queue) - self._head + 64:
            live = self._queue[self._head :]
            self._queue = []
            self._head = 0
            for entry in live:
                if self._skip[entry]:
                    self._skip[entry] -= 1
                else:
                    self._queue.append(entry)
            self._num_skip = 0

    def __iter__(self) -> Iterator[BlockId]:
        skip = list(self._skip)
        for block in self._queue[self._head :]:
            if skip[block]:
                skip[block] -= 1
            else:
                yield block


class SingleQueue(FreeOrder):
    """One queue: whatever becomes free goes to its tail. vLLM up to 0.19."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = LazyQueue((BlockId(i) for i in range(num_blocks)), num_blocks)

    def put(self, blocks: Sequence[BlockId]) -> None:
        self._queue.put(blocks)

    def put_blank(self, blocks: Sequence[BlockId]) -> None:
        self._queue.put(blocks)

    def pop(self, num: int, kept: list[bool]) -> tuple[list[BlockId], list[BlockId]]:
        blocks = self._queue.pop(num)
        return blocks, [block for block in blocks if kept[block]]

    def remove(self, block: BlockId) -> None:
        self._queue.remove(block)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._queue)


class BlankFirst(FreeOrder):
    """Blocks without content first (the last freed is the first given), then kept ones, least recently used first.

    vLLM 0.33 does this: a block that has no hash goes to the front of its queue.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blank: list[BlockId] = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._kept = LazyQueue((), num_blocks)

    def put(self, blocks: Sequence[BlockId]) -> None:
        self._kept.put(blocks)

    def put_blank(self, blocks: Sequence[BlockId]) -> None:
        self._blank.extend(reversed(blocks))

    def pop(self, num: int, kept: list[bool]) -> tuple[list[BlockId], list[BlockId]]:
        blank = self._blank
        if not blank:
            given = self._kept.pop(num)
            return given, given
        if num > len(blank):
            evicted = self._kept.pop(num - len(blank))
            given = blank[::-1] + evicted
            blank.clear()
            return given, evicted
        if num == 1:
            return [blank.pop()], []
        given = blank[: -num - 1 : -1]
        del blank[len(blank) - num :]
        return given, []

    def remove(self, block: BlockId) -> None:
        self._kept.remove(block)

    def __iter__(self) -> Iterator[BlockId]:
        yield from reversed(self._blank)
        yield from self._kept


FREE_ORDERS: dict[str, type[SingleQueue] | type[BlankFirst]] = {
    "single-queue": SingleQueue,
    "blank-first": BlankFirst,
}


class BlockPool:
    """The blocks of one tier (device or host) and the references to them.

    Whoever gets a block from `take` or `share` owns one reference, and gives it back with `drop`, once.
    """

    def __init__(self, num_blocks: int, free_order: str = "blank-first", order: FreeOrder | None = None) -> None:
        """`order` takes the place of the one that `free_order` names."""
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_kept_free = 0
        """How many of the free blocks are kept."""
        self._refs: list[int] = [0] * num_blocks
        self._kept: list[bool] = [False] * num_blocks
        self._order: FreeOrder = FREE_ORDERS[free_order](num_blocks) if order is None else order

    def take(self, num: int) -> tuple[list[BlockId], list[BlockId]]:
        """`num` free blocks, one reference each, and those among them that were kept: their content is lost now.

        All or nothing. Raises:
            NoFreeBlocks: fewer than `num` are free.
        """
        if num > self.num_free:
            raise NoFreeBlocks(f"{num} blocks were asked for, {self.num_free} are free")
        kept = self._kept
        blocks, evicted = self._order.pop(num, kept)
        self.num_free -= num
        self.num_kept_free -= len(evicted)
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        for block in evicted:
            kept[block] = False
        return blocks, evicted

    def share(self, blocks: Sequence[BlockId]) -> None:
        """One more reference to each block. Kept free blocks come back into use with their content."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                if not self._kept[block]:
                    raise InvariantError(f"block {block} is shared, but it is free and its content is gone")
                self._order.remove(block)
                self.num_free -= 1
                self.num_kept_free -= 1
            refs[block] += 1

    def drop(self, blocks: Sequence[BlockId], keep: Sequence[BlockId] = ()) -> None:
        """Give back one reference to each block, in this order. At the last one the block becomes free.

        Those without content become free before those that are kept, as in a table that is given back last block first.

        `keep`: those among them whose content is worth keeping from now on.

        Raises:
            InvariantError: a block that is free already.
        """
        refs = self._refs
        kept = self._kept
        for block in keep:
            kept[block] = True
        blank: list[BlockId] = []
        kept_free: list[BlockId] = []
        for block in blocks:
            count = refs[block] - 1
            if count < 0:
                raise InvariantError(f"a reference to block {block} is dropped, but nobody holds one")
            refs[block] = count
            if count == 0:
                if kept[block]:
                    kept_free.append(block)
                else:
                    blank.append(block)
        self.num_free += len(blank) + len(kept_free)
        if blank:
            self._order.put_blank(blank)
        if kept_free:
            self.num_kept_free += len(kept_free)
            self._order.put(kept_free)

    def keep(self, blocks: Sequence[BlockId]) -> None:
        """The content of these blocks, which are in use, is worth keeping when they become free."""
        refs = self._refs
        kept = self._kept
        for block in blocks:
            if refs[block] == 0:
                raise InvariantError(f"block {block} is free and cannot be marked as kept")
            kept[block] = True

    def refs(self, block: BlockId) -> int:
        return self._refs[block]

    def is_kept(self, block: BlockId) -> bool:
        return self._kept[block]

    def all_refs(self) -> list[int]:
        """References to each block, as a copy (for records; O(pool))."""
        return list(self._refs)

    def kept_flags(self) -> bytes:
        """One byte a block: whether its content is kept, as a copy (for records; O(pool))."""
        return bytes(self._kept)

    def free_order(self) -> list[BlockId]:
        """All free blocks in the order in which they would be given out (for checks; O(pool))."""
        return list(self._order)

    def check(self) -> None:
        """Free is exactly ref 0, without duplicates; the counters equal a walk. Raises InvariantError."""
        order = self.free_order()
        free = {block for block in range(self.num_blocks) if self._refs[block] == 0}
        if min(self._refs, default=0) < 0:
            raise InvariantError("a reference count is negative", str(self._refs))
        if len(order) != len(set(order)):
            raise InvariantError("a free block is listed twice", str(order))
        if set(order) != free or len(order) != self.num_free:
            raise InvariantError(
                f"free blocks are miscounted: {self.num_free} counted, {len(order)} listed", str(order)
            )
        kept = sum(1 for block in order if self._kept[block])
        if kept != self.num_kept_free:
            raise InvariantError(f"kept free blocks are miscounted: {self.num_kept_free} counted, {kept} listed")
