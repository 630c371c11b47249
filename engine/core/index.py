"""Which blocks hold which content, so that a new request can start where an old one got to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.errors import InvariantError
from engine.core.types import BlockHash, BlockId

__all__ = ["HashIndex", "PrefixIndex"]


class PrefixIndex:
    """Finds the longest cached prefix of a request. Knows nothing of references.

    Contents form a tree: the key of a block names its whole prefix, so it has one parent, the content before it. A
    block is listed behind a listed one and is lost before it, so whatever can be hit is reached from the root. Several
    blocks may hold one content (two requests that computed it side by side). They are not merged; a hit takes the one
    that was published first, and losing one leaves the others. Tenants and adapters are kept apart by the keys.
    """

    changes: int
    """Grows whenever a block is listed or leaves: as long as it stays, so does what `match` finds."""

    def __len__(self) -> int:
        """How many blocks are listed."""
        raise NotImplementedError

    def match(self, key: Callable[[int], BlockHash], stop: int) -> list[BlockId]:
        """Blocks for a request's block positions 0, 1, ... below `stop`, up to the first miss. Pure.

        `key(i)` names the content of the request's block i.
        """
        raise NotImplementedError

    def insert(self, key: BlockHash, parent: BlockId | None, block: BlockId) -> None:
        """`block` holds (or will, once its step has run) the content named by `key`, which follows that of `parent`.

        Raises:
            InvariantError: `block` is listed already, or `parent` is not.
        """
        raise NotImplementedError

    def remove(self, blocks: Sequence[BlockId]) -> int:
        """These blocks are going to hold something else, in this order. Returns how many of them were listed."""
        raise NotImplementedError

    def key_of(self, block: BlockId) -> BlockHash | None:
        """The content under which a block is listed; None: it is not."""
        raise NotImplementedError

    def ancestors(self, block: BlockId) -> list[BlockId]:
        """The blocks that a hit on a listed block goes through before it, from the first on. Pure; O(depth)."""
        raise NotImplementedError

    def is_needed(self, block: BlockId) -> bool:
        """Whether losing a listed block would leave something that cannot be reached: no other block holds its content,
        and something follows that. O(1)."""
        raise NotImplementedError

    def parent_key(self, block: BlockId) -> BlockHash | None:
        """The content before that of a listed block; None: it is a first one. O(1)."""
        raise NotImplementedError

    def entries(self) -> list[tuple[BlockHash, list[BlockId]]]:
        """All keys with their blocks, in the order of publication within a key (for digests and checks)."""
        raise NotImplementedError

    def check(self) -> None:
        """Both directions agree, and every content's parent is there too. Raises InvariantError."""
        raise NotImplementedError


class HashIndex(PrefixIndex):
    """A dictionary from chained keys to blocks, as in vLLM V1.

    Every operation is O(1) a block (O(d) where a content has d blocks), whatever the size of the index.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._first: dict[BlockHash, BlockId] = {}
        self._more: dict[BlockHash, list[BlockId]] = {}
        """Further blocks of keys that have several, in the order of publication."""
        self._key_of: dict[BlockId, BlockHash] = {}
        self._parent_of: dict[BlockId, BlockHash | None] = {}
        self._children: dict[BlockHash, int] = {}
        """How many contents follow a content, where any do."""

    def __len__(self) -> int:
        return len(self._key_of)

    def find(self, key: BlockHash) -> BlockId | None:
        return self._first.get(key)

    def match(self, key: Callable[[int], BlockHash], stop: int) -> list[BlockId]:
        hits: list[BlockId] = []
        find = self._first.get
        for i in range(stop):
            block = find(key(i))
            if block is None:
                break
            hits.append(block)
        return hits

    def insert(self, key: BlockHash, parent: BlockId | None, block: BlockId) -> None:
        if block in self._key_of:
            raise InvariantError(f"block {block} is published twice")
        if parent is None:
            self._parent_of[block] = None
        elif parent in self._key_of:
            self._parent_of[block] = self._key_of[parent]
        else:
            raise InvariantError(f"block {block} is published behind block {parent}, which is not listed")
        self.changes += 1
        self._key_of[block] = key
        if key in self._first:
            self._more.setdefault(key, []).append(block)
        else:
            self._first[key] = block
            before = self._parent_of[block]
            if before is not None:
                self._children[before] = self._children.get(before, 0) + 1

    def remove(self, blocks: Sequence[BlockId]) -> int:
        key_of = self._key_of
        if not key_of:
            return 0
        listed = [block for block in blocks if block in key_of]
        self.changes += len(listed)
        for block in listed:
            key = key_of.pop(block)
            before = self._parent_of.pop(block)
            more = self._more.get(key)
            if more is None:
                del self._first[key]
                if before is not None:
                    left = self._children[before] - 1
                    if left:
                        self._children[before] = left
                    else:
                        del self._children[before]
                continue
            if self._first[key] == block:
                self._first[key] = more.pop(0)
            else:
                more.remove(block)
            if not more:
                del self._more[key]
        return len(listed)

    def key_of(self, block: BlockId) -> BlockHash | None:
        return self._key_of.get(block)

    def is_needed(self, block: BlockId) -> bool:
        key = self._key_of[block]
        return key in self._children and key not in self._more

    def parent_key(self, block: BlockId) -> BlockHash | None:
        return self._parent_of[block]

    def ancestors(self, block: BlockId) -> list[BlockId]:
        chain: list[BlockId] = []
        parent = self._parent_of[block]
        while parent is not None:
            block = self._first[parent]
            chain.append(block)
            parent = self._parent_of[block]
        chain.reverse()
        return chain

    def entries(self) -> list[tuple[BlockHash, list[BlockId]]]:
        return [(key, [block, *self._more.get(key, ())]) for key, block in self._first.items()]

    def check(self) -> None:
        listed = 0
        for key, blocks in self.entries():
            for block in blocks:
                listed += 1
                if self._key_of.get(block) != key:
                    raise InvariantError(f"block {block} is listed under a key that it does not have")
        if listed != len(self._key_of) or listed != len(self._parent_of):
            raise InvariantError(f"{len(self._key_of)} blocks have a key, {listed} are listed")
        children: dict[BlockHash, int] = {}
        for block in self._first.values():
            before = self._parent_of[block]
            if before is not None:
                children[before] = children.get(before, 0) + 1
        if children != self._children:
            raise InvariantError("contents that follow others are miscounted", f"{self._children} {children}")
        for block, parent in self._parent_of.items():
            if parent is not None and parent not in self._first:
                raise InvariantError(f"block {block} can be hit, but its parent's content is gone")
