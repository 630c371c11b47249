"""Fast-forward against step by step: the same state, the same times, the same records."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from core_kit import Case, Simulated, simulate
from hypothesis import given, seed, settings
from strategies import fast_cases

from engine.core import Usage
from engine.core.records import Recorder
from engine.core.signals import SIGNAL_COLUMNS


def usage_by_step(recorder: Recorder, block_size: int) -> list[tuple[int, ...]]:
    """(step, decodes, context, *usage) of every step, runs written out the slow way."""
    table = recorder.steps()
    out = []
    for i in range(len(table["step"])):
        num = int(table["num_decodes"][i])
        usage = Usage(*(int(table[name][i]) for name in Usage._fields))
        for j in range(int(table["num_steps"][i])):
            if j:
                taken = table["run_takes"][i][j % block_size] * block_size
                cached = table["step_cached"][i][j] if len(table["step_cached"][i]) else usage.cached
                may, cannot = usage.reserved_may, usage.reserved_cannot
                if len(table["step_reserved_may"][i]):
                    may, cannot = table["step_reserved_may"][i][j], table["step_reserved_cannot"][i][j]
                drawn = usage.reserved_may + usage.reserved_cannot - may - cannot
                usage = usage._replace(
                    held=usage.held + num,
                    tail=usage.tail + taken - num,
                    reserved_may=may,
                    reserved_cannot=cannot,
                    cached=cached,
                    free=usage.free + usage.cached - cached - (taken - drawn),
                )
            context = int(table["decode_context_tokens"][i]) + j * num
            out.append((int(table["step"][i]) + j, num, context, *usage))
    return out


def signals_by_step(recorder: Recorder) -> list[tuple[int, ...]]:
    """(step, *signals) of every step: those of a run are the same in each step of it, and it loses no tokens."""
    table = recorder.steps()
    out = []
    for i in range(len(table["step"])):
        signals = tuple(int(table[name][i]) for name in SIGNAL_COLUMNS)
        if table["num_steps"][i] > 1:
            assert signals[4:] == (0, 0, 0)
        out += [(int(table["step"][i]) + j, *signals) for j in range(int(table["num_steps"][i]))]
    return out


def finished_by_step(recorder: Recorder) -> Counter[int]:
    """How many requests finished in each step."""
    table = recorder.steps()
    counts: Counter[int] = Counter()
    for first, num, finished, within in zip(
        table["step"], table["num_steps"], table["finished"], table["step_finished"], strict=True
    ):
        if num == 1:
            counts[int(first)] += int(finished)
        else:
            assert len(within) == finished
            counts.update(int(first) + step for step in within)
    return +counts


def same_both_ways(case: Case) -> Simulated:
    """Assert that a program does the same with and without fast-forward; returns the fast one."""
    slow, fast = simulate(case, False), simulate(case, True)
    assert fast.trail == slow.trail
    assert fast.scheduler.digest() == slow.scheduler.digest()
    assert np.array_equal(fast.recorder.step_ends(), slow.recorder.step_ends())
    assert np.array_equal(fast.recorder.gaps(), slow.recorder.gaps())
    requests, expected = fast.recorder.requests(), slow.recorder.requests()
    for name in expected:
        assert list(requests[name]) == list(expected[name]), name
    size = case.config.block_size
    usage = usage_by_step(fast.recorder, size)
    assert usage == usage_by_step(slow.recorder, size)
    assert finished_by_step(fast.recorder) == finished_by_step(slow.recorder)
    assert signals_by_step(fast.recorder) == signals_by_step(slow.recorder)
    total = size * case.config.num_blocks
    assert all(sum(row[3:-1]) == total for row in usage)
    return fast


@pytest.mark.parametrize("number", [0, 1])
def test_fast_forward_equals_step_by_step(number: int) -> None:
    """On 2 x 1,000 programs all is equal; half of them have a run of 3 steps, and each term of the horizon binds."""
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=1000, derandomize=False, database=None)
    @given(fast_cases())
    def check(case: Case) -> None:
        fast = same_both_ways(case)
        seen["programs"] += 1
        seen[f"in flight {case.config.steps_in_flight}"] += 1
        seen["with a run"] += any(run >= 3 for run in fast.runs)
        seen["preemptions"] += int(fast.recorder.requests()["num_preemptions"].sum())
        seen.update(fast.terms)

    check()
    assert seen["programs"] >= 1000
    assert seen["with a run"] * 2 >= seen["programs"], seen
    for term in (
        "finish",
        "max_tokens",
        "max_model_len",
        "blocks",
        "policy",
        "in flight 1",
        "in flight 2",
        "preemptions",
    ):
        assert seen[term] >= 25, (term, seen)
