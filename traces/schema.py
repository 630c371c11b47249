"""A trace: requests as columns.

A row is one request. Rows are sorted by arrival, ties in the order of the source. Prompts have no tokens here but
spans: a span is (id, number of tokens), its id names the whole prefix of the prompt up to the span's end, so two rows
share exactly as much of their prompts as their leading spans have equal ids (and the shorter length, where one id has
two). A row without spans has a prompt of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from traces.errors import TraceError

if TYPE_CHECKING:
    from traces.source import TraceSource

__all__ = ["NO_ID", "NO_ROW", "Trace", "make_trace", "prefix_conflict", "private_id"]

NO_ROW = -1
"""In `after`: the row waits for no other."""

NO_ID = -1
"""In `output_ids`: the generated tokens have no identity, so nobody can share them."""

_TYPES: dict[str, type[np.generic]] = {
    "arrival_ns": np.int64,
    "prompt_tokens": np.int32,
    "output_tokens": np.int32,
    "span_offsets": np.int64,
    "span_ids": np.int64,
    "span_tokens": np.int32,
    "output_ids": np.int64,
    "after": np.int64,
    "think_ns": np.int64,
    "priority": np.int64,
    "deadline": np.int64,
    "tenant": np.int64,
}
_INT32_MAX = 2**31 - 1
SPAN_COLUMNS = ("span_offsets", "span_ids", "span_tokens")
ROW_COLUMNS = tuple(name for name in _TYPES if name not in SPAN_COLUMNS)
ROW_DEFAULTS = {"output_ids": NO_ID, "after": NO_ROW, "think_ns": 0, "priority": 0, "deadline": 0, "tenant": 0}


def private_id(row: int) -> int:
    """The id of the single span that stands for the prompt of a row without spans; no trace has it as a span id."""
    return -2 - row


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests; every array is read-only. Build one with `make_trace`, which sorts and fills in defaults."""

    arrival_ns: npt.NDArray[np.int64]
    """int64[n], from the start of the trace, ascending. For a row with `after`, the earliest it could be: as if the
    row before it took no time."""
    prompt_tokens: npt.NDArray[np.int32]
    """int32[n], at least 1."""
    output_tokens: npt.NDArray[np.int32]
    """int32[n], at least 1: how many tokens the request generates."""
    span_offsets: npt.NDArray[np.int64]
    """int64[n + 1]: row i's spans are [span_offsets[i], span_offsets[i + 1])."""
    span_ids: npt.NDArray[np.int64]
    """int64[m], at least 0."""
    span_tokens: npt.NDArray[np.int32]
    """int32[m], at least 1; a row's spans cover its prompt exactly, or it has none."""
    output_ids: npt.NDArray[np.int64]
    """int64[n]: the span id under which a later row's prompt repeats this row's output; -1 for none."""
    after: npt.NDArray[np.int64]
    """int64[n]: the row that has to finish first (the turn before, always an earlier row); -1 for none."""
    think_ns: npt.NDArray[np.int64]
    """int64[n]: the pause between that finish and this arrival."""
    priority: npt.NDArray[np.int64]
    """int64[n]: smaller is more urgent."""
    deadline: npt.NDArray[np.int64]
    """int64[n]: ns after arrival; 0 for none."""
    tenant: npt.NDArray[np.int64]
    """int64[n]."""
    name: str = "trace"
    """Where it came from; no part of the digest."""
    concurrency: int | None = None
    """Closed loop: arrivals are ignored and this many requests are outstanding at any time."""
    span_block: int | None = None
    """Where spans are blocks of a fixed size (Mooncake: 512): that size. A shorter span is a prompt's partial tail."""
    dropped: int = 0
    """Rows of the file that were left out because nothing was served (failures); no part of the digest."""
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, dtype in _TYPES.items():
            given = np.asarray(getattr(self, name))
            if dtype is np.int32 and given.size and max(given.max(), -given.min()) > _INT32_MAX:
                raise TraceError(f"column {name} has a value beyond 32 bits: {max(given.max(), given.min(), key=abs)}")
            array = np.ascontiguousarray(given, dtype=dtype)
            if array is getattr(self, name) and array.flags.writeable:
                array = array.view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        _check(self)

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def __eq__(self, other: object) -> bool:
        """Equal content; the name does not matter."""
        return isinstance(other, Trace) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def spans(self, row: int) -> list[tuple[int, int]]:
        """(span id, tokens) of a row's prompt; a row without spans has a single one that is its own."""
        lo, hi = int(self.span_offsets[row]), int(self.span_offsets[row + 1])
        if lo == hi:
            return [(private_id(row), int(self.prompt_tokens[row]))]
        return list(zip(self.span_ids[lo:hi].tolist(), self.span_tokens[lo:hi].tolist(), strict=True))

    def output_id(self, row: int) -> int | None:
        """The identity of what the row generates, or None."""
        name = int(self.output_ids[row])
        return None if name == NO_ID else name

    def shared_prompt_tokens(self) -> npt.NDArray[np.int64]:
        """int64[n]: how many leading tokens of each prompt some other row has too (in its prompt or as its output)."""
        if "shared" not in self._cache:
            _, inverse, count = np.unique(self.span_ids, return_inverse=True, return_counts=True)
            shared = (count[inverse] > 1) | np.isin(self.span_ids, self.output_ids[self.output_ids != NO_ID])
            self._cache["shared"] = leading_sum(self.span_offsets, shared, self.span_tokens)
        result: npt.NDArray[np.int64] = self._cache["shared"]
        return result

    def digest(self) -> str:
        """SHA-256 over every column and the closed loop's size, as hex."""
        if "digest" not in self._cache:
            sha = hashlib.sha256(f"kvtwin trace 1;{len(self)};{self.concurrency};{self.span_block}".encode())
            for name in _TYPES:
                array = getattr(self, name)
                sha.update(name.encode())
                sha.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            self._cache["digest"] = sha.hexdigest()
        return str(self._cache["digest"])

    def head(self, n: int) -> Trace:
        """The first n rows (all of them if n is larger)."""
        if n < 1:
            raise TraceError(f"cannot take the first {n} requests of a trace: take 1 or more")
        n = min(n, len(self))
        end = int(self.span_offsets[n])
        columns: dict[str, Any] = {name: getattr(self, name)[:n] for name in ROW_COLUMNS}
        columns["span_offsets"] = self.span_offsets[: n + 1]
        columns["span_ids"], columns["span_tokens"] = self.span_ids[:end], self.span_tokens[:end]
        return replace(self, **columns, _cache={})

    def source(self, time_scale: float = 1.0) -> TraceSource:
        """What hands out the requests in time; see `TraceSource`."""
        from traces.source import TraceSource

        return TraceSource(self, time_scale)

    def columns(self) -> dict[str, np.ndarray]:
        """Every array by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in _TYPES}


def make_trace(
    arrival_ns: npt.ArrayLike,
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    *,
    spans: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike] | None = None,
    name: str = "trace",
    concurrency: int | None = None,
    span_block: int | None = None,
    dropped: int = 0,
    **columns: npt.ArrayLike,
) -> Trace:
    """A trace from columns in any order of arrival: sorts (stable), shifts the first arrival to 0, fills in defaults.

    `spans` is (offsets[n + 1], ids, tokens); `after` names rows by their place in the input. Raises TraceError.
    """
    arrival = np.asarray(arrival_ns, dtype=np.int64)
    n = len(arrival)
    unknown = set(columns) - set(ROW_DEFAULTS)
    if unknown:
        raise TraceError(f"unknown column {sorted(unknown)[0]!r}; a trace has {', '.join(_TYPES)}")
    rows: dict[str, Any] = {
        "arrival_ns": arrival - (arrival.min() if n else 0),
        "prompt_tokens": np.asarray(prompt_tokens),
        "output_tokens": np.asarray(output_tokens),
    }
    for column, default in ROW_DEFAULTS.items():
        given = columns.get(column)
        rows[column] = np.full(n, default, dtype=np.int64) if given is None else np.asarray(given)
    given_spans: tuple[npt.ArrayLike, ...] = spans or (np.zeros(n + 1, dtype=np.int64), [], [])
    offsets, ids, tokens = (np.asarray(part, dtype=np.int64) for part in given_spans)

    if n and (np.diff(arrival) < 0).any():
        order = np.argsort(arrival, kind="stable")
        place = np.empty(n, dtype=np.int64)
        place[order] = np.arange(n)
        waits = rows["after"] >= 0
        rows["after"] = np.where(waits, place[np.where(waits, rows["after"], 0)], NO_ROW)
        rows = {column: values[order] for column, values in rows.items()}
        counts = np.diff(offsets)[order]
        picked = ragged_ranges(offsets[:-1][order], counts)
        offsets, ids, tokens = offsets_of(counts), ids[picked], tokens[picked]
    return Trace(
        **rows,
        span_offsets=offsets,
        span_ids=ids,
        span_tokens=tokens,  # type: ignore[arg-type] # Trace checks that they fit, and narrows them
        name=name,
        concurrency=concurrency,
        span_block=span_block,
        dropped=dropped,
    )


def offsets_of(counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """int64[n + 1]: where each of n groups starts, and the end."""
    counts = np.asarray(counts, dtype=np.int64)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ragged_ranges(starts: np.ndarray, counts: np.ndarray) -> npt.NDArray[np.int64]:
    """[starts[0], ... starts[0] + counts[0] - 1, starts[1], ...]."""
    offsets = offsets_of(counts)
    return np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], counts)


def leading(offsets: np.ndarray, flags: np.ndarray) -> npt.NDArray[np.int64]:
    """int64[n]: how many of each group's first entries have their flag set before the first that has not."""
    counts = np.diff(offsets)
    misses = np.flatnonzero(~np.asarray(flags, dtype=bool))
    at = np.searchsorted(misses, offsets[:-1])
    first = np.append(misses, len(flags))[at]
    result: npt.NDArray[np.int64] = np.minimum(first - offsets[:-1], counts)
    return result


def leading_sum(offsets: np.ndarray, flags: np.ndarray, weights: Sequence[int] | np.ndarray) -> npt.NDArray[np.int64]:
    """int64[n]: the weights of each group's leading entries, as `leading` counts them, added up."""
    total = offsets_of(np.asarray(weights))
    start = offsets[:-1]
    result: npt.NDArray[np.int64] = total[start + leading(offsets, flags)] - total[start]
    return result


def prefix_conflict(offsets: np.ndarray, ids: np.ndarray) -> tuple[int, int, int] | None:
    """(id, row, other row) of a span id that follows different ids in two rows, so that it cannot name a prefix."""
    if not len(ids):
        return None
    before = np.empty(len(ids), dtype=np.int64)
    before[1:] = ids[:-1]
    before[offsets[:-1][np.diff(offsets) > 0]] = NO_ID
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    wrong = np.flatnonzero(same & (before[order][1:] != before[order][:-1]))
    if not len(wrong):
        return None
    first, second = order[wrong[0]], order[wrong[0] + 1]
    row, other = np.searchsorted(offsets, [first, second], side="right") - 1
    return int(ids[first]), int(other), int(row)


def _check(trace: Trace) -> None:
    n = len(trace)
    if n == 0:
        raise TraceError("a trace needs at least one request")
    for name in ROW_COLUMNS:
        if getattr(trace, name).shape != (n,):
            raise TraceError(f"column {name} has shape {getattr(trace, name).shape}; {n} requests need ({n},)")
    for name, least in (
        ("arrival_ns", 0),
        ("prompt_tokens", 1),
        ("output_tokens", 1),
        ("think_ns", 0),
        ("deadline", 0),
    ):
        wrong = np.flatnonzero(getattr(trace, name) < least)
        if len(wrong):
            value = getattr(trace, name)[wrong[0]]
            raise TraceError(f"request {wrong[0]}: {name} is {value}; it must be {least} or more")
    if (np.diff(trace.arrival_ns) < 0).any():
        row = int(np.flatnonzero(np.diff(trace.arrival_ns) < 0)[0]) + 1
        raise TraceError(f"request {row} arrives before the one above it; sort the requests by arrival_ns")
    wrong = np.flatnonzero((trace.after < NO_ROW) | (trace.after >= np.arange(n)))
    if len(wrong):
        raise TraceError(
            f"request {wrong[0]}: after is {trace.after[wrong[0]]}; it must be an earlier request, or {NO_ROW} for none"
        )
    if trace.concurrency is not None and trace.concurrency < 1:
        raise TraceError(f"concurrency is {trace.concurrency}; it must be 1 or more")
    _check_spans(trace, n)


def _check_spans(trace: Trace, n: int) -> None:
    offsets, ids, tokens = trace.span_offsets, trace.span_ids, trace.span_tokens
    if offsets.shape != (n + 1,) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise TraceError(f"span_offsets must be {n + 1} ascending numbers from 0 to the number of spans, {len(ids)}")
    if ids.shape != tokens.shape:
        raise TraceError(f"there are {len(ids)} span ids and {len(tokens)} span lengths; each span needs both")
    if len(ids) and (ids.min() < 0 or tokens.min() < 1):
        at = int(np.flatnonzero((ids < 0) | (tokens < 1))[0])
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise TraceError(f"request {row}: span ({ids[at]}, {tokens[at]}) needs an id of 0 or more and 1 token or more")
    covered = np.diff(offsets_of(tokens)[offsets])
    wrong = np.flatnonzero((np.diff(offsets) > 0) & (covered != trace.prompt_tokens))
    if len(wrong):
        row = int(wrong[0])
        raise TraceError(
            f"request {row}: its spans have {covered[row]} tokens and its prompt {trace.prompt_tokens[row]}; "
            "they must be equal, or the request must have no spans"
        )
    conflict = prefix_conflict(offsets, ids)
    if conflict:
        name, row, other = conflict
        raise TraceError(
            f"request {row}: span id {name} follows another id than in request {other}; "
            "an id must name the whole prefix up to its end, so give different prefixes different ids"
        )
