"""Generated traces: distributions, prefixes, sessions, determinism, and the words for a wrong description."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from trace_strategies import generator_specs

import traces

BASE: dict[str, Any] = {
    "kind": "synthetic",
    "num_requests": 20_000,
    "seed": 5,
    "arrival": {"process": "poisson", "rate_per_s": 4},
    "prompt_tokens": 512,
    "output_tokens": 256,
}


def make(**changes: Any) -> traces.Trace:
    return traces.generate({**BASE, **changes})


@pytest.mark.parametrize(
    ("arrival", "cv"),
    [
        ({"process": "poisson", "rate_per_s": 4}, 1.0),
        ({"process": "gamma", "rate_per_s": 4, "cv": 3}, 3.0),
        ({"process": "gamma", "rate_per_s": 4, "cv": 0.25}, 0.25),
        ({"process": "constant", "rate_per_s": 4}, 0.0),
    ],
)
def test_arrivals_have_the_asked_rate_and_burstiness(arrival: dict[str, Any], cv: float) -> None:
    """Mean gap and its coefficient of variation are what the description says."""
    gaps = np.diff(make(arrival=arrival).arrival_ns) / 1e9
    assert gaps.mean() == pytest.approx(0.25, rel=0.01 + 0.04 * cv)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06, abs=1e-6)


def test_poisson_gaps_are_exponential() -> None:
    """The share of gaps above t is exp(-rate t), at several t."""
    gaps = np.diff(make().arrival_ns) / 1e9
    for t in (0.05, 0.25, 0.5, 1.0):
        assert (gaps > t).mean() == pytest.approx(np.exp(-4 * t), abs=0.01)


def test_lengths_have_the_asked_distributions() -> None:
    """Fixed is fixed, uniform reaches both ends evenly, a lognormal's mean is that of the lengths."""
    trace = make(
        prompt_tokens={"dist": "lognormal", "mean": 800, "sigma": 0.7}, output_tokens={"dist": "fixed", "value": 9}
    )
    assert trace.prompt_tokens.mean() == pytest.approx(800, rel=0.02)
    assert np.log(trace.prompt_tokens).std() == pytest.approx(0.7, rel=0.02)
    assert set(trace.output_tokens.tolist()) == {9}
    counts = np.bincount(make(output_tokens={"dist": "uniform", "low": 3, "high": 6}).output_tokens)
    assert counts[:3].sum() == 0
    assert counts[3:] / 20_000 == pytest.approx([0.25] * 4, abs=0.015)


def test_bounds_hold() -> None:
    """low and high of a lognormal bound what is drawn; without them it is at least one token."""
    spec = {"dist": "lognormal", "mean": 100, "sigma": 2, "low": 20, "high": 300}
    lengths = make(prompt_tokens=spec).prompt_tokens
    assert (lengths.min(), lengths.max()) == (20, 300)
    assert make(prompt_tokens={"dist": "lognormal", "mean": 1, "sigma": 2}).prompt_tokens.min() == 1


def test_empirical_lengths_come_from_a_file_in_pairs(tmp_path: Path) -> None:
    """Lengths out of one trace are drawn as rows of it; out of a text of numbers, each on its own."""
    rows = "".join(f"2023-11-16 18:15:{i:02}.0,{10 + i},{100 + i}\r\n" for i in range(20))
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + rows)
    (tmp_path / "n.txt").write_text("5\n7\n7\n")
    spec = {"dist": "empirical", "file": "t.csv"}
    pairs = traces.generate({**BASE, "prompt_tokens": spec, "output_tokens": spec}, base=tmp_path)
    assert set(pairs.prompt_tokens.tolist()) == set(range(10, 30))
    assert (pairs.output_tokens - pairs.prompt_tokens == 90).all()
    text = {"dist": "empirical", "file": "n.txt"}
    loose = traces.generate({**BASE, "prompt_tokens": text, "output_tokens": text}, base=tmp_path)
    assert (loose.prompt_tokens == 7).mean() == pytest.approx(2 / 3, abs=0.02)
    assert ((loose.prompt_tokens == 7) & (loose.output_tokens == 5)).mean() == pytest.approx(2 / 9, abs=0.02)


def test_arrivals_can_be_those_of_a_trace(tmp_path: Path) -> None:
    """The process `trace` repeats recorded arrivals, stretched to a rate if one is given, and needs enough of them."""
    traces.save(traces.make_trace([0, 10**9, 4 * 10**9], [1, 1, 1], [1, 1, 1]), tmp_path / "t.jsonl")
    spec = {**BASE, "num_requests": 3, "arrival": {"process": "trace", "file": "t.jsonl"}}
    assert traces.generate(spec, base=tmp_path).arrival_ns.tolist() == [0, 10**9, 4 * 10**9]
    spec["arrival"] = {"process": "trace", "file": "t.jsonl", "rate_per_s": 1}
    assert traces.generate(spec, base=tmp_path).arrival_ns.tolist() == [0, 5 * 10**8, 2 * 10**9]
    with pytest.raises(traces.TraceError, match="has 3 arrivals and num_requests asks for 4"):
        traces.generate({**spec, "num_requests": 4}, base=tmp_path)


def test_a_closed_loop_has_no_arrivals() -> None:
    """All requests are there from the start, and the trace says how many may be outstanding."""
    trace = make(arrival={"process": "closed-loop", "concurrency": 7})
    assert trace.concurrency == 7
    assert trace.arrival_ns.max() == 0


def test_prefixes_are_shared_as_often_as_asked() -> None:
    """A share of the rows begins with one of the prefixes, in front of the prompt, the k-th as likely as 1 / k^zipf."""
    trace = make(prefix={"num_prefixes": 3, "tokens": 64, "share": 0.6, "zipf": 1.0})
    first = [trace.spans(row)[0] for row in range(len(trace))]
    ids = np.array([name if tokens == 64 else -1 for name, tokens in first])
    assert (ids >= 0).mean() == pytest.approx(0.6, abs=0.015)
    popularity = np.bincount(ids[ids >= 0]) / (ids >= 0).sum()
    assert popularity == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.015)
    assert (trace.prompt_tokens == np.where(ids >= 0, 512 + 64, 512)).all()
    assert (trace.shared_prompt_tokens() == np.where(ids >= 0, 64, 0)).all()


@given(generator_specs())
def test_a_turn_repeats_the_one_before(spec: dict[str, object]) -> None:
    """A turn's prompt is the prompt of the row it waits for, that row's output, and something new."""
    trace = traces.generate(spec)
    for row in range(len(trace)):
        before = int(trace.after[row])
        if before < 0:
            assert trace.think_ns[row] == 0
            continue
        assert trace.arrival_ns[row] == trace.arrival_ns[before] + trace.think_ns[row]
        name = trace.output_id(before)
        assert name is not None
        grown = [*trace.spans(before), (name, int(trace.output_tokens[before]))]
        assert trace.spans(row)[:-1] == grown
        new, _ = trace.spans(row)[-1]
        assert (trace.span_ids == new).sum() >= 1
        assert new not in [span for earlier in range(row) for span, _ in trace.spans(earlier)]
    waited_for = set(trace.after[trace.after >= 0].tolist())
    assert waited_for == set(np.flatnonzero(trace.output_ids >= 0).tolist())


def test_sessions_have_the_asked_turns_and_pauses() -> None:
    """Turns and pauses follow their distributions; the number of rows is exact, so the last session may be cut."""
    trace = make(sessions={"turns": {"dist": "uniform", "low": 1, "high": 4}, "think_s": 1.5}, num_requests=19_999)
    assert len(trace) == 19_999
    starts = int((trace.after == -1).sum())
    assert len(trace) / starts == pytest.approx(2.5, rel=0.02)
    assert set(trace.think_ns[trace.after >= 0].tolist()) == {1_500_000_000}
    no_pause = make(sessions={"turns": 2}, num_requests=10)
    assert no_pause.think_ns.max() == 0


def test_a_trace_is_a_function_of_its_description() -> None:
    """The same description gives the same trace; another seed another; a longer one begins like a shorter."""
    spec = {
        "prompt_tokens": {"dist": "lognormal", "mean": 90, "sigma": 1},
        "prefix": {"num_prefixes": 9, "tokens": {"dist": "uniform", "low": 5, "high": 50}, "share": 0.5, "zipf": 1},
        "num_requests": 500,
    }
    assert make(**spec) == make(**spec)
    assert make(**spec) != make(**spec, seed=6)
    assert make(**{**spec, "num_requests": 900}).head(500).prompt_tokens.tolist() == make(**spec).prompt_tokens.tolist()


def test_the_generator_stays_what_it_is() -> None:
    """A known description gives the known trace, so that results of one version can be compared with the next."""
    trace = make(
        num_requests=100,
        arrival={"process": "gamma", "rate_per_s": 2, "cv": 2},
        prompt_tokens={"dist": "lognormal", "mean": 90, "sigma": 1},
        output_tokens={"dist": "uniform", "low": 5, "high": 50},
        prefix={"num_prefixes": 3, "tokens": 20, "share": 0.5, "zipf": 1},
        sessions={
            "turns": {"dist": "uniform", "low": 1, "high": 3},
            "think_s": {"dist": "uniform", "low": 0, "high": 2},
        },
    )
    assert trace.prompt_tokens[:8].tolist() == [50, 162, 29, 24, 9, 39, 45, 151]
    assert trace.arrival_ns[:4].tolist() == [0, 2055, 464137, 1089469]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"output_tokens": {"dist": "uniform", "low": 1, "high": 9}}, ["arrival_ns", "prompt_tokens"]),
        ({"arrival": {"process": "constant", "rate_per_s": 1}}, ["prompt_tokens", "output_tokens", "span_ids"]),
        ({"prompt_tokens": 4}, ["arrival_ns", "output_tokens", "span_ids"]),
    ],
)
def test_changing_one_distribution_leaves_the_others(change: dict[str, Any], same: list[str]) -> None:
    """Each purpose has its own random stream."""
    random = {"dist": "lognormal", "mean": 90, "sigma": 1}
    spec = {
        "prompt_tokens": random,
        "output_tokens": random,
        "prefix": {"num_prefixes": 9, "tokens": 5, "share": 0.5, "zipf": 1},
    }
    before, after = make(**spec), make(**{**spec, **change})
    for column in same:
        assert (getattr(before, column) == getattr(after, column)).all(), column
    assert before != after


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "real"}, "kind is 'real'; it must be one of synthetic"),
        ({"num_requests": None}, "num_requests is missing; add it"),
        ({"num_requests": 0}, "num_requests is 0; it must be a whole number from 1 to"),
        ({"num_requests": 2.5}, "num_requests is 2.5"),
        ({"seed": -1}, "seed is -1"),
        ({"colour": 1}, "unknown key 'colour'; known are kind, name, num_requests"),
        ({"arrival": 3}, "arrival is 3; it must be a mapping"),
        ({"arrival": {"process": "pareto"}}, "arrival.process is 'pareto'; it must be one of poisson, gamma, constant"),
        ({"arrival": {"process": "poisson"}}, "arrival: rate_per_s is missing"),
        ({"arrival": {"process": "poisson", "rate_per_s": 0}}, "arrival.rate_per_s is 0; it must be a number above 0"),
        ({"arrival": {"process": "poisson", "rate_per_s": "fast"}}, "arrival.rate_per_s is 'fast'"),
        ({"arrival": {"process": "poisson", "rate_per_s": float("nan")}}, "arrival.rate_per_s is nan"),
        ({"arrival": {"process": "poisson", "rate_per_s": 1, "cv": 2}}, "arrival.cv has no effect"),
        ({"arrival": {"process": "poisson", "rate_per_s": 1, "rate": 2}}, "arrival: unknown key 'rate'"),
        ({"arrival": {"process": "closed-loop", "concurrency": 0}}, "arrival.concurrency is 0"),
        ({"arrival": {"process": "trace", "file": "absent"}}, "absent: there is no such file"),
        ({"prompt_tokens": -5}, "prompt_tokens.value is -5"),
        ({"prompt_tokens": "many"}, "prompt_tokens.value is 'many'"),
        ({"prompt_tokens": {"dist": "normal"}}, "prompt_tokens.dist is 'normal'; it must be one of fixed, uniform"),
        ({"prompt_tokens": {"dist": "fixed"}}, "prompt_tokens: value is missing"),
        ({"prompt_tokens": {"dist": "fixed", "value": 3, "mean": 3}}, "prompt_tokens: unknown key 'mean'"),
        ({"output_tokens": {"dist": "uniform", "low": 5, "high": 4}}, "output_tokens: low is 5 and high 4"),
        ({"output_tokens": {"dist": "lognormal", "mean": 5, "sigma": -1}}, "output_tokens.sigma is -1"),
        ({"output_tokens": {"dist": "lognormal", "mean": 0, "sigma": 1}}, "output_tokens.mean is 0"),
        ({"prefix": {"num_prefixes": 2}}, "prefix: tokens is missing"),
        (
            {"prefix": {"num_prefixes": 2, "tokens": 5, "share": 1.5}},
            "prefix.share is 1.5; it must be a number from 0 to 1",
        ),
        ({"prefix": {"num_prefixes": 0, "tokens": 5}}, "prefix.num_prefixes is 0"),
        ({"sessions": {"think_s": 5}}, "sessions: turns is missing"),
        ({"sessions": {"turns": 2, "think_s": -5}}, "sessions.think_s.value is -5"),
        ({"sessions": {"turns": 20_000}, "prompt_tokens": 2**20}, "use fewer turns or shorter ones"),
    ],
)
def test_a_wrong_description_is_named(change: dict[str, Any], says: str) -> None:
    """The error names the key, what it has and what it may have."""
    spec = {key: value for key, value in {**BASE, **change}.items() if value is not None}
    with pytest.raises(traces.TraceError) as caught:
        traces.generate(spec, where="w.yaml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_files_load(tmp_path: Path) -> None:
    """load reads a description from YAML, takes its name from it or the file, and another seed on request."""
    path = tmp_path / "load.yaml"
    path.write_text(
        "kind: synthetic\nnum_requests: 10\narrival: {process: poisson, rate_per_s: 2}\n"
        "prompt_tokens: {dist: lognormal, mean: 50, sigma: 1}\noutput_tokens: 3\n"
    )
    trace = traces.load(path)
    assert (trace.name, len(trace)) == ("load", 10)
    assert traces.load(path, seed=0) == trace != traces.load(path, seed=1)
    path.write_text("kind: [synthetic\n")
    with pytest.raises(traces.TraceError, match=r"load.yaml, line \d: is not YAML"):
        traces.load(path)
    path.write_text("- 1\n")
    with pytest.raises(traces.TraceError, match="it must be a mapping"):
        traces.load(path)
    with pytest.raises(traces.TraceError, match="there is no such file"):
        traces.load(tmp_path / "absent.yaml")
    with pytest.raises(traces.TraceError, match="a generator has no option 'dequantize'; it takes seed"):
        traces.load(path, dequantize=True)


def test_a_hundred_thousand_requests_take_well_under_a_second() -> None:
    """Generating is vectorised: 100,000 requests with prefixes and sessions in less than a CPU-second."""
    start = time.process_time()
    make(
        num_requests=100_000,
        prompt_tokens={"dist": "lognormal", "mean": 90, "sigma": 1},
        prefix={"num_prefixes": 9, "tokens": 50, "share": 0.5, "zipf": 1},
        sessions={"turns": {"dist": "uniform", "low": 1, "high": 5}, "think_s": 3},
    )
    assert time.process_time() - start < 1.0
