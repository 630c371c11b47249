"""Memory decides when tokens come, never which (P16); the cache hits exactly what it should; nobody starves."""

from __future__ import annotations

import pytest
from core_kit import Case, Job, full_prompt
from hypothesis import given, settings
from shadow import play
from strategies import cases, same_jobs_twice

from engine.core import SchedulerConfig


@settings(max_examples=100)
@given(same_jobs_twice())
def test_outputs_do_not_depend_on_memory(pair: tuple[Case, Case]) -> None:
    """P16: pool, block size, prefix caching, free order, same-step sharing and steps in flight change no output."""
    one, two = (play(case) for case in pair)
    assert one.finished == two.finished
    for i, job in enumerate(pair[0].jobs):
        assert one.outputs[i][: job.out] == two.outputs[i][: job.out]


def config(**changes: object) -> SchedulerConfig:
    options: dict[str, object] = {
        "num_blocks": 40,
        "block_size": 2,
        "max_model_len": 60,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        **changes,
    }
    return SchedulerConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("same_step", ["share", "off", "defer"])
@pytest.mark.parametrize(("size", "hit"), [(1, 8), (2, 8), (3, 6), (4, 8), (8, 8), (9, 0)])
def test_an_equal_prompt_hits_its_full_blocks(size: int, hit: int, same_step: str, steps_in_flight: int) -> None:
    """P13: of a cached prompt of 9 tokens, all full blocks within the first 8 are hit: no fewer and no more."""
    prompt = (0, 1, 1, 0, 0, 0, 1, 0, 1)
    jobs = (Job(0, prompt, 1, 1), Job(9, prompt, 1, 1))
    options = config(block_size=size, same_step=same_step, steps_in_flight=steps_in_flight)
    assert play(Case(options, jobs)).hits == hit


@pytest.mark.parametrize("caching", [True, False])
def test_a_follow_up_hits_prompt_and_output(caching: bool) -> None:
    """A second turn hits all full blocks of what the first computed: everything but its last token."""
    jobs = (Job(0, (0, 1, 1, 0, 1), 6, 6), Job(20, (1, 1), 1, 1, follows=0))
    # 5 prompt and 6 output tokens, the last of which was never an input: 10 tokens are in the cache.
    assert play(Case(config(enable_prefix_caching=caching), jobs)).hits == (10 if caching else 0)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("same_step", ["share", "off"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("turn", range(2, 9))
def test_a_running_request_is_hit_up_to_where_it_is(turn: int, size: int, same_step: str, steps_in_flight: int) -> None:
    """What a running request has generated is in the cache block by block: not earlier, and not later."""
    jobs = (Job(0, (0, 1, 1, 0, 1), 12, 12), Job(turn, (1,), 1, 1, follows=0))
    played = play(Case(config(block_size=size, same_step=same_step, steps_in_flight=steps_in_flight), jobs))
    # Turn 0 writes 5 tokens, each later turn one more; `share` counts this turn's, whose value is known with one step
    # in flight; without it, only completed steps count, one turn fewer for each step in flight.
    written = 5 + turn - (same_step == "off") - (steps_in_flight == 2)
    assert played.hits == written // size * size


@pytest.mark.parametrize(("same_step", "hit"), [("share", 8), ("off", 0), ("defer", 8)])
def test_equal_prompts_that_come_together(same_step: str, hit: int) -> None:
    """Rule 3: `share` hits what this very step writes, `off` computes it twice, `defer` waits and then hits."""
    prompt = (0, 1, 1, 0, 0, 0, 1, 0, 1)
    played = play(Case(config(same_step=same_step), (Job(0, prompt, 2, 2), Job(0, prompt, 2, 2))))
    assert played.hits == hit


def test_deferred_requests_start_one_step_later() -> None:
    """`defer` holds a request back until the prefix that it misses is written, and no longer."""
    prompt = (0, 1, 1, 0, 0, 0, 1, 0, 1)
    jobs = (Job(0, prompt, 2, 2), Job(0, prompt, 2, 2))
    turns = {name: play(Case(config(same_step=name), jobs)).turns for name in ("share", "off", "defer")}
    assert turns["share"] == turns["off"] == turns["defer"] - 1


@settings(max_examples=100)
@given(cases(min_jobs=3))
def test_nobody_is_preempted_for_ever(case: Case) -> None:
    """P7: a request is preempted at most once for each token that it and those before it may have."""
    total = sum(len(full_prompt(case.jobs, i)) + job.cap for i, job in enumerate(case.jobs))
    played = play(case)
    assert all(times <= total for times in played.preempted.values())
    if played.finished[0] != "abort" and case.config.scheduling_policy == "fcfs":
        assert played.preempted.get(0, 0) == 0, "the first in order lost its blocks, though it fits alone"


def test_preempted_requests_take_up_where_they_were() -> None:
    """Two requests that do not fit together: the later is preempted, once, hits what is left of it, and both end."""
    jobs = (Job(0, (0, 0, 1), 9, 9), Job(0, (1, 0, 1), 9, 9))
    played = play(Case(config(num_blocks=6, max_model_len=12), jobs))
    assert played.finished == {0: "length", 1: "length"}
    assert played.preempted == {1: 1}
