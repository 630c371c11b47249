"""RAGPulse: one week of a retrieval-augmented chat, as JSON Lines whose prompts are lists of components.

A row has timestamp (s, as text), input_length, output_length, session_id, and hash_ids: the ids of the system prompt,
the passages, the history, the web search and the user's input. How long each component is stands in five tables beside
the trace (1_sys_prompt.jsonl ... 5_web_search.jsonl, packed or not). A prompt is its components in that order; two
prompts share the components they begin with alike. input_length is the sum of the components and 6 to 12 tokens that
separate them, of which nobody knows where they stand: a prompt is as long as its components, or with `separators` as
input_length, the rest counted to its last component. Without any of the tables, prompts are input_length long and
share nothing.

The published file has one row out of order and a blank last line. With turns_wait a row waits for the one before it in
its session, with the time between the two as the pause; otherwise all arrive when they did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.files import TraceFile, is_integer
from traces.readers.base import Format, Rows, follow, prefix_ids, previous_of
from traces.schema import Trace

__all__ = ["FORMATS", "TABLES", "why_no_trace"]

TABLES = {
    "sys_prompt": ("1_sys_prompt", "sys_prompt_id"),
    "passages_ids": ("2_passages", "passage_id"),
    "history": ("3_history", "history_id"),
    "web_search": ("5_web_search", "web_search_id"),
    "user_input": ("4_user_input", "user_input_id"),
}
"""Component, in the order of a prompt: its table's file and the name of the id there."""


def _is_ragpulse(file: TraceFile) -> bool:
    hash_ids = file.first_object().get("hash_ids")
    return isinstance(hash_ids, dict) and bool(TABLES.keys() & hash_ids.keys())


def why_no_trace(file: TraceFile) -> str | None:
    """What to do with one of the tables."""
    keys = file.first_object().keys()
    if "token_length" in keys and keys & {key for _, key in TABLES.values()}:
        return "is a table of RAGPulse's components, not its trace; give the file 0_trace.jsonl beside it"
    return None


def _read(file: TraceFile, separators: bool, turns_wait: bool) -> Trace:
    tables = _tables(file)
    rows = Rows(file)
    sessions: list[str] = []
    for number, row in file.json_rows():
        ns = _seconds(file, number, row)
        prompt, output = (file.whole(number, row, key, 1, 2**31 - 1) for key in ("input_length", "output_length"))
        ids, tokens = _components(file, number, row, tables)
        rest = prompt - sum(tokens)
        if tokens and rest < 0:
            raise file.error(
                number,
                f"has input_length {prompt}, and its components have {prompt - rest} tokens; "
                "the tables beside it must be those of this trace",
            )
        if tokens and separators:
            tokens[-1] += rest
        prompt = sum(tokens) or prompt
        rows.add(number, ns, prompt, output, ids, tokens)
        sessions.append(str(row.get("session_id")))
    if len(rows.ids):
        rows.replace_ids(prefix_ids(rows.span_offsets(), np.frombuffer(rows.ids, dtype=np.int64)))
    arrival = rows.times()
    links: dict[str, Any] = follow(previous_of(sessions, arrival), arrival) if turns_wait and len(rows) else {}
    return rows.trace(**links)


def _seconds(file: TraceFile, number: int, row: dict[str, Any]) -> int:
    value = row.get("timestamp")
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise file.error(number, f"timestamp is {value!r}; it must be a number of seconds of 0 or more")
    return round(seconds * 1e9)


def _components(
    file: TraceFile, number: int, row: dict[str, Any], tables: dict[str, dict[int, int]]
) -> tuple[list[int], list[int]]:
    """(ids, tokens) of the row's components in the order of the prompt; nothing without tables."""
    components = row.get("hash_ids")
    if not isinstance(components, dict) or components.keys() - TABLES.keys():
        raise file.error(number, f"hash_ids must be an object with {', '.join(TABLES)}")
    ids: list[int] = []
    tokens: list[int] = []
    for component in TABLES if tables else ():
        for name in components.get(component) or ():
            length = tables[component].get(name) if is_integer(name) else None
            if length is None:
                raise file.error(
                    number, f"names {component} {name!r}, which is not in the table {TABLES[component][0]}"
                )
            ids.append(name)
            tokens.append(length)
    return ids, tokens


def _tables(file: TraceFile) -> dict[str, dict[int, int]]:
    """Tokens of each id, by component; empty if no table lies beside the trace."""
    found = {component: _beside(file.path, name) for component, (name, _) in TABLES.items()}
    missing = [TABLES[component][0] for component, path in found.items() if path is None]
    if len(missing) == len(TABLES):
        return {}
    if missing:
        raise TraceError(
            f"{file.path}: has no table {missing[0]}.jsonl beside it, but others; put all {len(TABLES)} there, or none "
            "to read the lengths alone"
        )
    return {component: _table(path, TABLES[component][1]) for component, path in found.items() if path is not None}


def _beside(path: Path, name: str) -> Path | None:
    candidates = (path.parent / f"{name}.jsonl{packing}" for packing in ("", ".xz", ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _table(path: Path, key: str) -> dict[int, int]:
    file = TraceFile(path)
    return {
        file.whole(number, row, key, 0): file.whole(number, row, "token_length", 1, 2**31 - 1)
        for number, row in file.json_rows()
    }


FORMATS = (
    Format(
        "ragpulse",
        "JSON Lines with hash_ids by component (sys_prompt, passages_ids, ...), and tables of their lengths beside it",
        _is_ragpulse,
        _read,
        options={"separators": False, "turns_wait": False},
    ),
)
