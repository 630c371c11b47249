"""The highest rate: against closed forms, against a walk over all rates, and what cannot be searched."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.presets import SchedulerConfig
from experiments.capacitysearch import Objective, Tried, find_knee, interval, parse_objective
from experiments.cli import main
from experiments.errors import UsageError
from sim.cluster import simulate_cluster
from sim.node import NodeSpec
from sim.steptime import StepTime
from traces import make_trace

STEPS, STEP_NS = 100, 10_000_000
"""A service of 1 s in a hundred steps."""
TRACE = """
kind: synthetic
num_requests: 150
seed: 5
arrival: {process: poisson, rate_per_s: 4}
prompt_tokens: {dist: lognormal, mean: 300, sigma: 0.8}
output_tokens: {dist: lognormal, mean: 80, sigma: 0.7}
"""
OPTIONS = ["--model", "llama-3-8b", "--hardware", "a100-80g", "--num-gpu-blocks-override", "1500"]
OPTIONS += ["--max-model-len", "4096"]


def md1_sojourn(rate: float, gaps: np.ndarray) -> float:
    """Mean sojourn in s of equal services, one at a time, served by the simulator's own processes."""
    n = len(gaps)
    arrivals = np.cumsum((gaps * 1e9 / rate).astype(np.int64))
    config = SchedulerConfig(
        num_blocks=2_000,
        max_model_len=8192,
        max_num_seqs=1,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    trace = make_trace(arrivals, np.ones(n, dtype=np.int64), np.full(n, STEPS))
    found = simulate_cluster(trace, [NodeSpec(config, StepTime(step=STEP_NS))]).requests()
    return float(np.mean(found["finish_ns"] - found["arrival_ns"])) / 1e9


def theory(rate: float) -> float:
    """Mean sojourn in an M/D/1 with services of 1 s (Pollaczek and Khinchine)."""
    return 1 + rate / (2 * (1 - rate))


@pytest.mark.parametrize(("requests", "replications"), [(4_000, 3), pytest.param(20_000, 9, marks=pytest.mark.slow)])
def test_the_knee_of_an_md1_is_found(requests: int, replications: int) -> None:
    """The rate at which the mean sojourn is 2 s, by theory 2/3: within 2 % over a few seeds."""
    want = 2.0
    exact = 2 * (want - 1) / (1 + 2 * (want - 1))
    assert theory(exact) == pytest.approx(want)
    knees = []
    for seed in range(replications):
        gaps = np.random.default_rng([seed, 9]).exponential(1.0, requests)

        def measure(rate: float, gaps: np.ndarray = gaps) -> dict[str, Any]:
            return {"e2e_s.mean": md1_sojourn(rate, gaps)}

        knees.append(find_knee(measure, [Objective("e2e_s.mean", True, want)], 0.2, 0.005).rate_per_s)
    mean, half = interval(knees)
    assert half is not None
    assert abs(mean / exact - 1) <= 0.02
    assert half / exact < 0.1


@pytest.mark.parametrize("start", [1e-3, 0.7, 3.0, 900.0])
def test_a_knee_is_found_from_anywhere(start: float) -> None:
    """The bracket has the knee, is as narrow as asked, and every rate that was tried is told once."""
    told: list[Tried] = []
    knee = find_knee(lambda rate: {"x": rate}, [Objective("x", True, 3.7)], start, 0.01, told.append)
    assert knee.low <= 3.7 < knee.high <= knee.low * 1.01
    assert told == knee.tried
    assert len({one.rate_per_s for one in told}) == len(told) < 40


def test_all_objectives_have_to_hold() -> None:
    """The stricter one decides; at least and at most are told apart, and no value is not met."""
    objectives = [Objective("x", True, 5.0), Objective("y", False, -2.0)]
    assert find_knee(lambda rate: {"x": rate, "y": -rate}, objectives, 1.0, 0.01).rate_per_s == pytest.approx(
        2, rel=0.01
    )
    assert not Objective("x", True, 5.0).met({"x": None})


def test_what_is_always_or_never_met_is_said() -> None:
    """A search that has no end stops with a sentence that says so."""
    with pytest.raises(UsageError, match="it limits nothing"):
        find_knee(lambda rate: {"x": 0.0}, [Objective("x", True, 1.0)], 1.0)
    with pytest.raises(UsageError, match=r"No rate meets x<=1: even at .* x is 3"):
        find_knee(lambda rate: {"x": 3.0}, [Objective("x", True, 1.0)], 1.0)


def test_intervals_are_students() -> None:
    """Of three values with a deviation of 1 the half-width is 4.303 over the root of three."""
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3))
    assert interval([5.0]) == (5.0, None)


def test_a_search_ends_where_a_walk_over_all_rates_ends(tmp_path: Path) -> None:
    """Simulating each rate by itself: the objective is met below the bracket and not above it, and the band has it."""
    (tmp_path / "trace.yaml").write_text(TRACE)
    words = [*OPTIONS, "--trace", str(tmp_path / "trace.yaml")]
    objective = ["--objective", "ttft_s.p99<=0.5", "--replications", "1", "--jobs", "1"]
    assert main(["capacity", *words, *objective, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "capacity.json").read_text())
    low, high = found["replications"][0]["low"], found["replications"][0]["high"]
    own = 149 / _span_s(tmp_path / "trace.yaml")
    for factor in (0.6, 0.8, 0.97, 1.03, 1.3, 1.8):
        rate = factor * found["rate_per_s"]
        out = tmp_path / f"at{factor}"
        scale = ["--time-scale", repr(own / rate), "--no-bands"]
        assert main(["simulate", *words, *scale, "--out", str(out)]) == 0
        p99 = json.loads((out / "summary.json").read_text())["ttft_s"]["p99"]
        assert (p99 <= 0.5) == (factor < 1), (factor, p99)
    assert low < found["rate_per_s"] < high <= 1.0101 * low
    ends = found["rates_in_band_per_s"]
    assert ends[0] < low < high < ends[1]
    assert (tmp_path / "out" / "capacity.png").read_bytes().startswith(b"\x89PNG")


def _span_s(path: Path) -> float:
    import traces

    arrivals = traces.load(str(path)).arrival_ns
    return float(arrivals.max() - arrivals.min()) / 1e9


def test_seeds_give_an_interval_and_a_share_of_good_requests(tmp_path: Path) -> None:
    """With objectives a request, 99 % of them have to be good; three traces are drawn; same seed, same bytes."""
    (tmp_path / "trace.yaml").write_text(TRACE)
    words = [
        "capacity",
        *OPTIONS,
        "--trace",
        str(tmp_path / "trace.yaml"),
        "--slo-ttft-s",
        "0.5",
        "--tolerance",
        "0.05",
    ]
    for name, jobs in (("a", "1"), ("b", "2")):
        assert main([*words, "--jobs", jobs, "--out", str(tmp_path / name)]) == 0
    found = json.loads((tmp_path / "a" / "capacity.json").read_text())
    assert found["objectives"] == ["good_share>=0.99"]
    assert [one["seed"] for one in found["replications"]] == [1, 2, 3]
    assert found["half_width_per_s"] > 0
    assert len({one["rate_per_s"] for one in found["replications"]}) == 3
    assert (tmp_path / "a" / "capacity.json").read_bytes() == (tmp_path / "b" / "capacity.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs what must hold"),
        (["--objective", "ttft_s.p99<1"], "takes METRIC<=X"),
        (["--objective", "ttft_s.p99<=soon"], "which is no number"),
        (["--objective", "tft_s.p99<=1"], "there is no metric tft_s.p99; did you mean ttft_s.p99"),
        (["--objective", "good_share>=0.9"], "give one"),
        (["--objective", "ttft_s.p99<=1e-6"], "No rate meets"),
        (["--objective", "ttft_s.p99<=1", "--max-concurrency", "4"], "closed loop"),
        (["--objective", "ttft_s.p99<=1", "--tolerance", "0"], "--tolerance must be"),
        (["--objective", "ttft_s.p99<=1", "--replications", "99"], "--replications must be 1 to 10"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """It names the option and what to give."""
    (tmp_path / "trace.yaml").write_text(TRACE.replace("150", "20"))
    common = [*OPTIONS, "--trace", str(tmp_path / "trace.yaml"), "--jobs", "1", "--out", str(tmp_path / "out")]
    assert main(["capacity", *common, *words]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert "pytest" in sys.modules  # nothing ended the process


def test_objectives_are_read() -> None:
    """Spaces do not matter."""
    assert parse_objective(" e2e_s.mean >= 2.5 ") == Objective("e2e_s.mean", False, 2.5)
