"""Which prefix index is used decides nothing."""

from __future__ import annotations

from dataclasses import replace

from core_kit import Case, simulate
from hypothesis import given, settings
from shadow import play
from strategies import cases, fast_cases


def with_index(case: Case, index: str) -> Case:
    return replace(case, config=replace(case.config, prefix_index=index))


@settings(max_examples=100)
@given(cases())
def test_programs_do_the_same_with_both_indices(case: Case) -> None:
    """Outputs, hits, preemptions and the number of steps are equal, under aborts, short memory and every option."""
    assert play(with_index(case, "radix")) == play(with_index(case, "hash"))


@settings(max_examples=150)
@given(fast_cases())
def test_every_state_is_the_same_with_both_indices(case: Case) -> None:
    """After each step in which something happened, blocks, free order, listed contents and tables are equal."""
    radix, plain = (simulate(with_index(case, index), False, log_decisions=True) for index in ("radix", "hash"))
    assert radix.trail == plain.trail
    assert radix.scheduler.digest() == plain.scheduler.digest()
    assert radix.log is not None
    assert plain.log is not None
    assert radix.log.steps == plain.log.steps
