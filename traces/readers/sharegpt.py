"""ShareGPT: a JSON list of {"id": ..., "conversations": [{"from": "human", "value": text}, {"from": "gpt", ...}, ...]}.

A pair of a human's message and the answer after it is a request. A later turn's prompt is the whole conversation
before it and the new message; it arrives `think_s` after the turn before has finished. `turns` keeps only so many
turns of each conversation (1 is what throughput benchmarks usually take). What comes before the first human message
(a system prompt) belongs to the first prompt; conversations that begin alike share that beginning. Messages without
an answer, and turns in which either is empty, are left out.

There are no lengths in tokens: a token is taken for `chars_per_token` (4) characters. There are no arrivals:
conversations start all at 0, or as a Poisson process of `rate_per_s`, seeded. The file is read piece by piece.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.files import TraceFile
from traces.readers.base import Format, Rows, check_number, starts_ns
from traces.schema import NO_ID, Trace

__all__ = ["FORMATS"]

_HUMAN, _MODEL = ("human", "user"), ("gpt", "chatgpt", "assistant", "bard", "bing")


def _is_sharegpt(file: TraceFile) -> bool:
    text = file.beginning[:4096].decode("utf-8-sig", errors="replace").lstrip()
    whole = file.beginning.decode("utf-8", errors="replace")
    return text.startswith("[") and '"conversations"' in whole


def _read(
    file: TraceFile,
    chars_per_token: float,
    turns: int | None,
    think_s: float,
    rate_per_s: float | None,
    seed: int,
) -> Trace:
    size = check_number(file, "chars_per_token", chars_per_token, above=0, most=1000)
    pause_ns = round(check_number(file, "think_s", think_s, most=1e6) * 1e9)
    most = math.inf if turns is None else check_number(file, "turns", turns, least=1)
    rows = Rows(file)
    openings: dict[tuple[bytes, int], int] = {}  # a conversation's beginning: its span id
    after, turn_of, conversation_of, output_ids = (array("q") for _ in range(4))
    next_id = 0
    conversations = 0
    for number, item in file.json_items():
        pairs = _pairs(file, number, item)
        ids: list[int] = []
        tokens: list[int] = []
        turn = 0
        for message, answer in pairs:
            if turn >= most:
                break
            prompt, output = (math.ceil(len(text) / size) for text in (message, answer))
            if not prompt or not output:
                rows.dropped += 1
                continue
            if not turn:
                key = (hashlib.blake2b(message.encode("utf-8", "surrogatepass"), digest_size=16).digest(), prompt)
                name = openings.setdefault(key, next_id)
            else:
                name = next_id
            next_id += name == next_id
            ids.append(name)
            tokens.append(prompt)
            if turn:
                output_ids[-1] = ids[-2]
            after.append(len(rows) - 1 if turn else -1)
            turn_of.append(turn)
            conversation_of.append(conversations)
            output_ids.append(NO_ID)
            rows.add(number, 0, sum(tokens), output, ids, tokens)
            ids.append(next_id)
            tokens.append(output)
            next_id += 1
            turn += 1
        conversations += turn > 0
    if not len(rows):
        raise TraceError(f"{file.path}: has no conversation with a human's message and an answer")
    starts = starts_ns(file, conversations, rate_per_s, seed)
    turn_numbers, places = (np.frombuffer(part, dtype=np.int64) for part in (turn_of, conversation_of))
    waits = np.frombuffer(after, dtype=np.int64)
    return rows.trace(
        starts[places] + turn_numbers * pause_ns,
        after=waits,
        think_ns=np.where(waits >= 0, pause_ns, 0),
        output_ids=np.frombuffer(output_ids, dtype=np.int64),
    )


def _pairs(file: TraceFile, number: int, item: Any) -> list[tuple[str, str]]:
    """(what was said since the last answer, the answer) of each turn of a conversation."""
    messages = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(messages, list):
        raise file.error(number, "begins an entry without a list of conversations; each needs one")
    pairs: list[tuple[str, str]] = []
    said: list[str] = []
    asked = False
    for message in messages:
        who, text = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if not isinstance(who, str) or not isinstance(text, str):
            raise file.error(number, 'begins a conversation with a message that is not {"from": ..., "value": text}')
        if who in _MODEL:
            if asked:
                pairs.append(("".join(said), text))
            said, asked = [], False
        else:
            said.append(text)
            asked = asked or who in _HUMAN
    return pairs


FORMATS = (
    Format(
        "sharegpt",
        "a JSON list of conversations, from and value of each message",
        _is_sharegpt,
        _read,
        options={"chars_per_token": 4, "turns": None, "think_s": 0, "rate_per_s": None, "seed": 0},
    ),
)
