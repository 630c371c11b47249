"""The prefix index against lists (P2)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.core import InvariantError
from engine.core.index import HashIndex
from engine.core.types import BlockHash, BlockId

KEYS = [BlockHash(key) for key in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))]
"""Contents by their path from the root, so that a parent's key is all but the last."""


def parent_of(key: BlockHash) -> BlockHash | None:
    assert isinstance(key, tuple)
    return BlockHash(key[:-1]) if key else None


class IndexMachine(RuleBasedStateMachine):
    """Any order of publishing and losing blocks; the model is a list of (key, block) in the order of publication."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HashIndex()
        self.listed: list[tuple[BlockHash, BlockId]] = []

    def blocks_of(self, key: BlockHash) -> list[BlockId]:
        return [block for other, block in self.listed if other == key]

    @rule(key=st.sampled_from(KEYS), block=st.integers(0, 9))
    def insert(self, key: BlockHash, block: int) -> None:
        if BlockId(block) in [other for _, other in self.listed]:
            with pytest.raises(InvariantError, match=f"block {block} is published twice"):
                self.index.insert(key, parent_of(key), BlockId(block))
        else:
            self.index.insert(key, parent_of(key), BlockId(block))
            self.listed.append((key, BlockId(block)))

    @precondition(lambda self: bool(self.listed))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entries = data.draw(st.lists(st.sampled_from(self.listed), min_size=1, max_size=4, unique=True))
        unlisted = data.draw(st.sampled_from([[], [BlockId(10)], [BlockId(11), BlockId(12)]]))
        assert self.index.remove([*unlisted, *(block for _, block in entries)]) == len(entries)
        for entry in entries:
            self.listed.remove(entry)

    @rule()
    def remove_what_is_not_listed(self) -> None:
        assert self.index.remove([BlockId(10), BlockId(11)]) == 0

    @rule(key=st.sampled_from(KEYS), stop=st.integers(0, 4))
    def match(self, key: BlockHash, stop: int) -> None:
        """A request whose block i has the path's first i steps as content."""
        assert isinstance(key, tuple)
        path = [BlockHash(key[:i]) for i in range(len(key) + 1)]
        expected: list[BlockId] = []
        for step in path[:stop]:
            if not self.blocks_of(step):
                break
            expected.append(self.blocks_of(step)[0])
        assert self.index.match(path.__getitem__, min(stop, len(path))) == expected

    @invariant()
    def agrees(self) -> None:
        index = self.index
        assert len(index) == len(self.listed)
        for key in KEYS:
            assert index.find(key) == next(iter(self.blocks_of(key)), None)
        assert dict(index.entries()) == {key: self.blocks_of(key) for key, _ in self.listed}
        for key, block in self.listed:
            assert index.key_of(block) == key
        for i in range(13):
            if BlockId(i) not in [block for _, block in self.listed]:
                assert index.key_of(BlockId(i)) is None
        closed = all(parent_of(key) is None or self.blocks_of(parent_of(key)) for key, _ in self.listed)
        if closed:
            index.check()
        else:
            with pytest.raises(InvariantError, match="parent's content is gone"):
                index.check()


def run_index_machine(**options: object) -> None:
    """Run the state machine."""
    run_state_machine_as_test(IndexMachine, settings=settings(settings(), **options))  # type: ignore[arg-type]


def test_the_index_does_what_lists_would_do() -> None:
    """P2: both directions agree, the first published is hit, duplicates are independent, a planted break is seen."""
    run_index_machine(max_examples=80, stateful_step_count=30)


def test_losing_one_duplicate_leaves_the_others() -> None:
    """Of three blocks with one content, the hit moves to the next published as they go, one by one."""
    index = HashIndex()
    key = BlockHash(b"k")
    for block in (5, 3, 4):
        index.insert(key, None, BlockId(block))
    assert index.find(key) == 5
    index.remove([BlockId(5)])
    assert index.find(key) == 3
    index.remove([BlockId(4)])
    assert index.find(key) == 3
    index.remove([BlockId(3)])
    assert index.find(key) is None
    assert len(index) == 0
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
