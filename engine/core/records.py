"""What happened, in columns: one row a request, one row a step or run of equal decode steps.

The engine and the simulator fill the same two tables, and everything that is reported later is computed from them.
Times are integer ns, memory is in slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, SupportsIndex

import numpy as np

from engine.core.blockmap import BlockRecorder
from engine.core.scheduler import Scheduler
from engine.core.signals import Signals
from engine.core.types import Finish, PlanItem, PrefixRow, RequestSpec, StepEvents, StepOutcome, StepPlan, Usage

__all__ = ["REQUEST_COLUMNS", "STEP_COLUMNS", "DecisionLog", "Lists", "Recorder"]

REQUEST_COLUMNS = (
    "request",
    "row",
    "arrival_ns",
    "queued_ns",
    "admitted_ns",
    "first_token_ns",
    "finish_ns",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "cached_tokens",
    "num_preemptions",
    "priority",
    "tenant",
    "outcome",
    "reason",
)

STEP_COLUMNS = (
    "step",
    "num_steps",
    "start_ns",
    "num_decodes",
    "decode_context_tokens",
    "num_prefills",
    "prefill_tokens",
    "prefill_context_work",
    "num_waiting",
    "num_running",
    "admitted",
    "preempted",
    "swap_out_blocks",
    "swap_in_blocks",
    "copied_blocks",
    "num_transfers",
    "held",
    "tail",
    "reserved_may",
    "reserved_cannot",
    "external",
    "transfer",
    "cached",
    "free",
    "shared",
)
"""Columns of integers; `end_ns`, `finished` and the lists of runs are added on the way out."""

_OUTCOMES = {"": 0, "length": 1, "stop": 2, "abort": 3, "rejected": 4, "no-memory": 5}
_OUTCOME_NAMES = np.array(["unfinished", "length", "stop", "aborted", "rejected", "no-memory"])


# Rows lie one after another in one flat array: a row is packed and appended at once, which costs a tenth of appending
# its numbers one by one.
_NUM_REQUEST = len(REQUEST_COLUMNS) - 2
_NUM_STEP = len(STEP_COLUMNS)
_PACK_REQUEST = Struct(f"{_NUM_REQUEST}q").pack
_PACK_STEP = Struct(f"{_NUM_STEP}q").pack
_ADMITTED = REQUEST_COLUMNS.index("admitted_ns")
_FIRST = REQUEST_COLUMNS.index("first_token_ns")
_FINISH = REQUEST_COLUMNS.index("finish_ns")
_OUTPUT = REQUEST_COLUMNS.index("output_tokens")
_CACHED = REQUEST_COLUMNS.index("cached_tokens")
_PREEMPTIONS = REQUEST_COLUMNS.index("num_preemptions")


class Lists:
    """A column of lists of integers: `column[i]` is the list of row i, as an int64 array."""

    def __init__(self, lengths: np.ndarray[Any, np.dtype[np.int64]], values: np.ndarray[Any, np.dtype[np.int64]]):
        """`values`: all lists one after another, of these lengths."""
        self.offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        """Where each list begins in `values`, and where the last ends."""
        np.cumsum(lengths, out=self.offsets[1:])
        self.values = values

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: SupportsIndex) -> np.ndarray[Any, np.dtype[np.int64]]:
        first = int(row)  # NumPy's integers, too: a compiled function would refuse them as int
        return self.values[self.offsets[first] : self.offsets[first + 1]]

    def __iter__(self) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        for row in range(len(self)):
            yield self[row]


class _ListColumn:
    """Lists of the few rows that have one, while they are collected."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._lengths = array("q")
        self._values = array("q")

    def put(self, row: int, values: Sequence[int]) -> None:
        self._rows.append(row)
        self._lengths.append(len(values))
        self._values.extend(values)

    def put_takes(self, row: int, marks: Sequence[int], most: int) -> None:
        """The differences of `marks`, the first `most` of them at most."""
        self._rows.append(row)
        values = self._values
        before = num = 0
        for mark in marks:
            values.append(mark - before)
            before = mark
            num += 1
            if num == most:
                break
        self._lengths.append(num)

    def column(self, num_rows: int, most: np.ndarray[Any, np.dtype[np.int64]] | None = None) -> Lists:
        """The column of a table of `num_rows` rows; `most`: the longest list that each row may have."""
        rows = np.array(self._rows, dtype=np.int64)
        given = np.array(self._lengths, dtype=np.int64)
        values = np.array(self._values, dtype=np.int64)
        kept = np.where(rows < num_rows, given, 0)
        if most is not None and len(rows):
            kept = np.minimum(kept, most[np.minimum(rows, num_rows - 1)]) if num_rows else kept
        if (kept < given).any():
            within = np.arange(len(values)) - np.repeat(np.cumsum(given) - given, given)
            values = values[within < np.repeat(kept, given)]
        lengths = np.zeros(num_rows, dtype=np.int64)
        inside = rows < num_rows
        lengths[rows[inside]] = kept[inside]
        return Lists(lengths, values)


class Recorder:
    """Collects the two tables in memory, in flat arrays: about 120 bytes a request and 200 a step or run."""

    def __init__(self, scheduler: Scheduler, blocks: BlockRecorder | None = None) -> None:
        self.blocks = blocks
        """Where every block was, if somebody wants to know."""
        self._scheduler = scheduler
        self._block_size = scheduler.config.block_size
        self._rows = array("q")
        """A row a request: REQUEST_COLUMNS but for the last two."""
        self._outcome = array("b")
        self._reasons: dict[int, str] = {}
        self._place: dict[int, int] = {}
        """Where in `_rows` the row of a live request begins."""
        self._steps = array("q")
        self._num_steps = 0
        """Rows in `_steps`."""
        self._ends = array("q")
        """End of each plan, by its number."""
        self._finished = array("q")
        """(plan, how many finished) where any did."""
        self._run_takes = _ListColumn()
        self._run_cached = _ListColumn()
        self._run_reserved = (_ListColumn(), _ListColumn())
        self._gaps = array("q")
        self._lost = 0
        self._signals = Signals(scheduler)

    @property
    def prefix_rows(self) -> list[PrefixRow] | None:
        """What each prompt found in the prefix cache, where the scheduler keeps account of it (`prefix_stats`)."""
        stats = self._scheduler.prefix_stats
        return None if stats is None else stats.rows()

    # ---- requests ----

    def added(self, id: int, row: int, spec: RequestSpec, now: int) -> None:
        self._place[id] = len(self._rows)
        self._new_row(id, row, spec, now, 0)

    def rejected(self, row: int, spec: RequestSpec, now: int, reason: str) -> None:
        self._reasons[len(self._outcome)] = reason
        self._new_row(-1, row, spec, now, _OUTCOMES["rejected"])

    def _new_row(self, id: int, row: int, spec: RequestSpec, now: int, outcome: int) -> None:
        self._rows.frombytes(
            _PACK_REQUEST(
                id,
                row,
                spec.arrival,
                now,
                -1,
                -1,
                -1,
                spec.num_prompt_tokens,
                0,
                spec.max_tokens,
                0,
                0,
                spec.priority,
                spec.tenant,
            )
        )
        self._outcome.append(outcome)

    def forked(self, parent: int, child: int) -> None:
        """A sequence begins with the tokens of another one: a row of its own, of the same request of the sender's."""
        rows = self._rows
        place = self._place[parent]
        self._place[child] = begin = len(rows)
        rows.extend(rows[place : place + _NUM_REQUEST])
        rows[begin] = child
        rows[begin + _FIRST] = -1
        rows[begin + _OUTPUT] = 0
        rows[begin + _PREEMPTIONS] = 0
        self._outcome.append(0)

    def ended(self, finish: Finish, now: int) -> None:
        place = self._place.pop(finish.request)
        rows = self._rows
        rows[place + _FINISH] = now
        rows[place + _OUTPUT] = finish.num_output_tokens
        rows[place + _PREEMPTIONS] = finish.num_preemptions
        self._outcome[place // _NUM_REQUEST] = _OUTCOMES[finish.reason]

    # ---- steps ----

    def planned(self, plan: StepPlan) -> None:
        """A plan was made; to be called before the next is."""
        if not plan.runs:
            self._lost += len(plan.preempted)  # counted with the next plan that runs
            return
        if self.blocks is not None:
            self.blocks.planned(plan.seq)
        tokens = work = 0
        for item in plan.prefills:
            num = item.num_tokens
            tokens += num
            work += num * (2 * item.start + num + 1)
        if plan.admitted or plan.loading:
            self._note_admitted(plan)
        scheduler = self._scheduler
        decodes = plan.decodes
        held, tail, may, cannot, external, transfer, cached, free, shared = scheduler.usage_row()
        self._steps.frombytes(
            _PACK_STEP(
                plan.seq,
                1,
                plan.now,
                decodes.num,
                decodes.context_tokens,
                len(plan.prefills),
                tokens,
                work // 2,
                scheduler.num_waiting,
                scheduler.num_running,
                len(plan.admitted),
                len(plan.preempted) + self._lost,
                len(plan.swap_out),
                len(plan.swap_in),
                len(plan.copies),
                len(plan.transfers),
                held,
                tail,
                may,
                cannot,
                external,
                transfer,
                cached,
                free,
                shared,
            )
        )
        self._signals.planned(self._num_steps)
        self._num_steps += 1
        self._lost = 0

    def _note_admitted(self, plan: StepPlan) -> None:
        rows = self._rows
        for request, tokens in plan.loading:
            place = self._place[request]
            if rows[place + _ADMITTED] < 0:
                rows[place + _ADMITTED] = plan.now
                rows[place + _CACHED] = tokens
        admitted = plan.admitted if len(plan.admitted) < 4 else set(plan.admitted)
        for item in plan.prefills:
            if item.epoch == 0 and item.request in admitted:
                place = self._place[item.request]
                rows[place + _ADMITTED] = plan.now
                rows[place + _CACHED] = item.start

    def completed(self, plan: StepPlan, end: int, events: StepEvents) -> None:
        self._ends.append(end)
        for parent, child in events.forked:
            self.forked(parent, child)
        for id in events.first_tokens:
            self._rows[self._place[id] + _FIRST] = end
        for _, before in events.resumed:
            self._gaps.append(end - self._ends[before - 1])
        if events.finished:
            for finish in events.finished:
                self.ended(finish, end)
            self._finished.extend((plan.seq, len(events.finished)))

    def advancing(self, turns: int) -> tuple[Usage, list[int], int, int]:
        """To be called before `Scheduler.advance`; the answer goes to `advanced`."""
        scheduler = self._scheduler
        takes = scheduler.num_blocks_taken(min(turns, self._block_size))
        return scheduler.usage(), takes, scheduler.num_waiting, scheduler.num_running

    def advanced(
        self, before: tuple[Usage, list[int], int, int], ends: Sequence[int], plans: Sequence[StepPlan]
    ) -> None:
        """A run of equal steps was decided, and as many older ones have ended, at `ends`."""
        usage, takes, waiting, running = before
        turns = len(ends)
        size = self._block_size
        last = plans[-1]
        num = last.decodes.num
        first = last.seq - turns + 1
        kept = self._scheduler.run_kept_free
        cached = kept[0] * size
        new = takes[0] * size
        may, cannot = usage.reserved_may, usage.reserved_cannot
        drawn = 0  # slots of blocks that were reserved, and that the first step puts into tables
        beyond = self._scheduler.run_unreachable
        if beyond:
            drawn = new
            may, cannot = may + cannot - drawn - beyond[0], beyond[0]
        place = self._num_steps
        self._signals.planned(place)
        self._num_steps += 1
        self._steps.frombytes(
            _PACK_STEP(
                first,
                turns,
                ends[0],
                num,
                last.decodes.context_tokens - num * (turns - 1),
                0,
                0,
                0,
                waiting,
                running,
                0,
                0,
                0,
                0,
                0,
                0,
                usage.held + num,
                usage.tail + new - num,
                may,
                cannot,
                usage.external,
                usage.transfer,
                cached,
                usage.free + usage.cached - (new - drawn) - cached,
                usage.shared,
            )
        )
        if turns > 1:
            self._run_takes.put(place, takes)
            if kept[-1] != kept[0]:
                self._run_cached.put(place, [k * size for k in kept])
            if beyond:
                reserved = may + cannot + drawn
                mays: list[int] = []
                for step, past in enumerate(beyond):
                    reserved -= takes[step % size] * size
                    mays.append(reserved - past)
                self._run_reserved[0].put(place, mays)
                self._run_reserved[1].put(place, beyond)
        self._ends.extend(ends)

    def glided(
        self,
        first: int,
        start: int,
        ends: Sequence[int],
        num: int,
        context: int,
        before: tuple[int, ...],
        marks: Sequence[int],
        kept: Sequence[int],
    ) -> None:
        """A run of steps that were decided and have ended (see glide.py).

        Args:
            first, start: number of the first, and when it was decided, in ns.
            ends: when each ended, in ns.
            num, context: rows of each, and cached tokens of the first.
            before: Scheduler.usage_row() before the first.
            marks: blocks that were taken up to each.
            kept: kept blocks that were free after each decision.
        """
        held, tail, may, cannot, external, transfer, cached, free, shared = before
        turns = len(ends)
        size = self._block_size
        new = marks[0] * size
        now_cached = kept[0] * size
        self._steps.frombytes(
            _PACK_STEP(
                first,
                turns,
                start,
                num,
                context,
                0,
                0,
                0,
                0,
                num,
                0,
                self._lost,
                0,
                0,
                0,
                0,
                held + num,
                tail + new - num,
                may,
                cannot,
                external,
                transfer,
                now_cached,
                free + cached - new - now_cached,
                shared,
            )
        )
        self._lost = 0
        self._signals.planned(self._num_steps)
        if turns > 1:
            place = self._num_steps
            self._run_takes.put_takes(place, marks, size)
            if kept[-1] != kept[0]:
                self._run_cached.put(place, [k * size for k in kept])
        self._num_steps += 1
        self._ends.extend(ends)

    def finished_in(self, seq: int, finished: Sequence[Finish], now: int) -> None:
        """Who finished in step `seq`, which ended at `now`."""
        for finish in finished:
            self.ended(finish, now)
        self._finished.append(seq)
        self._finished.append(len(finished))

    # ---- out ----

    def requests(self) -> dict[str, Any]:
        """The table of requests, in the order in which they came: name -> array (or list of text)."""
        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, _NUM_REQUEST)
        table: dict[str, Any] = {name: rows[:, i].copy() for i, name in enumerate(REQUEST_COLUMNS[:_NUM_REQUEST])}
        table["outcome"] = _OUTCOME_NAMES[np.array(self._outcome, dtype=np.int64)].tolist()
        table["reason"] = [self._reasons.get(i, "") for i in range(len(self._outcome))]
        return table

    def steps(self) -> dict[str, Any]:
        """The table of steps and runs: name -> array, or `Lists`.

        `step_ends_ns` lists the end of each step of a run. `run_takes[j]` is the number of blocks that the steps j,
        j + block_size, ... of a run take each, and `step_cached` the cached slots at each step where they change;
        `step_finished` names the steps of a run, counted from 0, in which a request finished, once for each; with
        them, every step's usage follows from the run's first: held + rows, tail + takes x block_size - rows,
        and so on. Where blocks are taken from what was reserved, `step_reserved_may` and `step_reserved_cannot` have
        those parts at each step, and free is what it was. All are empty for single steps.
        """
        flat = np.frombuffer(self._steps, dtype=np.int64).reshape(-1, _NUM_STEP)
        ends = np.array(self._ends, dtype=np.int64)
        flat = flat[: np.searchsorted(flat[:, 0], len(ends), side="right")]  # the rest was cut off in flight
        table: dict[str, Any] = {name: flat[:, i].copy() for i, name in enumerate(STEP_COLUMNS)}
        table.update(self._signals.columns(table))
        first = table["step"] - 1
        num = np.minimum(table["num_steps"], len(ends) - first)
        table["num_steps"] = num
        table["end_ns"] = ends[first + num - 1] if len(first) else first
        pairs = np.array(self._finished, dtype=np.int64).reshape(-1, 2)
        places = np.searchsorted(first, pairs[:, 0] - 1, side="right") - 1
        table["finished"] = np.bincount(places, weights=pairs[:, 1], minlength=len(first)).astype(np.int64)
        inside = np.repeat(num > 1, num)
        table["step_ends_ns"] = Lists(np.where(num > 1, num, 0), ends[: len(inside)][inside])
        rows = len(first)
        table["run_takes"] = self._run_takes.column(rows)
        in_run = num[places] > 1
        table["step_finished"] = Lists(
            np.where(num > 1, table["finished"], 0),
            np.repeat((pairs[:, 0] - 1 - first[places])[in_run], pairs[:, 1][in_run]),
        )
        table["step_cached"] = self._run_cached.column(rows, num)
        table["step_reserved_may"] = self._run_reserved[0].column(rows, num)
        table["step_reserved_cannot"] = self._run_reserved[1].column(rows, num)
        return table

    def step_ends(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """End of every completed step in ns; step 1 first."""
        return np.array(self._ends, dtype=np.int64)

    def gaps(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """ns between a token and the one before, for each token that a row outside the cohort sampled."""
        return np.array(self._gaps, dtype=np.int64)


class DecisionLog:
    """Every decision and every input of a run, so that it can be repeated and compared step by step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.manager.taken = []
        self.turns: list[tuple[int, int, list[int], list[int]]] = []
        """(now, number of the plan or 0, requests added before it, requests aborted before it)."""
        self.steps: list[dict[str, Any]] = []
        self.ends: list[int] = []
        self._added: list[int] = []
        self._aborted: list[int] = []
        self._by_seq: dict[int, dict[str, Any]] = {}

    def added(self, id: int) -> None:
        self._added.append(id)

    def aborted(self, id: int) -> None:
        self._aborted.append(id)

    def planned(self, plan: StepPlan) -> None:
        self.turns.append((plan.now, plan.seq, self._added, self._aborted))
        self._added, self._aborted = [], []
        if not plan.runs:
            return
        scheduler = self._scheduler
        rows: list[PlanItem] = scheduler.scheduled_order(plan)
        taken = scheduler.manager.taken or []
        scheduler.manager.taken = []
        step = {
            "step": plan.seq,
            "rows": [row.request for row in rows],
            "starts": [row.start for row in rows],
            "tokens": [row.num_tokens for row in rows],
            "taken": [int(block) for block in taken],
            "hits": [item.start for item in plan.prefills if item.request in plan.admitted],
            "preempted": list(plan.preempted),
            "moves": _moves(plan),
            "finished": [],
            "usage": list(scheduler.usage()),
        }
        self.steps.append(step)
        self._by_seq[plan.seq] = step

    def completed(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        self.ends.append(outcome.end)
        self._by_seq.pop(plan.seq)["finished"] = [finish.request for finish in events.finished]


def _moves(plan: StepPlan) -> list[int]:
    """A plan's block moves, flat: how many of each phase and of each transfer, each followed by (source, destination).

    In the order swap_out, swap_in, copies, then (1 for a load or 0, ...) of each transfer, and revoked transfers.
    Empty where nothing moves.
    """
    if not (plan.swap_out or plan.swap_in or plan.copies or plan.transfers or plan.revoked):
        return []
    flat: list[int] = []
    for copies in (plan.swap_out, plan.swap_in, plan.copies):
        flat.append(len(copies))
        for copy in copies:
            flat += (int(copy.src), int(copy.dst))
    for transfer in plan.transfers:
        flat += (int(transfer.load), len(transfer.copies))
        for copy in transfer.copies:
            flat += (int(copy.src), int(copy.dst))
    flat.append(-1)
    flat += plan.revoked
    return flat
