"""Requests as data: the schema, readers of public formats, generators, statistics. README.md has the definitions.

trace = traces.load("conversation_trace.jsonl.xz")
source = trace.source()                     # hands the requests out in time
traces.token_ids(trace, row=0, vocab_size=32000)
"""

from __future__ import annotations

from traces.errors import TraceError
from traces.generate import generate
from traces.readers import FORMATS, load, options_of
from traces.schema import NO_ID, NO_ROW, Trace, make_trace
from traces.source import TraceSource
from traces.stats import plot_stats, stats
from traces.tokens import output_token_ids, token_ids
from traces.writers import WRITERS, lost, save

__all__ = [
    "FORMATS",
    "NO_ID",
    "NO_ROW",
    "WRITERS",
    "Trace",
    "TraceError",
    "TraceSource",
    "generate",
    "load",
    "lost",
    "make_trace",
    "options_of",
    "output_token_ids",
    "plot_stats",
    "save",
    "stats",
    "token_ids",
]
