"""Faults at every point, one after another: the Nth take, swap, store or transfer fails, is lost, or meets an abort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import shadow
from core_kit import Case, Job
from shadow import Played, ShadowExecutor, play
from test_manager import Managed

from engine.core import NoFreeBlocks, SchedulerConfig, Transfer, TransferEnd
from engine.core.host import HostBlocks, Transfers
from engine.core.index import HashIndex
from engine.core.pool import BlockPool
from engine.core.request import RUNNING, Request
from engine.core.types import BlockHash, BlockId

OPTIONS: dict[str, Any] = {
    "num_blocks": 9,
    "block_size": 2,
    "max_model_len": 18,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "num_host_blocks": 24,
    "preemption_mode": "swap",
}
PROMPT = (0, 1, 1, 0, 0, 1, 0, 1, 1)
JOBS = (
    Job(0, PROMPT, 5, 5),
    Job(0, (1, 0, 1), 8, 9, n=3),
    Job(2, (1, 1, 0, 0), 9, 9, private=True),
    Job(14, (0, 0, 1), 6, 6, n=2, beam=True),
    Job(22, PROMPT, 3, 3),
)


def program(tier: bool = True, **options: Any) -> Case:
    """One in which blocks are shared, copied, swapped, stored and loaded."""
    return Case(SchedulerConfig(**{**OPTIONS, "host_tier": tier, "transfer_lease_ns": 7, **options}), JOBS)


@contextmanager
def nth_call(owner: type, name: str, n: int, fails: Callable[[], Any]) -> Iterator[list[int]]:
    """Call number `n` of `owner.name` (from 1 on) does what `fails` does; yields a list with the number of calls."""
    calls = [0]
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return fails() if calls[0] == n else original(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield calls
    finally:
        setattr(owner, name, original)


def no_blocks() -> None:
    raise NoFreeBlocks("injected")


def usual(played: Played) -> None:
    """Every request has ended as it would have without the fault."""
    assert played.finished == {0: "length", 1: "stop", 2: "length", 3: "length", 4: "length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_program_does_everything(depth: int) -> None:
    """What the faults below strike really happens in the program without one."""
    moved = play(program(steps_in_flight=depth)).moved
    assert all(moved[what] for what in ("copies", "swap_out", "swap_in", "store", "load")), moved
    moved = play(program(tier=False, steps_in_flight=depth)).moved
    assert all(moved[what] for what in ("copies", "swap_out", "swap_in")), moved


def forked(managed: Managed) -> tuple[Request, Request]:
    parent, child = managed.run([1, 2, 3], private=True), managed.new([1, 2, 3], private=True)
    parent.sched = child.sched = 3
    managed.manager.fork(parent, child)
    child.state = RUNNING
    return parent, child


def test_a_take_that_fails_leaves_the_manager_as_it_was() -> None:
    """P6: where the pool has no block although `need` said so, tables, references, order and counters stay."""
    managed = Managed(8, 2)
    parent, child = forked(managed)
    new = managed.new([7, 8, 9])
    operations: list[Callable[[], object]] = [
        lambda: managed.manager.append_slots(child, 4),
        lambda: managed.manager.append_slots(child, 9),
        lambda: managed.manager.append_slots(parent, 9),
        lambda: managed.manager.append_block_each([parent, child]),
        lambda: managed.manager.allocate(new, [], 3),
    ]
    before = managed.digest()
    for operation in operations:
        with nth_call(BlockPool, "take", 1, no_blocks), pytest.raises(NoFreeBlocks, match="injected"):
            operation()
        assert managed.digest() == before
        assert (parent.id in managed.manager.cow, child.id in managed.manager.cow) == (True, True)
        managed.manager.check([parent, child])
    managed.manager.append_slots(child, 4)
    assert len(managed.manager.end_step()) == 1, "the copy is made once the block is there"
    managed.manager.check([parent, child])


@pytest.mark.parametrize("tier", [False, True])
def test_a_take_without_need_stops_the_run(tier: bool) -> None:
    """A device that has fewer blocks than were counted is a broken promise of ours: it is raised, never swallowed."""
    n = 0
    while True:
        n += 1
        with nth_call(BlockPool, "take", n, no_blocks) as calls:
            try:
                play(program(tier))
            except NoFreeBlocks:
                continue
        assert calls[0] < n, f"take number {n} failed, and nobody noticed"
        break
    assert n > 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("tier", "name"), [(False, "swap_out"), (True, "swap_out"), (True, "take")])
def test_the_nth_time_the_host_has_no_room(tier: bool, name: str, depth: int) -> None:
    """A swap that finds no room becomes a recompute, a store is made as far as there is room; nobody is harmed."""
    n = 0
    while True:
        n += 1
        with nth_call(HostBlocks, name, n, lambda: None) as calls:
            usual(play(program(tier, steps_in_flight=depth)))
        if calls[0] < n:
            break
    assert n > 2


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lost", [False, True])
def test_the_nth_transfer_that_fails_or_is_lost(lost: bool, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8, P10: whichever transfer fails at once, or never ends and is revoked, all requests end as usual."""

    class Unlucky(ShadowExecutor):
        victim = 0
        struck = False

        def _begin(self, transfer: Transfer) -> None:
            super()._begin(transfer)
            steps = 0
            if transfer.id == self.victim and lost:
                steps = 10**6
            self.open[transfer.id] = (transfer, steps, self.open[transfer.id][2])

        def _ended(self) -> tuple[TransferEnd, ...]:
            ends = []
            for id, (transfer, steps, _) in list(self.open.items()):
                if not steps:
                    ok = transfer.id != self.victim
                    self._end(id, ok)
                    ends.append(TransferEnd(id, ok))
                    type(self).struck |= not ok
            return tuple(ends)

        def _end(self, id: int, ok: bool) -> None:
            type(self).struck |= id == self.victim
            super()._end(id, ok)

    monkeypatch.setattr(shadow, "ShadowExecutor", Unlucky)
    n = -1
    while True:
        n += 1
        Unlucky.victim, Unlucky.struck = n, False
        usual(play(program(steps_in_flight=depth)))
        if not Unlucky.struck:
            break
    assert n > 3


@pytest.mark.parametrize("lease", [1, 2, 3, 5, 8])
def test_a_lease_may_be_over_at_any_point(lease: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: if no transfer ever ends, each is revoked when its lease is over, and all requests end as usual."""

    class Lost(ShadowExecutor):
        def _ended(self) -> tuple[TransferEnd, ...]:
            return ()

    monkeypatch.setattr(shadow, "ShadowExecutor", Lost)
    for depth in (1, 2):
        usual(play(program(transfer_lease_ns=lease, steps_in_flight=depth)))


@pytest.mark.parametrize(("tier", "depth"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("victim", range(len(JOBS)))
def test_an_abort_between_any_two_calls(victim: int, tier: bool, depth: int) -> None:
    """P9: a request with forks, a beam, swaps or loads goes at every point; others end as usual, no block is lost."""
    case = program(tier, steps_in_flight=depth)
    expected = play(case).finished
    start = JOBS[victim].at
    for turn in range(start, start + 24):
        for in_flight in (False, True):
            job = replace(JOBS[victim], abort_at=turn, abort_in_flight=in_flight)
            played = play(replace(case, jobs=(*JOBS[:victim], job, *JOBS[victim + 1 :])))
            assert {i: why for i, why in played.finished.items() if i != victim} == {
                i: why for i, why in expected.items() if i != victim
            }
            assert played.finished[victim] in ("abort", expected[victim])


def test_a_swap_without_room_leaves_the_host_as_it_was() -> None:
    """P6, P11: all or nothing with any number of free host blocks, whether the host keeps content or not."""
    for room in range(5):
        for keeps in (False, True):
            host = HostBlocks(4, keeps)
            held = [host.take() for _ in range(4 - room)]
            before = host.digest()
            table = host.swap_out([BlockId(i) for i in (1, 2, 3)], [BlockHash("a"), BlockHash("b"), None])
            assert (table is None) == (room < 3)
            if table is None:
                assert host.digest() == before
            else:
                host.release(table)
            host.check([[block for block in held if block is not None]])


def test_a_store_takes_what_there_is_room_for() -> None:
    """P6: a store without any room changes nothing; with some, it takes the first blocks, parents before children."""
    for room in range(5):
        device, index, host = BlockPool(4), HashIndex(), HostBlocks(4, True)
        transfers = Transfers(host, device, 5)
        blocks, _ = device.take(3)
        for i, block in enumerate(blocks):
            index.insert(BlockHash(f"key {i}"), blocks[i - 1] if i else None, block)
        device.keep(blocks)
        for _ in range(4 - room):
            host.take()
        before = host.digest()
        transfer = transfers.store([(BlockHash(f"key {i}"), block) for i, block in enumerate(blocks)], index, 0)
        if transfer is None:
            assert room == 0
            assert host.digest() == before
            assert not transfers.open
            continue
        assert [copy.src for copy in transfer.copies] == blocks[:room]
        assert transfers.end(transfer.id, True) is not None
        assert transfers.end(transfer.id, True) is None, "a transfer ends once"
        assert [device.refs(block) for block in blocks] == [1, 1, 1]
        assert host.pool.num_kept_free == min(room, 3)
