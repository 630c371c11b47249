"""Requests with several sequences: fork, copy-on-write, beams."""

from __future__ import annotations

import pytest
from core_kit import Case, Job
from hypothesis import given, settings
from shadow import play
from strategies import cases

from engine.core import BlockCopy, InvalidRequest, RequestSpec, Scheduler, SchedulerConfig, StepOutcome
from engine.core.manager import BlockManager
from engine.core.request import RUNNING, Request


def config(**options: object) -> SchedulerConfig:
    defaults: dict[str, object] = {"num_blocks": 20, "block_size": 4, "max_model_len": 40}
    return SchedulerConfig(**{**defaults, **options})  # type: ignore[arg-type]


@settings(max_examples=600)
@given(cases(of="forks"))
def test_programs_with_forks_and_beams(case: Case) -> None:
    """Whoever shares a block reads what it computed, and nobody writes to a block that another has."""
    play(case)


@pytest.mark.parametrize(("prompt", "copies"), [(4, 0), (5, 2), (6, 2), (8, 0)])
def test_a_shared_block_is_copied_once_for_all_but_one(prompt: int, copies: int) -> None:
    """Three sequences: the partial last block of the prompt is copied for two, and the third keeps it; full blocks are
    never copied."""
    played = play(Case(config(), (Job(0, tuple(i % 2 for i in range(prompt)), 6, 6, n=3),)))
    assert played.moved["copies"] == copies


def test_the_source_of_a_copy_is_no_target_in_the_same_step() -> None:
    """Phase rule: a block that a step copies from stays out of the pool until the step is planned, whoever lets go."""
    manager = BlockManager(4, 2, False, "blank-first")
    parent, one, two = (Request(id, RequestSpec(0, 3, 9), 9, 0, (id,)) for id in range(3))
    manager.allocate(parent, [], 3)
    parent.sched = one.sched = two.sched = 3
    for child in (one, two):
        manager.fork(parent, child)
    source = parent.table[1]
    manager.append_slots(one, 4)
    manager.free(two, 3, ended=True)
    manager.free(parent, 3, ended=True)
    assert manager.pool.refs(source) == 1
    assert manager.end_step() == [BlockCopy(source, one.table[1])]
    assert manager.pool.refs(source) == 0
    one.state = RUNNING
    manager.check([one])


def test_sequences_share_the_blocks_of_their_prompt() -> None:
    """Four sequences of a prompt of three blocks take three blocks and four, not sixteen."""
    scheduler = Scheduler(config(num_blocks=7, enable_prefix_caching=False))
    played = play(Case(scheduler.config, (Job(0, tuple(i % 2 for i in range(12)), 4, 4, n=4),)))
    assert (played.preemptions, played.turns) == (0, 4)


def test_a_beam_that_can_never_fit_is_refused() -> None:
    """A beam needs room for all its sequences at once; that of n samples for each on its own."""
    scheduler = Scheduler(config(num_blocks=9))
    with pytest.raises(InvalidRequest, match="a beam of 3 sequences needs up to 3 x 4 blocks"):
        scheduler.add(RequestSpec(0, 12, 4, n=3, beam=True), 0)
    scheduler.add(RequestSpec(0, 12, 4, n=3), 0)


@pytest.mark.parametrize("n", [0, -1, 257])
def test_n_is_at_least_one_and_at_most_the_seats(n: int) -> None:
    """More sequences than may run at once can never fork."""
    with pytest.raises(InvalidRequest, match=f"n is {n}; it must be from 1 to max_num_seqs = 256"):
        Scheduler(config()).add(RequestSpec(0, 12, 4, n=n), 0)


def test_an_abort_takes_all_sequences_and_that_of_one_only_that() -> None:
    """The id of a request stands for all of its sequences, also when its first has ended; others for themselves."""
    for beam in (False, True):
        scheduler = Scheduler(config())
        root = scheduler.add(RequestSpec(0, 5, 9, n=3, beam=beam), 0)
        plan = scheduler.schedule(0)
        events = scheduler.complete(plan, StepOutcome(1))
        assert events.forked == ((root, root + 1), (root, root + 2))
        assert [finish.request for finish in scheduler.abort(root + 1)] == (
            [root, root + 1, root + 2] if beam else [root + 1]
        )
        scheduler.check()
        assert [finish.request for finish in scheduler.abort(root)] == ([] if beam else [root, root + 2])
        scheduler.check()
        assert not scheduler.has_unfinished
