"""Seeded bugs are seen: each check passes on the core as it is, and fails on the core with the fault."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import test_built_in_policies
import test_contiguous
import test_core_config
import test_eviction
import test_extents
import test_forks
import test_identity
import test_index
import test_manager
import test_outputs_and_hits
import test_policies
import test_pool
import test_prefix_stats
import test_regressions
import test_tiers
from core_kit import Case, Job, PulseAdmission, aborts_everywhere, decodes_behind_chunks, followers_everywhere
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test
from mutants import EQUIVALENT, MUTANTS, Mutant, applied
from shadow import play
from strategies import cases, contiguous_cases, fast_cases
from test_fast_forward import same_both_ways
from test_index import run_index_machine
from test_manager_machine import run_manager_machine
from test_pool import run_pool_machine
from test_scheduler_machine import run_scheduler_machine

from engine.core import RequestSpec, SchedulerConfig

NO_SHRINKING: dict[str, Any] = {
    "phases": [Phase.generate],
    "database": None,
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}


@cache
def generated(fast: bool, num: int, of: str = "") -> tuple[Case, ...]:
    """The programs that the suite's strategies draw first."""
    drawn: list[Case] = []

    @settings(max_examples=num, **NO_SHRINKING)
    @given(contiguous_cases(fast=fast) if of == "contiguous" else fast_cases() if fast else cases(of=of))
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    return tuple(drawn)


def programs() -> None:
    for case in generated(False, 400):
        play(case)


def programs_of(kind: str) -> None:
    for case in generated(False, 500, kind):
        play(case)


def extents() -> None:
    test_extents.test_the_placements_differ()
    run_state_machine_as_test(
        test_extents.ExtentMachine, settings=settings(max_examples=40, stateful_step_count=25, **NO_SHRINKING)
    )


def contiguous() -> None:
    test_contiguous.test_a_watermark_counts_blocks_that_are_left()
    test_contiguous.test_an_oracle_that_promised_too_little_ends_its_request()
    options: dict[str, object] = {"allocator": "contiguous-oracle", "placement": "buddy"}
    spec = RequestSpec(0, 60, 20, oracle_tokens=10)
    test_contiguous.test_what_can_never_be_placed_is_refused(options, spec, "8 in a row")
    test_contiguous.test_the_next_power_of_two(4, 4)
    programs_of("contiguous")


def contiguous_runs() -> None:
    for case in generated(True, 150, "contiguous"):
        same_both_ways(case)


def evictions() -> None:
    for name in ("fifo", "lfu"):
        for case in generated(False, 300, "tiers"):
            options = replace(case.config, eviction_policy=name, free_order="blank-first")
            assert play(replace(case, config=options)) == play(
                replace(case, config=options), test_eviction.scheduler_with(test_eviction.BruteForce)
            )


def pulses() -> None:
    for case in generated(True, 150):
        options = replace(case.config, policies=(PulseAdmission(),), eviction_policy="lru", batching="mixed")
        same_both_ways(replace(case, config=replace(options, scheduling_policy="fcfs", victim_policy="last-in")))


def narrow() -> None:
    for case in generated(False, 500, "forks"):
        play(replace(case, config=replace(case.config, max_num_batched_tokens=case.config.max_num_seqs)))


def same_block_again() -> None:
    """The second prompt is the first one's, and gets its block while that is about to be stored."""
    options = SchedulerConfig(1, 2, 1, max_num_seqs=1, max_num_batched_tokens=1, num_host_blocks=1, host_tier=True)
    play(Case(options, (Job(0, (0,), 1, 1), Job(0, (0,), 1, 1))))


def chunks() -> None:
    for case in decodes_behind_chunks():
        if case.config.same_step == "share":
            play(case)


def aborts() -> None:
    for case in aborts_everywhere()[::5]:
        play(case)


def followers() -> None:
    for case in followers_everywhere()[::2]:
        same_both_ways(case)


def fast_forward() -> None:
    for case in generated(True, 500):
        same_both_ways(case)


def pool() -> None:
    for free_order in ("blank-first", "single-queue"):
        test_pool.test_drop_takes_a_multiset(free_order)
        test_pool.test_a_take_that_fails_changes_nothing(free_order)
        run_pool_machine(free_order, max_examples=20, stateful_step_count=20, **NO_SHRINKING)


def index() -> None:
    test_index.test_losing_one_duplicate_leaves_the_others("hash")
    run_index_machine("hash", max_examples=20, stateful_step_count=20, **NO_SHRINKING)


def radix() -> None:
    run_index_machine("radix", max_examples=40, stateful_step_count=20, **NO_SHRINKING)
    test_index.test_edges_part_where_prompts_do_and_join_when_one_has_gone()


def manager() -> None:
    run_manager_machine(max_examples=40, stateful_step_count=30, **NO_SHRINKING)


def scheduler_machine(of: str) -> None:
    run_scheduler_machine(of, max_examples=30, stateful_step_count=40, **NO_SHRINKING)


def identity() -> None:
    test_identity.test_a_salt_is_not_an_adapter()
    test_identity.test_a_key_covers_the_parent()
    test_identity.test_a_salt_keeps_the_tenants_of_a_trace_apart()


def promise() -> None:
    for case in generated(False, 400):
        test_built_in_policies.check_promise(case)


def batching() -> None:
    for name, expected in test_built_in_policies.STEPS:
        test_built_in_policies.test_a_step_holds_what_the_batching_says(name, expected)


CHECKS: dict[str, Callable[[], object]] = {
    "programs": programs,
    "forks": lambda: programs_of("forks"),
    "swaps": lambda: programs_of("swaps"),
    "tiers": lambda: programs_of("tiers"),
    "one copy": test_tiers.test_sequences_that_share_blocks_have_one_copy_of_each_on_the_host,
    "copied for nobody": test_tiers.test_a_copy_for_a_request_that_is_gone_is_not_made,
    "copy sources": test_forks.test_the_source_of_a_copy_is_no_target_in_the_same_step,
    "loading victim": test_tiers.test_a_request_that_loads_is_no_victim,
    "evictions": evictions,
    "policies of eviction": test_eviction.test_frequency_outlives_a_scan_and_recency_does_not,
    "pulses": pulses,
    "narrow": narrow,
    "same block again": same_block_again,
    "prefix misses": lambda: [
        test_prefix_stats.test_each_reason_is_told_from_the_others(),
        test_prefix_stats.test_what_is_lost_is_nobodys(),
    ],
    "back early": lambda: [
        test_regressions.test_a_request_may_come_back_before_the_token_of_its_last_row_is_known(same_step, "recompute")
        for same_step in ("share", "off")
    ],
    "prefix misses of forks": test_prefix_stats.test_a_sequence_that_forks_asks_for_nothing,
    "prefix misses of twins": test_prefix_stats.test_one_of_several_blocks_is_enough,
    "prefix misses of swaps": test_prefix_stats.test_what_a_swap_stored_was_there,
    "promises": test_tiers.test_what_a_loading_prompt_still_needs_is_promised_to_it,
    "extents": extents,
    "contiguous": contiguous,
    "contiguous runs": contiguous_runs,
    "chunks": chunks,
    "aborts": aborts,
    "fast-forward": fast_forward,
    "followers": followers,
    "pool": pool,
    "lazy queue": lambda: test_pool.test_a_queue_that_skips_is_a_queue(20),
    "index": index,
    "radix": radix,
    "tree trimmed": lambda: [test_index.test_a_tree_loses_nothing_that_something_follows([i]) for i in (0, 1, 3)],
    "manager": manager,
    "scheduler of forks": lambda: scheduler_machine("forks"),
    "scheduler of swaps": lambda: scheduler_machine("swaps"),
    "scheduler of tiers": lambda: scheduler_machine("tiers"),
    "identity": identity,
    "hits": lambda: test_outputs_and_hits.test_a_follow_up_hits_prompt_and_output(True),
    "hits of a running request": lambda: [
        test_outputs_and_hits.test_a_running_request_is_hit_up_to_where_it_is(turn, 2, "share", 1) for turn in (2, 3)
    ],
    "private": test_manager.test_private_content_comes_back_to_its_own_request_alone,
    "lookup": lambda: test_manager.test_a_lookup_changes_nothing("blank-first"),
    "deferred": test_outputs_and_hits.test_deferred_requests_start_one_step_later,
    "refused": lambda: test_core_config.test_a_request_that_can_never_be_served_is_refused(20, 2, "can never fit"),
    "watermark": test_core_config.test_the_watermark_counts_only_while_something_runs,
    "whole prompt": lambda: test_core_config.test_admission_looks_at_the_whole_prompt(True, (0,)),
    "victims": test_policies.test_a_victim_that_has_its_place_is_refused,
    "promise": promise,
    "first victim": test_built_in_policies.test_the_first_in_the_order_is_no_victim,
    "batching": batching,
    "whole steps": test_built_in_policies.test_prefill_first_takes_whole_prompts,
    "stall": test_built_in_policies.test_no_batching_can_stall,
    "next in a run": test_built_in_policies.test_a_run_ends_where_the_cache_changes_who_is_next,
    "own policies": test_built_in_policies.test_every_scheduler_has_policies_of_its_own,
    "fair": test_built_in_policies.test_an_idle_tenant_saves_up_nothing,
}
"""Parts of the suite, cut short where they are long: each raises where it fails."""

MACHINES: dict[str, tuple[str, ...]] = {
    "manager": (
        "a block put into the free queue twice",
        "evicted blocks stay counted as cached",
        "the last published of equal blocks is hit",
        "losing one duplicate forgets the others",
        "a stale index: an evicted block stays listed",
        "a hash without its parent",
        "the salt left out",
    ),
    "scheduler of forks": (
        "hits that nobody holds are not counted",
        "blocks taken before the hits are touched",
        "freed head first",
        "blocks kept that were not written",
        "published tokens off by one",
        "a confirmed entry before its step is complete",
        "the preempted sent to the back",
        "preemptions not counted",
        "one token more than max_tokens",
        "deferred requests are held back for ever",
        "the calendar of last tokens is a step late",
        "a cohort's blocks come a step late",
        "a shared block written in place",
        "the copied block is not given back",
        "a fork without references",
        "seats for sequences to come are not kept",
    ),
    "scheduler of swaps": (
        "a swap that is not copied",
        "a swapped request comes back without a copy",
        "host blocks kept for ever",
        "host blocks of an aborted request kept for ever",
        "a partly filled block swapped under a key",
        "a swap loses the tokens of its last block",
    ),
    "scheduler of tiers": (
        "a transfer without references",
        "a lease that is never over",
        "stored without what is before it",
    ),
}
"""Faults that a stateful machine sees, too, beside the check that the mutant names."""


LONG = {"evictions", "swaps", "contiguous", "forks", "tiers", "programs", "promise", "narrow"}
"""Checks that are programs of the suite, which `make test` runs at full length anyway."""


@pytest.mark.parametrize("check", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c for c in CHECKS])
def test_the_core_as_it_is_passes(check: str) -> None:
    """What is to fail with a fault passes without one."""
    CHECKS[check]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_suite_sees(mutant: Mutant) -> None:
    """A fault that is written into the core makes its check fail."""
    with applied(mutant):
        try:
            CHECKS[mutant.check]()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - however it shows
            return
    raise AssertionError(f"nothing fails with this fault: {mutant.name}")


@pytest.mark.parametrize(("check", "name"), [(check, name) for check, names in MACHINES.items() for name in names])
def test_a_machine_sees(check: str, name: str) -> None:
    """Calls in any order meet the fault, and the machine's model says otherwise."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    with applied(mutant), pytest.raises((Exception, pytest.fail.Exception)):
        CHECKS[check]()


@pytest.mark.parametrize("mutant", [mutant for mutant, _ in EQUIVALENT], ids=[m.name for m, _ in EQUIVALENT])
def test_nothing_can_see(mutant: Mutant) -> None:
    """An edit that is listed as equivalent indeed changes nothing that its check could see."""
    with applied(mutant):
        CHECKS[mutant.check]()


def test_a_fault_is_gone_after_its_context() -> None:
    """Faults do not stay: after the context the core has its own functions again, also if the check failed."""
    touched = {(edit.owner, edit.function) for mutant in MUTANTS for edit in mutant.edits}
    before = {(owner, name): inspect.getattr_static(owner, name) for owner, name in touched}
    for mutant in MUTANTS:
        with pytest.raises(ZeroDivisionError), applied(mutant):
            raise ZeroDivisionError
    assert {(owner, name): inspect.getattr_static(owner, name) for owner, name in touched} == before


def test_there_are_enough_and_their_names_differ() -> None:
    """The list does not shrink unnoticed, and a name stands for one fault."""
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 60
