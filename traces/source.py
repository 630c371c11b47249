"""Hands out a trace's requests in time, for the simulator and for the real engine's driver alike. It reads no clock."""

from __future__ import annotations

import heapq
import math

import numpy as np

from traces.errors import TraceError
from traces.schema import NO_ROW, Trace, offsets_of

__all__ = ["TraceSource"]


class TraceSource:
    """Knows which request arrives when.

    Rows without `after` arrive at their time (open loop), or as soon as one of `concurrency` clients is idle (closed
    loop). A row with `after` arrives `think_ns` after that row was reported finished; in a closed loop it keeps its
    client meanwhile. Every row that was handed out has to be reported through `finished`, also when it was rejected or
    aborted: otherwise its successors never come.

    `time_scale` stretches arrivals and pauses: 2.0 halves the rate.
    """

    def __init__(self, trace: Trace, time_scale: float = 1.0) -> None:
        if not (math.isfinite(time_scale) and time_scale > 0):
            raise TraceError(f"time scale {time_scale} is not possible; it must be above 0")
        arrival, think = trace.arrival_ns, trace.think_ns
        if time_scale != 1.0:
            arrival = np.rint(arrival * time_scale).astype(np.int64)
            think = np.rint(think * time_scale).astype(np.int64)
        fresh = np.flatnonzero(trace.after == NO_ROW)
        self._fresh: list[int] = fresh.tolist()
        self._fresh_ns: list[int] = arrival[fresh].tolist()
        self._next_fresh = 0
        self._think: list[int] = think.tolist()
        self._next_of, self._next_offsets = _successors(trace)
        self._released: list[tuple[int, int]] = []  # heap of (time, row): ties go by row
        self._concurrency = trace.concurrency
        self._busy = 0  # clients with a request that is outstanding or about to come
        self.remaining = len(trace)
        """Requests not handed out yet."""
        self._admit_clients(0)

    def next_ns(self) -> int | None:
        """When the next request that is known by now arrives; None if that depends on a finish, or all have arrived."""
        released = self._released[0][0] if self._released else None
        if self._concurrency is not None or self._next_fresh == len(self._fresh):
            return released
        fresh = self._fresh_ns[self._next_fresh]
        return fresh if released is None or fresh < released else released

    def due(self, now: int) -> list[tuple[int, int]]:
        """(row, arrival_ns) of each request that has arrived by `now`, by time, then row; each is handed out once."""
        out: list[tuple[int, int]] = []
        released, fresh_ns = self._released, self._fresh_ns
        fresh_end = 0 if self._concurrency is not None else len(self._fresh)
        while True:
            at = self._next_fresh
            fresh = (fresh_ns[at], self._fresh[at]) if at < fresh_end else None
            if released and (fresh is None or released[0] < fresh):
                if released[0][0] > now:
                    break
                when, row = heapq.heappop(released)
            elif fresh is not None and fresh[0] <= now:
                when, row = fresh
                self._next_fresh += 1
            else:
                break
            out.append((row, when))
        self.remaining -= len(out)
        return out

    def finished(self, row: int, now: int) -> None:
        """Row `row` ended at `now`, however it ended: releases the turns after it, or lets the next client come."""
        lo, hi = self._next_offsets[row], self._next_offsets[row + 1]
        for successor in self._next_of[lo:hi]:
            heapq.heappush(self._released, (now + self._think[successor], successor))
        if self._concurrency is not None:
            self._busy += hi - lo - 1
            self._admit_clients(now)

    def _admit_clients(self, now: int) -> None:
        if self._concurrency is None:
            return
        while self._busy < self._concurrency and self._next_fresh < len(self._fresh):
            heapq.heappush(self._released, (now, self._fresh[self._next_fresh]))
            self._next_fresh += 1
            self._busy += 1


def _successors(trace: Trace) -> tuple[list[int], list[int]]:
    """Rows sorted by what they wait for, and where each row's successors start in that list."""
    waiting = np.flatnonzero(trace.after != NO_ROW)
    order = waiting[np.argsort(trace.after[waiting], kind="stable")]
    counts = np.bincount(trace.after[waiting], minlength=len(trace))
    return order.tolist(), offsets_of(counts).tolist()
