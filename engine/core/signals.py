"""What limits a run: why the waiting wait, and which work is lost and done again, step by step."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from engine.core.scheduler import Scheduler

__all__ = ["SIGNAL_COLUMNS", "Signals"]

SIGNAL_COLUMNS = (
    "waiting_for_tokens",
    "waiting_for_sequences",
    "waiting_for_kv",
    "waiting_for_policy",
    "preempted_tokens",
    "recomputed_tokens",
    "zero_progress",
)
"""Columns of the steps table.

waiting_for_*       Requests that wait behind one that was not admitted in this step, by what stopped that one: the
                    step's budget of tokens, the limit of sequences, KV blocks (those that a watermark or a reservation
                    keeps included), or a policy (of admission or of batching, or same_step `defer`). All of
                    `num_waiting` count under one of the four, as nobody overtakes the one that is stopped.
preempted_tokens    Tokens whose KV blocks were taken from running requests before this step and since the step before.
recomputed_tokens   Of `prefill_tokens`, those that the request had had in KV before it was preempted.
zero_progress       1 if the step computed nothing that was not computed before (it had no rows, or only such tokens).
"""


class Signals:
    """Collects them beside the rows of the steps table: 16 bytes for a row in which somebody waits, or tokens are lost
    or recomputed, and none for others."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waits = array("q")
        """(row, why) of rows that have somebody waiting."""
        self._lost = array("q")
        """(row, preempted, recomputed) of rows that have either."""
        self._preempted = 0
        self._recomputed = 0

    def planned(self, row: int) -> None:
        """Row `row` of the table was made of the newest plan, or of a run that repeats it."""
        scheduler = self._scheduler
        if scheduler.waits_for:
            self._waits.append(row)
            self._waits.append(scheduler.waits_for)
        preempted = scheduler.num_preempted_tokens - self._preempted
        recomputed = scheduler.num_recomputed_tokens - self._recomputed
        if preempted or recomputed:
            self._preempted += preempted
            self._recomputed += recomputed
            self._lost.append(row)
            self._lost.append(preempted)
            self._lost.append(recomputed)

    def columns(self, table: dict[str, Any]) -> dict[str, Any]:
        """The columns for the rows of the steps table, of which `table` has the others: int64[rows] each."""
        num = len(table["step"])
        waits = np.zeros(num, dtype=np.int64)
        pairs = np.array(self._waits, dtype=np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 0] < num]
        waits[pairs[:, 0]] = pairs[:, 1]
        lost = np.array(self._lost, dtype=np.int64).reshape(-1, 3)
        lost = lost[lost[:, 0] < num]
        found: dict[str, Any] = {
            name: np.where(waits == why, table["num_waiting"], 0) for why, name in enumerate(SIGNAL_COLUMNS[:4], 1)
        }
        for place, name in enumerate(SIGNAL_COLUMNS[4:6], 1):
            found[name] = np.zeros(num, dtype=np.int64)
            found[name][lost[:, 0]] = lost[:, place]
        new = table["num_decodes"] + table["prefill_tokens"] - found["recomputed_tokens"]
        found["zero_progress"] = (new == 0).astype(np.int64)
        return found
