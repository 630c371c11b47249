"""ServeGen: descriptions of clients from which a workload is drawn, not recorded requests.

A pool is a tar (packed or not) of `chunk-N-trace.csv` and `chunk-N-dataset.json`, one pair a client. The CSV has no
header; a row is a window of 10 minutes: start (s), requests per second, coefficient of variation of the gaps, Gamma or
Weibull, and two parameters, of which the first is the shape (nothing and zeros where the client was silent). The JSON
has, for times of day in s, the probabilities of lengths as text like a Python dictionary: input_tokens, output_tokens.

How requests are drawn here: a client has in each window as many requests as its rate says. Their gaps are drawn from
its distribution and stretched so that they fill the window: the counts are those of the pool, the shape of the gaps too
(drawing gaps until the window is over would add (cv^2 - 1) / 2 requests to each). Prompt and output lengths are drawn
independently, from the table of the latest time of day that has one (else the next). A client without a dataset is left
out. The tenant of a row is its client. Each client and window has a random stream of its own.

`*_length_pmf.csv` (field,tokens,probability) and `*_rate_10min.csv` (t_s,total_rate_rps,rate_weighted_client_cv,
active_clients,top_client_share) are a pool summed up: the lengths' file is the trace, the rates' file is looked for
beside it. In each window, one client has the top client's share and the others have equal parts of the rest, each with
Gamma gaps of the window's coefficient of variation. Without the rates' file, arrivals are Poisson at `rate_per_s`.

`start_s` and `duration_s` (600, one window) choose the part of the day, `rate_per_s` scales the whole part to a mean
rate, `seed` decides everything random.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import tarfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.files import TraceFile
from traces.readers.base import Format, check_number, check_seed
from traces.schema import Trace, make_trace

__all__ = ["FORMATS", "WINDOW_S", "why_no_trace"]

WINDOW_S = 600
_MOST_REQUESTS = 20_000_000
_MEMBER = re.compile(r"(?:^|/)chunk-(\d+)-(trace\.csv|dataset\.json)$")
_LENGTHS = ("field", "tokens", "probability")
_RATES = ("t_s", "total_rate_rps", "rate_weighted_client_cv", "active_clients", "top_client_share")
_FIELDS = ("input_tokens", "output_tokens")
_SHAPES = ("Gamma", "Weibull")


@dataclass(frozen=True)
class _Window:
    """One client's requests from `start_s` on, for WINDOW_S seconds."""

    client: int
    start_s: float
    rate_per_s: float
    kind: str
    shape: float


class _Lengths:
    """A distribution of lengths: draws by inversion."""

    def __init__(self, where: str, tokens: list[int], probabilities: list[float]) -> None:
        values = np.array(tokens, dtype=np.int64)
        weights = np.array(probabilities, dtype=np.float64)
        good = len(weights) and np.isfinite(weights).all() and weights.min() >= 0 and weights.sum() > 0
        if not good or values.min() < 0 or values.max() >= 2**31:
            raise TraceError(f"{where}: needs lengths of 0 or more, with probabilities of 0 or more that are not all 0")
        order = np.argsort(values, kind="stable")
        self._values = np.maximum(values[order], 1)
        self._bounds = np.cumsum(weights[order])

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        at = np.searchsorted(self._bounds, rng.random(n) * self._bounds[-1], side="right")
        drawn: np.ndarray = self._values[np.minimum(at, len(self._values) - 1)]
        return drawn


_Tables = dict[float, tuple[_Lengths, _Lengths]]
"""Time of day in s: the distributions of prompts and of outputs."""


def _is_pool(file: TraceFile) -> bool:
    return file.beginning[257:262] == b"ustar"


def _is_lengths(file: TraceFile) -> bool:
    return set(_LENGTHS) <= set(file.columns())


def why_no_trace(file: TraceFile) -> str | None:
    """What to do with a part of a pool."""
    if set(_RATES[:2]) <= set(file.columns()):
        return "has a ServeGen pool's rates and no lengths; give the file *_length_pmf.csv beside it"
    if _MEMBER.search(file.name):
        return "is one client of a ServeGen pool; give a tar of the pool's folder"
    return None


def _read_pool(file: TraceFile, seed: int, start_s: float, duration_s: float, rate_per_s: float | None) -> Trace:
    windows: list[_Window] = []
    tables: dict[int, _Tables] = {}
    for client, kind, where, text in _members(file):
        if kind == "trace.csv":
            windows += _client_windows(client, where, text)
        else:
            tables[client] = _client_tables(where, text)
    kept = [window for window in windows if tables.get(window.client)]
    if not kept:
        raise TraceError(f"{file.path}: has no client with both a chunk-N-trace.csv and a chunk-N-dataset.json in use")
    return _draw(file, kept, tables, check_seed(file, seed), start_s, duration_s, rate_per_s)


def _members(file: TraceFile) -> Iterator[tuple[int, str, str, str]]:
    """(client, trace.csv or dataset.json, name for messages, text) of each file of the pool, by client."""
    found = []
    try:
        with tarfile.open(fileobj=io.BytesIO(file.data), mode="r:") as archive:
            for member in archive:
                match = _MEMBER.search(member.name)
                stream = archive.extractfile(member) if match and member.isfile() else None
                if match and stream is not None:
                    found.append((int(match[1]), match[2], f"{file.path}, {member.name}", stream.read()))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise TraceError(f"{file.path}: is a damaged tar file ({error}); fetch it again") from None
    for client, kind, where, data in sorted(found, key=lambda entry: entry[:2]):
        try:
            yield client, kind, where, data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise TraceError(f"{where}: is not UTF-8 text; fetch the pool again") from None


def _client_windows(client: int, where: str, text: str) -> Iterator[_Window]:
    for number, cells in enumerate(csv.reader(io.StringIO(text)), 1):
        if not cells:
            continue
        try:
            start, rate, _cv, kind, shape = (
                float(cells[0]),
                float(cells[1]),
                cells[2],
                cells[3].strip(),
                float(cells[4]),
            )
        except (ValueError, IndexError):
            raise TraceError(
                f"{where}, line {number}: is not start, rate, cv, Gamma or Weibull, and two parameters"
            ) from None
        if rate == 0:
            continue
        good = kind in _SHAPES and 0 < shape < math.inf
        if not good or not 0 <= start < 1e9 or not 0 < rate < 1e6:
            raise TraceError(
                f"{where}, line {number}: has rate {rate:g} and the gaps {kind!r} of shape {shape:g}; a client that "
                "sends needs a rate above 0, and Gamma or Weibull with a shape above 0"
            )
        yield _Window(client, start, rate, kind, shape)


def _client_tables(where: str, text: str) -> _Tables:
    """The distributions by time of day; times without one are left out."""
    try:
        entries = json.loads(text)
        times = {float(time): entry for time, entry in entries.items()}
    except (ValueError, AttributeError, RecursionError):
        raise TraceError(f"{where}: is not a JSON object of times of day in s; fetch the pool again") from None
    tables: _Tables = {}
    for time, entry in times.items():
        texts = [entry.get(field) if isinstance(entry, dict) else None for field in _FIELDS]
        prompt, output = (
            _parsed(f"{where}, {field} at {time:g} s", value) for field, value in zip(_FIELDS, texts, strict=True)
        )
        if prompt is not None and output is not None:
            tables[time] = prompt, output
    return tables


def _parsed(where: str, text: Any) -> _Lengths | None:
    """`{45: 0.5, 46: 0.5}`, which is neither JSON nor to be run as Python; None for `{}`."""
    try:
        body = text.strip().removeprefix("{").removesuffix("}")
        pairs = [pair.split(":") for pair in body.split(",") if pair.strip()]
        tokens = [int(float(key)) for key, _ in pairs]
        probabilities = [float(value) for _, value in pairs]
    except (AttributeError, ValueError, OverflowError):
        raise TraceError(f"{where}: must be text like {{45: 0.5, 46: 0.5}}; fetch the pool again") from None
    return _Lengths(where, tokens, probabilities) if pairs else None


def _read_summed(file: TraceFile, seed: int, start_s: float, duration_s: float, rate_per_s: float | None) -> Trace:
    lengths: dict[str, tuple[list[int], list[float]]] = {field: ([], []) for field in _FIELDS}
    for number, (field, tokens, probability) in file.csv_rows(_LENGTHS):
        if field not in lengths:
            raise file.error(number, f"has the field {field!r}; it must be {' or '.join(_FIELDS)}")
        lengths[field][0].append(file.whole_cell(number, "tokens", tokens, 0))
        lengths[field][1].append(_cell(file, number, "probability", probability, 1.0))
    prompt, output = (_Lengths(f"{file.path}, {field}", *lengths[field]) for field in _FIELDS)
    rates = _rates_beside(file)
    windows: list[_Window] = []
    if rates is not None:
        windows = list(_summed_windows(rates))
    elif rate_per_s is None:
        raise TraceError(f"{file.path}: has no *_rate_10min.csv beside it; put it there, or give rate_per_s")
    else:
        rate = check_number(file, "rate_per_s", rate_per_s, above=0, most=1e6)
        first = check_number(file, "start_s", start_s, most=1e9)
        span = check_number(file, "duration_s", duration_s, above=0, most=1e8)
        windows = [
            _Window(0, start, rate, "Gamma", 1.0)
            for start in np.arange(first // WINDOW_S * WINDOW_S, first + span, WINDOW_S).tolist()
        ]
    tables = {window.client: {0.0: (prompt, output)} for window in windows}
    return _draw(file, windows, tables, check_seed(file, seed), start_s, duration_s, rate_per_s)


def _rates_beside(file: TraceFile) -> TraceFile | None:
    name = file.name.replace("_length_pmf.csv", "_rate_10min.csv")
    candidates: Iterator[Path] = (file.path.parent / f"{name}{packing}" for packing in ("", ".gz", ".xz"))
    found = next((path for path in candidates if name != file.name and path.is_file()), None)
    return TraceFile(found) if found is not None else None


def _summed_windows(file: TraceFile) -> Iterator[_Window]:
    for number, cells in file.csv_rows(_RATES):
        values = [_cell(file, number, name, cell, 1e9) for name, cell in zip(_RATES, cells, strict=True)]
        start, rate, cv, clients, top = values
        if top > 1 or (rate and (clients < 1 or not cv)):
            raise file.error(
                number, "needs a top_client_share up to 1, and a cv above 0 and a client where there is a rate"
            )
        others = int(clients) - 1
        for client in range(int(clients)):
            share = (top if others else 1.0) if client == 0 else (1 - top) / others
            if rate * share:
                yield _Window(client, start, rate * share, "Gamma", cv**-2)


def _cell(file: TraceFile, number: int, column: str, cell: str, most: float) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise file.error(number, f"{column} is {cell!r}; it must be a number from 0 to {most:g}")
    return value


def _draw(
    file: TraceFile,
    windows: list[_Window],
    tables: dict[int, _Tables],
    seed: int,
    start_s: float,
    duration_s: float,
    rate_per_s: float | None,
) -> Trace:
    """The requests of [start_s, start_s + duration_s)."""
    first = check_number(file, "start_s", start_s, most=1e9)
    end = first + check_number(file, "duration_s", duration_s, above=0, most=1e8)
    used = [window for window in windows if window.start_s < end and window.start_s + WINDOW_S > first]
    expected = sum(
        window.rate_per_s * (min(end, window.start_s + WINDOW_S) - max(first, window.start_s)) for window in used
    )
    last = max(window.start_s for window in windows) + WINDOW_S
    if not expected:
        raise TraceError(f"{file.path}: nobody sends from {first:g} s to {end:g} s; its clients send until {last:g} s")
    scale = 1.0
    if rate_per_s is not None:
        scale = check_number(file, "rate_per_s", rate_per_s, above=0, most=1e6) * (end - first) / expected
    if expected * scale > _MOST_REQUESTS:
        raise TraceError(
            f"{file.path}: would be {expected * scale:,.0f} requests; give a shorter duration_s or a lower rate_per_s "
            f"(at most {_MOST_REQUESTS:,} requests)"
        )
    arrival, prompt, output, tenant = (array("q") for _ in range(4))
    for window in used:
        rng = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(window.client, int(window.start_s))))
        )
        count = window.rate_per_s * scale * WINDOW_S
        # A count like 50.999999999999993 is the 51 that was divided by 600.
        n = round(count) if abs(count - round(count)) < 1e-6 else math.floor(count + rng.random())
        if not n:
            continue
        gaps = rng.standard_gamma(window.shape, n + 1) if window.kind == "Gamma" else rng.weibull(window.shape, n + 1)
        ends = np.cumsum(gaps)
        times = window.start_s + ends[:-1] * (WINDOW_S / ends[-1] if ends[-1] > 0 else 0.0)
        # Where the last gap is as good as nothing, rounding must not carry a request into the next window.
        times = np.minimum(times, np.nextafter(window.start_s + WINDOW_S, 0.0))
        lengths = _at(tables[window.client], window.start_s)
        prompts, outputs = (drawn.draw(rng, n) for drawn in lengths)
        inside = (times >= first) & (times < end)
        arrival.extend(np.floor(times[inside] * 1e9).astype(np.int64).tolist())
        prompt.extend(prompts[inside].tolist())
        output.extend(outputs[inside].tolist())
        tenant.extend([window.client] * int(inside.sum()))
    if not arrival:
        raise TraceError(f"{file.path}: no request fell between {first:g} s and {end:g} s; give a longer duration_s")
    columns = (np.frombuffer(part, dtype=np.int64) for part in (arrival, prompt, output, tenant))
    when, prompts, outputs, tenants = columns
    return make_trace(when, prompts, outputs, tenant=tenants, name=file.stem.removesuffix(".tar"))


def _at(tables: _Tables, time_s: float) -> tuple[_Lengths, _Lengths]:
    """The distributions of the latest time that is not after `time_s`, or the earliest there are."""
    times = sorted(tables)
    before = [time for time in times if time <= time_s]
    return tables[before[-1] if before else times[0]]


_OPTIONS = {"seed": 0, "start_s": 0, "duration_s": WINDOW_S, "rate_per_s": None}

FORMATS = (
    Format("servegen-pool", "a tar of chunk-N-trace.csv and chunk-N-dataset.json", _is_pool, _read_pool, _OPTIONS),
    Format(
        "servegen-pmf",
        f"CSV, {','.join(_LENGTHS)}, and *_rate_10min.csv beside it",
        _is_lengths,
        _read_summed,
        _OPTIONS,
    ),
)
