"""Traces whose prompts are lists of block hashes: Mooncake, files that use its schema, and Qwen-Bailian.

Mooncake: JSON Lines with timestamp (ms), input_length, output_length, hash_ids. Each id stands for 512 tokens and names
the whole prefix up to its end; the last may be partial. Others use the schema with fewer tokens an id; unless
`id_tokens` says how many, they are 512, or else the power of two with which every row has as many ids as its length
needs. Arrivals are ms, in the published conversation trace rounded to 3 s: `dequantize` spreads them.

Qwen-Bailian: JSON Lines with chat_id, parent_chat_id (-1 for none), timestamp (s), input_length, output_length, type,
turn and hash_ids of 16 tokens each. Ids that turn out to name a block's content alone are chained to name prefixes.
Tokens at the end of a prompt that no id covers are the row's own. `turns_wait` makes a row wait for the one that
parent_chat_id names, with the time between the two as the pause; otherwise all arrive when they did. A row without
input or output tokens is left out.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.files import INT64_MAX, TraceFile, is_integer
from traces.readers.base import Format, Rows, dequantized, follow, prefix_ids
from traces.schema import Trace, prefix_conflict

__all__ = ["FORMATS", "MOONCAKE_BLOCK"]

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""

BAILIAN_BLOCK = 16
"""Tokens that one of Bailian's hash ids stands for."""

_MOONCAKE_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}
_BAILIAN_KEYS = {"chat_id", "parent_chat_id"}
_POWERS = tuple(2**power for power in range(15))


def _is_mooncake(file: TraceFile) -> bool:
    first = (file.head(1) or [""])[0]
    row = file.first_object()
    if not row:
        return first.startswith("{") and '"hash_ids"' in first and '"chat_id"' not in first and '"session' not in first
    if isinstance(row.get("hash_ids"), dict):
        return False
    # A key too few or too many is a mistake in a Mooncake file, which the reader names; more are another format.
    return len(_MOONCAKE_KEYS - set(row)) <= 1 and len(set(row) - _MOONCAKE_KEYS) <= 1


def _read_mooncake(file: TraceFile, dequantize: bool, seed: int, id_tokens: int | None) -> Trace:
    if id_tokens is not None and (not is_integer(id_tokens) or id_tokens < 1):
        raise TraceError(f"id_tokens is {id_tokens!r}; it must be a whole number of 1 or more")
    rows = Rows(file)
    fitting = _POWERS if id_tokens is None else (id_tokens,)
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
        ids = _hash_ids(file, number, row)
        still = tuple(size for size in fitting if len(ids) == -(-length // size))
        if not still:
            size = _preferred(fitting)
            raise file.error(
                number,
                f"has {len(ids)} hash_ids for input_length {length}; "
                f"at {size} tokens an id it needs {-(-length // size)}",
            )
        fitting = still
        rows.add(number, round(when * 1e6), length, file.whole(number, row, "output_length", 1), ids)
    size = _preferred(fitting)
    if len(rows):
        _refuse_conflict(file, rows)
        _set_tokens(rows, size)
    arrival = dequantized(file, rows.times(), seed) if dequantize else None
    return rows.trace(arrival, span_block=size)


def _preferred(sizes: tuple[int, ...]) -> int:
    return MOONCAKE_BLOCK if MOONCAKE_BLOCK in sizes else sizes[0]


def _hash_ids(file: TraceFile, number: int, row: dict[str, Any]) -> list[int]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(is_integer(i) and 0 <= i <= INT64_MAX for i in ids):
        raise file.error(number, "hash_ids must be a list of whole numbers of 0 or more")
    return ids


def _refuse_conflict(file: TraceFile, rows: Rows) -> None:
    conflict = prefix_conflict(rows.span_offsets(), np.frombuffer(rows.ids, dtype=np.int64))
    if conflict:
        name, at, other = conflict
        raise file.error(
            rows.lines[at],
            f"hash id {name} follows another id than on line {rows.lines[other]}; "
            "an id must name the whole prefix up to its end, so hash each block together with its parent",
        )


def _set_tokens(rows: Rows, size: int) -> None:
    """Every id is `size` tokens but the last, which is the rest."""
    offsets = rows.span_offsets()
    counts, prompt = (np.frombuffer(part, dtype=np.int64) for part in (rows.counts, rows.prompt))
    tokens = np.full(len(rows.ids), size, dtype=np.int64)
    tokens[offsets[1:] - 1] = prompt - size * (counts - 1)
    rows.tokens = array("q", tokens.tobytes())


def _is_bailian(file: TraceFile) -> bool:
    row = file.first_object()
    return bool(row) and "hash_ids" in row and bool(_BAILIAN_KEYS & row.keys())


def _read_bailian(file: TraceFile, turns_wait: bool) -> Trace:
    rows = Rows(file)
    row_of: dict[int, int] = {}
    parents: list[int] = []
    for number, row in file.json_rows():
        ns = round(file.number(number, row, "timestamp", most=1e9) * 1e9)
        prompt, output = (file.whole(number, row, key, 0, 2**31 - 1) for key in ("input_length", "output_length"))
        chat, parent = (file.whole(number, row, key, -1) for key in ("chat_id", "parent_chat_id"))
        ids = _hash_ids(file, number, row)
        needed = -(-prompt // BAILIAN_BLOCK)
        if len(ids) > needed:
            raise file.error(
                number,
                f"has {len(ids)} hash_ids for input_length {prompt}; at {BAILIAN_BLOCK} tokens an id it has {needed}",
            )
        if not prompt or not output:
            rows.dropped += 1
            continue
        row_of[chat] = len(rows)
        parents.append(parent)
        # What no id covers is the row's own: -1 - line is no id of the file, and becomes one below.
        rows.add(number, ns, prompt, output, ids + [-1 - number] * (needed - len(ids)))
    if not len(rows):
        return rows.trace()
    offsets, ids_array = rows.span_offsets(), np.frombuffer(rows.ids, dtype=np.int64)
    if (ids_array < 0).any() or prefix_conflict(offsets, ids_array):
        rows.replace_ids(prefix_ids(offsets, ids_array))
    _set_tokens(rows, BAILIAN_BLOCK)
    links: dict[str, Any] = follow([row_of.get(parent, -1) for parent in parents], rows.times()) if turns_wait else {}
    return rows.trace(span_block=BAILIAN_BLOCK, **links)


FORMATS = (
    Format(
        "bailian",
        "JSON Lines with chat_id, parent_chat_id, timestamp, input_length, output_length, hash_ids",
        _is_bailian,
        _read_bailian,
        options={"turns_wait": False},
    ),
    Format(
        "mooncake",
        "JSON Lines with timestamp, input_length, output_length, hash_ids",
        _is_mooncake,
        _read_mooncake,
        options={"dequantize": False, "seed": 0, "id_tokens": None},
    ),
)
