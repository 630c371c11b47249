"""Collectives against published figures and closed forms, and pipelines against a walk through their stages."""

from __future__ import annotations

import pytest

from sim.collectives import (
    ALGORITHMS,
    AllReduce,
    all_reduce_ns,
    all_reduces_per_step,
    fit_all_reduce,
    pipeline_bubble,
    pipeline_ns,
    quickest,
)
from sim.errors import CalibrationError, SimError

US = 1e3
KIB = 1024
TEN_GBE = 1.25e9
"""Bytes a second."""

V100_RING = [(4 * KIB, 19 * US), (32 * KIB, 24 * US), (128 * KIB, 52 * US), (384 * KIB, 84 * US)]
V100_ONE_SHOT = [(4 * KIB, 4 * US), (32 * KIB, 12 * US), (128 * KIB, 45 * US), (384 * KIB, 120 * US)]
"""Four V100 on a PLX switch, NCCL and one-shot (haohervchb/sglang-V100, issue 2)."""


def test_reported_all_reduces_are_met_after_fitting_two_parameters() -> None:
    """Each of eight times within 20 %, and at each size the algorithm that was quicker is chosen."""
    fitted = [fit_all_reduce("ring", 4, V100_RING), fit_all_reduce("one-shot", 4, V100_ONE_SHOT)]
    for model, points in zip(fitted, (V100_RING, V100_ONE_SHOT), strict=True):
        for size, time in points:
            assert model.time_ns(size, 4) == pytest.approx(time, rel=0.20), (model.algorithm, size)
    for (size, ring), (_, shot) in zip(V100_RING, V100_ONE_SHOT, strict=True):
        assert quickest(fitted, size, 4).algorithm == ("ring" if ring < shot else "one-shot"), size


def test_a_step_has_two_all_reduces_a_layer_and_one_more() -> None:
    """161 for 80 layers, 65 for 32."""
    assert (all_reduces_per_step(80), all_reduces_per_step(32)) == (161, 65)


@pytest.mark.parametrize(("latency_us", "milliseconds"), [(50, 20), (500, 196)])
def test_a_decode_step_over_ten_gigabit_ethernet(latency_us: int, milliseconds: float) -> None:
    """65 ring all-reduces of 8 KiB over four devices: latency is nearly all of it."""
    ring = AllReduce("ring", latency_us * US, TEN_GBE)
    assert all_reduce_ns([ring], 32, 1, 4096, 2, 4) / 1e6 == pytest.approx(milliseconds, rel=0.05)


def test_a_long_prefill_over_ten_gigabit_ethernet() -> None:
    """4,096 tokens of a 70B over four devices spend 12.9 s in all-reduces: bandwidth is nearly all of it."""
    for latency_us in (0, 50):
        ring = AllReduce("ring", latency_us * US, TEN_GBE)
        assert all_reduce_ns([ring], 80, 4096, 8192, 2, 4) / 1e9 == pytest.approx(12.9, rel=0.05)


def test_the_same_formula_holds_for_faster_links() -> None:
    """PCIe and NVLink differ from Ethernet by their two parameters alone, and by their ratio where one dominates."""
    slow, pcie, nvlink = (AllReduce("ring", a, b) for a, b in ((50 * US, TEN_GBE), (5 * US, 25e9), (1 * US, 300e9)))
    long = [all_reduce_ns([link], 80, 4096, 8192, 2, 4) for link in (slow, pcie, nvlink)]
    assert long[0] / long[1] == pytest.approx(20, rel=0.02)
    assert long[1] / long[2] == pytest.approx(12, rel=0.02)
    tiny = [link.time_ns(1, 4) for link in (slow, pcie, nvlink)]
    assert tiny == pytest.approx([300 * US, 30 * US, 6 * US], rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_algorithms_by_hand(ranks: int) -> None:
    """A ring's and a tree's messages one after another, and one-shot's reads over one link."""
    size, latency, rate = 1_000_000, 7_000.0, 2e9
    ring = tree = 0.0
    for _ in range(2 * (ranks - 1)):
        ring += latency + size / ranks / rate * 1e9
    reached, hops = 1, 0
    while reached < ranks:
        reached, hops = reached * 2, hops + 1
    tree = 2 * hops * (latency + size / rate * 1e9)
    shot = latency + sum(size / rate * 1e9 for _ in range(ranks - 1))
    for name, time in (("ring", ring), ("tree", tree), ("one-shot", shot)):
        assert AllReduce(name, latency, rate).time_ns(size, ranks) == pytest.approx(time), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_fit_finds_what_made_its_points(algorithm: str, ranks: int) -> None:
    """Points of the formula itself give its parameters back; with no latency, none comes out."""
    for latency in (0.0, 12_345.0):
        true = AllReduce(algorithm, latency, 11e9)
        points = [(float(size), true.time_ns(size, ranks)) for size in (1_000, 50_000, 2_000_000)]
        found = fit_all_reduce(algorithm, ranks, points)
        assert found.latency_ns == pytest.approx(latency, abs=1e-3)
        assert found.bandwidth == pytest.approx(11e9)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_a_pipeline_is_a_walk_through_its_stages(stages: int, microbatches: int) -> None:
    """Each stage takes a microbatch when it has the one before done and the stage before has sent it."""
    stage_ns, send_ns = 1_000.0, 130.0
    free = [0.0] * stages
    for _ in range(microbatches):
        ready = 0.0
        for stage in range(stages):
            free[stage] = max(free[stage], ready) + stage_ns
            ready = free[stage] + send_ns
    assert pipeline_ns(stage_ns, stages, microbatches, send_ns) == pytest.approx(free[-1])
    whole = pipeline_ns(stage_ns, stages, microbatches)
    assert pipeline_bubble(stages, microbatches) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert pipeline_bubble(stages, microbatches) == pytest.approx(1 - microbatches * stage_ns / whole)


def test_what_cannot_be_is_one_sentence() -> None:
    """Unknown algorithms, links without bandwidth, sizes and devices that cannot be, points that give no line."""
    for make, message in (
        (lambda: AllReduce("butterfly", 1, 1), "no all-reduce 'butterfly'; there are ring, tree, one-shot"),
        (lambda: AllReduce("ring", 1, 0), "bandwidth above 0"),
        (lambda: AllReduce("ring", 1, 1).time_ns(1, 0), "1 or more devices"),
        (lambda: quickest([], 1, 2), "no all-reduce to choose"),
        (lambda: pipeline_ns(1.0, 0, 1), "1 or more stages"),
    ):
        with pytest.raises(SimError, match=message):
            make()
    for points, message in (([(1.0, 1.0)], "two sizes"), ([(1.0, 5.0), (2.0, 1.0)], "do not grow")):
        with pytest.raises(CalibrationError, match=message):
            fit_all_reduce("ring", 2, points)
