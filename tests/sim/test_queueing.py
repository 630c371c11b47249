"""Queues whose answers are known, built from the gateway, the router and the replicas.

A service is a hundred decode steps, so that a step is 1 % of it. Each queue is held twice: request by request against a
few lines that do nothing else (`lindley`, `servers`, `shared`), and its mean against theory, with a 99 % confidence
interval from 40 batches of requests in order. The intervals are corrected for how far the interarrival and service
times of a batch are from their known means (control variates: A. M. Law, Simulation Modeling and Analysis, 11.4).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import factorial
from typing import NamedTuple

import numpy as np
import pytest

from engine.core.presets import SchedulerConfig
from sim.cluster import ClusterResult, simulate_cluster
from sim.gateway import GatewayOptions
from sim.node import NodeSpec
from sim.routers import LeastLoaded
from sim.steptime import StepTime
from traces import Trace, make_trace

STEPS = 100
"""Of a service, on average."""
STEP_NS = 10_000_000
SERVICE_NS = STEPS * STEP_NS
LOAD = 0.5
SERVERS = 4
CLIENTS, THINK = 8, 6.0
"""Of the closed loop; think times in service times."""
BATCHES = 40
T_99 = {37: 2.7154, 38: 2.7116, 39: 2.7079}
"""Two-sided 99 % quantiles of Student's t by degrees of freedom."""


class Estimate(NamedTuple):
    """A mean and the half-width of its confidence interval."""

    mean: float
    half: float

    def against(self, theory: float) -> tuple[float, float]:
        """(how far the mean is off, half-width), both as shares of the theory's."""
        return self.mean / theory - 1, self.half / theory


def estimate(values: np.ndarray, controls: Sequence[tuple[np.ndarray, float]] = ()) -> Estimate:
    """The mean of `values`; `controls` are (values, known mean). The first batch is left out: the queue fills."""
    size = len(values) // (BATCHES + 1)

    def batches(column: np.ndarray) -> np.ndarray:
        means: np.ndarray = column[size : size * (BATCHES + 1)].reshape(BATCHES, size).mean(axis=1)
        return means

    y = batches(values)
    design = np.column_stack([np.ones(BATCHES), *(batches(column) - mean for column, mean in controls)])
    inverse = np.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ y
    residual = y - design @ beta
    free = BATCHES - design.shape[1]
    return Estimate(float(beta[0]), T_99[free] * float(np.sqrt(residual @ residual / free * inverse[0, 0])))


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    """Of 1,000 intervals of sums with a known mean about 99 % have it, and controls make them narrower."""
    rng = np.random.default_rng(0)
    covered, narrower = 0, 0
    for _ in range(1000):
        noise, control = rng.exponential(1.0, 4100), rng.exponential(1.0, 4100)
        plain, corrected = estimate(noise + control), estimate(noise + control, [(control, 1.0)])
        covered += abs(corrected.mean - 2.0) <= corrected.half
        narrower += corrected.half < plain.half
    assert 980 <= covered <= 998
    assert narrower > 950


# ---- loads ----


def config(num_seqs: int, num_blocks: int = 2_000) -> SchedulerConfig:
    """One that serves so many at a time, with memory for all."""
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=8192,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )


def poisson(rate: float, services: np.ndarray, seed: int) -> tuple[Trace, np.ndarray]:
    """Poisson arrivals at `rate` a service time, and the gaps before them in ns. A prompt is one token."""
    n = len(services)
    gaps = np.random.default_rng([seed, 1]).exponential(SERVICE_NS / rate, n).astype(np.int64)
    return make_trace(np.cumsum(gaps), np.ones(n, dtype=np.int64), services), gaps


def geometric(n: int, seed: int) -> np.ndarray:
    """Steps of services: the exponential distribution, in whole steps."""
    return np.minimum(np.random.default_rng([seed, 2]).geometric(1 / STEPS, n), 8000)


def sojourns(result: ClusterResult) -> np.ndarray:
    """From each arrival to its finish, in ns."""
    requests = result.requests()
    assert set(requests["outcome"]) == {"length"}
    return np.asarray(requests["finish_ns"] - requests["arrival_ns"], dtype=np.float64)


def md1(n: int, seed: int = 0) -> tuple[Trace, np.ndarray, Estimate]:
    """Equal services, one at a time. Requests queue in the replica's core."""
    trace, gaps = poisson(LOAD, np.full(n, STEPS), seed)
    found = sojourns(simulate_cluster(trace, [NodeSpec(config(1), StepTime(step=STEP_NS))]))
    return trace, found, estimate(found, [(gaps, SERVICE_NS / LOAD)])


def mmc(n: int, seed: int = 0) -> tuple[Trace, np.ndarray, Estimate]:
    """Exponential services on several replicas with one request each. Requests queue in the gateway."""
    services = geometric(n, seed)
    trace, gaps = poisson(LOAD * SERVERS, services, seed)
    nodes = [NodeSpec(config(1), StepTime(step=STEP_NS))] * SERVERS
    found = sojourns(simulate_cluster(trace, nodes, LeastLoaded(), GatewayOptions(max_outstanding=1)))
    controls = [(gaps, SERVICE_NS / LOAD / SERVERS), (services * float(STEP_NS), float(SERVICE_NS))]
    return trace, found, estimate(found, controls)


def processor_sharing(n: int, equal: bool, seed: int = 0) -> tuple[Trace, np.ndarray, Estimate]:
    """All at a time, a step as long as it has rows. `equal` services, or exponential ones."""
    services = np.full(n, STEPS) if equal else geometric(n, seed)
    trace, gaps = poisson(LOAD, services, seed)
    found = sojourns(simulate_cluster(trace, [NodeSpec(config(1024, 20_000), StepTime(row=STEP_NS))]))
    return trace, found, estimate(found, [(gaps, SERVICE_NS / LOAD)])


def closed_loop(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients that think, ask one replica that serves one at a time, and think again.

    Returns, in the order of finishes, in ns: gaps between them, sojourns, and the pauses before each; up to when the
    first client has nothing left to ask.
    """
    rng = np.random.default_rng([seed, 3])
    rows = np.arange(n)
    think = rng.exponential(THINK * SERVICE_NS, n).astype(np.int64)
    after = np.where(rows >= CLIENTS, rows - CLIENTS, -1)
    arrival = np.where(rows < CLIENTS, np.sort(think[:CLIENTS])[np.minimum(rows, CLIENTS - 1)], 0)
    arrival = np.maximum.accumulate(arrival)
    trace = make_trace(arrival, np.ones(n, dtype=np.int64), geometric(n, seed), after=after, think_ns=think)
    result = simulate_cluster(trace, [NodeSpec(config(1), StepTime(step=STEP_NS))])
    requests, found = result.requests(), sojourns(result)
    order = np.argsort(requests["finish_ns"], kind="stable")
    order = order[: int((requests["finish_ns"] <= requests["finish_ns"][-CLIENTS:].min()).sum())]
    return np.diff(requests["finish_ns"][order], prepend=0).astype(float), found[order], think[order].astype(float)


# ---- theory ----


def erlang_c(servers: int, load: float) -> float:
    """How likely a request has to wait, with an offered load in servers (Erlang, 1917)."""
    busy = load**servers / factorial(servers) * servers / (servers - load)
    return busy / (sum(load**k / factorial(k) for k in range(servers)) + busy)


W_MD1 = SERVICE_NS * (1 + LOAD / (2 * (1 - LOAD)))
"""Pollaczek and Khinchine."""
W_MMC = SERVICE_NS * (1 + erlang_c(SERVERS, LOAD * SERVERS) / (SERVERS - LOAD * SERVERS))
W_PS = SERVICE_NS / (1 - LOAD)
"""Whatever the distribution of services (Kleinrock, Queueing Systems, volume 2, section 4.4)."""


def repairman() -> float:
    """Requests a service time in the closed loop: M/M/1//N, the machine repairman."""
    empty = 1 / sum(factorial(CLIENTS) / factorial(CLIENTS - k) / THINK**k for k in range(CLIENTS + 1))
    return 1 - empty


# ---- slow references, request by request ----


def lindley(trace: Trace) -> np.ndarray:
    """Sojourns where one server takes one after another."""
    free = 0
    found = []
    for at, steps in zip(trace.arrival_ns.tolist(), trace.output_tokens.tolist(), strict=True):
        free = max(free, at) + steps * STEP_NS
        found.append(free - at)
    return np.array(found, dtype=np.float64)


def servers(trace: Trace) -> np.ndarray:
    """Sojourns where the first free of SERVERS takes the next."""
    free = [0] * SERVERS
    found = []
    for at, steps in zip(trace.arrival_ns.tolist(), trace.output_tokens.tolist(), strict=True):
        done = max(heapq.heappop(free), at) + steps * STEP_NS
        heapq.heappush(free, done)
        found.append(done - at)
    return np.array(found, dtype=np.float64)


def shared(trace: Trace) -> np.ndarray:
    """Sojourns where all that are there share a server evenly, at every moment."""
    arrivals = trace.arrival_ns.tolist()
    found = np.zeros(len(trace))
    left: list[tuple[float, int]] = []  # heap of (work at which it is done, row)
    now = done = 0.0  # `done`: work that a request has got that was there all the time
    for row, at in enumerate([*arrivals, float("inf")]):
        while left and now + (left[0][0] - done) * len(left) <= at:
            level, ended = left[0]
            now += (level - done) * len(left)
            done = level
            heapq.heappop(left)
            found[ended] = now - arrivals[ended]
        if row < len(arrivals):
            done += (at - now) / len(left) if left else 0.0
            now = float(at)
            heapq.heappush(left, (done + int(trace.output_tokens[row]) * STEP_NS, row))
    return found


# ---- the queues ----


def test_one_at_a_time_is_lindleys_recursion() -> None:
    """Each sojourn of an M/D/1 is the recursion's to the nanosecond, and theory's mean lies in the interval."""
    trace, found, mean = md1(1_230)
    assert (found == lindley(trace)).all()
    assert abs(mean.mean - W_MD1) <= mean.half < 0.15 * W_MD1


def test_replicas_with_one_request_each_are_servers() -> None:
    """Each sojourn of an M/M/c is that of a request that the first free server takes: what follows from an answer comes
    1 ns after it, and adds up over a busy period."""
    trace, found, mean = mmc(1_230)
    assert np.abs(found - servers(trace)).max() <= 200
    assert abs(mean.mean - W_MMC) <= mean.half < 0.15 * W_MMC


@pytest.mark.parametrize("equal", [True, False])
def test_steps_as_long_as_they_have_rows_share_a_processor(equal: bool) -> None:
    """Sojourns are those of a server that is shared evenly at every moment, but for the step in which one arrives."""
    trace, found, mean = processor_sharing(820, equal)
    exact = shared(trace)
    assert abs(found.mean() / exact.mean() - 1) < 0.01
    assert np.abs(found - exact).max() < 0.15 * exact.max()
    assert abs(mean.mean - W_PS) <= mean.half < 0.4 * W_PS


def test_a_closed_loop_obeys_littles_law() -> None:
    """Clients are throughput times (sojourn + pause), and throughput is the machine repairman's."""
    gaps, found, think = closed_loop(1_230)
    rate = estimate(gaps)
    clients = (estimate(found).mean + estimate(think).mean) / rate.mean
    assert clients == pytest.approx(CLIENTS, rel=0.02)
    assert abs(rate.mean - SERVICE_NS / repairman()) <= rate.half < 0.1 * rate.mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queue", "n", "theory"),
    [
        pytest.param(lambda n: md1(n)[2], 120_000, W_MD1, id="M/D/1"),
        pytest.param(lambda n: mmc(n)[2], 120_000, W_MMC, id="M/M/c"),
        pytest.param(lambda n: processor_sharing(n, True)[2], 160_000, W_PS, id="processor sharing"),
        pytest.param(lambda n: estimate(closed_loop(n)[0]), 120_000, SERVICE_NS / repairman(), id="closed loop"),
    ],
)
def test_means_are_theorys_within_one_percent(queue: Callable[[int], Estimate], n: int, theory: float) -> None:
    """The mean lies within a 99 % confidence interval whose half-width is at most 1 % of theory."""
    off, width = queue(n).against(theory)
    print(f"{off:+.3%} +- {width:.3%}")
    assert width <= 0.01
    assert abs(off) <= width
