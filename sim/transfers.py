"""A link that is shared: transfers wait for nobody, and divide its bandwidth evenly among them.

A transfer alone takes its latency, what each copy costs, and bytes / bandwidth. While n are under way at once each gets
the n-th part of the bandwidth. Latency and the copies' cost are the host's and the device's: they hold up nobody else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator

import simpy

from sim.errors import SimError

__all__ = ["Link"]

_ALMOST = 1e-3
"""Bytes: less than that is left by rounding."""


class Link:
    """One direction of a link, in a simulation whose clock is in ns. A full-duplex one is two of these."""

    def __init__(
        self,
        env: simpy.Environment,
        bandwidth: float,
        latency_ns: int = 0,
        per_copy_ns: int = 0,
        name: str = "link",
    ) -> None:
        """`bandwidth` in bytes a second. Raises SimError: not above 0, or a time below 0."""
        if not (bandwidth > 0 and math.isfinite(bandwidth)):
            raise SimError(f"The {name} needs a bandwidth above 0 bytes/s, not {bandwidth}.")
        if latency_ns < 0 or per_copy_ns < 0:
            raise SimError(f"The {name} needs times of 0 ns or more, not {latency_ns} and {per_copy_ns}.")
        self.name = name
        self.bytes_moved = 0
        self.busy_ns = 0.0
        """How long something was under way."""
        self._env = env
        self._rate = bandwidth / 1e9
        self._latency_ns = latency_ns
        self._per_copy_ns = per_copy_ns
        self._served = 0.0
        """Bytes that a transfer which was there all the time would have got."""
        self._since = 0
        self._open: list[tuple[float, int, simpy.Event]] = []
        """(what `_served` is when it is done, order, its event): a heap."""
        self._number = 0
        self._alarm = 0
        """Counts plans of the next end: an older one is void."""

    @property
    def num_open(self) -> int:
        """Transfers that share the bandwidth now."""
        return len(self._open)

    def alone_ns(self, num_bytes: int, copies: int = 1) -> float:
        """What a transfer takes while there is no other."""
        return self._latency_ns + copies * self._per_copy_ns + num_bytes / self._rate

    def transfer(self, num_bytes: int, copies: int = 1) -> simpy.Process:
        """An event for the end of a transfer that starts now, in so many copies.

        Raises:
            SimError: fewer than 0 bytes, or no copy.
        """
        if num_bytes < 0 or copies < 1:
            raise SimError(f"The {self.name} moves 0 or more bytes in 1 or more copies, not {num_bytes} in {copies}.")
        return self._env.process(self._transfer(num_bytes, copies))

    def _transfer(self, num_bytes: int, copies: int) -> Generator[simpy.Event, None, None]:
        before = self._latency_ns + copies * self._per_copy_ns
        if before:
            yield self._env.timeout(before)
        if not num_bytes:
            return
        self._advance()
        done = self._env.event()
        self._number += 1
        heapq.heappush(self._open, (self._served + num_bytes, self._number, done))
        self.bytes_moved += num_bytes
        self._plan()
        yield done

    def _advance(self) -> None:
        """What was moved up to now."""
        now = int(self._env.now)
        if self._open:
            self._served += (now - self._since) * self._rate / len(self._open)
            self.busy_ns += now - self._since
        self._since = now

    def _plan(self) -> None:
        """See to the next end, if nothing changes before."""
        self._alarm += 1
        if not self._open:
            self._served = 0.0  # nobody's bytes are counted from it
            return
        left = max(0.0, self._open[0][0] - self._served)
        self._env.process(self._end(math.ceil(left * len(self._open) / self._rate), self._alarm))

    def _end(self, delay: int, alarm: int) -> Generator[simpy.Event, None, None]:
        yield self._env.timeout(delay)
        if alarm != self._alarm:
            return
        self._advance()
        while self._open and self._open[0][0] <= self._served + _ALMOST:
            heapq.heappop(self._open)[2].succeed()
        self._plan()
