"""Reported cases of serving where memory runs out: what was seen, seen again in simulation, and what ends it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from engine.core.presets import SchedulerConfig
from experiments import scenarios
from experiments.metrics import Tables, expand_steps, summarize
from sim.simulate import simulate
from sim.steptime import StepTime
from traces import Trace, make_trace


def served(trace: Trace, options: SchedulerConfig, step_time: StepTime, **more: Any) -> tuple[Tables, dict[str, Any]]:
    found = simulate(trace, options, step_time, **more)
    tables = Tables(
        found.requests(), found.steps(), found.gaps(), options.steps_in_flight, block_size=options.block_size
    )
    return tables, summarize(tables, options.num_blocks)


@cache
def cliff(concurrency: int, **options: Any) -> dict[str, Any]:
    step_time = scenarios.step_time("llama-3.1-70b", "h100", 8)
    return served(scenarios.cliff_load(concurrency), scenarios.cliff(**options), step_time)[1]


def tpot(concurrency: int, **options: Any) -> float:
    value: float = cliff(concurrency, **options)["tpot_s"]["mean"]
    return value


def test_eight_requests_are_one_too_many() -> None:
    """At 13.2 % of the pool a request, the eighth in a closed loop makes the others three times as slow; the twelfth
    adds nothing to that."""
    assert tpot(7) < 1.15 * tpot(6)
    assert tpot(8) > 3 * tpot(7)
    assert tpot(12) < 1.2 * tpot(8)
    assert cliff(7)["num_preemptions"] == 0 < cliff(8)["num_preemptions"]
    assert cliff(8)["recomputed_tokens"] > 10 * 8 * scenarios.CLIFF_PROMPT


@pytest.mark.parametrize(
    "options", [{"admission_reserve": "max_tokens"}, {"scheduler_reserve_full_isl": True}, {"watermark": 0.1}]
)
def test_admission_with_foresight_removes_the_cliff(options: dict[str, Any]) -> None:
    """With admission by full length, by the whole prompt, or with a watermark, eight are as fast as seven."""
    for concurrency in (8, 12):
        assert tpot(concurrency, **options) < 1.1 * tpot(7)
        assert cliff(concurrency, **options)["num_preemptions"] == 0


def test_a_full_pool_drains_by_preemption_alone() -> None:
    """987 open requests: running and waiting sum to 987, running falls step by step without a finish while the pool is
    full, and in the end everybody is served."""
    tables, summary = served(scenarios.drain_load(), scenarios.drain(), scenarios.step_time("qwen2.5-0.5b", "h100"))
    steps = expand_steps(tables)
    running = steps["num_running"]
    before = np.cumsum(steps["finished"]) == 0
    full = np.flatnonzero(before & (np.arange(len(running)) >= np.argmax(np.cumsum(steps["preempted"]) > 0)))
    assert (running + steps["num_waiting"])[np.flatnonzero(before)].tolist() == [987] * int(before.sum())
    assert running[full[0]] >= 247
    assert running[full[-1]] <= 219
    assert (np.diff(running[full]) <= 0).all()
    used = (steps["held"] + steps["tail"])[full] / (scenarios.drain().num_blocks * 16)
    assert used.min() > 0.99
    assert summary["num_preemptions"] > 0
    assert set(tables.requests["outcome"]) == {"length"}


@cache
def evicted(policy: str, concurrency: int) -> dict[str, Any]:
    step_time = scenarios.step_time("llama-3.1-70b", "h200", 1, "fp8")
    return served(scenarios.evict_load(concurrency), scenarios.evict_options(policy), step_time)[1]


def test_five_signs_of_eviction_under_pressure() -> None:
    """Beside one that evicts nobody, a policy of maximum utilization has less throughput, a longer p99 of TPOT and of
    the whole latency, and a shorter median TTFT; it is the one that preempts."""
    safe, greedy = evicted("no-evict", 32), evicted("max-utilization", 32)
    assert safe["num_preemptions"] == 0 < greedy["num_preemptions"]
    assert safe["output_tokens_per_s"] > 1.2 * greedy["output_tokens_per_s"]
    assert safe["tpot_s"]["p99"] < greedy["tpot_s"]["p99"] / 1.2
    assert safe["e2e_s"]["p99"] < greedy["e2e_s"]["p99"] / 1.2
    assert safe["ttft_s"]["p50"] > greedy["ttft_s"]["p50"]


def test_no_difference_off_pressure() -> None:
    """Where all fit, both capacity policies agree within 1 % in each metric."""
    safe, greedy = evicted("no-evict", 16), evicted("max-utilization", 16)
    assert greedy["num_preemptions"] == 0
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        for statistic, value in safe[metric].items():
            assert greedy[metric][statistic] == pytest.approx(value, rel=0.01)
    assert greedy["output_tokens_per_s"] == pytest.approx(safe["output_tokens_per_s"], rel=0.01)


@pytest.mark.parametrize("blocks", [49, 125, 400, 1000])
def test_every_feasible_request_ends_in_a_tiny_pool(blocks: int) -> None:
    """512 prompt and 256 output tokens at 2,000 requests/s: all end, however few the blocks, with a bounded number of
    preemptions each; with one block less than a request needs, all are rejected by name."""
    rng = np.random.default_rng(0)
    at = np.cumsum(rng.exponential(5e5, 300)).astype(np.int64)
    trace = make_trace(at, np.full(300, 512), np.full(300, 256))
    step_time = scenarios.step_time("llama-2-7b", "a100-80g")
    options = SchedulerConfig(num_blocks=blocks, max_model_len=4096, enable_prefix_caching=False)
    tables, _ = served(trace, options, step_time)
    if blocks * 16 < 512 + 256 - 1:
        assert set(tables.requests["outcome"]) == {"rejected"}
    else:
        assert set(tables.requests["outcome"]) == {"length"}
        assert tables.requests["output_tokens"].tolist() == [256] * 300
        assert tables.requests["num_preemptions"].max() < 100


def test_less_than_one_request_is_a_refusal() -> None:
    """A pool one block too small for any request refuses each at once, and says what it needs and what there is."""
    trace = make_trace(np.zeros(3, dtype=np.int64), np.full(3, 512), np.full(3, 256))
    options = SchedulerConfig(num_blocks=47, max_model_len=4096)
    tables, _ = served(trace, options, scenarios.step_time("llama-2-7b", "a100-80g"))
    assert set(tables.requests["outcome"]) == {"rejected"}
    assert "need 48 blocks of 16, and the pool has 47" in tables.requests["reason"][0]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("requests", [1, 2, 5])
@pytest.mark.parametrize(("blocks", "lookahead"), [(69, 48), (69, 3), (64, 48), (66, 16)])
def test_lookahead_slots_do_not_livelock(blocks: int, lookahead: int, requests: int, steps_in_flight: int) -> None:
    """69 blocks of 16, 1,024 tokens at most, three speculative blocks, 1,000 + 24 tokens: the request that once hung at
    1,008 tokens ends, alone or in company, whether the speculative slots fit beside it or not."""
    trace = make_trace(np.zeros(requests, dtype=np.int64), np.full(requests, 1000), np.full(requests, 24))
    options = SchedulerConfig(
        num_blocks=blocks, max_model_len=1024, num_lookahead_tokens=lookahead, steps_in_flight=steps_in_flight
    )
    tables, _ = served(trace, options, scenarios.step_time("llama-3-8b", "a100-80g"), check=True)
    assert set(tables.requests["outcome"]) == {"length"}
    assert tables.requests["output_tokens"].tolist() == [24] * requests
    assert not tables.steps["zero_progress"].any()


def test_a_pool_that_lookahead_outgrows_is_a_refusal() -> None:
    """Where the request with its speculative slots exceeds the pool, it is refused when it comes, and nothing hangs."""
    trace = make_trace(np.zeros(2, dtype=np.int64), np.full(2, 1000), np.full(2, 24))
    options = SchedulerConfig(num_blocks=63, max_model_len=1024, num_lookahead_tokens=48)
    tables, _ = served(trace, options, scenarios.step_time("llama-3-8b", "a100-80g"))
    assert set(tables.requests["outcome"]) == {"rejected"}


def test_with_and_without_the_full_prompt_gate_all_ends() -> None:
    """Twelve clients of 32,768 tokens end with the gate and without it; without, it takes more than twice as long."""
    step_time = scenarios.step_time("llama-3.1-70b", "h100", 8)
    makespan = {}
    for gate in (True, False):
        tables, summary = served(scenarios.cliff_load(12), scenarios.full_prompt_gate(gate), step_time)
        assert set(tables.requests["outcome"]) == {"length"}
        makespan[gate] = summary["duration_s"]
    assert makespan[False] > 2 * makespan[True]


def test_usage_counts_referenced_blocks_only() -> None:
    """Between requests the prefix cache keeps their blocks, which count as cached and free, and not as in use; the next
    request's usage is its own."""
    trace = make_trace(np.array([0, 10**10]), np.array([320, 100]), np.array([33, 5]))
    options = SchedulerConfig(num_blocks=100, max_model_len=1024)
    tables, _ = served(trace, options, scenarios.step_time("llama-3-8b", "a100-80g"))
    steps = expand_steps(tables)
    last = np.flatnonzero(steps["start_ns"] < 10**10)[-1]
    used = steps["held"] + steps["tail"]
    assert used[last] == 352
    assert steps["cached"][last] == 0
    assert used[last + 1] == 112
    assert steps["cached"][last + 1] == 352
    assert (used + steps["cached"] + steps["free"])[last + 1] == 1600
