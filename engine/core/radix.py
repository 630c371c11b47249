"""The prefix index as a radix tree whose unit is a block, as SGLang's radix cache has it (there with a page size).

    root --[A B C]--+--[D E]      an edge holds a run of contents that nothing branches off from; two prompts
                    +--[F G H]    share the edges up to where they part

Complexity, with p the blocks of a prompt and e the edges on its way (e <= p):

    match        O(p): one look into a dictionary at each of the e edges, one comparison for each block
    insert       O(1), and where an edge is split or a block begins a branch, O(shorter part of the edge)
    remove       O(1) a block, and O(shorter part) where a run is joined with the only one that is left behind it

There are fewer than twice as many edges as prompts that end differently. Keys are compared, never hashed, within an
edge; since keys here are chained, a dictionary of all of them (HashIndex) finds the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.errors import InvariantError
from engine.core.index import PrefixIndex
from engine.core.types import BlockHash, BlockId

__all__ = ["RadixIndex"]


class _Run:
    """Contents that follow one another with no branch between them, and what branches off behind the last."""

    __slots__ = ("children", "firsts", "keys", "parent", "start")

    def __init__(self, start: int, parent: _Run | None) -> None:
        self.start = start
        """How many contents are before it on the way from the root."""
        self.parent = parent
        self.keys: list[BlockHash] = []
        self.firsts: list[BlockId] = []
        """Of each content the block that was published first."""
        self.children: dict[BlockHash, _Run] = {}
        """By the first key of each."""


class RadixIndex(PrefixIndex):
    """A tree of runs. Always compressed: a run that something follows has at least two that do."""

    def __init__(self) -> None:
        self.changes = 0
        self._root = _Run(0, None)
        self._run_of: dict[BlockId, _Run] = {}
        self._depth_of: dict[BlockId, int] = {}
        """How many contents are before that of a block."""
        self._more: dict[BlockId, list[BlockId]] = {}
        """By the first block of a content: its further blocks, in the order of publication."""

    def __len__(self) -> int:
        return len(self._run_of)

    def match(self, key: Callable[[int], BlockHash], stop: int) -> list[BlockId]:
        hits: list[BlockId] = []
        run = self._root
        i = 0
        while i < stop:
            child = run.children.get(key(i))
            if child is None:
                break
            keys = child.keys
            num = min(len(keys), stop - i)
            same = 1
            while same < num and key(i + same) == keys[same]:
                same += 1
            hits += child.firsts[:same]
            if same < len(keys):
                break
            i += same
            run = child
        return hits

    def insert(self, key: BlockHash, parent: BlockId | None, block: BlockId) -> None:
        if block in self._run_of:
            raise InvariantError(f"block {block} is published twice")
        self.changes += 1
        run, depth = self._root, 0
        if parent is not None:
            if parent not in self._run_of:
                raise InvariantError(f"block {block} is published behind block {parent}, which is not listed")
            run, depth = self._run_of[parent], self._depth_of[parent] + 1
        at = depth - run.start
        if at < len(run.keys):
            if run.keys[at] == key:
                self._add(run, depth, block)
                return
            run = self._split(run, at)
        elif key in run.children:
            self._add(run.children[key], depth, block)
            return
        elif run.children or run is self._root:
            pass  # a new branch
        else:
            self._append(run, key, block)
            return
        child = _Run(depth, run)
        run.children[key] = child
        self._append(child, key, block)

    def _append(self, run: _Run, key: BlockHash, block: BlockId) -> None:
        """A new content at the end of a run."""
        self._run_of[block] = run
        self._depth_of[block] = run.start + len(run.keys)
        run.keys.append(key)
        run.firsts.append(block)

    def _add(self, run: _Run, depth: int, block: BlockId) -> None:
        """A further block of a content that is listed."""
        self._run_of[block] = run
        self._depth_of[block] = depth
        self._more.setdefault(run.firsts[depth - run.start], []).append(block)

    def ancestors(self, block: BlockId) -> list[BlockId]:
        run: _Run | None = self._run_of[block]
        assert run is not None
        parts = [run.firsts[: self._depth_of[block] - run.start]]
        run = run.parent
        while run is not None:
            parts.append(run.firsts)
            run = run.parent
        return [block for part in reversed(parts) for block in part]

    def remove(self, blocks: Sequence[BlockId]) -> int:
        """These blocks are going to hold something else, in this order. Returns how many of them were listed.

        Raises:
            InvariantError: what a block holds is nowhere else, and something follows it: runs are trimmed at their end.
        """
        listed = 0
        for block in blocks:
            run = self._run_of.get(block)
            if run is None:
                continue
            listed += 1
            self.changes += 1
            at = self._depth_of[block] - run.start
            first = run.firsts[at]
            more = self._more.get(first)
            if more is not None:
                self._remove_one_of(run, at, block, first, more)
            elif at + 1 < len(run.keys) or run.children:
                raise InvariantError(f"block {block} is lost before the blocks that follow it")
            else:
                key = run.keys.pop()
                run.firsts.pop()
                if not run.keys:
                    self._cut(run, key)
            del self._run_of[block]
            del self._depth_of[block]
        return listed

    def _remove_one_of(self, run: _Run, at: int, block: BlockId, first: BlockId, more: list[BlockId]) -> None:
        """One of several blocks of a content goes."""
        if block == first:
            del self._more[first]
            first = run.firsts[at] = more.pop(0)
            if more:
                self._more[first] = more
        else:
            more.remove(block)
            if not more:
                del self._more[first]

    def _cut(self, run: _Run, key: BlockHash) -> None:
        """A run has become empty; `key` was its first."""
        parent = run.parent
        assert parent is not None  # the root has no keys to lose
        del parent.children[key]
        if len(parent.children) == 1 and parent is not self._root:
            self._join(parent)

    def _split(self, run: _Run, at: int) -> _Run:
        """Part a run in two before its content `at`; returns the first of them. The shorter one is made anew."""
        if at <= len(run.keys) - at + len(run.children):
            upper, lower = _Run(run.start, run.parent), run
            assert run.parent is not None  # the root has no keys to part
            run.parent.children[run.keys[0]] = upper
            upper.keys, upper.firsts = run.keys[:at], run.firsts[:at]
            del run.keys[:at]
            del run.firsts[:at]
            run.start += at
            self._relabel(upper)
        else:
            upper, lower = run, _Run(run.start + at, run)
            lower.keys, lower.firsts = run.keys[at:], run.firsts[at:]
            del run.keys[at:]
            del run.firsts[at:]
            lower.children = run.children
            for child in lower.children.values():
                child.parent = lower
            self._relabel(lower)
        upper.children = {lower.keys[0]: lower}
        lower.parent = upper
        return upper

    def _join(self, run: _Run) -> None:
        """A run and the only one behind it become one. The blocks of the shorter move."""
        (child,) = run.children.values()
        if len(run.keys) <= len(child.keys) + len(child.children):
            parent = run.parent
            assert parent is not None  # the root is not joined
            self._relabel(run, child)
            child.keys[:0] = run.keys
            child.firsts[:0] = run.firsts
            child.start, child.parent = run.start, parent
            parent.children[child.keys[0]] = child
        else:
            self._relabel(child, run)
            run.keys += child.keys
            run.firsts += child.firsts
            run.children = child.children
            for grandchild in run.children.values():
                grandchild.parent = run

    def _relabel(self, run: _Run, to: _Run | None = None) -> None:
        """The blocks of `run` are in `to` (or in itself) from now on."""
        where = run if to is None else to
        for first in run.firsts:
            self._run_of[first] = where
            for block in self._more.get(first, ()):
                self._run_of[block] = where

    def key_of(self, block: BlockId) -> BlockHash | None:
        run = self._run_of.get(block)
        return None if run is None else run.keys[self._depth_of[block] - run.start]

    def is_needed(self, block: BlockId) -> bool:
        run = self._run_of[block]
        at = self._depth_of[block] - run.start
        return (at + 1 < len(run.keys) or bool(run.children)) and run.firsts[at] not in self._more

    def parent_key(self, block: BlockId) -> BlockHash | None:
        run = self._run_of[block]
        at = self._depth_of[block] - run.start
        if at:
            return run.keys[at - 1]
        before = run.parent
        return before.keys[-1] if before is not None and before.keys else None

    def entries(self) -> list[tuple[BlockHash, list[BlockId]]]:
        found: list[tuple[BlockHash, list[BlockId]]] = []
        for run in self._runs():
            for key, first in zip(run.keys, run.firsts, strict=True):
                found.append((key, [first, *self._more.get(first, ())]))
        return found

    def _runs(self) -> list[_Run]:
        """All runs but the root, parents first."""
        runs = list(self._root.children.values())
        for run in runs:
            runs += run.children.values()
        return runs

    def num_runs(self) -> int:
        """How many edges the tree has (walks)."""
        return len(self._runs())

    def check(self) -> None:
        """Both directions agree, and the tree is compressed. Raises InvariantError."""
        listed = 0
        for run in [self._root, *self._runs()]:
            if run is not self._root and (not run.keys or len(run.children) == 1):
                raise InvariantError(f"a run of {len(run.keys)} contents has {len(run.children)} behind it")
            for key, child in run.children.items():
                if child.keys[:1] != [key]:
                    raise InvariantError(f"a run is listed under {key!r}, which is not its first key")
                if child.parent is not run or child.start != run.start + len(run.keys):
                    raise InvariantError(f"the run behind {key!r} is not where it says")
            for at, first in enumerate(run.firsts):
                for block in [first, *self._more.get(first, ())]:
                    listed += 1
                    if self._run_of.get(block) is not run or self._depth_of.get(block) != run.start + at:
                        raise InvariantError(f"block {block} is listed under a key that it does not have")
        if listed != len(self._run_of) or listed != len(self._depth_of):
            raise InvariantError(f"{len(self._run_of)} blocks have a key, {listed} are listed")
