"""Both prefix indices against lists, and against each other (P2)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.core import InvariantError
from engine.core.index import HashIndex, PrefixIndex
from engine.core.radix import RadixIndex
from engine.core.types import BlockHash, BlockId

INDICES: dict[str, Callable[[], PrefixIndex]] = {"hash": HashIndex, "radix": RadixIndex}

Path = tuple[int, ...]
"""A content by its way from the root: its parent's path is all but the last."""

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


class IndexMachine(RuleBasedStateMachine):
    """Any order of publishing and losing blocks that keeps what is listed reachable; the model is a list of (path,
    block) in the order of publication."""

    index_name = "hash"

    @initialize()
    def begin(self) -> None:
        self.index = INDICES[self.index_name]()
        self.listed: list[tuple[Path, BlockId]] = []

    def blocks_of(self, path: Path) -> list[BlockId]:
        return [block for other, block in self.listed if other == path]

    def may_go(self) -> list[tuple[Path, BlockId]]:
        """What another block holds too, or what nothing follows."""
        parents = {path[:-1] for path, _ in self.listed}
        return [(path, b) for path, b in self.listed if len(self.blocks_of(path)) > 1 or path not in parents]

    @rule(data=st.data(), path=PATHS, block=st.integers(0, 15))
    def insert(self, data: st.DataObject, path: Path, block: int) -> None:
        """Publish the path as far as it is not listed, and its end once more."""
        for k in range(1, len(path) + 1):
            if k < len(path) and self.blocks_of(path[:k]):
                continue
            new = BlockId(block)
            parents: list[BlockId | None] = [*self.blocks_of(path[: k - 1])] if k > 1 else [None]
            parent = data.draw(st.sampled_from(parents))
            if new in [other for _, other in self.listed]:
                with pytest.raises(InvariantError, match=f"block {block} is published twice"):
                    self.index.insert(BlockHash(path[:k]), parent, new)
                return
            self.index.insert(BlockHash(path[:k]), parent, new)
            self.listed.append((path[:k], new))
            block = (block + 1) % 16

    @rule()
    def insert_behind_nothing(self) -> None:
        with pytest.raises(InvariantError, match="behind block 20, which is not listed"):
            self.index.insert(BlockHash((0,)), BlockId(20), BlockId(21))

    @precondition(lambda self: bool(self.listed))
    @rule(data=st.data(), num=st.integers(1, 5))
    def remove(self, data: st.DataObject, num: int) -> None:
        """Several at once: a parent may follow its last child within one call."""
        going = []
        for _ in range(min(num, len(self.listed))):
            entry = data.draw(st.sampled_from(self.may_go()))
            self.listed.remove(entry)
            going.append(entry[1])
        assert self.index.remove([BlockId(20), *going]) == len(going)

    @rule(path=PATHS, data=st.data())
    def match(self, path: Path, data: st.DataObject) -> None:
        """A request whose block i has the first i + 1 steps of the path as content, looked up as far as each block."""
        if self.listed and data.draw(st.booleans()):
            path = (*data.draw(st.sampled_from(self.listed))[0], *path)
        keys = [BlockHash(path[: k + 1]) for k in range(len(path))]
        expected: list[BlockId] = []
        for k in range(len(path)):
            if not self.blocks_of(path[: k + 1]):
                break
            expected.append(self.blocks_of(path[: k + 1])[0])
        for stop in range(len(path) + 1):
            assert self.index.match(keys.__getitem__, stop) == expected[:stop]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        index = self.index
        assert len(index) == len(self.listed)
        assert dict(index.entries()) == {BlockHash(path): self.blocks_of(path) for path, _ in self.listed}
        for path, block in self.listed:
            assert index.key_of(block) == path
        for i in range(22):
            if BlockId(i) not in [block for _, block in self.listed]:
                assert index.key_of(BlockId(i)) is None
        index.check()
        if isinstance(index, RadixIndex):
            paths = {path for path, _ in self.listed}
            ends = {path for path in paths if (*path, 0) not in paths and (*path, 1) not in paths}
            forks = {path for path in paths if (*path, 0) in paths and (*path, 1) in paths}
            assert index.num_runs() == len(ends) + len(forks)


def run_index_machine(index: str, **options: object) -> None:
    """Run the state machine on an index of this kind."""
    machine = type("Machine", (IndexMachine,), {"index_name": index})
    run_state_machine_as_test(machine, settings=settings(settings(), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("index", INDICES)
def test_the_index_does_what_lists_would_do(index: str) -> None:
    """P2: both directions agree, the first published is hit, duplicates are independent, edges are compressed."""
    run_index_machine(index, max_examples=80, stateful_step_count=30)


@pytest.mark.parametrize("index", INDICES)
def test_losing_one_duplicate_leaves_the_others(index: str) -> None:
    """Of three blocks with one content, the hit moves to the next published as they go, one by one."""
    found = INDICES[index]()
    key = BlockHash(b"k")
    for block in (5, 3, 4):
        found.insert(key, None, BlockId(block))
    for lost, hit in ((5, [3]), (4, [3]), (3, [])):
        found.remove([BlockId(lost)])
        assert found.match(lambda i: key, 1) == hit
    assert len(found) == 0
    found.check()


def test_edges_part_where_prompts_do_and_join_when_one_has_gone() -> None:
    """Two prompts of 8 blocks that share 5 are three edges; when one has lost its tail, they are one again."""
    index = RadixIndex()

    def publish(path: str, first: int) -> list[BlockId]:
        parent = None
        for k in range(len(path)):
            hits = index.match(lambda i: BlockHash(path[: i + 1]), k + 1)
            if len(hits) <= k:
                index.insert(BlockHash(path[: k + 1]), parent, BlockId(first + k))
            parent = index.match(lambda i: BlockHash(path[: i + 1]), k + 1)[k]
        return index.match(lambda i: BlockHash(path[: i + 1]), len(path))

    one = publish("abcdefgh", 0)
    assert index.num_runs() == 1
    other = publish("abcdexyz", 10)
    assert index.num_runs() == 3
    assert other == [0, 1, 2, 3, 4, 15, 16, 17]
    for block in reversed(one[5:]):
        index.remove([block])
        index.check()
    assert index.num_runs() == 1
    assert index.match(lambda i: BlockHash("abcdexyz"[: i + 1]), 8) == other


@pytest.mark.parametrize("blocks", [[0], [1], [3]])
def test_a_tree_loses_nothing_that_something_follows(blocks: list[int]) -> None:
    """Runs are trimmed at their end alone; otherwise what is behind could be listed and never found."""
    index = RadixIndex()
    for block, parent in enumerate([None, 0, 1]):
        index.insert(BlockHash(block), parent, BlockId(block))
    index.insert(BlockHash(7), BlockId(0), BlockId(3))
    index.insert(BlockHash(8), BlockId(3), BlockId(4))
    with pytest.raises(InvariantError, match="before the blocks that follow it"):
        index.remove([BlockId(block) for block in blocks])


def test_the_check_sees_a_parent_that_is_gone() -> None:
    """A content whose parent was lost is listed and cannot be reached."""
    index = HashIndex()
    index.insert(BlockHash(0), None, BlockId(0))
    index.insert(BlockHash(1), BlockId(0), BlockId(1))
    index.check()
    index.remove([BlockId(0)])
    with pytest.raises(InvariantError, match="parent's content is gone"):
        index.check()


def test_the_check_sees_a_block_under_a_key_it_does_not_have() -> None:
    """The two directions are compared: a one-sided change of either is found."""
    index = HashIndex()
    index.insert(BlockHash(b"a"), None, BlockId(0))
    index._key_of[BlockId(0)] = BlockHash(b"b")
    with pytest.raises(InvariantError, match="a key that it does not have"):
        index.check()
    index = HashIndex()
    index.insert(BlockHash(b"a"), None, BlockId(0))
    index._key_of[BlockId(1)] = BlockHash(b"b")
    with pytest.raises(InvariantError, match="2 blocks have a key, 1 are listed"):
        index.check()


def _tree() -> RadixIndex:
    index = RadixIndex()
    for block, parent in ((0, None), (1, 0), (2, 1), (3, 0)):
        index.insert(BlockHash(block), None if parent is None else BlockId(parent), BlockId(block))
    index.check()
    return index


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: index._depth_of.__setitem__(2, 1), "a key that it does not have"),
        (lambda index: index._run_of.__setitem__(2, index._run_of[3]), "a key that it does not have"),
        (lambda index: index._run_of.__setitem__(9, index._run_of[3]), "5 blocks have a key, 4 are listed"),
        (lambda index: index._run_of[0].children.pop(BlockHash(3)), "contents has 1 behind it"),
        (lambda index: setattr(index._run_of[2], "start", 5), "is not where it says"),
        (lambda index: index._run_of[3].keys.__setitem__(0, BlockHash(8)), "not its first key"),
    ],
)
def test_the_check_sees_damage_to_a_tree(damage: Callable[[RadixIndex], object], message: str) -> None:
    """Labels, places, names and compression of the tree are all compared."""
    index = _tree()
    damage(index)
    with pytest.raises(InvariantError, match=message):
        index.check()


def test_paths_of_one_length_share_an_edge_each() -> None:
    """A chain of 1,000 contents is one edge, and its blocks are found in order."""
    index = RadixIndex()
    blocks = [BlockId(i) for i in range(1000)]
    index.insert(BlockHash(0), None, blocks[0])
    for parent, block in pairwise(blocks):
        index.insert(BlockHash(block), parent, block)
    assert index.num_runs() == 1
    assert index.match(BlockHash, 1000) == blocks
    assert index.match(BlockHash, 300) == blocks[:300]
