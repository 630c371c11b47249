"""Synthetic token ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_strategies import generator_specs

import traces
from traces.tokens import output_token_ids, token_ids


@given(generator_specs(max_requests=12), st.sampled_from([64, 259, 49_152, 200_000]), st.integers(0, 2**40))
def test_prompts_share_exactly_what_their_spans_share(spec: dict[str, object], vocab: int, seed: int) -> None:
    """Rows have equal tokens over equal leading spans, and part soon after; ids stay clear of the first 16."""
    trace = traces.generate(spec)
    prompts = [token_ids(trace, row, vocab, seed) for row in range(len(trace))]
    for row, prompt in enumerate(prompts):
        assert len(prompt) == trace.prompt_tokens[row]
        assert prompt.dtype == np.int32
        assert prompt.min() >= 16
        assert prompt.max() < vocab
        before = int(trace.after[row])
        if before >= 0:
            grown = np.concatenate([prompts[before], output_token_ids(trace, before, vocab, seed)])
            assert (prompt[: len(grown)] == grown).all()
        for other in range(row):
            shared = 0
            for mine, theirs in zip(trace.spans(row), trace.spans(other), strict=False):
                if mine != theirs:
                    break
                shared += mine[1]
            n = min(len(prompt), len(prompts[other]))
            assert (prompt[:shared] == prompts[other][:shared]).all()
            if n - shared >= 24:  # by chance at most one in 48^24
                assert (prompt[shared:n] != prompts[other][shared:n]).any()


def test_tokens_are_spread_evenly() -> None:
    """A long prompt uses the whole range of ids about evenly, and rows, seeds and neighbours are unrelated."""
    trace = traces.make_trace([0, 1], [200_000, 200_000], [1, 1])
    first, second = token_ids(trace, 0, 116), token_ids(trace, 1, 116)
    counts = np.bincount(first, minlength=116)[16:]
    assert ((counts - 2000) ** 2 / 2000).sum() < 150  # chi-squared, 99 degrees of freedom: 0.07 % of good hashes fail
    for other in (second, token_ids(trace, 0, 116, seed=1), np.roll(first, 1)):
        assert (first == other).mean() == pytest.approx(0.01, abs=0.002)


def test_the_hash_stays_what_it_is() -> None:
    """Known (id, offset) give known tokens, so that recorded runs can be repeated by later versions."""
    trace = traces.make_trace([0], [4], [2], spans=([0, 2], [0, 7], [2, 2]), output_ids=[9])
    assert token_ids(trace, 0, 49_152).tolist() == [9217, 26896, 45914, 35892]
    assert output_token_ids(trace, 0, 49_152).tolist() == [14366, 30545]


def test_real_outputs_take_the_place_of_synthetic_ones() -> None:
    """A prompt that repeats an output has the tokens that were generated, and synthetic ones beyond them."""
    trace = traces.make_trace(
        [0, 1], [4, 9], [3, 1], spans=([0, 1, 4], [0, 0, 1, 2], [4, 4, 3, 2]), output_ids=[1, -1], after=[-1, 0]
    )
    plain = token_ids(trace, 1, 1000)
    assert token_ids(trace, 1, 1000, outputs={1: [5, 6, 7]}).tolist() == [*plain[:4], 5, 6, 7, *plain[7:]]
    assert token_ids(trace, 1, 1000, outputs={1: [5]}).tolist() == [*plain[:4], 5, *plain[5:]]
    assert token_ids(trace, 1, 1000, outputs={1: [5, 6, 7, 8]}).tolist() == [*plain[:4], 5, 6, 7, *plain[7:]]


def test_what_cannot_have_tokens_says_so() -> None:
    """A tiny vocabulary and an output without an id are refused."""
    trace = traces.make_trace([0], [4], [2])
    with pytest.raises(traces.TraceError, match="at least 64, not 63"):
        token_ids(trace, 0, 63)
    with pytest.raises(traces.TraceError, match="request 0 has no output id"):
        output_token_ids(trace, 0, 1000)
