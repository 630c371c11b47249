"""Reads traces in the formats that others publish, and in our own.

A format is one entry of `FORMATS`: a name, a look at the file's beginning that recognises it, and a function from the
file to a Trace. A further format is a further entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traces import canonical
from traces.errors import TraceError
from traces.files import INT64_MAX, TraceFile, is_integer
from traces.schema import Trace, make_trace, offsets_of, prefix_conflict

__all__ = ["FORMATS", "Format", "load", "save"]

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""


@dataclass(frozen=True)
class Format:
    """One trace format: `recognises` sees the file, `read` gets the options that `options` names, with defaults."""

    name: str
    about: str
    recognises: Callable[[TraceFile], bool]
    read: Callable[..., Trace]
    options: Mapping[str, object]


def load(path: str | Path, *, format: str | None = None, **options: Any) -> Trace:
    """The trace in a file, or the one that a generator's YAML (.yaml, .yml) describes.

    Plain, .gz and .xz are told apart by content, and so are the formats unless `format` names one. `options` are the
    format's own (`dequantize`, `seed` and `id_tokens` for Mooncake; `seed` for a generator). Raises TraceError.
    """
    path = Path(path)
    if format is None and path.suffix in (".yaml", ".yml"):
        from traces.generate import load_generator

        return load_generator(path, **_allowed(options, {"seed": None}, f"{path}: a generator"))
    if format is not None and format not in FORMATS:
        raise TraceError(f"unknown trace format {format!r}; known are {', '.join(FORMATS)}")
    file = TraceFile(path)
    if not file.data.strip():
        raise TraceError(f"{path}: is empty; a trace needs at least one request")
    if format is None:
        reader = next((entry for entry in FORMATS.values() if entry.recognises(file)), None)
        if reader is None:
            beginning = (file.head(1) or [""])[0][:60]
            known = "; ".join(f"{entry.name} ({entry.about})" for entry in FORMATS.values())
            raise TraceError(f"{path}: begins with {beginning!r}, which is none of the formats we read: {known}")
    else:
        reader = FORMATS[format]
    allowed = _allowed(options, reader.options, f"{path}: format {reader.name}")
    try:
        return reader.read(file, **allowed)
    except TraceError as error:
        if str(path) in str(error):
            raise
        raise TraceError(f"{path}: {error}") from None


def save(trace: Trace, path: str | Path) -> None:
    """Writes our own format, by the name's ending: .parquet, or .jsonl, .jsonl.gz, .jsonl.xz. `load` gives it back."""
    path = Path(path)
    if path.suffix == ".parquet":
        canonical.write_parquet(trace, path)
    elif path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz")):
        canonical.write_jsonl(trace, path)
    else:
        raise TraceError(f"{path}: a trace is written as .parquet, .jsonl, .jsonl.gz or .jsonl.xz; name it so")


def _allowed(options: Mapping[str, Any], known: Mapping[str, object], who: str) -> dict[str, Any]:
    for key in options:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise TraceError(f"{who} has no option {key!r}; {takes}")
    return {**known, **options}


# Azure 2023: TIMESTAMP,ContextTokens,GeneratedTokens with CRLF line ends, 7 fractional digits and no time zone.

_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})?")


def _is_azure_2023(file: TraceFile) -> bool:
    head = file.head(2)
    return bool(head) and head[0].strip() == _AZURE_HEADER and not (len(head) > 1 and re.search(r"[+Z]", head[1]))


def _read_azure_2023(file: TraceFile) -> Trace:
    times: list[str] = []
    numbers: list[int] = []
    prompt: list[int] = []
    output: list[int] = []
    lines = file.lines()
    number, header = next(lines)
    if header.strip() != _AZURE_HEADER:
        raise file.error(number, f"begins with {header[:60]!r}; the header must be {_AZURE_HEADER!r}")
    for number, line in lines:
        cells = line.split(",")
        if len(cells) != 3:
            raise file.error(number, f"has {len(cells)} columns; it needs the 3 of the header {_AZURE_HEADER!r}")
        when = cells[0].strip()
        if not _AZURE_TIME.fullmatch(when):
            raise file.error(
                number, f"TIMESTAMP is {when!r}; it must look like 2023-11-16 18:15:46.6805900, without a time zone"
            )
        if not "1970" <= when[:4] < "2262":
            raise file.error(number, f"TIMESTAMP is {when!r}; the year must be from 1970 to 2261")
        times.append(when)
        numbers.append(number)
        prompt.append(_azure_count(file, number, "ContextTokens", cells[1]))
        output.append(_azure_count(file, number, "GeneratedTokens", cells[2]))
    if not times:
        raise TraceError(f"{file.path}: has a header and no requests; a trace needs at least one")
    try:
        arrival = np.array(times, dtype="datetime64[ns]")
    except ValueError:
        raise _first_wrong_time(file, numbers, times) from None
    return make_trace(arrival.astype(np.int64), prompt, output, name=file.stem)


def _azure_count(file: TraceFile, number: int, column: str, cell: str) -> int:
    cell = cell.strip()
    if not (cell.isascii() and cell.isdigit()) or not 1 <= int(cell) < 2**31:
        raise file.error(number, f"{column} is {cell!r}; it must be a whole number of 1 or more (or drop the row)")
    return int(cell)


def _first_wrong_time(file: TraceFile, numbers: list[int], times: list[str]) -> TraceError:
    for number, when in zip(numbers, times, strict=True):
        try:
            np.datetime64(when, "ns")
        except ValueError:
            return file.error(number, f"TIMESTAMP {when!r} is no date and time that exists; correct it")
    return TraceError(f"{file.path}: has timestamps that cannot be read together")


# Mooncake: one JSON object a line; timestamps in ms; each hash id stands for 512 tokens (others use the schema with
# fewer, which `id_tokens` says) and names the whole prefix up to its end; the last may be partial.

_MOONCAKE_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}


def _is_mooncake(file: TraceFile) -> bool:
    first = (file.head(1) or [""])[0]
    try:
        row = json.loads(first)
    except (json.JSONDecodeError, RecursionError):
        return '"hash_ids"' in first and '"chat_id"' not in first
    # A key too few or too many is a mistake in a Mooncake file, which the reader names; more are another format.
    return isinstance(row, dict) and len(_MOONCAKE_KEYS - set(row)) <= 1 and len(set(row) - _MOONCAKE_KEYS) <= 1


def _read_mooncake(file: TraceFile, dequantize: bool, seed: int, id_tokens: int) -> Trace:
    if not is_integer(id_tokens) or id_tokens < 1:
        raise TraceError(f"id_tokens is {id_tokens!r}; it must be a whole number of 1 or more")
    arrival: list[float] = []
    prompt: list[int] = []
    output: list[int] = []
    counts: list[int] = []
    ids: list[int] = []
    numbers: list[int] = []
    for number, row in file.json_rows():
        unknown = row.keys() - _MOONCAKE_KEYS
        if unknown:
            raise file.error(
                number, f"has a key {sorted(unknown)[0]!r}; a row has {', '.join(sorted(_MOONCAKE_KEYS))} and no other"
            )
        when = row.get("timestamp")
        if isinstance(when, bool) or not isinstance(when, int | float) or not 0 <= when < 1e12:
            said = "is missing" if when is None else f"is {json.dumps(when)}"
            raise file.error(number, f"timestamp {said}; it must be a number of milliseconds of 0 or more")
        length = file.whole(number, row, "input_length", 1)
        row_ids = row.get("hash_ids")
        needed = -(-length // id_tokens)
        if not isinstance(row_ids, list) or not all(is_integer(i) and 0 <= i <= INT64_MAX for i in row_ids):
            raise file.error(number, "hash_ids must be a list of whole numbers of 0 or more")
        if len(row_ids) != needed:
            raise file.error(
                number,
                f"has {len(row_ids)} hash_ids for input_length {length}; at {id_tokens} tokens an id it needs {needed}",
            )
        numbers.append(number)
        arrival.append(when)
        prompt.append(length)
        output.append(file.whole(number, row, "output_length", 1))
        counts.append(needed)
        ids.extend(row_ids)
    offsets = offsets_of(counts)
    span_ids = np.array(ids, dtype=np.int64)
    conflict = prefix_conflict(offsets, span_ids)
    if conflict:
        name, at, other = conflict
        raise file.error(
            numbers[at],
            f"hash id {name} follows another id than on line {numbers[other]}; "
            "an id must name the whole prefix up to its end, so hash each block together with its parent",
        )
    tokens = np.full(len(ids), id_tokens, dtype=np.int64)
    tokens[offsets[1:] - 1] = np.array(prompt) - id_tokens * (np.array(counts) - 1)
    arrival_ns = np.rint(np.array(arrival, dtype=np.float64) * 1e6).astype(np.int64)
    if dequantize:
        arrival_ns = _dequantize(file, arrival_ns, seed)
    return make_trace(
        arrival_ns, prompt, output, spans=(offsets, span_ids, tokens), name=file.stem, span_block=id_tokens
    )


def _dequantize(file: TraceFile, arrival_ns: np.ndarray, seed: int) -> np.ndarray:
    """Spreads rows that share a coarse timestamp evenly at random up to the next one, keeping the order of the file.

    The bin is the usual (median) step between timestamps; finer ones than 0.5 s are taken for real times.
    """
    if not is_integer(seed) or seed < 0:
        raise TraceError(f"{file.path}: seed is {seed!r}; it must be a whole number of 0 or more")
    ticks, at = np.unique(arrival_ns, return_inverse=True)
    if len(ticks) < 2 or np.median(np.diff(ticks)) < 5e8:
        raise TraceError(
            f"{file.path}: its timestamps are not rounded to a coarse step; load it without dequantize (--dequantize)"
        )
    usual = np.median(np.diff(ticks))
    width = np.minimum(np.append(np.diff(ticks), usual), usual)
    jitter = np.random.Generator(np.random.PCG64(seed)).random(len(arrival_ns)) * width[at]
    order = np.lexsort((jitter, arrival_ns))  # by time, then by jitter
    rows = np.argsort(arrival_ns, kind="stable")  # the same times in the order of the file
    spread = np.empty_like(arrival_ns)
    spread[rows] = arrival_ns[order] + jitter[order].astype(np.int64)
    return spread


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format("kvtwin-parquet", "our own, Parquet", canonical.is_parquet, canonical.read_parquet, options={}),
        Format("kvtwin-jsonl", "our own, JSON Lines", canonical.is_jsonl, canonical.read_jsonl, options={}),
        Format("azure-2023", f"CSV, {_AZURE_HEADER}", _is_azure_2023, _read_azure_2023, options={}),
        Format(
            "mooncake",
            "JSON Lines with timestamp, input_length, output_length, hash_ids",
            _is_mooncake,
            _read_mooncake,
            options={"dequantize": False, "seed": 0, "id_tokens": MOONCAKE_BLOCK},
        ),
    )
}
