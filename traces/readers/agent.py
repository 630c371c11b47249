"""Calls that agents made of a model, in characters.

JSON Lines with set, session, turn, dt_us, in_chars, out_chars and hashes. Each hash stands for 64 characters and
names the whole prefix up to its end; what is left of a prompt is the row's own. A token is taken for
`chars_per_token` (4) characters, so a hash is 16 tokens. Some rows have no characters (a call of a tool without text,
or a prompt that was not recorded): they count as one token.

Sessions have no common clock: dt_us begins at 0 in each. They all start at 0 here, or as a Poisson process of
`rate_per_s`, seeded. An agent sends its next call when it has the answer of the last: a row waits for the one before
it in its session, with the time between the two as the pause (an upper bound, for it holds the time of that answer),
unless `turns_wait` is off.
"""

from __future__ import annotations

from array import array

import numpy as np

from traces.errors import TraceError
from traces.files import INT64_MAX, TraceFile, is_integer
from traces.readers.base import Format, Rows, follow, starts_ns
from traces.schema import Trace

__all__ = ["CHARS_PER_HASH", "FORMATS"]

CHARS_PER_HASH = 64
_KEYS = {"session", "turn", "dt_us", "in_chars", "out_chars", "hashes"}


def _is_agent(file: TraceFile) -> bool:
    row = file.first_object()
    return bool(row) and len(_KEYS - row.keys()) <= 1


def _read(file: TraceFile, chars_per_token: int, turns_wait: bool, rate_per_s: float | None, seed: int) -> Trace:
    if not is_integer(chars_per_token) or chars_per_token < 1 or CHARS_PER_HASH % chars_per_token:
        raise TraceError(
            f"{file.path}: chars_per_token is {chars_per_token!r}; it must be a divisor of {CHARS_PER_HASH}, so that a "
            "hash is a whole number of tokens"
        )
    block = CHARS_PER_HASH // chars_per_token
    rows = Rows(file)
    last: dict[tuple[str, str], tuple[int, int]] = {}  # session: its last row and turn
    before, session_of = array("q"), array("q")
    numbers: dict[tuple[str, str], int] = {}
    for number, row in file.json_rows():
        name = (str(row.get("set")), str(row.get("session")))
        turn, dt_us = file.whole(number, row, "turn", 0), file.whole(number, row, "dt_us", 0, INT64_MAX // 2000)
        chars, out_chars = (file.whole(number, row, key, 0, 2**31 - 1) for key in ("in_chars", "out_chars"))
        hashes = row.get("hashes")
        if not isinstance(hashes, list) or not all(is_integer(i) and 0 <= i <= INT64_MAX for i in hashes):
            raise file.error(number, "hashes must be a list of whole numbers of 0 or more")
        if len(hashes) != chars // CHARS_PER_HASH:
            raise file.error(
                number,
                f"has {len(hashes)} hashes for in_chars {chars}; at {CHARS_PER_HASH} characters a hash it needs "
                f"{chars // CHARS_PER_HASH}",
            )
        at, earlier = last.get(name, (-1, -1))
        if turn <= earlier:
            raise file.error(
                number, f"is turn {turn} of session {name[1]} after turn {earlier}; sort each session by turn"
            )
        last[name] = (len(rows), turn)
        before.append(at)
        session_of.append(numbers.setdefault(name, len(numbers)))
        rest = chars % CHARS_PER_HASH // chars_per_token
        if not hashes:
            rest = max(rest, 1)
        prompt = block * len(hashes) + rest
        own = [-1 - number] if rest else []  # becomes an id of its own below
        tokens = [block] * len(hashes) + ([rest] if rest else [])
        rows.add(number, dt_us * 1000, prompt, max(-(-out_chars // chars_per_token), 1), hashes + own, tokens)
    if not len(rows):
        return rows.trace()
    ids = np.frombuffer(rows.ids, dtype=np.int64)
    rows.replace_ids(np.where(ids < 0, ids.max() - ids, ids))
    sessions = np.frombuffer(session_of, dtype=np.int64)
    arrival = starts_ns(file, len(numbers), rate_per_s, seed)[sessions] + rows.times()
    links = follow(np.frombuffer(before, dtype=np.int64), arrival) if turns_wait else {}
    return rows.trace(arrival, span_block=block, **links)


FORMATS = (
    Format(
        "agent-calls",
        "JSON Lines with session, turn, dt_us, in_chars, out_chars, hashes (of 64 characters)",
        _is_agent,
        _read,
        options={"chars_per_token": 4, "turns_wait": True, "rate_per_s": None, "seed": 0},
    ),
)
