"""The decode cohort: all running requests that do one token a step, advanced together.

Members are not touched from step to step. With S the number of the newest plan and D that of the newest completed
plan, a member has

    sched   = base + S                  (base and floor are fixed when it joins)
    known   = base + max(D, floor) + 1
    pending = S - max(D, floor)

Only members at a block boundary need work in a step. They are found by position modulo block size: the member writes
position base + S - 1 in plan S, so it needs a block in the plans S = 1 - base (mod block size), and fills one in the
plans S = -base (mod block size).
"""

from __future__ import annotations

import heapq
from operator import attrgetter

from engine.core.request import Request
from engine.core.types import NO_LIMIT

__all__ = ["DecodeCohort", "by_key"]


by_key = attrgetter("key")
"""Sorts requests by their place in the policy's order."""


class DecodeCohort:
    """Members by phase, and a calendar of the plans in which they reach their cap."""

    def __init__(self, block_size: int, lookahead: int) -> None:
        self.num = 0
        self.context_tokens = 0
        """Sum of the members' sched."""
        self.block_size = block_size
        self._lookahead = lookahead
        self._cross: list[dict[int, Request]] = [{} for _ in range(block_size)]
        self._fill: list[dict[int, Request]] = [{} for _ in range(block_size)]
        self.num_sharing = 0
        """Members that publish blocks of generated tokens while they run."""
        self._caps: dict[int, dict[int, Request]] = {}
        self._cap_heap: list[int] = []

    def join(self, request: Request, seq: int) -> None:
        """The request, whose newest row is in plan `seq`, decodes one token in each plan after it."""
        request.base = base = request.sched - seq
        request.join_seq = seq
        request.floor = seq - request.pending
        request.in_cohort = True
        self.num += 1
        self.context_tokens += request.sched
        size = self.block_size
        self._cross[(1 - base - self._lookahead) % size][request.id] = request
        if request.publishes_output:
            self._fill[-base % size][request.id] = request
            self.num_sharing += 1
        cap_seq = request.cap + request.num_prompt - 1 - base
        due = self._caps.get(cap_seq)
        if due is None:
            due = self._caps[cap_seq] = {}
            heapq.heappush(self._cap_heap, cap_seq)
        due[request.id] = request

    def leave(self, request: Request, seq: int, done: int) -> None:
        """Take a member out and bring its own counters up to date, as of newest plan `seq`, completed `done`."""
        base = request.base
        request.in_cohort = False
        request.sched = base + seq
        told = max(done, request.floor)
        request.known = base + told + 1
        request.pending = seq - told
        request.sample_seq = seq
        self.num -= 1
        self.context_tokens -= request.sched
        size = self.block_size
        del self._cross[(1 - base - self._lookahead) % size][request.id]
        if request.publishes_output:
            del self._fill[-base % size][request.id]
            self.num_sharing -= 1
        cap_seq = request.cap + request.num_prompt - 1 - base
        due = self._caps[cap_seq]
        del due[request.id]
        if not due:
            del self._caps[cap_seq]

    def crossing(self, seq: int) -> list[Request]:
        """Members that need a block in plan `seq`, in order."""
        return self._sorted(self._cross[seq % self.block_size])

    def cross(self, seq: int, into: list[Request]) -> None:
        """Append the members that need a block in plan `seq`, in order."""
        bucket = self._cross[seq % self.block_size]
        if not bucket:
            return
        if len(bucket) == 1:
            into.extend(bucket.values())
        else:
            into.extend(self._sorted(bucket))

    def num_crossing(self, seq: int) -> int:
        return len(self._cross[seq % self.block_size])

    def filling(self, seq: int) -> list[Request]:
        """Members that fill a block in plan `seq` and publish it at once, in order."""
        return self._sorted(self._fill[seq % self.block_size])

    def phase_counts(self) -> list[int]:
        """How many members need a block in the plans with seq = 0, 1, ... (mod block size)."""
        return [len(bucket) for bucket in self._cross]

    def capped(self, seq: int) -> list[Request]:
        """Members that sample their last token in plan `seq`, in order."""
        due = self._caps.get(seq)
        return [] if due is None else self._sorted(due)

    def next_cap(self) -> int:
        """The first plan in which a member samples its last token."""
        heap = self._cap_heap
        while heap and heap[0] not in self._caps:
            heapq.heappop(heap)
        return heap[0] if heap else NO_LIMIT

    def advance(self, plans: int) -> None:
        """So many plans were decided, each with one token for every member."""
        self.context_tokens += self.num * plans

    def turns_within(self, seq: int, free_blocks: int) -> int:
        """How many plans after `seq` the free blocks suffice for, if membership stays."""
        if not self.num:
            return NO_LIMIT
        cycles, left = divmod(free_blocks, self.num)
        turns = cycles * self.block_size
        for step in range(1, self.block_size + 1):
            left -= len(self._cross[(seq + step) % self.block_size])
            if left < 0:
                break
            turns += 1
        return turns

    def members(self) -> list[Request]:
        """All members (for checks; unordered)."""
        return [request for bucket in self._cross for request in bucket.values()]

    @staticmethod
    def _sorted(bucket: dict[int, Request]) -> list[Request]:
        requests = list(bucket.values())
        if len(requests) > 1:
            requests.sort(key=by_key)
        return requests
