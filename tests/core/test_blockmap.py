"""Recorded blocks: the changes, expanded, are the state of the scheduler at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from core_kit import Case, Job, simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import fast_cases

from engine.core import Scheduler, SchedulerConfig
from engine.core.blockmap import CACHED, CUT, HELD, RESERVED, SET, BlockMap, BlockRecorder
from engine.core.types import BlockId, RequestSpec, StepOutcome


@dataclass
class Moment:
    """The state of a scheduler right after a plan, read block by block."""

    tables: dict[int, list[int]]
    refs: list[int]
    cached: list[int]
    reserved: dict[int, int]


class Watching(BlockRecorder):
    """Also remembers what the state was, the slow way."""

    def __init__(self, scheduler: Scheduler, limit: int = 1 << 40) -> None:
        super().__init__(scheduler, limit)
        self.scheduler = scheduler
        self.moments: dict[int, Moment] = {}

    def planned(self, seq: int) -> None:
        super().planned(seq)
        scheduler, size = self.scheduler, self.scheduler.config.block_size
        pool = scheduler.manager.pool
        holders = {request.id: request for request in scheduler._requests.values() if request.table}
        blocks = [BlockId(i) for i in range(pool.num_blocks)]
        reserved = {}
        for id, request in holders.items():
            first = -(-scheduler.view_of(request).num_computed_tokens // size)
            if first < len(request.table):
                reserved[id] = first
        self.moments[seq] = Moment(
            {id: list(request.table) for id, request in holders.items()},
            [pool.refs(block) for block in blocks],
            [int(pool.refs(block) == 0 and pool.is_kept(block)) for block in blocks],
            reserved,
        )


def expand(recorder: BlockRecorder, num_blocks: int) -> dict[int, BlockMap]:
    """The state after every step in which something changed."""
    table = recorder.table()
    found = {}
    state = BlockMap(num_blocks)
    rows = list(zip(*(table[name].tolist() for name in ("step", "event", "request", "index", "block")), strict=True))
    for number, (step, event, request, index, block) in enumerate(rows):
        state.apply((event, request, index, block))
        if number + 1 == len(rows) or rows[number + 1][0] != step:
            copy = BlockMap(num_blocks)
            copy.follow(
                [(id, held, state.reserved.get(id, len(held))) for id, held in state.tables.items()],
                dict(state.held),
                state.cached,
            )
            found[step] = copy
    return found


def check(case: Case) -> Watching:
    """Assert that the changes give the state back at each step; returns the recorder."""
    ran = simulate(case, True, blocks_type=Watching)
    recorder = ran.recorder.blocks
    assert isinstance(recorder, Watching)
    assert not ran.runs, "steps were skipped although blocks are recorded"
    steps = ran.recorder.steps()
    seqs = sorted(recorder.moments)
    assert seqs == [*steps["step"].tolist(), ran.scheduler.last_seq + 1]
    states = expand(recorder, case.config.num_blocks)
    state = BlockMap(case.config.num_blocks)
    for place, seq in enumerate(seqs):
        state = states.get(seq, state)
        expected = recorder.moments[seq]
        assert state.tables == expected.tables
        assert [state.refs(block) for block in range(state.num_blocks)] == expected.refs
        assert state.cached.tolist() == expected.cached
        assert state.reserved == expected.reserved
        if place < len(steps["step"]):
            size = case.config.block_size
            assert int(state.cached.sum()) * size == steps["cached"][place]
            assert (expected.refs.count(0) - int(state.cached.sum())) * size == steps["free"][place]
    assert not state.tables
    return recorder


@settings(max_examples=150, deadline=None)
@given(case=fast_cases(), lookahead=st.sampled_from([0, 0, 2]))
def test_changes_expand_to_the_live_state_at_every_step(case: Case, lookahead: int) -> None:
    """Tables, references, cached blocks and reserved entries of random programs, with preemptions and aborts."""
    capacity = case.config.num_blocks * case.config.block_size
    longest = max(len(job.prompt) + job.cap for job in case.jobs)
    if lookahead and longest + lookahead < capacity:
        case = replace(case, config=replace(case.config, num_lookahead_tokens=lookahead))
    check(case)


PRESSURE = Case(
    SchedulerConfig(num_blocks=9, block_size=2, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=20),
    tuple(Job(i, (0, 1, 1, i % 2), 8, 8) for i in range(5)),
)
"""Five requests that share prefixes and do not fit together."""


def test_shared_preempted_and_evicted_blocks_are_among_what_is_recorded() -> None:
    """The program under pressure has blocks in several tables, tables that are cut, and cached blocks."""
    recorder = check(PRESSURE)
    events = recorder.table()["event"].tolist()
    assert {SET, CUT, CACHED} <= set(events)
    assert any(max(moment.refs) > 1 for moment in recorder.moments.values())


def test_lookahead_slots_are_listed_as_reserved() -> None:
    """Whole blocks without a token are known as such."""
    case = replace(PRESSURE, config=replace(PRESSURE.config, num_blocks=20, num_lookahead_tokens=5))
    assert RESERVED in check(case).table()["event"].tolist()


def test_recording_stops_at_its_limit_with_a_whole_step() -> None:
    """What is there up to the last recorded step is what a longer record has, and no step is half there."""
    whole = check(PRESSURE).table()

    class Short(Watching):
        def __init__(self, scheduler: Scheduler) -> None:
            super().__init__(scheduler, limit=30)

    recorder = simulate(PRESSURE, True, blocks_type=Short).recorder.blocks
    assert recorder is not None
    assert recorder.truncated
    short = recorder.table()
    assert 0 < len(short["step"]) <= 30
    for name, column in short.items():
        np.testing.assert_array_equal(column, whole[name][: len(column)])
    assert whole["step"][len(short["step"])] > recorder.last_step == short["step"][-1]


def test_recording_changes_nothing_else() -> None:
    """The tables of requests and of steps are the same with and without it."""
    plain, recorded = simulate(PRESSURE, False), simulate(PRESSURE, False, blocks_type=BlockRecorder)
    assert plain.trail == recorded.trail
    for name, column in plain.recorder.steps().items():
        np.testing.assert_array_equal(column, recorded.recorder.steps()[name])


def test_references_that_no_table_has_are_listed_as_held() -> None:
    """A block that something beside the tables holds, such as a transfer, keeps its reference until it is dropped."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, block_size=2, max_model_len=8, max_num_seqs=4))
    recorder = BlockRecorder(scheduler)
    pool = scheduler.manager.pool
    held, _ = pool.take(2)
    scheduler.add(RequestSpec(0, 3, 2), 0)
    plan = scheduler.schedule(0)
    recorder.planned(plan.seq)
    pool.drop(held)
    scheduler.complete(plan, StepOutcome(1))
    recorder.planned(scheduler.schedule(1).seq)
    table = recorder.table()
    rows = zip(*(table[name].tolist() for name in ("event", "step", "index", "block")), strict=True)
    assert sorted(row[1:] for row in rows if row[0] == HELD) == [(1, 1, 0), (1, 1, 1), (2, 0, 0), (2, 0, 1)]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_following_any_states_gives_changes_that_lead_there(data: st.DataObject) -> None:
    """Tables may be replaced, shortened and exchanged: the changes still lead from each state to the next."""
    num = 6
    here, there = BlockMap(num), BlockMap(num)
    for _ in range(data.draw(st.integers(1, 6))):
        tables = data.draw(
            st.dictionaries(st.integers(0, 3), st.lists(st.integers(0, num - 1), max_size=4, unique=True), max_size=4)
        )
        held = data.draw(st.dictionaries(st.integers(0, num - 1), st.integers(1, 2), max_size=2))
        kept = np.array(data.draw(st.lists(st.integers(0, 1), min_size=num, max_size=num)), dtype=np.uint8)
        used = {id: data.draw(st.integers(0, 5)) for id in tables}
        for change in here.follow([(id, table, used[id]) for id, table in tables.items()], held, kept):
            there.apply(change)
        assert there.tables == here.tables == {id: table for id, table in tables.items() if table}
        assert there.reserved == here.reserved
        assert there.held == here.held == held
        assert there.cached.tolist() == here.cached.tolist()
        in_use = {block for table in tables.values() for block in table} | held.keys()
        assert here.cached.tolist() == [int(kept[i] and i not in in_use) for i in range(num)]


def test_an_unknown_event_is_an_error() -> None:
    """A row that means nothing is not passed over."""
    with pytest.raises(ValueError, match="no block event 9"):
        BlockMap(1).apply((9, 0, 0, 0))
