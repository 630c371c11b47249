"""Contiguous runs: placement, merging, waste and failure against a bitmap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.errors import InvariantError, NoFreeBlocks
from engine.core.extents import PLACEMENTS, ExtentPool, Run
from engine.core.types import BlockId

NAMES = sorted(PLACEMENTS)


class Bitmap:
    """The slow reference: one cell a block, everything found by walking. Free buddies are found by trial."""

    def __init__(self, num_blocks: int, placement: str) -> None:
        self.owner = [0] * num_blocks
        self.placement = placement
        self.owners = 0

    def rounded(self, num: int) -> int:
        size = 1
        while size < num:
            size *= 2
        return size if self.placement == "buddy" else num

    def holes(self) -> list[tuple[int, int]]:
        """(first, size). Under buddy: each free, aligned power of two that lies in no larger one."""
        if self.placement == "buddy":
            return self.buddies()
        found, start = [], None
        for i, owner in enumerate([*self.owner, -1]):
            if owner and start is not None:
                found.append((start, i - start))
                start = None
            elif not owner and start is None:
                start = i
        return found

    def buddies(self) -> list[tuple[int, int]]:
        num = len(self.owner)
        free = {
            (first, 1 << order)
            for order in range(num.bit_length())
            for first in range(0, num - (1 << order) + 1, 1 << order)
            if not any(self.owner[first : first + (1 << order)])
        }
        return sorted((f, s) for f, s in free if (f & ~s, 2 * s) not in free)

    def take(self, num: int) -> Run | None:
        size = self.rounded(num)
        fitting = [hole for hole in self.holes() if hole[1] >= size]
        if not fitting:
            return None
        first = fitting[0][0] if self.placement == "first-fit" else min(fitting, key=lambda hole: (hole[1], hole[0]))[0]
        self.owners += 1
        self.owner[first : first + size] = [self.owners] * size
        return Run(first, num, size)

    def drop(self, first: int) -> None:
        owner = self.owner[first]
        self.owner = [0 if o == owner else o for o in self.owner]


class ExtentMachine(RuleBasedStateMachine):
    """Runs come and go in any order, and calls that must fail are made too."""

    @initialize(num_blocks=st.integers(1, 40), placement=st.sampled_from(NAMES))
    def begin(self, num_blocks: int, placement: str) -> None:
        self.pool = ExtentPool(num_blocks, placement)
        self.slow = Bitmap(num_blocks, placement)
        self.runs: list[Run] = []

    @rule(num=st.integers(1, 12))
    def take(self, num: int) -> None:
        """P6: the run is the reference's; where there is no room the call fails and changes nothing."""
        before = self.pool.digest()
        expected = self.slow.take(num)
        assert self.pool.has_room(num) == (expected is not None)
        if expected is None:
            with pytest.raises(NoFreeBlocks):
                self.pool.take_run(num)
            assert self.pool.digest() == before
            return
        assert self.pool.take_run(num) == expected
        assert expected.size == self.pool.rounded(num)
        self.runs.append(expected)

    @precondition(lambda self: bool(self.runs))
    @rule(data=st.data(), as_blocks=st.booleans())
    def drop(self, data: st.DataObject, as_blocks: bool) -> None:
        """P1: a run is given back once."""
        run = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
        if as_blocks:
            self.pool.drop([BlockId(i) for i in reversed(range(run.first, run.first + run.num_blocks))])
        else:
            self.pool.drop_run(run.first)
        self.slow.drop(run.first)
        before = self.pool.digest()
        with pytest.raises(InvariantError):
            self.pool.drop_run(run.first)
        assert self.pool.digest() == before

    @rule(first=st.integers(-1, 40))
    def drop_nothing(self, first: int) -> None:
        """Only the first block of a run gives it back."""
        if first not in [run.first for run in self.runs]:
            before = self.pool.digest()
            with pytest.raises(InvariantError):
                self.pool.drop_run(first)
            assert self.pool.digest() == before

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        holes = self.slow.holes()
        assert self.pool.num_free == self.slow.owner.count(0)
        assert self.pool.free_order() == [i for i, owner in enumerate(self.slow.owner) if not owner]
        assert self.pool.largest_hole == max((size for _, size in holes), default=0)
        assert self.pool.runs() == sorted(self.runs)
        for num in (1, 2, 3, 5, 8, 13):
            small = sum(size for _, size in holes if size < self.slow.rounded(num))
            assert self.pool.too_small_for(num) == small
        assert [self.pool.refs(BlockId(i)) for i in range(self.pool.num_blocks)] == [
            min(owner, 1) for owner in self.slow.owner
        ]

    def teardown(self) -> None:
        """Whatever the order, all runs given back leave the pool as it was made."""
        if hasattr(self, "pool"):
            for run in self.runs:
                self.pool.drop_run(run.first)
            assert self.pool.digest() == ExtentPool(self.pool.num_blocks, self.slow.placement).digest()


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=150, stateful_step_count=30)


@pytest.mark.parametrize("placement", NAMES)
@given(num_blocks=st.integers(1, 64), sizes=st.lists(st.integers(1, 20), max_size=20), hold=st.integers(0, 2**20))
def test_the_nth_take_that_fails_leaves_no_trace(placement: str, num_blocks: int, sizes: list[int], hold: int) -> None:
    """For each N, the pool up to the Nth take is the same whether or not the takes that found no room were tried."""
    for stop in range(len(sizes) + 1):
        tried, spared = ExtentPool(num_blocks, placement), ExtentPool(num_blocks, placement)
        for i, num in enumerate(sizes[:stop]):
            try:
                run = tried.take_run(num)
            except NoFreeBlocks:
                continue
            assert spared.take_run(num) == run
            if not hold >> i & 1:
                tried.drop_run(run.first)
                spared.drop_run(run.first)
        assert tried.digest() == spared.digest()
        tried.check()


@pytest.mark.parametrize("num_blocks", range(1, 34))
def test_a_buddy_pool_of_any_size_gives_out_every_block(num_blocks: int) -> None:
    """A pool whose size is no power of two has room for one run per binary digit, and single blocks fill it."""
    pool = ExtentPool(num_blocks, "buddy")
    assert pool.longest_run == 1 << (num_blocks.bit_length() - 1)
    for order in range(num_blocks.bit_length() - 1, -1, -1):
        if num_blocks >> order & 1:
            assert pool.take_run(1 << order).first % (1 << order) == 0
    assert pool.num_free == 0
    pool.check()
    pool = ExtentPool(num_blocks, "buddy")
    assert sorted(pool.take_run(1).first for _ in range(num_blocks)) == list(range(num_blocks))


def test_the_placements_differ() -> None:
    """First fit takes the first hole with room, best fit the smallest, buddy an aligned power of two."""
    found = {}
    for placement in ("first-fit", "best-fit"):
        pool = ExtentPool(16, placement)
        runs = [pool.take_run(num).first for num in (6, 1, 3, 1, 4, 1)]
        for place in (0, 2, 4):
            pool.drop_run(runs[place])
        found[placement] = pool.take_run(3).first
    assert found == {"first-fit": 0, "best-fit": 7}
    pool = ExtentPool(16, "buddy")
    assert pool.take_run(3) == Run(0, 3, 4)
    assert pool.take_run(5) == Run(8, 5, 8)
    assert pool.num_free == 4
    assert pool.largest_hole == 4
    with pytest.raises(NoFreeBlocks):
        pool.take_run(5)


@pytest.mark.parametrize("placement", NAMES)
def test_blocks_of_a_run_are_not_shared_kept_or_given_back_in_part(placement: str) -> None:
    """What only paged blocks can do is refused, and changes nothing."""
    pool = ExtentPool(8, placement)
    blocks, evicted = pool.take(4)
    assert evicted == []
    before = pool.digest()
    for call in (pool.share, pool.keep):
        with pytest.raises(InvariantError):
            call(blocks[:1])
    for part in (blocks[:3], blocks[1:], [*blocks, blocks[0]], [blocks[0]]):
        with pytest.raises(InvariantError):
            pool.drop(part)
    with pytest.raises(InvariantError):
        pool.take_run(0)
    assert pool.digest() == before
    pool.drop(blocks)
    assert pool.num_free == 8


@pytest.mark.parametrize("placement", NAMES)
def test_the_check_sees_damage(placement: str) -> None:
    """A run that is forgotten, a miscounted pool and a hole that is in use are found."""

    def damaged() -> ExtentPool:
        pool = ExtentPool(9, placement)
        pool.take_run(2)
        pool.drop_run(pool.take_run(2).first)
        return pool

    pool = damaged()
    pool._runs.clear()
    with pytest.raises(InvariantError):
        pool.check()
    pool = damaged()
    pool.num_free += 1
    with pytest.raises(InvariantError):
        pool.check()
    pool = damaged()
    pool._used[0] = 0
    with pytest.raises(InvariantError):
        pool.check()
    pool = damaged()
    pool._holes._by_size.pop()
    with pytest.raises(InvariantError):
        pool.check()
