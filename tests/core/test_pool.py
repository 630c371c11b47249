"""The block pool against a list that does the same the slow way (P1)."""

from __future__ import annotations

from copy import deepcopy
from random import Random

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

from engine.core import InvariantError, NoFreeBlocks
from engine.core.pool import FREE_ORDERS, BlockPool, LazyQueue
from engine.core.types import BlockId


class PoolMachine(RuleBasedStateMachine):
    """Any order of takes, shares, drops and keeps; the model is a list of free blocks, the next to be given first."""

    free_order = ""

    @initialize(num=st.integers(1, 7))
    def start(self, num: int) -> None:
        self.pool = BlockPool(num, self.free_order)
        self.refs = [0] * num
        self.kept = [False] * num
        self.free = [BlockId(i) for i in range(num)]

    def some(self, data: st.DataObject, blocks: list[BlockId]) -> list[BlockId]:
        """A few of `blocks`, in any order, each perhaps several times."""
        return data.draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=5))

    @property
    def used(self) -> list[BlockId]:
        return [BlockId(i) for i, refs in enumerate(self.refs) if refs]

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        num = data.draw(st.integers(0, len(self.free)))
        blocks, evicted = self.pool.take(num)
        assert blocks == self.free[:num]
        assert evicted == [block for block in blocks if self.kept[block]]
        del self.free[:num]
        for block in blocks:
            self.refs[block], self.kept[block] = 1, False

    @rule(more=st.integers(1, 3))
    def take_too_many(self, more: int) -> None:
        with pytest.raises(NoFreeBlocks):
            self.pool.take(len(self.free) + more)

    @precondition(lambda self: any(refs or kept for refs, kept in zip(self.refs, self.kept, strict=True)))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        can = [BlockId(i) for i in range(len(self.refs)) if self.refs[i] or self.kept[i]]
        blocks = self.some(data, can)
        self.pool.share(blocks)
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    @precondition(lambda self: any(not self.kept[block] for block in self.free))
    @rule(data=st.data())
    def share_what_is_gone(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for block in self.free if not self.kept[block]]))
        with pytest.raises(InvariantError, match=f"block {block} is shared"):
            self.pool.share([block])

    @precondition(lambda self: bool(self.used))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        blocks: list[BlockId] = []
        for block in self.some(data, self.used):
            if blocks.count(block) < self.refs[block]:
                blocks.append(block)
        self.pool.drop(blocks)
        blank, kept = [], []
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                (kept if self.kept[block] else blank).append(block)
        if self.free_order == "single-queue":
            self.free = [*self.free, *blank, *kept]
        else:
            self.free = [*blank, *self.free, *kept]

    @precondition(lambda self: bool(self.free))
    @rule(data=st.data())
    def drop_what_nobody_holds(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.free))
        with pytest.raises(InvariantError, match=f"block {block} is dropped"):
            self.pool.drop([block])

    @precondition(lambda self: bool(self.used))
    @rule(data=st.data())
    def drop_once_too_often(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used))
        with pytest.raises(InvariantError, match=f"block {block} is dropped"):
            deepcopy(self.pool).drop([block] * (self.refs[block] + 1))

    @precondition(lambda self: bool(self.used))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.used)
        self.pool.keep(blocks)
        for block in blocks:
            self.kept[block] = True

    @precondition(lambda self: bool(self.free))
    @rule(data=st.data())
    def keep_what_is_free(self, data: st.DataObject) -> None:
        with pytest.raises(InvariantError, match="cannot be marked"):
            self.pool.keep([data.draw(st.sampled_from(self.free))])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check()
        blocks = [BlockId(i) for i in range(pool.num_blocks)]
        assert [pool.refs(block) for block in blocks] == self.refs
        assert [pool.is_kept(block) for block in blocks] == self.kept
        assert pool.free_order() == self.free
        assert sorted(self.free) == [block for block in blocks if not self.refs[block]]
        assert pool.num_free == len(self.free)
        assert pool.num_kept_free == sum(self.kept[block] for block in self.free)


def run_pool_machine(free_order: str, **options: object) -> None:
    """Run the state machine on a pool of this free order."""
    machine = type("Machine", (PoolMachine,), {"free_order": free_order})
    run_state_machine_as_test(machine, settings=settings(settings(), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("free_order", sorted(FREE_ORDERS))
def test_the_pool_does_what_a_list_would_do(free_order: str) -> None:
    """P1: free is exactly ref 0, blocks come in the promised order, counters are right, misuse raises at once."""
    run_pool_machine(free_order, max_examples=80, stateful_step_count=30)


@pytest.mark.parametrize("free_order", sorted(FREE_ORDERS))
def test_drop_takes_a_multiset(free_order: str) -> None:
    """A block named twice in one drop loses two references, becomes free once, and a third name raises."""
    pool = BlockPool(3, free_order)
    (block,), _ = pool.take(1)
    pool.share([block])
    pool.drop([block, block])
    assert pool.refs(block) == 0
    assert pool.free_order().count(block) == 1
    assert pool.num_free == 3
    pool.check()
    (again,), _ = pool.take(1)
    pool.share([again])
    with pytest.raises(InvariantError, match="nobody holds one"):
        pool.drop([again, again, again])
    pool = BlockPool(3, free_order)
    (block,), _ = pool.take(1)
    with pytest.raises(InvariantError, match="nobody holds one"):
        pool.drop([block, block])


@pytest.mark.parametrize("free_order", sorted(FREE_ORDERS))
def test_a_take_that_fails_changes_nothing(free_order: str) -> None:
    """Take is all or nothing: too many blocks leave order, references and counters as they were."""
    pool = BlockPool(4, free_order)
    pool.take(2)
    before = (pool.free_order(), [pool.refs(BlockId(i)) for i in range(4)], pool.num_free, pool.num_kept_free)
    with pytest.raises(NoFreeBlocks, match="3 blocks were asked for, 2 are free"):
        pool.take(3)
    after = (pool.free_order(), [pool.refs(BlockId(i)) for i in range(4)], pool.num_free, pool.num_kept_free)
    assert after == before


@pytest.mark.parametrize("num_blocks", [1, 3, 20])
def test_a_queue_that_skips_is_a_queue(num_blocks: int) -> None:
    """Blocks that are taken out of the middle and come back many times are given out in the order of a plain list."""
    random = Random(num_blocks)
    queue, plain = LazyQueue(range(num_blocks), num_blocks), list(range(num_blocks))
    away: list[int] = []
    for _ in range(3000):
        what = random.random()
        if what < 0.45 and plain:
            block = random.choice(plain)
            plain.remove(block)
            queue.remove(BlockId(block))
            away.append(block)
        elif what < 0.96 and away:
            block = away.pop(random.randrange(len(away)))
            plain.append(block)
            queue.put([BlockId(block)])
        elif plain and random.random() < 0.2:
            num = random.randint(1, len(plain))
            assert queue.pop(num) == plain[:num]
            away.extend(plain[:num])
            del plain[:num]
        assert list(queue) == plain
        assert len(queue._queue) - queue._head <= 2 * num_blocks + 65
        assert queue._head <= max(1024, len(queue._queue) // 2)


def test_the_two_orders_differ_where_blocks_are_blank() -> None:
    """Blank-first gives the last freed blank block first; the single queue gives it last."""
    given = {}
    for free_order in FREE_ORDERS:
        pool = BlockPool(4, free_order)
        blocks, _ = pool.take(2)
        pool.keep(blocks[:1])
        pool.drop(list(reversed(blocks)))
        given[free_order] = pool.free_order()
    assert given == {"blank-first": [1, 2, 3, 0], "single-queue": [2, 3, 1, 0]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._refs.__setitem__(0, -1), "negative"),
        (lambda pool: pool._refs.__setitem__(0, 1), "miscounted"),
        (lambda pool: setattr(pool, "num_free", 2), "free blocks are miscounted"),
        (lambda pool: pool._order._blank.append(0), "listed twice"),
        (lambda pool: setattr(pool, "num_kept_free", 1), "kept free blocks are miscounted"),
    ],
)
def test_the_check_sees_damage(damage: object, message: str) -> None:
    """Each kind of damage to references, order or counters is found by `check`."""
    pool = BlockPool(3)
    pool.check()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(InvariantError, match=message):
        pool.check()
