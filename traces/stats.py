"""What a trace looks like: rate, burstiness, lengths, waste of fixed block sizes, and how much of its prompts repeats.

traces/README.md defines every number; they are about the trace alone, served in no time by a machine without limits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.schema import NO_ID, Trace, leading, leading_sum

__all__ = ["plot_stats", "stats"]

WINDOWS_S = (1, 10, 60)
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
RESERVED_LENGTHS = (2048, 4096, 8192, 32768)
_PERCENTILES = (10, 50, 90, 95, 99)


def stats(trace: Trace, lru_tokens: Sequence[int] = ()) -> dict[str, Any]:
    """Numbers about a trace, ready for JSON; shares are fractions, and None where there is nothing to divide by.

    `lru_tokens` are sizes of a prefix cache, in tokens, to give `lru_hit_share` for.
    """
    wrong = next((size for size in lru_tokens if size < 1), None)
    if wrong is not None:
        raise TraceError(f"a cache of {wrong} tokens is not possible; it must have room for 1 or more")
    prompt, output = trace.prompt_tokens.astype(np.int64), trace.output_tokens.astype(np.int64)
    total = prompt + output
    result: dict[str, Any] = {
        "name": trace.name,
        "n": len(trace),
        "dropped": trace.dropped,
        "digest": trace.digest(),
        "concurrency": trace.concurrency,
        **_arrival_stats(trace.arrival_ns),
        "input": _lengths(prompt),
        "output": _lengths(output),
        "in_tokens": int(prompt.sum()),
        "out_tokens": int(output.sum()),
        "waste_fixed_block": {str(b): 1 - int(total.sum()) / int((-(-total // b) * b).sum()) for b in BLOCK_SIZES},
        "reserve_maxlen_waste": {str(m): 1 - float(np.minimum(total, m).mean()) / m for m in RESERVED_LENGTHS},
    }
    every, full = _ids_of(trace, full=False), _ids_of(trace, full=True)
    result["prefix"] = _reuse(trace, every)
    result["prefix_full_ids"] = _reuse(trace, full)
    result["prefix_reuse_share"] = {"all_ids": _share(every), "full_ids": _share(full)}
    result["lru_hit_share"] = {
        str(size): {"all_ids": _lru_share(every, size), "full_ids": _lru_share(full, size)} for size in lru_tokens
    }
    return result


def _arrival_stats(arrival_ns: np.ndarray) -> dict[str, Any]:
    n = len(arrival_ns)
    gaps = np.diff(arrival_ns)
    duration = float(arrival_ns[-1] - arrival_ns[0]) / 1e9
    out: dict[str, Any] = {
        "duration_s": duration,
        "rate": n / duration if duration else None,
        "cv_interarrival": float(gaps.std() / gaps.mean()) if duration else None,
        "zero_gap_frac": float((gaps == 0).mean()) if n > 1 else None,
    }
    for window in WINDOWS_S:
        counts = arrivals_per_window(arrival_ns, window)
        out[f"dispersion_{window}s"] = float(counts.var() / counts.mean())
        out[f"peak_rate_{window}s"] = float(counts.max()) / window
    return out


def arrivals_per_window(arrival_ns: np.ndarray, window_s: float) -> np.ndarray:
    """int64: arrivals in [0, W), [W, 2 W), ... up to the window of the last one."""
    return np.bincount((arrival_ns - arrival_ns[0]) // int(window_s * 1e9))


def _lengths(tokens: np.ndarray) -> dict[str, Any]:
    marks = np.percentile(tokens, _PERCENTILES)
    named = {f"p{p}": int(mark) for p, mark in zip(_PERCENTILES, marks, strict=True)}
    return {"mean": float(tokens.mean()), **named, "max": int(tokens.max()), "min": int(tokens.min())}


class _Ids:
    """The ids of each row, as one array with offsets, and the tokens of each id's span; `weights` is what an id takes
    up in a cache, in tokens."""

    def __init__(
        self, offsets: np.ndarray, ids: np.ndarray, tokens: np.ndarray, weights: np.ndarray, trace: Trace
    ) -> None:
        self.offsets, self.ids, self.tokens, self.weights = offsets, ids, tokens, weights
        self.outputs, self.output_weights = trace.output_ids, trace.output_tokens.tolist()
        """int64[n]: the id of what a row generated, which is cached after it; -1 for none."""
        self.owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        self.hits = self._hits()
        """int64[n]: leading ids of each row that an earlier row brought."""

    def _hits(self) -> np.ndarray:
        rows = np.flatnonzero(self.outputs != NO_ID)
        names = np.concatenate([self.ids, self.outputs[rows]])
        brought = np.concatenate([self.owner, rows])
        unique, inverse = np.unique(names, return_inverse=True)
        first = np.full(len(unique), len(self.offsets), dtype=np.int64)
        np.minimum.at(first, inverse, brought)
        return leading(self.offsets, first[inverse[: len(self.ids)]] < self.owner)


def _ids_of(trace: Trace, full: bool) -> _Ids:
    """All ids, or only those of whole blocks: where spans have one size, the shorter ones are left out."""
    offsets, ids, tokens = trace.span_offsets, trace.span_ids, trace.span_tokens.astype(np.int64)
    if trace.span_block is None:
        return _Ids(offsets, ids, tokens, tokens, trace)
    if full:
        keep = tokens == trace.span_block
        before = np.concatenate([[0], np.cumsum(keep)])
        offsets, ids, tokens = before[offsets], ids[keep], tokens[keep]
    return _Ids(offsets, ids, tokens, np.full(len(ids), trace.span_block), trace)


def _share(ids: _Ids) -> float | None:
    return int(ids.hits.sum()) / len(ids.ids) if len(ids.ids) else None


def _reuse(trace: Trace, ids: _Ids) -> dict[str, Any] | None:
    """Reuse by an unlimited cache, in ids and in tokens; None for a trace without ids."""
    if not len(ids.ids):
        return None
    hit = np.arange(len(ids.ids)) - ids.offsets[:-1][ids.owner] < ids.hits[ids.owner]
    hit_tokens = leading_sum(ids.offsets, hit, ids.tokens)
    counts = np.diff(ids.offsets)
    return {
        "block_tokens": trace.span_block,
        "blocks": len(ids.ids),
        "unique": len(np.unique(ids.ids)),
        "block_hit": _share(ids),
        "token_hit": int(hit_tokens.sum()) / int(trace.prompt_tokens.sum()),
        "requests_full_hit": int(((counts > 0) & (ids.hits == counts)).sum()),
    }


def _lru_share(ids: _Ids, capacity: int) -> float | None:
    """Share of ids that hit a least-recently-used cache with room for `capacity` tokens."""
    if not len(ids.ids):
        return None
    cache: OrderedDict[int, int] = OrderedDict()
    room, hits = capacity, 0
    names, weights, offsets = ids.ids.tolist(), ids.weights.tolist(), ids.offsets.tolist()
    for row, output in enumerate(ids.outputs.tolist()):
        lo, hi = offsets[row], offsets[row + 1]
        for at in range(lo, hi):
            if names[at] not in cache:
                break
            hits += 1
        touched = list(zip(names[lo:hi], weights[lo:hi], strict=True))
        if output != NO_ID:
            touched.append((output, ids.output_weights[row]))
        for name, weight in reversed(touched):  # so that the head is the youngest
            room += cache.pop(name, 0) - weight
            cache[name] = weight
        while room < 0:
            room += cache.popitem(last=False)[1]
    return hits / len(names)


def plot_stats(trace: Trace, path: str | Path) -> None:
    """Draws the trace as a PNG: lengths, arrivals, gaps, and reuse (block waste, where no prompts are shared)."""
    from traces.plot import draw

    draw(trace, Path(path))
