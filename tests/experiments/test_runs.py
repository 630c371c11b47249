"""Tables of a simulation with runs, expanded, against the tables of the same simulation step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from engine.core.presets import SchedulerConfig
from experiments import metrics
from sim.simulate import SimResult, simulate
from sim.steptime import StepTime

STEP_TIME = StepTime(step=1e6, token=3e4, context=20.0, context_mixed=10.0, work=50.0)


def served(seed: int, blocks: int, in_flight: int, rate: float, fast: bool) -> metrics.Tables:
    """A small workload with shared prefixes under memory pressure."""
    trace = traces.generate(
        {
            "kind": "synthetic",
            "num_requests": 14,
            "seed": seed,
            "arrival": {"process": "poisson", "rate_per_s": rate},
            "prompt_tokens": {"dist": "uniform", "low": 3, "high": 40},
            "output_tokens": {"dist": "uniform", "low": 1, "high": 60},
            "prefix": {"num_prefixes": 2, "tokens": {"dist": "fixed", "value": 12}, "share": 0.5},
        }
    )
    options = SchedulerConfig(
        num_blocks=blocks,
        max_model_len=128,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        steps_in_flight=in_flight,
    )
    found: SimResult = simulate(trace, options, STEP_TIME, fast_forward=fast)
    return metrics.Tables(found.requests(), found.steps(), found.gaps(), in_flight, 4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    blocks=st.integers(32, 90),
    in_flight=st.sampled_from([1, 2]),
    rate=st.sampled_from([5.0, 100.0]),
)
def test_expansion_gives_back_every_step(seed: int, blocks: int, in_flight: int, rate: float) -> None:
    """Composition, times and where every slot is: the same at each step, however the steps were recorded."""
    runs, singles = (served(seed, blocks, in_flight, rate, fast) for fast in (True, False))
    assert len(runs.steps["step"]) < len(singles.steps["step"])
    found, expected = metrics.expand_steps(runs), metrics.expand_steps(singles)
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column, err_msg=name)
    assert metrics.summarize(runs, blocks) == metrics.summarize(singles, blocks)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_pool_keeps_its_size_in_every_expanded_step(in_flight: int) -> None:
    """The uses of slots sum to the pool at each step."""
    steps = metrics.expand_steps(served(1, 40, in_flight, 100.0, True))
    assert set(sum(steps[name] for name in metrics.USAGE).tolist()) == {40 * 4}
    assert steps["preempted"].sum() > 0
