"""What a simulation does, counted, so that it stays fast; benchmarks/sim.py has the times."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import test_simulate

from engine.core import SchedulerConfig, preset
from sim.simulate import SimResult, simulate
from sim.steptime import StepTime
from traces.generate import generate

MODEL = StepTime(step=8e6, token=4e4, context=120.0, work=60.0, cpu_step=5e5)


def poisson(num: int, rate: float, **more: Any) -> Any:
    arrival = {"process": "poisson", "rate_per_s": rate}
    lengths = {"prompt_tokens": 512, "output_tokens": 256, **more}
    return generate({"kind": "synthetic", "num_requests": num, "seed": 1, "arrival": arrival, **lengths})


def config(num_blocks: int = 7_000, **options: Any) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks, max_model_len=4096, **{**preset("vllm-0.33"), "max_num_seqs": 128, **options}
    )


def plans_of(num: int, rate: float) -> tuple[SimResult, int]:
    plans: list[int] = []
    return simulate(poisson(num, rate), config(), MODEL, observe=lambda plan: plans.append(plan.seq)), len(plans)


def test_a_request_that_waits_for_nobody_costs_one_plan() -> None:
    """At 4 requests a second some 20 steps a request are taken, but only those that begin one are planned."""
    result, plans = plans_of(400, 4.0)
    steps = result.steps()
    assert steps["num_steps"].sum() >= 15 * 400
    assert plans <= 1.1 * 400
    assert len(steps["step"]) <= 3.2 * 400


def test_saturated_steps_are_planned_only_where_somebody_comes_or_goes() -> None:
    """With a queue, plans are made for arrivals' chunks and finishes, not for each token."""
    result, plans = plans_of(600, 60.0)
    assert result.steps()["num_waiting"].max() > 50
    assert plans <= 2.5 * 600


def calls(num: int) -> int:
    """Python functions entered by a whole simulation of `num` requests (of the sources: compiled ones are not seen)."""
    entered = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal entered
        entered += event == "call"

    trace, options = poisson(num, 4.0), config()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        simulate(trace, options, MODEL)
    finally:
        sys.setprofile(before)
    return entered


def test_work_grows_linearly_with_requests() -> None:
    """Four times the requests enter at most 4.6 times the functions, and a request enters at most 250."""
    few, many = calls(200), calls(800)
    assert many <= 4.6 * few
    assert many <= 250 * 800


@pytest.mark.parametrize("same_step", ["share", "defer", "off"])
def test_steps_without_plans_publish_what_planned_ones_do(same_step: str) -> None:
    """Sessions whose answers are hit later come out the same with and without plans, under each same-step rule."""
    sessions = {"turns": {"dist": "uniform", "low": 1, "high": 4}, "think_s": 1.0}
    lengths = {"prompt_tokens": 40, "output_tokens": {"dist": "uniform", "low": 1, "high": 60}}
    trace = poisson(60, 3.0, sessions=sessions, **lengths)
    options = config(400, same_step=same_step)
    fast = simulate(trace, options, MODEL, check=True)
    slow = simulate(trace, options, MODEL, fast_forward=False)
    assert test_simulate.requests(fast) == test_simulate.requests(slow)
    assert test_simulate.expanded(fast) == test_simulate.expanded(slow)
    assert fast.scheduler.digest() == slow.scheduler.digest()
    assert fast.requests()["cached_tokens"].sum() > 0
