"""BurstGPT, versions 1 to 3: CSV with Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type.

Columns are read by name: version 3 has `Session ID` and `Elapsed time` after the first. A row with no response (or no
request) tokens is a failed request (7.26 % in version 3) and left out. Timestamps are whole seconds: `dequantize`
spreads those of one second evenly at random over it. `turns_wait` makes a row wait for the one before it in its
session, with a pause of the time between the two less the elapsed time of the first (version 3 only).
"""

from __future__ import annotations

import math
from array import array
from itertools import pairwise
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.files import TraceFile
from traces.readers.base import Format, Rows, dequantized, follow, previous_of
from traces.schema import Trace

__all__ = ["FORMATS"]

_NEEDED = ("Timestamp", "Request tokens", "Response tokens")
_SESSIONS = ("Session ID", "Elapsed time")
_COUNTED_ROWS = 50


def _is_burstgpt(file: TraceFile) -> bool:
    names = set(file.columns())
    return set(_NEEDED) <= names or ("Timestamp" in names and len({*_NEEDED, "Model", "Log Type"} - names) <= 1)


def _read(file: TraceFile, dequantize: bool, seed: int, turns_wait: bool) -> Trace:
    has_sessions = set(_SESSIONS) <= set(file.columns())
    if turns_wait and not has_sessions:
        raise TraceError(f"{file.path}: has no columns {' and '.join(_SESSIONS)}, which turns_wait needs; leave it out")
    rows = Rows(file)
    sessions: list[str] = []
    elapsed = array("q")
    for number, (when, prompt, output, *session) in file.csv_rows((*_NEEDED, *(_SESSIONS if has_sessions else ()))):
        ns = _seconds(file, number, "Timestamp", when)
        counts = file.whole_cell(number, _NEEDED[1], prompt, 0), file.whole_cell(number, _NEEDED[2], output, 0)
        if 0 in counts:
            rows.dropped += 1
            continue
        rows.add(number, ns, *counts)
        if turns_wait:
            sessions.append(session[0])
            elapsed.append(_seconds(file, number, _SESSIONS[1], session[1] or "0"))
    if not file.forced and len(rows) + rows.dropped >= _COUNTED_ROWS and _counts_its_rows(rows):
        raise TraceError(
            f"{file.path}: has BurstGPT's header, but its timestamps just count the rows, as in a made-up file "
            "that goes by this name; fetch BurstGPT from its authors, or pass format burstgpt to read it as it is"
        )
    links: dict[str, Any] = {}
    arrival = rows.times()
    if turns_wait and len(rows):
        links = follow(previous_of(sessions, arrival), arrival, np.frombuffer(elapsed, dtype=np.int64))
    if dequantize and len(rows):
        arrival = dequantized(file, arrival, seed, step_ns=10**9)
    return rows.trace(arrival, **links)


def _seconds(file: TraceFile, number: int, column: str, cell: str) -> int:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e9:
        raise file.error(number, f"{column} is {cell!r}; it must be a number of seconds of 0 or more")
    return round(value * 1e9)


def _counts_its_rows(rows: Rows) -> bool:
    """Whether each row is exactly as many seconds after the one before as there are rows from one to the other."""
    return all(
        later[0] - earlier[0] == (later[1] - earlier[1]) * 10**9
        for earlier, later in pairwise(zip(rows.arrival_ns, rows.lines, strict=True))
    )


FORMATS = (
    Format(
        "burstgpt",
        "CSV, Timestamp, Request tokens, Response tokens, ... (versions 1 to 3)",
        _is_burstgpt,
        _read,
        options={"dequantize": False, "seed": 0, "turns_wait": False},
    ),
)
