"""Sampling: what is drawn, how often, and what it depends on."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from engine.exec.sampler import SampleRow, SamplingParams, sample, uniform  # noqa: E402
from engine.models.errors import SamplingError  # noqa: E402

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15]))


def draw(params: SamplingParams, count: int = 4000, logits=LOGITS, key: int = 1) -> list[float]:
    """Relative frequencies over `count` output positions."""
    rows = [SampleRow(params, key, position, ()) for position in range(count)]
    tokens = sample(logits.repeat(count, 1).clone(), rows).tokens
    return [tokens.count(token) / count for token in range(logits.shape[0])]


def assert_close(frequencies, expected):
    for got, want in zip(frequencies, expected, strict=True):
        # Four standard deviations of 4,000 draws, which is nothing at 0 and 1.
        assert got == want or abs(got - want) < 4 * math.sqrt(want * (1 - want) / 4000)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": -1}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_k": 99}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.71}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"min_p": 0.5}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 0.5}, [v / 0.285 for v in (0.0025, 0.16, 0.01, 0.09, 0.0225)]),
        ({"temperature": 1e-4}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
    ],
)
def test_draws_follow_the_distribution_that_the_parameters_leave(params, expected):
    """Temperature, top-k (first), top-p (of what that left) and min-p shape the distribution as documented."""
    assert_close(draw(SamplingParams(**params)), expected)


def test_top_p_reaches_beyond_the_candidates_that_are_sorted_first():
    """A flat distribution over 2,000 tokens is cut at the exact share, far beyond the first 256 candidates."""
    logits = torch.linspace(0.0, 1e-3, 2000)
    rows = [SampleRow(SamplingParams(top_p=0.5), 3, position, ()) for position in range(3000)]
    tokens = sample(logits.repeat(3000, 1), rows).tokens
    probabilities = torch.softmax(logits.double(), 0).sort(descending=True).values
    kept = int((probabilities.cumsum(0) < 0.5).sum()) + 1
    assert min(tokens) >= 2000 - kept
    assert min(tokens) < 2000 - kept + 20


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 1 << 20),
    place=st.integers(0, 5),
    others=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 9), st.floats(0.1, 1)), min_size=5, max_size=5),
)
@settings(max_examples=100)
def test_a_token_depends_on_seed_position_and_logits_alone(seed, position, place, others):
    """The row's place in the batch and its neighbours' parameters change nothing."""
    generator = torch.Generator().manual_seed(5)
    own, rest = torch.randn(300, generator=generator), torch.randn(5, 300, generator=generator)
    params = SamplingParams(temperature=1.2, top_p=0.9, top_k=50)
    alone = sample(own.unsqueeze(0).clone(), [SampleRow(params, seed, position, ())]).tokens[0]
    rows = [SampleRow(SamplingParams(temperature=t, top_k=k, top_p=p), i, i, ()) for i, (t, k, p) in enumerate(others)]
    rows.insert(place, SampleRow(params, seed, position, ()))
    logits = torch.cat([rest[:place], own.unsqueeze(0), rest[place:]])
    assert sample(logits.clone(), rows).tokens[place] == alone


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position():
    """The counter-based numbers fill [0, 1) evenly, along positions and along seeds."""
    for numbers in ([uniform(7, k) for k in range(10_000)], [uniform(k, 7) for k in range(10_000)]):
        assert len(set(numbers)) == 10_000
        assert all(0 <= number < 1 for number in numbers)
        for tenth in range(10):
            count = sum(tenth <= 10 * number < tenth + 1 for number in numbers)
            assert abs(count - 1000) < 5 * math.sqrt(900)


def test_stop_tokens_are_barred_until_min_tokens_are_out():
    """Before min_tokens no stop token is drawn, greedy or not; after that it is."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=3, max_tokens=9)
        peaked = torch.tensor([[0.0, 50.0, 0.0]])
        tokens = [sample(peaked.clone(), [SampleRow(params, 1, k, (1,))]).tokens[0] for k in range(5)]
        assert 1 not in tokens[:3]
        assert tokens[3:] == [1, 1]


def test_forced_tokens_come_out_whatever_is_sampled():
    """Output k is forced_tokens[k] while there is one, and sampled afterwards."""
    params = SamplingParams(temperature=0, forced_tokens=[4, 0, 2])
    rows = [SampleRow(params, 0, position, ()) for position in range(5)]
    assert sample(LOGITS.repeat(5, 1), rows).tokens == [4, 0, 2, 1, 1]


def test_logprobs_are_the_models_own_and_include_the_sampled_token():
    """Log-probabilities are those before temperature and cuts, ranked from 1; the sampled token's is there."""
    params = SamplingParams(temperature=3.0, top_k=1, logprobs=2, forced_tokens=[0])
    result = sample(LOGITS.unsqueeze(0).clone(), [SampleRow(params, 1, 0, (1,))])
    table = result.logprobs[0]
    assert result.tokens == [0]
    assert {token: entry.rank for token, entry in table.items()} == {1: 1, 3: 2, 0: 5}
    for token, entry in table.items():
        assert entry.logprob == pytest.approx(float(LOGITS[token]), abs=1e-6)
    assert sample(LOGITS.unsqueeze(0).clone(), [SampleRow(SamplingParams(), 1, 0, ())]).logprobs == [None]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 3, "beam_width": 2}, "n is 3 and beam_width is 2"),
        ({"n": 3, "best_of": 2}, "best_of is 2"),
        ({"beam_width": 2, "best_of": 4}, "best_of and beam search"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"beam_width": 2, "stop": "x"}, "beam search does not take stop"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 17}, "min_tokens is 17"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": ["x"], "detokenize": False}, "detokenize is off"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"forced_tokens": [0.5]}, "forced_tokens is 0.5"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(values, name):
    """One sentence names the parameter and its value."""
    with pytest.raises(SamplingError, match=name):
        SamplingParams(**values)
