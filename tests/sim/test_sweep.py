"""The batches of a profile: they fit the engine, vary as they should, and keep to the time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import SimError
from sim.models import preset
from sim.steptime import StepTime
from sim.sweep import Limits, anchor, cpu_guess, pick_trace_like, sweep

GPU = Limits(max_rows=256, max_tokens=2048, max_context=8192, pool_tokens=400_000)


@given(
    st.builds(
        Limits,
        max_rows=st.integers(1, 256),
        max_tokens=st.integers(2, 4096),
        max_context=st.integers(8, 16384),
        pool_tokens=st.integers(64, 400_000),
        block_size=st.sampled_from([1, 16, 32]),
    ),
    st.integers(0, 100),
)
@settings(max_examples=25, deadline=None)
def test_every_batch_fits_the_engine(limits: Limits, seed: int) -> None:
    """Whatever the engine's limits, no batch breaks one of them, and the same seed gives the same batches."""
    batches = sweep(limits, seed=seed)
    for batch in batches:
        assert batch.kind == "anchor" or limits.fit(batch.rows), batch
        assert all(q >= 1 and c >= 0 for q, c in batch.rows)
    assert sweep(limits, seed=seed) == batches


def test_the_full_sweep_has_the_planned_grids() -> None:
    """On a large engine all grid points are there, contexts differ in a batch, and anchors come every 25 batches."""
    batches = sweep(GPU)
    kinds = [batch.kind for batch in batches]
    # 14 x 5 decode points, of which the largest (256 x 4096, 192 x 4096, 128 x 4096, 256 x 2048) exceed the pool.
    assert 63 <= kinds.count("decode") <= 70
    assert kinds.count("prefill") == 24
    assert kinds.count("mixed") >= 55
    positions = [i for i, kind in enumerate(kinds) if kind == "anchor"]
    assert positions[0] == 0
    assert positions[-1] == len(kinds) - 1
    assert set(np.diff(positions[:-1])) == {26}
    for batch in batches:
        contexts = [c for q, c in batch.rows if q == 1]
        if len(contexts) >= 8 and batch.kind == "decode":
            assert np.std(np.log(contexts)) > 0.25
    assert any(len([q for q, _ in batch.rows if q > 1]) == 4 for batch in batches if batch.kind == "mixed")


def test_a_budget_is_kept_and_still_spans_the_range() -> None:
    """With a time budget the estimated time stays within it, and small and large batches of each kind remain."""
    limits = Limits(max_rows=32, max_tokens=512, max_context=2048, pool_tokens=16_384)
    estimate = cpu_guess(preset("smollm2"))
    batches = sweep(limits, budget_s=120, estimate=estimate, runs=6)
    spent = sum(estimate.duration(b.shape()) * 6 for b in batches if b.kind != "anchor") / 1e9
    assert 40 < spent <= 120
    for kind in ("decode", "prefill", "mixed"):
        sizes = [b.shape().num_tokens for b in batches if b.kind == kind]
        assert len(sizes) >= 8
        assert max(sizes) >= 4 * min(sizes)
    with pytest.raises(SimError, match="estimate"):
        sweep(limits, budget_s=10)
    with pytest.raises(SimError, match="positive"):
        sweep(limits, budget_s=0, estimate=estimate)


def test_trace_like_batches_are_spread_over_the_steps() -> None:
    """Of many steps, the chosen ones cover the range of K (decodes) and n (mixed) without a wide gap."""
    rng = np.random.default_rng(1)
    steps: list[list[tuple[int, int]]] = []
    for _ in range(2000):
        rows = [(1, int(c)) for c in rng.integers(1, 2000, int(rng.integers(1, 100)))]
        if rng.random() < 0.5:
            rows.append((int(rng.integers(2, 1500)), int(rng.integers(0, 500))))
        steps.append(rows)
    picked = pick_trace_like(steps, GPU, decode=80, mixed=80)
    assert len(picked) == 160
    shapes = [batch.shape() for batch in picked]
    contexts = sorted(s.context_tokens for s in shapes if not s.has_prefill)
    tokens = sorted(s.num_tokens for s in shapes if s.has_prefill)
    assert len(contexts) == len(tokens) == 80
    assert max(np.diff(contexts)) < 0.05 * contexts[-1]
    assert max(np.diff(tokens)) < 0.05 * tokens[-1]
    assert pick_trace_like(steps[:10], GPU)  # fewer steps than asked for: all of them


def test_the_anchor_is_a_batch_that_any_engine_can_run() -> None:
    """The anchor fits small engines too, and is the same each time."""
    for limits in (GPU, Limits(2, 8, 64, 128), Limits(1, 2, 8, 64)):
        assert limits.fit(anchor(limits).rows)
        assert anchor(limits) == anchor(limits)


def test_limits_must_be_positive() -> None:
    """A limit of zero is refused by name."""
    with pytest.raises(SimError, match="max_rows"):
        Limits(0, 1, 1, 1)


def test_an_estimate_for_sizing_is_within_reason() -> None:
    """The guess that sizes a sweep on a CPU puts one decode of the default model between 5 and 200 ms."""
    guess: StepTime = cpu_guess(preset("smollm2"))
    assert 5e6 < guess.duration(sweep(Limits(1, 2, 64, 64))[0].shape()) < 2e8


def test_passes_repeat_the_batches_in_other_orders() -> None:
    """Each pass times every batch once, in an order of its own, within the same budget altogether."""
    estimate = cpu_guess(preset("smollm2"))
    limits = Limits(max_rows=32, max_tokens=512, max_context=2048, pool_tokens=16_384)
    batches = sweep(limits, budget_s=120, estimate=estimate, runs=3, passes=3)
    third = len(batches) // 3
    parts = [batches[i * third : (i + 1) * third] for i in range(3)]
    assert sorted(parts[0]) == sorted(parts[1]) == sorted(parts[2])
    assert parts[0] != parts[1] != parts[2]
    assert sum(estimate.duration(b.shape()) * 3 for b in batches if b.kind != "anchor") <= 120e9
    with pytest.raises(SimError, match="passes"):
        sweep(limits, passes=0)
