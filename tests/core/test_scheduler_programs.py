"""Random programs over the shadow executor: every read and write of every step is checked."""

from __future__ import annotations

from core_kit import Case
from hypothesis import given, settings
from shadow import play
from strategies import cases


@settings(max_examples=1000)
@given(cases())
def test_programs_read_only_what_was_computed_for_them(case: Case) -> None:
    """Whatever the options and aborts: reads match, writes are exclusive, all requests end, no block is lost."""
    play(case)
