"""Token ids for prompts of which a trace gives only lengths and identities.

A token is a counter-based hash of (seed, span id, offset), so equal spans have equal tokens, in any order, on any
machine, without a table. Different spans differ as random tokens do: two of them begin alike with a chance of one in
the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from traces.errors import TraceError
from traces.schema import Trace, offsets_of

__all__ = ["output_token_ids", "token_ids"]

_FIRST = 16  # ids below are left alone: end-of-text and the like usually live there
_MIN_VOCAB = 64


def token_ids(
    trace: Trace,
    row: int,
    vocab_size: int,
    seed: int = 0,
    outputs: Mapping[int, npt.ArrayLike] | None = None,
) -> npt.NDArray[np.int32]:
    """int32[prompt_tokens[row]]: the prompt of a row, each id in [16, vocab_size).

    `outputs` maps an output id to tokens that were really generated for it: where the prompt repeats that output, these
    take the place of the synthetic ones, as far as they go.
    """
    spans = trace.spans(row)
    ids = np.array([name for name, _ in spans], dtype=np.int64)
    counts = np.array([tokens for _, tokens in spans], dtype=np.int64)
    starts = offsets_of(counts)
    offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    tokens = _hash_tokens(np.repeat(ids, counts), offsets, vocab_size, seed)
    for at, (name, count) in enumerate(spans):
        if outputs is not None and name in outputs:
            real = np.asarray(outputs[name], dtype=np.int32)[:count]
            tokens[starts[at] : starts[at] + len(real)] = real
    return tokens


def output_token_ids(trace: Trace, row: int, vocab_size: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """int32[output_tokens[row]]: the synthetic output of a row that has an output id, as later prompts repeat it."""
    name = trace.output_id(row)
    if name is None:
        raise TraceError(f"request {row} has no output id, so its output has no tokens that a later request could know")
    n = int(trace.output_tokens[row])
    return _hash_tokens(np.full(n, name, dtype=np.int64), np.arange(n), vocab_size, seed)


def _hash_tokens(ids: np.ndarray, offsets: np.ndarray, vocab_size: int, seed: int) -> npt.NDArray[np.int32]:
    if vocab_size < _MIN_VOCAB:
        raise TraceError(f"synthetic tokens need a vocabulary of at least {_MIN_VOCAB}, not {vocab_size}")
    start = np.full(len(ids), seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    mixed = _splitmix64(_splitmix64(_splitmix64(start) ^ ids.astype(np.uint64)) ^ offsets.astype(np.uint64))
    return (mixed % np.uint64(vocab_size - _FIRST)).astype(np.int32) + np.int32(_FIRST)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
