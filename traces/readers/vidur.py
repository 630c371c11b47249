"""Vidur's processed traces: CSV with num_prefill_tokens and num_decode_tokens, and with or without arrived_at (s).

Columns are read by name (num_total_tokens, pd_ratio and an index column are left alone). A file of lengths alone has no
arrivals: they are all at 0, or a Poisson process of `rate_per_s`, seeded.
"""

from __future__ import annotations

import math

from traces.errors import TraceError
from traces.files import TraceFile
from traces.readers.base import Format, Rows, starts_ns
from traces.schema import Trace

__all__ = ["FORMATS"]

_LENGTHS = ("num_prefill_tokens", "num_decode_tokens")
_ARRIVAL = "arrived_at"


def _is_vidur(file: TraceFile) -> bool:
    return bool(set(_LENGTHS) & set(file.columns()))


def _read(file: TraceFile, rate_per_s: float | None, seed: int) -> Trace:
    timed = _ARRIVAL in file.columns()
    if timed and rate_per_s is not None:
        raise TraceError(f"{file.path}: has arrivals of its own, so rate_per_s has no effect; leave it out")
    rows = Rows(file)
    for number, (prompt, output, *when) in file.csv_rows((*_LENGTHS, *([_ARRIVAL] if timed else []))):
        rows.add(
            number,
            _seconds(file, number, when[0]) if timed else 0,
            file.whole_cell(number, _LENGTHS[0], prompt),
            file.whole_cell(number, _LENGTHS[1], output),
        )
    return rows.trace(None if timed else starts_ns(file, len(rows), rate_per_s, seed))


def _seconds(file: TraceFile, number: int, cell: str) -> int:
    """A decimal number of seconds, exact to the ns as far as it is written out."""
    whole, _, fraction = cell.partition(".")
    if whole.isascii() and whole.isdigit() and len(whole) < 10 and (not fraction or fraction.isdigit()):
        return int(whole) * 10**9 + round(int(fraction.ljust(18, "0")[:18] or 0) / 1e9)
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e9:
        raise file.error(number, f"{_ARRIVAL} is {cell!r}; it must be a number of seconds of 0 or more")
    return round(value * 1e9)


FORMATS = (
    Format(
        "vidur",
        f"CSV, {', '.join(_LENGTHS)} and perhaps {_ARRIVAL}",
        _is_vidur,
        _read,
        options={"rate_per_s": None, "seed": 0},
    ),
)
