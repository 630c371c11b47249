"""Lengths of requests, from public traces and distributions, and what allocators waste at them."""

from __future__ import annotations

import csv
import gzip
from typing import TYPE_CHECKING

import numpy as np

from experiments.experiment import Context

if TYPE_CHECKING:
    from traces import Trace

__all__ = [
    "SHORT_ANSWERS",
    "TRACES",
    "final_tokens",
    "named_trace",
    "short_answer_tokens",
    "waste_paged",
    "waste_reserved",
]

TRACES = {
    "azure2023_conv": "traces/azure2023/AzureLLMInferenceTrace_conv.csv.xz",
    "azure2023_code": "traces/azure2023/AzureLLMInferenceTrace_code.csv.xz",
    "mooncake_conversation": "traces/mooncake/conversation_trace.jsonl.xz",
    "mooncake_synthetic": "traces/mooncake/synthetic_trace.jsonl.xz",
    "sharegpt-llama-3.1-8b-300-sps10": "traces/sharegpt/sharegpt-llama-3.1-8b-300-sps10.blk16.jsonl.xz",
    "sharegpt-qwen3-32b-300-sps10": "traces/sharegpt/sharegpt-qwen3-32b-300-sps10.blk16.jsonl.xz",
}
"""Files of the shared data, by the names that its stats.json gives them."""
ID_TOKENS = {name: 16 for name in TRACES if name.startswith("sharegpt")}
"""Tokens that a hash id of a file stands for, where the reader has to be told."""
SHORT_ANSWERS = "traces/servegen/m-small_length_pmf.csv.gz"
"""ServeGen's pool m-small as distributions of prompt and output length: the shortest answers among public traces."""


def named_trace(context: Context, name: str) -> Trace:
    """One of TRACES."""
    return context.trace(TRACES[name], **({"id_tokens": ID_TOKENS[name]} if name in ID_TOKENS else {}))


def final_tokens(trace: Trace) -> np.ndarray:
    """int64[n]: prompt and output of each request together."""
    return trace.prompt_tokens.astype(np.int64) + trace.output_tokens


def short_answer_tokens(context: Context, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(prompt, output) tokens of `count` requests drawn from SHORT_ANSWERS, each on its own: int64[count] each."""
    values: dict[str, tuple[list[int], list[float]]] = {}
    with gzip.open(context.path(SHORT_ANSWERS), "rt", encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            tokens, shares = values.setdefault(row["field"], ([], []))
            tokens.append(int(row["tokens"]))
            shares.append(float(row["probability"]))
    rng = np.random.default_rng(context.seed)
    drawn = []
    for name in ("input_tokens", "output_tokens"):
        tokens, shares = values[name]
        drawn.append(rng.choice(np.array(tokens), size=count, p=np.array(shares) / sum(shares)))
    return drawn[0], np.maximum(drawn[1], 1)


def waste_paged(tokens: np.ndarray, block_size: int) -> float:
    """Share of allocated slots that hold nothing when each request has reached its length, in blocks."""
    return 1 - int(tokens.sum()) / int((-(-tokens // block_size) * block_size).sum())


def waste_reserved(tokens: np.ndarray, longest: int) -> float:
    """The same when each reserves `longest` slots; longer requests are cut there."""
    return 1 - float(np.minimum(tokens, longest).mean()) / longest
