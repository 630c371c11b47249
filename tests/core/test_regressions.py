"""Faults that other engines have had and that need a case of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from core_kit import Case, Job, simulate
from shadow import play
from test_faults import forked
from test_manager import Managed
from test_scheduler_machine import SchedulerMachine

from engine.core import SchedulerConfig


def config(**changes: Any) -> SchedulerConfig:
    options: dict[str, Any] = {"num_blocks": 12, "block_size": 2, "max_model_len": 24, **changes}
    return SchedulerConfig(**options)


@pytest.mark.parametrize("same_step", ["share", "off", "defer"])
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_with_and_without_hits_in_one_step(same_step: str, depth: int) -> None:
    """A step with a decode, a prompt that hits and one that does not: each row reads through its own table."""
    jobs = (
        Job(0, (0, 1, 1, 0, 1), 1, 1),
        Job(4, (1, 1), 8, 8, private=True),
        Job(8, (0, 1, 1, 0, 0), 3, 3),
        Job(8, (1, 0, 0, 1, 1), 3, 3),
    )
    played = play(Case(config(num_blocks=24, same_step=same_step, steps_in_flight=depth), jobs))
    assert played.hits == 4
    assert set(played.finished.values()) == {"length"}


@pytest.mark.parametrize("mode", ["recompute", "swap", "reject"])
def test_the_last_one_goes_on_after_all_others_lost_their_blocks(mode: str) -> None:
    """Requests that each need the whole pool: one at a time ends; `reject` gives up the others, and never the first."""
    jobs = tuple(Job(0, (i % 2, 1, 0), 10, 10) for i in range(3))
    played = play(Case(config(num_blocks=6, preemption_mode=mode, num_host_blocks=12), jobs))
    assert played.finished[0] == "length"
    assert set(played.finished.values()) == ({"length", "no-memory"} if mode == "reject" else {"length"})


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_what_was_generated_is_counted_once(mode: str) -> None:
    """A request that lost its blocks keeps its outputs, and neither they nor its preemptions are counted again."""
    jobs = tuple(Job(0, (i % 2, 1, 0), 10, 10) for i in range(3))
    options = config(num_blocks=6, preemption_mode=mode, num_host_blocks=12)
    requests = simulate(Case(options, jobs), False).recorder.requests()
    assert int(requests["num_preemptions"].sum()) > 0
    assert list(requests["output_tokens"]) == [10, 10, 10]
    played = play(Case(options, jobs))
    assert [len(played.outputs[i]) for i in range(3)] == [10, 10, 10]


def test_a_sequence_that_has_its_own_block_copies_no_more() -> None:
    """Once a forked sequence has copied the shared block, it and the one that keeps the original write in place."""
    managed = Managed(8, 2)
    parent, child = forked(managed)
    managed.manager.append_slots(child, 4)
    assert len(managed.manager.end_step()) == 1
    for request in (parent, child, child, parent):
        managed.manager.append_slots(request, 4)
        assert managed.manager.end_step() == []
    assert parent.table[0] == child.table[0]
    assert parent.table[1] != child.table[1]
    managed.manager.check([parent, child])


@pytest.mark.parametrize("more", range(1, 8))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [3, 4])
def test_appending_many_to_a_shared_block_is_appending_one_often(tokens: int, size: int, more: int) -> None:
    """P5: with a copy to be made first, n tokens at once give the tables, copies and free order of n times one."""
    one = Managed(24, size)
    parent, child = one.run([1] * tokens, private=True), one.new([1] * tokens, private=True)
    parent.sched = child.sched = tokens
    one.manager.fork(parent, child)
    other: Managed = copy.deepcopy(one)
    need = one.manager.need(child, (), tokens + more)
    free = one.manager.pool.num_free
    one.manager.append_slots(child, tokens + more)
    assert free - one.manager.pool.num_free == need
    for k in range(1, more + 1):
        other.manager.append_slots(other.requests[child.id], tokens + k)
    assert one.digest() == other.digest()
    assert one.manager.end_step() == other.manager.end_step()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("same_step", ["share", "off", "defer"])
def test_a_request_may_come_back_before_the_token_of_its_last_row_is_known(same_step: str, mode: str) -> None:
    """Preempted by a plan that has nothing to run, and admitted by the next one while its row is in flight, it ends."""
    machine = SchedulerMachine()
    options = {"same_step": same_step, "preemption_mode": mode, "num_host_blocks": 1 if mode == "swap" else 0}
    machine.start(config(num_blocks=7, block_size=1, steps_in_flight=2, **options))
    machine.put(Job(0, (0, 1), 2, 2))  # its last row is in flight when the other needs a block
    machine.put(Job(0, (1, 1, 0), 4, 4))
    machine.plan()
    machine.plan()
    machine.finish_step(set())
    empty = machine.plan()
    assert (empty.runs, empty.preempted) == (False, (1,))
    assert machine.plan().admitted == (1,)
    while machine.flight:
        machine.holds()
        machine.finish_step(set())
        machine.plan()
    assert {sequence.reason for sequence in machine.model.all.values()} == {"length"}
