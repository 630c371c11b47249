"""Handing requests out in time."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_strategies import generator_specs

import traces


def serve(trace: traces.Trace, service_ns: int = 10, time_scale: float = 1.0) -> list[tuple[int, int, int]]:
    """(row, arrival, finish) in the order of arrival, when every request takes `service_ns`."""
    source = trace.source(time_scale)
    served: list[tuple[int, int, int]] = []
    running: list[tuple[int, int]] = []
    while source.remaining or running:
        arrival = source.next_ns()
        if running and (arrival is None or running[0][0] <= arrival):
            now, row = heapq.heappop(running)
            source.finished(row, now)
            continue
        assert arrival is not None, "requests are left, none is running and none will come"
        for row, when in source.due(arrival):
            assert when == arrival
            served.append((row, when, when + service_ns))
            heapq.heappush(running, (when + service_ns, row))
    assert source.next_ns() is None
    return served


def test_open_loop_arrives_at_its_times() -> None:
    """Rows come at their arrivals, ties by row; what is due is handed out once, with its own time."""
    trace = traces.make_trace([0, 7, 7, 20], [1] * 4, [1] * 4)
    source = trace.source()
    assert source.next_ns() == 0
    assert source.due(-1) == []
    assert source.due(7) == [(0, 0), (1, 7), (2, 7)]
    assert source.due(7) == []
    assert (source.next_ns(), source.remaining) == (20, 1)
    assert source.due(10**9) == [(3, 20)]
    assert (source.next_ns(), source.remaining) == (None, 0)


def test_a_turn_comes_after_the_one_before_and_a_pause() -> None:
    """A row with `after` is unknown until that row has finished, then comes after its pause."""
    trace = traces.make_trace([0, 5, 6], [1] * 3, [1] * 3, after=[-1, 0, -1], think_ns=[0, 5, 0])
    source = trace.source()
    assert source.due(100) == [(0, 0), (2, 6)]
    assert source.next_ns() is None
    source.finished(0, 200)
    assert source.next_ns() == 205
    assert source.due(205) == [(1, 205)]


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    """`concurrency` requests come at once, and each finish brings the next."""
    trace = traces.make_trace([0] * 5, [1] * 5, [1] * 5, concurrency=2)
    source = trace.source()
    assert source.due(0) == [(0, 0), (1, 0)]
    assert source.next_ns() is None
    source.finished(1, 30)
    assert source.due(30) == [(2, 30)]
    source.finished(0, 40)
    source.finished(2, 40)
    assert source.due(40) == [(3, 40), (4, 40)]
    source.finished(3, 50)
    assert (source.next_ns(), source.remaining) == (None, 0)


def test_a_session_keeps_its_client_while_it_pauses() -> None:
    """In a closed loop, the next session starts when a session ends, not when one of its turns does."""
    trace = traces.make_trace([0] * 3, [1] * 3, [1] * 3, after=[-1, 0, -1], think_ns=[0, 50, 0], concurrency=1)
    assert serve(trace) == [(0, 0, 10), (1, 60, 70), (2, 70, 80)]


@given(generator_specs(), st.integers(0, 10**9))
def test_every_row_comes_once_in_every_kind_of_trace(spec: dict[str, object], service_ns: int) -> None:
    """Each row arrives exactly once, in order of time, never before its predecessor's finish plus the pause, and a
    closed loop never has more outstanding than its concurrency."""
    trace = traces.generate(spec)
    served = serve(trace, service_ns)
    assert sorted(row for row, _, _ in served) == list(range(len(trace)))
    times = [arrival for _, arrival, _ in served]
    assert times == sorted(times)
    finish = {row: end for row, _, end in served}
    for row, arrival, _ in served:
        if trace.after[row] >= 0:
            assert arrival == finish[int(trace.after[row])] + trace.think_ns[row]
        elif trace.concurrency is None:
            assert arrival == trace.arrival_ns[row]
    if trace.concurrency is not None and service_ns:
        events = sorted([(a, 1) for _, a, _ in served] + [(e, -1) for _, _, e in served])
        assert np.cumsum([change for _, change in events]).max() <= trace.concurrency


def test_time_scale_stretches_arrivals_and_pauses() -> None:
    """Twice the scale is half the rate; the pauses of sessions stretch too."""
    trace = traces.make_trace([0, 5, 8], [1] * 3, [1] * 3, after=[-1, 0, -1], think_ns=[0, 5, 0])
    assert serve(trace, time_scale=2.0) == [(0, 0, 10), (2, 16, 26), (1, 20, 30)]
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(traces.TraceError, match="must be above 0"):
            trace.source(wrong)
