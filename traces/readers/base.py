"""What the readers share: the description of a format, columns that grow row by row, links between turns, arrivals."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.files import TraceFile, available_bytes, is_integer
from traces.schema import NO_ROW, Trace, make_trace, offsets_of

__all__ = [
    "Format",
    "Rows",
    "check_number",
    "check_seed",
    "dequantized",
    "follow",
    "prefix_ids",
    "previous_of",
    "starts_ns",
]

_CHECK_ROWS = 1 << 16


@dataclass(frozen=True)
class Format:
    """One trace format: `recognises` sees the file, `read` gets the options that `options` names, with defaults."""

    name: str
    about: str
    recognises: Callable[[TraceFile], bool]
    read: Callable[..., Trace]
    options: Mapping[str, object]


class Rows:
    """The requests of a file as they are read, packed: 8 bytes a number, so that long traces fit.

    Raises TraceError as soon as what is still to be done with them would not fit in memory.
    """

    def __init__(self, file: TraceFile) -> None:
        self.file = file
        self.arrival_ns, self.prompt, self.output, self.lines = (array("q") for _ in range(4))
        self.ids, self.tokens, self.counts = (array("q") for _ in range(3))
        self.dropped = 0
        """Rows left out because nothing was served: failures."""

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def add(
        self, line: int, arrival_ns: int, prompt: int, output: int, ids: Sequence[int] = (), tokens: Sequence[int] = ()
    ) -> None:
        """One request, with the spans of its prompt as far as they are known."""
        self.lines.append(line)
        self.arrival_ns.append(arrival_ns)
        self.prompt.append(prompt)
        self.output.append(output)
        self.counts.append(len(ids))
        if ids:
            self.ids.extend(ids)
            self.tokens.extend(tokens)
        if len(self.lines) % _CHECK_ROWS == 0:
            self._check_memory()

    def set_spans(self, row: int, ids: Sequence[int], tokens: Sequence[int]) -> None:
        """The spans of a row that was added without; rows go in ascending order, each once."""
        self.counts[row] = len(ids)
        self.ids.extend(ids)
        self.tokens.extend(tokens)

    def replace_ids(self, ids: np.ndarray) -> None:
        self.ids = array("q", ids.astype(np.int64).tobytes())

    def _check_memory(self) -> None:
        # Sorting and checking make about three copies of everything.
        needed = 3 * 8 * (5 * len(self.lines) + 2 * len(self.ids))
        if needed > available_bytes():
            raise self.file.too_big(f"{len(self.lines):,} requests")

    def times(self) -> np.ndarray:
        return np.frombuffer(self.arrival_ns, dtype=np.int64)

    def span_offsets(self) -> np.ndarray:
        return offsets_of(np.frombuffer(self.counts, dtype=np.int64))

    def trace(self, arrival_ns: np.ndarray | None = None, span_block: int | None = None, **columns: Any) -> Trace:
        """The trace of these rows; `arrival_ns` takes the place of the arrivals that were read."""
        if not len(self):
            found = "only failures" if self.dropped else "no requests"
            raise TraceError(f"{self.file.path}: has a header and {found}; a trace needs at least one request")
        spans = None
        if len(self.ids):
            ids, tokens = (np.frombuffer(part, dtype=np.int64) for part in (self.ids, self.tokens))
            spans = (self.span_offsets(), ids, tokens)
        return make_trace(
            self.times() if arrival_ns is None else arrival_ns,
            np.frombuffer(self.prompt, dtype=np.int64),
            np.frombuffer(self.output, dtype=np.int64),
            spans=spans,
            name=self.file.stem,
            span_block=span_block if len(self.ids) else None,
            dropped=self.dropped,
            **columns,
        )


def follow(
    before: Sequence[int] | np.ndarray, arrival_ns: np.ndarray, busy_ns: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The columns `after` and `think_ns` of rows that wait for row `before[i]` (-1 for none) to finish.

    The pause is the time between the two arrivals, less `busy_ns` of the row before where that is known. A row that
    arrived before the one it names waits for none.
    """
    after = np.asarray(before, dtype=np.int64)
    rows = np.arange(len(after))
    gap = arrival_ns - arrival_ns[np.maximum(after, 0)]
    after = np.where((after >= 0) & ((gap > 0) | ((gap == 0) & (after < rows))), after, NO_ROW)
    if busy_ns is not None:
        gap = np.maximum(gap - busy_ns[np.maximum(after, 0)], 0)
    return {"after": after, "think_ns": np.where(after >= 0, gap, 0)}


def previous_of(sessions: Sequence[str], arrival_ns: np.ndarray) -> list[int]:
    """For each row the one before it in its session, in order of arrival; -1 for the first."""
    last: dict[str, int] = {}
    before = [-1] * len(sessions)
    for row in np.argsort(arrival_ns, kind="stable").tolist():
        before[row] = last.get(sessions[row], -1)
        last[sessions[row]] = row
    return before


def prefix_ids(offsets: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """int64: ids that name the whole prefix up to and with each of `ids`, which name contents alone."""
    known: dict[tuple[int, int], int] = {}
    out = array("q")
    bounds, contents = offsets.tolist(), ids.tolist()
    for row in range(len(bounds) - 1):
        parent = -1
        for content in contents[bounds[row] : bounds[row + 1]]:
            parent = known.setdefault((parent, content), len(known))
            out.append(parent)
    return np.frombuffer(out, dtype=np.int64) if out else np.zeros(0, dtype=np.int64)


def starts_ns(file: TraceFile, n: int, rate_per_s: object, seed: object) -> np.ndarray:
    """int64[n]: arrivals for a file that has none: all at 0, or a Poisson process with the first at 0."""
    rng = np.random.Generator(np.random.PCG64(check_seed(file, seed)))
    if rate_per_s is None:
        return np.zeros(n, dtype=np.int64)
    rate = check_number(file, "rate_per_s", rate_per_s, above=0, most=1e9)
    gaps = rng.standard_exponential(n)
    gaps[:1] = 0.0
    return np.rint(np.cumsum(gaps) * (1e9 / rate)).astype(np.int64)


def dequantized(file: TraceFile, arrival_ns: np.ndarray, seed: object, step_ns: int | None = None) -> np.ndarray:
    """Spreads rows that share a coarse timestamp evenly at random up to the next one, keeping the order of the file.

    The bin is `step_ns` where the format has one; else the usual (median) step between timestamps, and finer ones than
    0.5 s are taken for real times.
    """
    number = check_seed(file, seed)
    ticks, at = np.unique(arrival_ns, return_inverse=True)
    usual = float(np.median(np.diff(ticks))) if len(ticks) > 1 else 0.0
    fine = usual < 5e8 if step_ns is None else bool((ticks % step_ns).any())
    if fine:
        raise TraceError(
            f"{file.path}: its timestamps are not rounded to a coarse step; load it without dequantize (--dequantize)"
        )
    width = float(step_ns) if step_ns is not None else usual
    widths = np.minimum(np.append(np.diff(ticks), width), width)
    jitter = np.random.Generator(np.random.PCG64(number)).random(len(arrival_ns)) * widths[at]
    order = np.lexsort((jitter, arrival_ns))  # by time, then by jitter
    rows = np.argsort(arrival_ns, kind="stable")  # the same times in the order of the file
    spread = np.empty_like(arrival_ns)
    spread[rows] = arrival_ns[order] + jitter[order].astype(np.int64)
    return spread


def check_seed(file: TraceFile, seed: object) -> int:
    if not isinstance(seed, int) or not is_integer(seed) or seed < 0:
        raise TraceError(f"{file.path}: seed is {seed!r}; it must be a whole number of 0 or more")
    return seed


def check_number(
    file: TraceFile, name: str, value: object, *, least: float = 0.0, above: float | None = None, most: float = 1e18
) -> float:
    """An option's value as a number from `least` (or above `above`) to `most`."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not isinstance(value, int | float)
        or not good
        or not least <= value <= most
        or (above is not None and value <= above)
    ):
        lower = f"above {above:g}" if above is not None else f"of {least:g} or more"
        raise TraceError(f"{file.path}: {name} is {value!r}; it must be a number {lower}, at most {most:g}")
    return float(value)
