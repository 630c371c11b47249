"""The block-size experiment: its closed forms against counting, and what it concludes from figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_results import toy_tables
from hypothesis import given
from hypothesis import strategies as st

import traces
from experiments import block_size, stepcost
from experiments.alone import serve_alone
from experiments.config import Config
from experiments.experiment import Context
from experiments.lengths import waste_paged, waste_reserved
from experiments.terminal import Terminal

lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8)


@given(lengths, st.sampled_from([(8, 16), (2, 4), (1, 16)]))
def test_the_ratio_is_what_the_core_takes(pairs: list[tuple[int, int]], sizes: tuple[int, int]) -> None:
    """Blocks of both sizes over the life of requests, as the core hands them out, give the same ratio."""
    small, large = sizes
    slots = {size: sum(size * len(s.table) for p, n in pairs for s in serve_alone(p, n, size)) for size in sizes}
    prompt, output = (np.array(column) for column in zip(*pairs, strict=True))
    assert block_size.concurrency_ratio(prompt, output, small, large) == slots[large] / slots[small]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 64))
def test_waste_counts_empty_slots(tokens: list[int], size: int) -> None:
    """The share of slots in blocks that hold nothing, and of reserved slots that are never reached."""
    blocks = [(t + size - 1) // size for t in tokens]
    assert waste_paged(np.array(tokens), size) == pytest.approx(1 - sum(tokens) / (size * sum(blocks)))
    kept = [min(t, 128) for t in tokens]
    assert waste_reserved(np.array(tokens), 128) == pytest.approx(1 - sum(kept) / (128 * len(kept)))


def test_running_is_averaged_over_time_while_others_wait() -> None:
    """Steps count by their length, and only while somebody waits and somebody was admitted."""
    tables = toy_tables(num_requests=80, rate_per_s=60.0)
    steps = tables.steps
    total = weight = 0.0
    before = int(steps["start_ns"][0])
    for end, waiting, running in zip(steps["end_ns"], steps["num_waiting"], steps["num_running"], strict=True):
        if waiting > 0:
            total += float(running) * (int(end) - before)
            weight += int(end) - before
        before = int(end)
    assert block_size.mean_running(tables) == pytest.approx(total / weight)


def test_costs_are_times() -> None:
    """Smaller blocks take longer, by more than noise between the ends of the scale."""
    found = stepcost.costs((1, 64), rounds=1)
    assert found[1]["step_us"] > found[64]["step_us"] > 0
    assert found[1]["admission_us"] > found[64]["admission_us"] > 0
    assert stepcost.build() in ("pure", "compiled")


def test_what_180_to_245_requires(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At most 4/3 above 8 tokens (17 to 24), and prompts of at most 2 tokens with answers of 12."""
    monkeypatch.setattr(block_size, "_load", lambda *args: _few(*args))
    toy = Context("block_size", Config(), Terminal(quiet_stdout=True), tmp_path, tmp_path / "none")
    found = block_size._incident(toy)
    assert found["greatest_ratio_above_8"] == pytest.approx(4 / 3)
    assert found["greatest_at"] == list(range(17, 25))
    assert found["greatest_ratio_to_8"] == 2
    assert found["longest_prompt"] == 2
    assert found["needed_bytes"] == 245 * 24 * 131072
    row = block_size._ratio(found)
    assert row.status == "does-not-follow"
    assert "prompts of at most 2 tokens" in row.condition
    assert toy.manifest()["usage_check"]["runs"] == 6


real_load = block_size._load


def _few(count: int, *rest: Any) -> traces.Trace:
    """The same load, shorter."""
    return real_load(600, *rest)


@pytest.mark.parametrize(("share", "status"), [(0.5, "reproduced-only-if"), (200.0, "reproduced")])
def test_overload_is_a_step_that_takes_longer_to_decide_than_to_run(share: float, status: str) -> None:
    """Block size 1 overloads the host if deciding takes as long as the step on the device; else only the direction."""
    costs = {size: {"step_us": 1000 * share / size, "admission_us": 1.0} for size in block_size.SIZES}
    assert block_size._cpu(costs).status == status


def test_a_cost_that_does_not_rise_reproduces_nothing() -> None:
    """Where smaller blocks are not dearer, the row says so."""
    costs = {size: {"step_us": 100.0} for size in block_size.SIZES}
    assert block_size._overhead(costs).status == "does-not-follow"
