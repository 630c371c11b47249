"""Every metric, computed from the two tables by one code path, whoever wrote them.

    ttft_s    first token - arrival
    tpot_s    (finish - first token) / (output tokens - 1); requests with one output token have none
    itl_s     the time between two output tokens of a request, over all such pairs
    e2e_s     finish - arrival

A percentile p of n sorted values is the linear interpolation at position (n - 1) p / 100 (numpy's default). For
itl_s the values are the steps' gaps, each as often as there were decode rows, without expanding them. Times are summed
as integer nanoseconds (tpot_s excepted, which is a quotient), so sums are exact.

Requests that were rejected count in `num_rejected` only. A request without a finish (the run was interrupted, or it was
aborted before its first token) contributes what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.records import Lists
from experiments.limits import limits

__all__ = [
    "PERCENTILES",
    "USAGE",
    "Slo",
    "Tables",
    "distribution",
    "expand_steps",
    "inter_token_gaps",
    "latencies",
    "summarize",
    "time_weighted",
    "usage_over_time",
]

PERCENTILES = (50, 90, 95, 99)
USAGE = ("held", "tail", "reserved_may", "reserved_cannot", "external", "transfer", "cached", "free")
"""Columns of the steps table that sum to the pool, in slots."""

_RUN_COLUMNS = (
    "num_steps",
    "step_ends_ns",
    "run_takes",
    "step_cached",
    "step_finished",
    "step_reserved_may",
    "step_reserved_cannot",
)

Columns = Mapping[str, Any]
"""Column name to array; a list column is a sequence of arrays."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What a run wrote."""

    requests: Columns
    steps: Columns
    gaps_ns: np.ndarray
    """int64[g]: gaps between two tokens of a request that were not sampled in consecutive steps."""
    steps_in_flight: int = 1
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.e2e_s))


def latencies(requests: Columns) -> dict[str, np.ndarray]:
    """`ttft_s`, `tpot_s`, `e2e_s` in ns as float64, one value a request, NaN where the request has none."""
    arrival = np.asarray(requests["arrival_ns"], dtype=np.int64)
    first = np.asarray(requests["first_token_ns"], dtype=np.int64)
    finish = np.asarray(requests["finish_ns"], dtype=np.int64)
    tokens = np.asarray(requests["output_tokens"], dtype=np.int64)
    served = ~rejected(requests)
    has_first = served & (first >= 0)
    has_finish = served & (finish >= 0)
    both = has_first & has_finish & (tokens > 1)
    tpot = np.divide((finish - first).astype(np.float64), np.maximum(tokens - 1, 1), dtype=np.float64)
    return {
        "ttft_s": np.where(has_first, (first - arrival).astype(np.float64), np.nan),
        "tpot_s": np.where(both, tpot, np.nan),
        "e2e_s": np.where(has_finish, (finish - arrival).astype(np.float64), np.nan),
    }


def rejected(requests: Columns) -> np.ndarray:
    """bool[n]: which requests were refused."""
    return np.asarray([outcome == "rejected" for outcome in requests["outcome"]], dtype=bool)


def distribution(values_ns: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float | None]:
    """mean and percentiles in seconds; of values repeated `weights` times each where given. None when empty.

    Args:
        values_ns: float64 or int64 [n], in ns; NaN is left out.
        weights: int64 [n].
    """
    values = np.asarray(values_ns)
    if values.dtype.kind == "f":
        keep = ~np.isnan(values)
        values = values[keep]
        weights = None if weights is None else np.asarray(weights)[keep]
    counts = np.ones(len(values), dtype=np.int64) if weights is None else np.asarray(weights, dtype=np.int64)
    values, counts = values[counts > 0], counts[counts > 0]
    names = [f"p{p}" for p in PERCENTILES]
    if len(values) == 0:
        return dict.fromkeys(["mean", *names])
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    last = np.cumsum(counts)  # one past the position of each value's last copy
    total = int(last[-1])
    if values.dtype.kind == "i":
        mean = _exact_dot(values, counts) / total
    else:
        mean = float(np.sum(values * counts)) / total
    result: dict[str, float | None] = {"mean": mean / 1e9}
    for name, percent in zip(names, PERCENTILES, strict=True):
        position = (total - 1) * percent / 100
        below = int(position)
        above = min(below + 1, total - 1)
        low, high = (float(values[np.searchsorted(last, index, side="right")]) for index in (below, above))
        result[name] = (low + (high - low) * (position - below)) / 1e9
    return result


def _exact_dot(values: np.ndarray, counts: np.ndarray) -> int:
    """sum(values * counts) without overflow: the two halves of the values are summed apart."""
    high, low = values >> 32, values & 0xFFFFFFFF
    return (int(np.sum(high * counts)) << 32) + int(np.sum(low * counts))


def inter_token_gaps(tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    """All gaps between consecutive output tokens: (values in ns, how often each occurs), both int64.

    A decode row of a step got its previous token at the end of the step before. Rows that rejoined after a pause are
    not decode rows of their step; their gaps are recorded one by one.
    """
    steps = tables.steps
    ends = _step_ends(steps)
    rows = np.repeat(np.asarray(steps["num_decodes"], dtype=np.int64), np.asarray(steps["num_steps"], dtype=np.int64))
    gaps = np.diff(ends, prepend=_first_start(steps)) if len(ends) else ends
    extra = np.asarray(tables.gaps_ns, dtype=np.int64)
    return np.concatenate([gaps, extra]), np.concatenate([rows, np.ones(len(extra), dtype=np.int64)])


def _step_ends(steps: Columns) -> np.ndarray:
    """int64: the end of every step in ns, those within runs included."""
    lengths = np.asarray(steps["num_steps"], dtype=np.int64)
    ends = np.repeat(np.asarray(steps["end_ns"], dtype=np.int64), lengths)
    runs = np.flatnonzero(lengths > 1)
    if len(runs):
        inside = np.repeat(lengths > 1, lengths)
        column = steps["step_ends_ns"]
        if isinstance(column, Lists):
            ends[inside] = column.values
        else:
            ends[inside] = np.concatenate([np.asarray(column[index], dtype=np.int64) for index in runs])
    return ends


def _first_start(steps: Columns) -> int:
    return int(np.asarray(steps["start_ns"])[0])


def expand_steps(tables: Tables) -> dict[str, np.ndarray]:
    """The steps table with every run written out, one row a step, without the list columns.

    Within a run nothing changes but time, contexts and usage: every decode row writes one token a step, step j takes
    `run_takes[j modulo block size]` blocks (step 0 is the run's own row), and `step_cached` lists the reusable free
    slots where they change; `step_reserved_may` and `step_reserved_cannot` do where blocks are taken from what was
    reserved, and not from what is free; `step_finished` names the step of each finish. A step is decided when the step
    `steps_in_flight` before it has ended.
    """
    steps = tables.steps
    lengths = np.asarray(steps["num_steps"], dtype=np.int64)
    total = int(lengths.sum())
    first = np.cumsum(lengths) - lengths
    offset = np.arange(total, dtype=np.int64) - np.repeat(first, lengths)  # of a step within its run
    out: dict[str, np.ndarray] = {
        name: np.repeat(np.asarray(column), lengths) for name, column in steps.items() if name not in _RUN_COLUMNS
    }
    out["step"] = out["step"] + offset
    rows = out["num_decodes"].astype(np.int64)
    out["decode_context_tokens"] = out["decode_context_tokens"] + offset * rows
    for name in ("admitted", "preempted", "preempted_tokens", "recomputed_tokens"):
        if name in out:
            out[name] = np.where(offset == 0, out[name], 0)

    taken = np.zeros(total, dtype=np.int64)  # slots of blocks taken since the run's first step
    cached = out["cached"].copy()
    drawn = np.zeros(total, dtype=np.int64)  # of them, slots that were reserved
    ends = _step_ends(steps)
    finished = out["finished"]
    size = tables.block_size
    for index in np.flatnonzero(lengths > 1):
        where = slice(int(first[index]), int(first[index] + lengths[index]))
        takes = np.asarray(steps["run_takes"][index], dtype=np.int64)
        later = np.arange(1, int(lengths[index]))
        finished[where] = np.bincount(
            np.asarray(steps["step_finished"][index], dtype=np.int64), minlength=len(later) + 1
        )
        taken[where] = np.concatenate([[0], np.cumsum(takes[later % size])]) * size
        if len(steps["step_cached"][index]):
            cached[where] = np.asarray(steps["step_cached"][index], dtype=np.int64)
        for name in ("reserved_may", "reserved_cannot"):
            if len(steps[f"step_{name}"][index]):
                now = np.asarray(steps[f"step_{name}"][index], dtype=np.int64)
                drawn[where] += out[name][where] - now
                out[name][where] = now
        within = np.asarray(steps["step_finished"][index], dtype=np.int64)
        out["finished"][where] = np.bincount(within, minlength=int(lengths[index]))
    out["end_ns"] = ends
    lag = tables.steps_in_flight
    starts = np.concatenate([np.full(min(lag, total), _first_start(steps) if total else 0), ends[:-lag]])[:total]
    out["start_ns"] = np.where(offset == 0, out["start_ns"], starts)
    if "gpu_busy_ns" in out:
        begins = np.maximum(out["start_ns"], np.concatenate([[0], ends[:-1]])) if total else ends
        spans = ends - begins
        idle = np.add.reduceat(spans, first) - np.asarray(steps["gpu_busy_ns"]) if total else spans
        out["gpu_busy_ns"] = spans - np.repeat(idle // np.maximum(lengths, 1), lengths)
    out["held"] = out["held"] + offset * rows
    out["tail"] = out["tail"] + taken - offset * rows
    out["free"] = out["free"] + out["cached"] - (taken - drawn) - cached
    out["cached"] = cached
    return out


def usage_over_time(tables: Tables) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(time in ns at which each step was decided, int64[s]; slots by use from then on, int64[s] each)."""
    steps = expand_steps(tables)
    return steps["start_ns"], {name: steps[name] for name in USAGE}


def time_weighted(times: np.ndarray, values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The step function that is values[i] from times[i] on, at every time of `grid`; 0 before the first."""
    index = np.searchsorted(times, grid, side="right") - 1
    return np.where(index >= 0, values[np.maximum(index, 0)], 0)


def duration_ns(requests: Columns) -> int:
    """From the first arrival of a request that was served to the last thing that happened to any."""
    served = ~rejected(requests)
    if not served.any():
        return 0
    arrival = np.asarray(requests["arrival_ns"], dtype=np.int64)[served]
    last = max(
        int(np.asarray(requests[name], dtype=np.int64)[served].max()) for name in ("finish_ns", "first_token_ns")
    )
    return max(0, last - int(arrival.min()))


def good(requests: Columns, slo: Slo) -> np.ndarray:
    """bool[n]: which requests finished and met every limit. One output token meets any limit on tpot_s."""
    values = latencies(requests)
    outcome = np.asarray(requests["outcome"], dtype=object)
    met: np.ndarray = np.isin(outcome.astype(str), ("length", "stop"))
    met &= np.asarray(requests["finish_ns"], dtype=np.int64) >= 0
    for name, limit in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s), ("e2e_s", slo.e2e_s)):
        if limit is not None:
            late = values[name] > limit * 1e9
            met &= ~late if name == "tpot_s" else ~(late | np.isnan(values[name]))
    return met


def _overload(requests: Columns, served: np.ndarray, seconds: float) -> float | None:
    """How many times as long it took to serve the requests as they took to arrive: 1 plus a little where the machine
    keeps up, more the more of them had to queue. None: all arrived at once."""
    arrival = np.asarray(requests["arrival_ns"], dtype=np.int64)[served]
    span = int(arrival.max() - arrival.min()) if len(arrival) else 0
    return seconds * 1e9 / span if span else None


def summarize(tables: Tables, kv_blocks: int, slo: Slo = Slo()) -> dict[str, Any]:
    """The content of summary.json. Where there is nothing to measure the value is None."""
    requests, steps = tables.requests, tables.steps
    served = ~rejected(requests)
    seconds = duration_ns(requests) / 1e9
    output = int(np.asarray(requests["output_tokens"], dtype=np.int64)[served].sum())
    admitted = served & (np.asarray(requests["admitted_ns"], dtype=np.int64) >= 0)
    values = latencies(requests)
    summary: dict[str, Any] = {
        "num_requests": len(served),
        "num_rejected": int((~served).sum()),
        "duration_s": seconds,
        "output_tokens_per_s": output / seconds if seconds else None,
        "ttft_s": distribution(values["ttft_s"]),
        "tpot_s": distribution(values["tpot_s"]),
        "itl_s": distribution(*inter_token_gaps(tables)),
        "e2e_s": distribution(values["e2e_s"]),
    }
    if slo:
        summary["goodput_per_s"] = int(good(requests, slo).sum()) / seconds if seconds else None
    summary["overload_factor"] = _overload(requests, served, seconds)
    summary["num_preemptions"] = int(np.asarray(requests["num_preemptions"], dtype=np.int64)[served].sum())
    summary["prefix_hit_tokens"] = int(np.asarray(requests["cached_tokens"], dtype=np.int64)[admitted].sum())
    summary["prompt_tokens"] = int(np.asarray(requests["prompt_tokens"], dtype=np.int64)[admitted].sum())
    summary["num_steps"] = int(np.asarray(steps["num_steps"], dtype=np.int64).sum())
    summary["kv_blocks"] = int(kv_blocks)
    if "waiting_for_kv" in steps:
        summary |= limits(tables)
    return summary
