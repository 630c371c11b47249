"""The trace table: what it accepts, and what its helpers say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from trace_strategies import generator_specs

import traces
from traces.schema import leading, leading_sum, make_trace, offsets_of, ragged_ranges


def small() -> traces.Trace:
    """Three rows: two share span 7, the last is its own."""
    return make_trace(
        [0, 5, 9],
        [10, 12, 3],
        [1, 2, 3],
        spans=([0, 2, 4, 4], [7, 8, 7, 9], [4, 6, 4, 8]),
        output_ids=[8_000, -1, -1],
    )


def test_rows_are_sorted_stably_and_everything_moves_with_them() -> None:
    """make_trace sorts by arrival, keeps ties in order, and renames `after` and moves spans along."""
    trace = make_trace(
        [30, 10, 20, 10],
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        spans=([0, 1, 1, 3, 4], [50, 60, 61, 70], [1, 1, 2, 4]),
        after=[2, -1, 1, -1],
    )
    assert trace.arrival_ns.tolist() == [0, 0, 10, 20]
    assert trace.prompt_tokens.tolist() == [2, 4, 3, 1]
    assert trace.after.tolist() == [-1, -1, 0, 2]
    assert [trace.spans(row) for row in range(4)] == [[(-2, 2)], [(70, 4)], [(60, 1), (61, 2)], [(50, 1)]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_tokens": [10, 0, 3]}, "request 1: prompt_tokens is 0; it must be 1 or more"),
        ({"output_tokens": [1, 2, -3]}, "request 2: output_tokens is -3"),
        ({"prompt_tokens": [10, 2**31, 3]}, "beyond 32 bits"),
        ({"after": [-1, 1, -1]}, "request 1: after is 1; it must be an earlier request"),
        ({"think_ns": [0, -1, 0]}, "request 1: think_ns is -1"),
        ({"tenant": [0, 0]}, "column tenant has shape"),
        ({"spans": ([0, 1, 1, 1], [7], [9])}, "its spans have 9 tokens and its prompt 10"),
        ({"spans": ([0, 2, 2, 2], [7, -1], [9, 1])}, "needs an id of 0 or more"),
        ({"spans": ([0, 1, 2], [7, 7], [10, 12])}, "span_offsets must be 4 ascending numbers"),
        ({"spans": ([0, 2, 4, 4], [7, 8, 9, 8], [4, 6, 4, 8])}, "span id 8 follows another id than in request 0"),
        ({"concurrency": 0}, "concurrency is 0; it must be 1 or more"),
        ({"colour": [1, 2, 3]}, "unknown column 'colour'"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(change: dict[str, object], says: str) -> None:
    """Each impossible value is refused with a sentence that names it."""
    given_columns = {"arrival_ns": [0, 5, 9], "prompt_tokens": [10, 12, 3], "output_tokens": [1, 2, 3], **change}
    with pytest.raises(traces.TraceError) as caught:
        make_trace(**given_columns)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_trace_cannot_be_changed() -> None:
    """Its arrays are read-only, and those of the caller stay writeable."""
    mine = np.array([0, 1], dtype=np.int64)
    trace = make_trace(mine, [1, 1], [1, 1])
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_tokens[0] = 5
    mine[0] = 1


def test_the_digest_sees_every_column_and_not_the_name() -> None:
    """Equal content has equal digests whatever it is called; a change in any column changes it."""
    base = {"arrival_ns": [0, 5], "prompt_tokens": [4, 4], "output_tokens": [1, 1]}
    same = make_trace(**base)
    changes: list[dict[str, object]] = [
        {"arrival_ns": [0, 6]},
        {"prompt_tokens": [4, 5]},
        {"output_tokens": [1, 2]},
        {"spans": ([0, 1, 2], [1, 1], [4, 4])},
        {"spans": ([0, 1, 2], [1, 2], [4, 4])},
        {"output_ids": [3, -1]},
        {"after": [-1, 0]},
        {"think_ns": [0, 1]},
        {"priority": [0, 1]},
        {"deadline": [0, 1]},
        {"tenant": [0, 1]},
        {"concurrency": 1},
        {"span_block": 4},
    ]
    digests = {make_trace(**{**base, **change}).digest() for change in changes}  # type: ignore[arg-type]
    assert len(digests | {same.digest()}) == len(changes) + 1
    assert make_trace(**base, name="other") == same


def test_head_takes_the_first_rows() -> None:
    """head(n) keeps n rows and their spans, and asking for more gives all."""
    trace = small()
    assert trace.head(1).spans(0) == [(7, 4), (8, 6)]
    assert len(trace.head(1).span_ids) == 2
    assert trace.head(99) == trace
    with pytest.raises(traces.TraceError, match="take 1 or more"):
        trace.head(0)


def test_shared_prompt_tokens_counts_what_another_row_has_too() -> None:
    """Leading tokens under an id of two rows, or of an output, are shared; those of an id of one row are not."""
    assert small().shared_prompt_tokens().tolist() == [4, 4, 0]
    turns = make_trace(
        [0, 1], [4, 9], [3, 1], spans=([0, 1, 4], [0, 0, 1, 2], [4, 4, 3, 2]), output_ids=[1, -1], after=[-1, 0]
    )
    assert turns.shared_prompt_tokens().tolist() == [4, 7]


@given(generator_specs())
def test_shared_prompt_tokens_agrees_with_comparing_rows(spec: dict[str, object]) -> None:
    """It is the longest common beginning with any other row's prompt and identified output."""
    trace = traces.generate(spec).head(12)
    whole = [
        trace.spans(row) + ([(trace.output_id(row), int(trace.output_tokens[row]))] if trace.output_id(row) else [])
        for row in range(len(trace))
    ]

    def common(a: list, b: list) -> int:
        total = 0
        for one, other in zip(a, b, strict=False):
            if one != other:
                break
            total += one[1]
        return total

    for row in range(len(trace)):
        others = (common(trace.spans(row), whole[other]) for other in range(len(trace)) if other != row)
        assert trace.shared_prompt_tokens()[row] == max(others, default=0)


def test_group_helpers() -> None:
    """Offsets, ranges and leading counts treat empty groups as empty."""
    assert offsets_of([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert ragged_ranges(np.array([10, 0, 20]), np.array([2, 0, 3])).tolist() == [10, 11, 20, 21, 22]
    offsets = np.array([0, 3, 3, 5, 6])
    flags = np.array([1, 0, 1, 1, 1, 0], dtype=bool)
    assert leading(offsets, flags).tolist() == [1, 0, 2, 0]
    assert leading_sum(offsets, flags, [5, 6, 7, 8, 9, 10]).tolist() == [5, 0, 17, 0]
    assert leading(np.array([0, 1]), np.array([True])).tolist() == [1]
