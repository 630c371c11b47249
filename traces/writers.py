"""Writes traces: in our own formats, which hold everything, and in those of other tools, which hold a part.

Reading a foreign file back gives the same arrivals, lengths and shared prefixes, as far as the format has them; `lost`
names what a trace has and a format has not.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traces import canonical
from traces.errors import TraceError
from traces.files import write_packed
from traces.readers.hashed import MOONCAKE_BLOCK
from traces.schema import NO_ID, NO_ROW, Trace
from traces.tokens import token_ids

__all__ = ["WRITERS", "Writer", "lost", "save"]

_AZURE_START = datetime.datetime(2023, 11, 16)
_AZURE_TICK_NS = 100

# Common English words; with a space before it, each is one token of the usual byte-pair vocabularies.
_TEXT = """
    the of and to in is that it was for on are with as his they be at one have this from or had by not word but what
    some we can out other were all there when up use your how said an each she which do their time if will way about
    many then them write would like so these her long make thing see him two has look more day could go come did number
    sound no most people my over know water than call first who may down side been now find any new work part take get
    place made live where after back little only round man year came show every good me give our under name very through
    just form great think say help low line turn cause much mean before move right boy old too same
"""
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Writer:
    """One format that is written: its lines, and the columns of a trace that they keep besides the lengths."""

    name: str
    about: str
    ending: str
    lines: Callable[[Trace], Iterator[str]]
    keeps: tuple[str, ...]


def save(trace: Trace, path: str | Path, format: str | None = None) -> None:
    """Writes a trace. `format` is a name of `WRITERS`, or kvtwin-parquet or kvtwin-jsonl, which hold everything.

    Without it the format is ours, by the name's ending: .parquet, or .jsonl, .jsonl.gz, .jsonl.xz. Foreign formats are
    packed as the name ends too. Raises TraceError.
    """
    path = Path(path)
    if format is None:
        if path.suffix == ".parquet":
            format = "kvtwin-parquet"
        elif path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz")):
            format = "kvtwin-jsonl"
        else:
            raise TraceError(f"{path}: a trace is written as .parquet, .jsonl, .jsonl.gz or .jsonl.xz; name it so")
    if format == "kvtwin-parquet":
        canonical.write_parquet(trace, path)
    elif format == "kvtwin-jsonl":
        canonical.write_jsonl(trace, path)
    elif format in WRITERS:
        write_packed(path, "".join(WRITERS[format].lines(trace)).encode())
    else:
        known = ", ".join(("kvtwin-parquet", "kvtwin-jsonl", *WRITERS))
        raise TraceError(f"cannot write the trace format {format!r}; can be written are {known}")


def lost(trace: Trace, format: str) -> list[str]:
    """What this trace has and a file of the format will not have, in words."""
    if format not in WRITERS:
        return []
    keeps = WRITERS[format].keeps
    has = {
        "arrival_ns": ("arrival times", bool(trace.arrival_ns.any())),
        "spans": ("shared prefixes", bool((trace.shared_prompt_tokens() > 0).any())),
        "output_ids": ("which prompts repeat which outputs", bool((trace.output_ids != NO_ID).any())),
        "after": ("turns that wait for others", bool((trace.after != NO_ROW).any())),
        "concurrency": ("the closed loop", trace.concurrency is not None),
        "priority": ("priorities", bool(trace.priority.any())),
        "deadline": ("deadlines", bool(trace.deadline.any())),
        "tenant": ("tenants", bool(trace.tenant.any())),
    }
    words = [text for column, (text, there) in has.items() if there and column not in keeps]
    if format == "azure-2023" and (trace.arrival_ns % _AZURE_TICK_NS).any():
        words.append("times below 100 ns")
    return words


def _azure(trace: Trace) -> Iterator[str]:
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    for when, prompt, output in _rows(trace):
        seconds, ticks = divmod(round(when / _AZURE_TICK_NS), 10**9 // _AZURE_TICK_NS)
        moment = _AZURE_START + datetime.timedelta(seconds=seconds)
        yield f"{moment:%Y-%m-%d %H:%M:%S}.{ticks:07d},{prompt},{output}\r\n"


def _vidur(trace: Trace) -> Iterator[str]:
    yield "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    for when, prompt, output in _rows(trace):
        yield f"{when // 10**9}.{when % 10**9:09d},{prompt},{output}\n"


def _llmservingsim(trace: Trace) -> Iterator[str]:
    for when, prompt, output in _rows(trace):
        yield json.dumps({"input_toks": prompt, "output_toks": output, "arrival_time_ns": when}) + "\n"


def _mooncake(trace: Trace) -> Iterator[str]:
    known: dict[tuple[int, int], int] = {}
    for row, (when, prompt, output) in enumerate(_rows(trace)):
        ids = [known.setdefault(key, len(known)) for key in _block_ends(trace, row)]
        milliseconds = when // 10**6 if when % 10**6 == 0 else when / 1e6
        entry = {"timestamp": milliseconds, "input_length": prompt, "output_length": output, "hash_ids": ids}
        yield json.dumps(entry) + "\n"


def _block_ends(trace: Trace, row: int) -> Iterator[tuple[int, int]]:
    """(span id, tokens of that span so far) at the end of each block of 512 tokens: it names the prefix up to there."""
    end, at = MOONCAKE_BLOCK, 0
    for name, tokens in trace.spans(row):
        while end <= at + tokens:
            yield name, end - at
            end += MOONCAKE_BLOCK
        at += tokens
    if at % MOONCAKE_BLOCK:
        yield name, tokens


def _vllm_custom(trace: Trace) -> Iterator[str]:
    for row in range(len(trace)):
        words = token_ids(trace, row, vocab_size=16 + len(_WORDS)) - 16
        text = " ".join(_WORDS[word] for word in words.tolist())
        yield json.dumps({"prompt": text, "output_tokens": int(trace.output_tokens[row])}) + "\n"


def _rows(trace: Trace) -> Iterator[tuple[int, int, int]]:
    columns: tuple[np.ndarray, ...] = (trace.arrival_ns, trace.prompt_tokens, trace.output_tokens)
    return zip(*(column.tolist() for column in columns), strict=True)


WRITERS: dict[str, Writer] = {
    entry.name: entry
    for entry in (
        Writer("azure-2023", "CSV, times to 100 ns", ".csv", _azure, ("arrival_ns",)),
        Writer("mooncake", "JSON Lines, ids of 512 tokens", ".jsonl", _mooncake, ("arrival_ns", "spans")),
        Writer("llmservingsim", "JSON Lines, lengths and arrivals in ns", ".jsonl", _llmservingsim, ("arrival_ns",)),
        Writer("vidur", "CSV, lengths and arrivals in s", ".csv", _vidur, ("arrival_ns",)),
        Writer(
            "vllm-custom",
            "JSON Lines for `vllm bench serve --dataset-name custom`: words that have about as many tokens",
            ".jsonl",
            _vllm_custom,
            ("spans",),
        ),
    )
}
