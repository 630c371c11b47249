"""Where every block was after each step, as changes from step to step: `BlockRecorder` writes them while a scheduler is
at work, `BlockMap` expands them again.

A row is (step, event, request, index, block), and means

    SET       entry `index` of the block table of `request` is `block` from now on; tables grow at their end
    CUT       the table of `request` has only its first `index` entries left; 0: it holds nothing
    CACHED    `block`, which nobody holds, keeps content that a prefix hit could use (`index` 1), or does not (0)
    HELD      `index` references to `block` are in no table: transfers hold them
    RESERVED  the entries of `request` from `index` on carry no token yet; -1: all carry one

`step` is the number of the plan that decided it, as in the table of steps; what happened between two plans is listed
with the later one, and what happened after the last with the number that would follow. A block that enters a table is
no longer CACHED, and one that leaves all tables is not CACHED unless a row says so; neither is listed. An event that
does not concern a request, an index or a block has -1 there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from engine.core.scheduler import Scheduler

__all__ = ["CACHED", "CUT", "DEFAULT_LIMIT", "EVENTS", "HELD", "RESERVED", "SET", "BlockMap", "BlockRecorder", "Change"]

SET, CUT, CACHED, HELD, RESERVED = range(5)
EVENTS = ("set", "cut", "cached", "held", "reserved")
"""Names of the events by their number."""
DEFAULT_LIMIT = 4_000_000
"""Changes that are recorded where no other number is named: about 160 MB in memory, far less on disk."""


Change = tuple[int, int, int, int]
"""One row without its step: event, request, index, block."""


class BlockMap:
    """Where every block of a pool is at one moment. Starts as an empty pool."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tables: dict[int, list[int]] = {}
        """The block table of every request that holds blocks."""
        self.owners = np.zeros(num_blocks, dtype=np.int32)
        """In how many tables each block is."""
        self.cached = np.zeros(num_blocks, dtype=np.uint8)
        """1: free, with content that a prefix hit could use."""
        self.held: dict[int, int] = {}
        """References that are in no table, of the blocks that have any."""
        self.reserved: dict[int, int] = {}
        """The first entry without a token, of the requests that have such entries."""

    def apply(self, change: Change) -> None:
        """One change; in the order in which they are listed."""
        event, request, index, block = change
        if event == SET:
            table = self.tables.setdefault(request, [])
            if index == len(table):
                table.append(block)
            else:
                self.owners[table[index]] -= 1
                table[index] = block
            self.owners[block] += 1
            self.cached[block] = 0
        elif event == CUT:
            table = self.tables[request]
            for left in table[index:]:
                self.owners[left] -= 1
            del table[index:]
            if not table:
                del self.tables[request]
                self.reserved.pop(request, None)
        elif event == CACHED:
            self.cached[block] = index
        elif event == HELD:
            self.held.pop(block, None)
            if index:
                self.held[block] = index
        elif event == RESERVED:
            self.reserved.pop(request, None)
            if index >= 0:
                self.reserved[request] = index
        else:
            raise ValueError(f"there is no block event {event}")

    def refs(self, block: int) -> int:
        """References to a block, from tables and others."""
        return int(self.owners[block]) + self.held.get(block, 0)

    def follow(
        self,
        tables: Iterable[tuple[int, Sequence[int], int]],
        held: dict[int, int],
        kept: np.ndarray[Any, np.dtype[np.uint8]],
    ) -> list[Change]:
        """The changes from here to another state, which are applied.

        Args:
            tables: (request, its block table, how many of its entries carry a token) of all that hold blocks.
            held: see the attribute.
            kept: uint8 [num_blocks], 1 for every block whose content could serve a hit once it is free; what it says
                of blocks in use does not matter.
        """
        found: list[Change] = []
        mine = self.tables
        sets: list[Change] = []
        marks: list[Change] = []
        seen = set()
        for request, table, used in tables:
            if not table:
                continue
            seen.add(request)
            old = mine.get(request, [])
            if old != table:
                common = len(old)
                if common > len(table):
                    common = len(table)
                    found.append((CUT, request, common, -1))
                sets.extend((SET, request, i, table[i]) for i in range(common) if old[i] != table[i])
                sets.extend((SET, request, i, table[i]) for i in range(common, len(table)))
            first = used if used < len(table) else -1
            if self.reserved.get(request, -1) != first:
                marks.append((RESERVED, request, first, -1))
        found.extend((CUT, request, 0, -1) for request in mine if request not in seen)
        found += sets
        found += marks
        for block in self.held.keys() | held.keys():
            if self.held.get(block, 0) != held.get(block, 0):
                found.append((HELD, -1, held.get(block, 0), block))
        for change in found:
            self.apply(change)
        free = self.owners == 0
        if held:
            free[list(held)] = False
        cached = np.where(free, kept, 0)
        for block in np.flatnonzero(cached != self.cached).tolist():
            found.append((CACHED, -1, int(cached[block]), block))
        self.cached = cached.astype(np.uint8)
        return found


class BlockRecorder:
    """Writes down what changes in the tables and the pool of a scheduler, from an empty pool on.

    It compares all tables with those before at every plan, so a run that records takes longer; one that does not record
    pays nothing. Runs of equal steps are not taken at once while it records (see `drive`).
    """

    def __init__(self, scheduler: Scheduler, limit: int = DEFAULT_LIMIT) -> None:
        self._scheduler = scheduler
        self._map = BlockMap(scheduler.manager.pool.num_blocks)
        self._size = scheduler.config.block_size
        self._limit = limit
        self._rows = array("q")
        self.last_step = 0
        """The last step whose changes are all there."""
        self.truncated = False
        """Whether the limit was reached: later steps are not recorded."""

    def planned(self, seq: int) -> None:
        """Plan `seq` was made; to be called before the next is."""
        if self.truncated:
            return
        scheduler = self._scheduler
        pool = scheduler.manager.pool
        newest = scheduler.last_seq
        size = self._size
        tables = [
            (
                request.id,
                scheduler.manager.owned(request),
                -(-(request.base + newest if request.in_cohort else request.sched) // size),
            )
            for request in scheduler._running
        ]
        before = self._map
        kept = np.frombuffer(pool.kept_flags(), dtype=np.uint8)
        found = before.follow(tables, self._held(tables), kept)
        if len(self._rows) // 5 + len(found) > self._limit:
            self.truncated = True
            return
        for change in found:
            self._rows.extend((seq, *change))
        self.last_step = seq

    def _held(self, tables: Iterable[tuple[int, Sequence[int], int]]) -> dict[int, int]:
        """References of the pool that are in no table. Transfers have such; without any, the sums agree."""
        counts = self._scheduler.manager.pool.all_refs()
        if sum(counts) == self._scheduler.manager.num_table_blocks:
            return {}
        for _, table, _ in tables:
            for block in table:
                counts[block] -= 1
        return {block: count for block, count in enumerate(counts) if count}

    def ended(self) -> None:
        """Nothing more will be planned: what has changed since the last plan is listed too."""
        self.planned(self._scheduler.last_seq + 1)

    def table(self) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The columns step, event, request, index and block: int64 [changes]."""
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 5)
        return {name: rows[:, i].copy() for i, name in enumerate(("step", "event", "request", "index", "block"))}
