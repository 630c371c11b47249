"""Metrics against a slow reference that writes everything out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_results import toy_tables
from hypothesis import given
from hypothesis import strategies as st

from experiments import metrics
from experiments.metrics import Slo, Tables

times = st.integers(0, 10**11)


@st.composite
def request_tables(draw: st.DrawFn) -> dict[str, Any]:
    """Requests in any state: rejected, waiting, running, finished, aborted."""
    rows = draw(
        st.lists(
            st.tuples(
                times,
                st.integers(0, 10**10),
                st.integers(0, 10**11),
                st.integers(1, 50),
                st.sampled_from(["length", "stop", "abort", "rejected", "queued", "running"]),
            ),
            max_size=12,
        )
    )
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            *("arrival_ns", "admitted_ns", "first_token_ns", "finish_ns", "output_tokens", "outcome"),
            *("num_preemptions", "cached_tokens", "prompt_tokens"),
        )
    }
    for arrival, to_first, to_finish, tokens, outcome in rows:
        started = outcome not in ("rejected", "queued")
        done = outcome in ("length", "stop", "abort")
        first = arrival + to_first
        columns["arrival_ns"].append(arrival)
        columns["admitted_ns"].append(arrival if started else -1)
        columns["first_token_ns"].append(first if started else -1)
        columns["finish_ns"].append(first + (to_finish if tokens > 1 else 0) if done else -1)
        columns["output_tokens"].append(tokens if started else 0)
        columns["outcome"].append(outcome)
        columns["num_preemptions"].append(tokens % 3)
        columns["cached_tokens"].append(tokens)
        columns["prompt_tokens"].append(100)
    return {n: np.array(c, dtype=object if n == "outcome" else np.int64) for n, c in columns.items()}


@st.composite
def step_tables(draw: st.DrawFn, block_size: int = 4) -> dict[str, Any]:
    """Steps and runs that follow each other without idle time."""
    now, seq = draw(times), 1
    lists = ("step_ends_ns", "run_takes", "step_finished", "step_cached", "step_reserved_may", "step_reserved_cannot")
    columns: dict[str, list[Any]] = {n: [] for n in ("step", "num_steps", "start_ns", "end_ns", "num_decodes", *lists)}
    columns |= {n: [] for n in ("decode_context_tokens", "admitted", "preempted", "finished", *metrics.USAGE)}
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 7))
        run = length > 1
        ends = now + np.cumsum(draw(st.lists(st.integers(1, 10**8), min_size=length, max_size=length)))
        takes = draw(st.lists(st.integers(0, 3), min_size=block_size, max_size=block_size))[:length]
        cached = draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)) if draw(st.booleans()) else []
        reserves = draw(st.booleans())
        columns["step"].append(seq)
        columns["num_steps"].append(length)
        columns["start_ns"].append(now)
        columns["end_ns"].append(int(ends[-1]))
        columns["num_decodes"].append(draw(st.integers(0, 9)))
        columns["decode_context_tokens"].append(draw(st.integers(0, 99)))
        columns["step_ends_ns"].append(ends if run else [])
        columns["run_takes"].append(takes if run else [])
        for name in ("reserved_may", "reserved_cannot"):
            drawn = draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)) if reserves else []
            columns[f"step_{name}"].append([blocks * block_size for blocks in drawn] if run else [])
        columns["step_cached"].append([columns_cached * block_size for columns_cached in cached] if run else [])
        for name in ("admitted", "preempted"):
            columns[name].append(draw(st.integers(0, 2)))
        finished = draw(st.lists(st.integers(0, length - 1), max_size=3))
        columns["finished"].append(len(finished))
        columns["step_finished"].append(finished if run else [])
        for name in metrics.USAGE:
            columns[name].append(draw(st.integers(0, 50)) * block_size)
        if run and cached:
            columns["cached"][-1] = cached[0] * block_size
        if run and reserves:
            for name in ("reserved_may", "reserved_cannot"):
                columns[name][-1] = columns[f"step_{name}"][-1][0]
        now, seq = int(ends[-1]), seq + length
    return {n: c if n in lists else np.array(c, dtype=np.int64) for n, c in columns.items()}


def slow_distribution(values: list[float]) -> dict[str, float | None]:
    """The same by numpy over the values written out."""
    if not values:
        return dict.fromkeys(["mean", "p50", "p90", "p95", "p99"])
    seconds = np.array(values, dtype=np.float64) / 1e9
    return {"mean": float(seconds.mean()), **{f"p{p}": float(np.percentile(seconds, p)) for p in (50, 90, 95, 99)}}


def close(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal keys, and values that differ by rounding only."""
    return a.keys() == b.keys() and all(
        a[k] is b[k] if a[k] is None or b[k] is None else math.isclose(a[k], b[k], rel_tol=1e-9, abs_tol=1e-12)
        for k in a
    )


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 6)), max_size=20))
def test_weighted_distribution_equals_numpy_on_repeated_values(pairs: list[tuple[int, int]]) -> None:
    """A value of weight w counts exactly like w copies of it."""
    values = np.array([v for v, _ in pairs], dtype=np.int64)
    weights = np.array([w for _, w in pairs], dtype=np.int64)
    assert close(metrics.distribution(values, weights), slow_distribution(np.repeat(values, weights).tolist()))


def test_long_sums_do_not_overflow() -> None:
    """The mean is right where the sum of nanoseconds exceeds 64 bits."""
    found = metrics.distribution(np.array([10**15, 3 * 10**15]), np.array([10**6, 10**6]))
    assert found["mean"] == 2 * 10**6


@given(request_tables())
def test_latencies_equal_a_loop_over_requests(requests: dict[str, Any]) -> None:
    """TTFT, TPOT and end-to-end latency, request by request, including those that have none."""
    expected: dict[str, list[float]] = {"ttft_s": [], "tpot_s": [], "e2e_s": []}
    good = 0
    for i in range(len(requests["arrival_ns"])):
        row = {name: column[i] for name, column in requests.items()}
        if row["outcome"] == "rejected":
            continue
        if row["first_token_ns"] >= 0:
            expected["ttft_s"].append(row["first_token_ns"] - row["arrival_ns"])
        if row["finish_ns"] >= 0:
            expected["e2e_s"].append(row["finish_ns"] - row["arrival_ns"])
            if row["output_tokens"] > 1:
                expected["tpot_s"].append((row["finish_ns"] - row["first_token_ns"]) / (row["output_tokens"] - 1))
            quick = row["first_token_ns"] - row["arrival_ns"] <= 5e9
            good += row["outcome"] in ("length", "stop") and quick
    found = metrics.latencies(requests)
    for name, values in expected.items():
        assert close(metrics.distribution(found[name]), slow_distribution(values))
    assert metrics.good(requests, Slo(ttft_s=5.0)).sum() == good


@given(step_tables(), st.lists(st.integers(0, 10**9), max_size=4))
def test_inter_token_gaps_equal_a_loop_over_rows(steps: dict[str, Any], extra: list[int]) -> None:
    """Each decode row of each step contributes the time since the step before; recorded pauses come on top."""
    tables = Tables(steps=steps, requests={}, gaps_ns=np.array(extra, dtype=np.int64), block_size=4)
    expected = list(extra)
    before = int(steps["start_ns"][0])
    for i in range(len(steps["step"])):
        ends = steps["step_ends_ns"][i] if steps["num_steps"][i] > 1 else [steps["end_ns"][i]]
        for end in ends:
            expected += [int(end) - before] * int(steps["num_decodes"][i])
            before = int(end)
    assert close(metrics.distribution(*metrics.inter_token_gaps(tables)), slow_distribution(expected))


@given(step_tables(), st.sampled_from([1, 2]))
def test_expansion_equals_stepping_through_each_run(steps: dict[str, Any], in_flight: int) -> None:
    """A run written out has each step's number, times, context and usage, and keeps the pool's size."""
    tables = Tables(steps=steps, requests={}, gaps_ns=np.empty(0), steps_in_flight=in_flight, block_size=4)
    found = metrics.expand_steps(tables)
    ends: list[int] = []
    row = 0
    for i in range(len(steps["step"])):
        usage = {name: int(steps[name][i]) for name in metrics.USAGE}
        pool = sum(usage.values())
        decodes = int(steps["num_decodes"][i])
        for j in range(int(steps["num_steps"][i])):
            if j:
                new = int(steps["run_takes"][i][j % 4]) * 4
                usage["held"] += decodes
                usage["tail"] += new - decodes
                before = usage["cached"]
                if len(steps["step_cached"][i]):
                    usage["cached"] = int(steps["step_cached"][i][j])
                usage["free"] -= new + usage["cached"] - before
                for name in ("reserved_may", "reserved_cannot"):
                    if len(steps[f"step_{name}"][i]):
                        usage["free"] += usage[name] - int(steps[f"step_{name}"][i][j])
                        usage[name] = int(steps[f"step_{name}"][i][j])
                lag = len(ends) - in_flight
                assert found["start_ns"][row] == (ends[lag] if lag >= 0 else steps["start_ns"][0])
            else:
                assert found["start_ns"][row] == steps["start_ns"][i]
            end = int(steps["step_ends_ns"][i][j]) if steps["num_steps"][i] > 1 else int(steps["end_ns"][i])
            ends.append(end)
            assert found["end_ns"][row] == end
            assert found["step"][row] == steps["step"][i] + j
            ended = steps["step_finished"][i].count(j) if steps["num_steps"][i] > 1 else steps["finished"][i]
            assert found["finished"][row] == ended
            assert found["decode_context_tokens"][row] == steps["decode_context_tokens"][i] + j * decodes
            assert {name: int(found[name][row]) for name in metrics.USAGE} == usage
            assert sum(usage.values()) == pool
            row += 1
    for name in ("admitted", "preempted", "finished"):
        assert found[name].sum() == steps[name].sum()
    assert row == len(found["step"])


def test_summary_has_the_promised_keys_and_adds_goodput_only_with_an_slo() -> None:
    """summary.json holds exactly the documented keys."""
    tables = toy_tables(num_requests=10)
    keys = {
        *("num_requests", "num_rejected", "duration_s", "output_tokens_per_s", "ttft_s", "tpot_s", "itl_s", "e2e_s"),
        *("overload_factor", "num_preemptions", "prefix_hit_tokens", "prompt_tokens", "num_steps", "kv_blocks"),
    }
    plain = metrics.summarize(tables, 120)
    assert set(plain) == keys
    assert set(plain["itl_s"]) == {"mean", "p50", "p90", "p95", "p99"}
    with_slo = metrics.summarize(tables, 120, Slo(e2e_s=1e9))
    assert set(with_slo) == {*keys, "goodput_per_s"}
    assert with_slo["goodput_per_s"] == pytest.approx(10 / plain["duration_s"])


def test_mean_itl_is_the_token_weighted_mean_tpot() -> None:
    """Without pauses both say how long the tokens after the first took: the sums over all tokens agree."""
    tables = toy_tables(num_requests=30)
    requests = tables.requests
    total = (requests["finish_ns"] - requests["first_token_ns"]).sum()
    tokens = (requests["output_tokens"] - 1).sum()
    assert metrics.summarize(tables, 1)["itl_s"]["mean"] == pytest.approx(total / tokens / 1e9)


def test_a_run_in_which_nothing_was_served_has_no_values() -> None:
    """All requests rejected: counts are there, distributions are empty, nothing fails."""
    tables = toy_tables(num_requests=3)
    requests = {**tables.requests, "outcome": np.array(["rejected"] * 3, dtype=object)}
    steps = {name: column[:0] for name, column in tables.steps.items()}
    summary = metrics.summarize(Tables(requests, steps, np.empty(0, dtype=np.int64)), 5)
    assert summary["num_rejected"] == 3
    assert summary["ttft_s"]["mean"] is None
    assert summary["itl_s"]["mean"] is None
    assert summary["output_tokens_per_s"] is None


def test_overload_is_serving_time_over_arrival_time() -> None:
    """Ten requests that take 20 s to arrive and 50 s to serve have an overload factor of 2.5; one request has none."""
    tables = toy_tables(num_requests=10)
    arrival = np.arange(10) * 20 * 10**9 // 9
    requests = {**tables.requests, "arrival_ns": arrival, "first_token_ns": arrival + 10**9}
    requests["finish_ns"] = np.full(10, 50 * 10**9)
    assert metrics.summarize(replace(tables, requests=requests), 120)["overload_factor"] == pytest.approx(2.5)
    alone = {name: column[:1] for name, column in requests.items()}
    assert metrics.summarize(replace(tables, requests=alone), 120)["overload_factor"] is None
