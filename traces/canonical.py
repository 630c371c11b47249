"""Our own trace format, as Parquet and as JSON Lines; both hold all that a Trace holds and read back identical.

JSON Lines: the first line is a header, {"kvtwin_trace": 1, "name": ..., "concurrency": ..., "span_block": ...}; each
further line is a request, with its spans as [[id, tokens], ...] and without the keys that have their default value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.files import INT64_MAX, TraceFile, is_integer, write_packed
from traces.schema import ROW_COLUMNS, ROW_DEFAULTS, Trace, offsets_of

__all__ = ["is_jsonl", "is_parquet", "read_jsonl", "read_parquet", "write_jsonl", "write_parquet"]

_VERSION = 1
_META = b"kvtwin_trace"
_REQUIRED = ("arrival_ns", "prompt_tokens", "output_tokens")


def is_parquet(file: TraceFile) -> bool:
    return file.beginning.startswith(b"PAR1")


def is_jsonl(file: TraceFile) -> bool:
    return (file.head(1) or [""])[0].startswith('{"kvtwin_trace"')


def write_jsonl(trace: Trace, path: Path) -> None:
    lines = [json.dumps(_header(trace))]
    columns = {name: getattr(trace, name).tolist() for name in ROW_COLUMNS}
    offsets = trace.span_offsets.tolist()
    for row in range(len(trace)):
        entry: dict[str, Any] = {
            name: values[row]
            for name, values in columns.items()
            if name in _REQUIRED or values[row] != ROW_DEFAULTS[name]
        }
        if offsets[row] < offsets[row + 1]:
            entry["spans"] = trace.spans(row)
        lines.append(json.dumps(entry, separators=(",", ":")))
    write_packed(path, ("\n".join(lines) + "\n").encode())


def read_jsonl(file: TraceFile) -> Trace:
    rows = file.json_rows()
    number, header = next(rows)
    name, concurrency, span_block = _read_header(header, f"{file.path}, line {number}")
    columns: dict[str, list[int]] = {column: [] for column in ROW_COLUMNS}
    counts: list[int] = []
    ids: list[int] = []
    tokens: list[int] = []
    last = 0
    for at, (number, row) in enumerate(rows):
        unknown = row.keys() - set(ROW_COLUMNS) - {"spans"}
        if unknown:
            raise file.error(number, f"has an unknown key {sorted(unknown)[0]!r}; correct or remove it")
        for column in ROW_COLUMNS:
            if column in ROW_DEFAULTS and column not in row:
                value = ROW_DEFAULTS[column]
            else:
                value = file.whole(number, row, column, 1 if column in _REQUIRED[1:] else _least(column))
            columns[column].append(value)
        if columns["arrival_ns"][-1] < last:
            raise file.error(number, "arrival_ns is before that of the line above; sort the lines by it")
        last = columns["arrival_ns"][-1]
        if columns["after"][-1] >= at:
            raise file.error(number, f"after is {columns['after'][-1]}; it must be an earlier request (this is {at})")
        spans = _spans(file, number, row)
        if spans and sum(n for _, n in spans) != columns["prompt_tokens"][-1]:
            raise file.error(
                number, "its spans and its prompt_tokens differ in length; make them equal, or drop the spans"
            )
        counts.append(len(spans))
        ids.extend(i for i, _ in spans)
        tokens.extend(n for _, n in spans)
    return _trace(columns, counts, ids, tokens, name, concurrency, span_block)


def write_parquet(trace: Trace, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {name: pa.array(getattr(trace, name)) for name in ROW_COLUMNS}
    offsets = pa.array(trace.span_offsets)
    for name in ("span_ids", "span_tokens"):
        columns[name] = pa.LargeListArray.from_arrays(offsets, pa.array(getattr(trace, name)))
    table = pa.table(columns).replace_schema_metadata({_META: json.dumps(_header(trace)).encode()})
    try:
        pq.write_table(table, path, compression="zstd")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error})") from None


def read_parquet(file: TraceFile) -> Trace:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(file.data))
        names = set(table.column_names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{file.path}: is a damaged Parquet file ({error}); write it again") from None
    meta = (table.schema.metadata or {}).get(_META)
    wanted = {*ROW_COLUMNS, "span_ids", "span_tokens"}
    if meta is None or names != wanted:
        raise TraceError(f"{file.path}: is a Parquet file but no kvtwin trace; convert it with `kvtwin trace convert`")
    try:
        header = json.loads(meta)
    except ValueError:
        header = {}  # which is of no version that there is
    name, concurrency, span_block = _read_header(header, str(file.path))
    columns = {column: table[column].to_numpy() for column in ROW_COLUMNS}
    ids, tokens = (table[column].combine_chunks() for column in ("span_ids", "span_tokens"))
    counts = ids.value_lengths().to_numpy(zero_copy_only=False)
    if not np.array_equal(counts, tokens.value_lengths().to_numpy(zero_copy_only=False)):
        raise TraceError(f"{file.path}: has requests with more span ids than span lengths; write it again")
    flat = (ids.flatten().to_numpy(), tokens.flatten().to_numpy())
    return _trace(columns, counts, *flat, name, concurrency, span_block)


def _least(column: str) -> int:
    return -1 if column in ("output_ids", "after") else -INT64_MAX if column in ("priority", "tenant") else 0


def _spans(file: TraceFile, number: int, row: dict[str, Any]) -> list[tuple[int, int]]:
    spans = row.get("spans", [])
    good = isinstance(spans, list) and all(
        isinstance(span, list)
        and len(span) == 2
        and all(map(is_integer, span))
        and 0 <= span[0] <= INT64_MAX
        and 1 <= span[1] < 2**31
        for span in spans
    )
    if not good:
        raise file.error(number, "spans must be a list of [id of 0 or more, tokens of 1 or more]")
    return [(span[0], span[1]) for span in spans]


def _header(trace: Trace) -> dict[str, Any]:
    return {
        "kvtwin_trace": _VERSION,
        "name": trace.name,
        "concurrency": trace.concurrency,
        "span_block": trace.span_block,
    }


def _read_header(header: Any, where: str) -> tuple[str, int | None, int | None]:
    header = header if isinstance(header, dict) else {}
    if header.get("kvtwin_trace") != _VERSION:
        version = json.dumps(header.get("kvtwin_trace"))
        raise TraceError(f"{where}: kvtwin_trace is {version}; the header must say version {_VERSION}")
    for key in ("concurrency", "span_block"):
        value = header.get(key)
        if value is not None and (not is_integer(value) or value < 1):
            raise TraceError(f"{where}: {key} is {json.dumps(value)}; it must be a whole number of 1 or more, or null")
    return str(header.get("name", "trace")), header.get("concurrency"), header.get("span_block")


def _trace(
    columns: dict[str, Any],
    counts: Any,
    ids: Any,
    tokens: Any,
    name: str,
    concurrency: int | None,
    span_block: int | None,
) -> Trace:
    """Columns as they were written: no shift, no sort, so that what is read back is what was written."""
    return Trace(
        **columns,
        span_offsets=offsets_of(counts),
        span_ids=np.asarray(ids, dtype=np.int64),
        span_tokens=np.asarray(tokens),
        name=name,
        concurrency=concurrency,
        span_block=span_block,
    )
