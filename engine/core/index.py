"""Which blocks hold which content, so that a new request can start where an old one got to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.core.errors import InvariantError
from engine.core.types import BlockHash, BlockId

__all__ = ["HashIndex", "PrefixIndex"]


class PrefixIndex(Protocol):
    """Finds the longest cached prefix of a request. Knows nothing of references."""

    def match(self, key: Callable[[int], BlockHash], stop: int) -> list[BlockId]:
        """Blocks for a request's block positions 0, 1, ... below `stop`, up to the first miss. Pure.

        `key(i)` names the content of the request's block i.
        """
        ...

    def insert(self, key: BlockHash, parent: BlockHash | None, block: BlockId) -> None:
        """`block` holds (or will, once its step has run) the content named by `key`."""
        ...

    def remove(self, blocks: Sequence[BlockId]) -> int:
        """These blocks are going to hold something else. Returns how many of them were listed."""
        ...


class HashIndex:
    """A dictionary from chained keys to blocks.

    Several blocks may hold the same content (two requests that computed it side by side). They are not merged; a hit
    takes the one that was published first, and losing one leaves the others.
    """

    def __init__(self) -> None:
        self._first: dict[BlockHash, BlockId] = {}
        self._more: dict[BlockHash, list[BlockId]] = {}
        """Further blocks of keys that have several, in the order of publication."""
        self._key_of: dict[BlockId, BlockHash] = {}
        self._parent_of: dict[BlockId, BlockHash | None] = {}

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

    def insert(self, key: BlockHash, parent: BlockHash | None, block: BlockId) -> None:
        if block in self._key_of:
            raise InvariantError(f"block {block} is published twice")
        self._key_of[block] = key
        self._parent_of[block] = parent
        if key in self._first:
            self._more.setdefault(key, []).append(block)
        else:
            self._first[key] = block

    def remove(self, blocks: Sequence[BlockId]) -> int:
        key_of = self._key_of
        if not key_of:
            return 0
        listed = [block for block in blocks if block in key_of]
        for block in listed:
            key = key_of.pop(block)
            del self._parent_of[block]
            more = self._more.get(key)
            if more is None:
                del self._first[key]
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

    def entries(self) -> list[tuple[BlockHash, list[BlockId]]]:
        """All keys with their blocks, in the order of publication (for digests and checks)."""
        return [(key, [block, *self._more.get(key, ())]) for key, block in self._first.items()]

    def check(self) -> None:
        """Both directions agree, and every content's parent is there too. Raises InvariantError."""
        listed = 0
        for key, blocks in self.entries():
            for block in blocks:
                listed += 1
                if self._key_of.get(block) != key:
                    raise InvariantError(f"block {block} is listed under a key that it does not have")
        if listed != len(self._key_of) or listed != len(self._parent_of):
            raise InvariantError(f"{len(self._key_of)} blocks have a key, {listed} are listed")
        for block, parent in self._parent_of.items():
            if parent is not None and parent not in self._first:
                raise InvariantError(f"block {block} can be hit, but its parent's content is gone")
