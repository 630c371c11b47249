"""The step-time formula: runs equal single steps, the terms mean what they say, the roofline follows from peaks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import ModelError, SimError
from sim.hardware import device, from_description
from sim.models import preset
from sim.steptime import (
    ROOFLINE_LABEL,
    Assumptions,
    BatchShape,
    StepTime,
    allreduce_ns,
    noise_factor,
    noise_factors,
    roofline,
)

coefficient = st.floats(0, 1e7, allow_nan=False, allow_infinity=False)


@st.composite
def models(draw: st.DrawFn) -> StepTime:
    """Any step-time model."""
    return StepTime(
        step=draw(coefficient),
        token=draw(coefficient),
        token_above=draw(coefficient),
        ridge=draw(st.floats(0, 512)),
        context=draw(st.floats(0, 5e3)),
        context_mixed=draw(st.floats(0, 5e3)),
        work=draw(st.floats(0, 1e3)),
        row=draw(coefficient),
        cpu_step=draw(coefficient),
        cpu_row=draw(coefficient),
        cpu_new=draw(coefficient),
        overlap=draw(st.booleans()),
        buckets=draw(st.sampled_from([(), (1, 2, 4, 8, 16, 64)])),
        table=draw(st.sampled_from([(), ((1, 5.0), (8, 7.5), (100, 1e6))])),
        noise=draw(st.sampled_from([0.0, 0.03, 0.2])),
        seed=draw(st.integers(0, 2**63)),
    )


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    """Any batch: some decodes, and possibly prefills."""
    decodes = draw(st.integers(0, 300))
    context = draw(st.integers(0, 10_000_000)) if decodes else 0
    prefill = draw(st.integers(0, 2048)) if draw(st.booleans()) else 0
    work = draw(st.integers(prefill, 10**9)) if prefill > 1 else 0
    rows = max(1, decodes + (1 if prefill else 0))
    return BatchShape(max(1, decodes + prefill), decodes, context, work, rows, draw(st.integers(0, 5)), context)


@given(models(), shapes(), st.integers(2, 40), st.integers(0, 10**9))
def test_a_run_is_its_single_steps_to_the_bit(model: StepTime, batch: BatchShape, k: int, first: int) -> None:
    """k steps at once take exactly what k single steps take, noise and rounding included."""
    run = model.durations(batch, k, step=first)
    single = [
        model.duration(batch._replace(context_tokens=batch.context_tokens + i * batch.num_decodes), step=first + i)
        for i in range(k)
    ]
    assert run.dtype == np.int64
    assert run.tolist() == single
    assert min(single) >= 1
    assert model.durations(batch, 1, step=first).tolist() == single[:1]


@given(models(), st.integers(1, 300), st.integers(0, 10_000_000), st.integers(1, 90), st.integers(0, 10**6))
def test_ends_of_decode_steps_are_their_durations_added_up(
    model: StepTime, rows: int, context: int, k: int, first: int
) -> None:
    """The quick way to the ends of a run of decodes gives the ends of the steps, to the nanosecond."""
    durations = model.durations(BatchShape(rows, rows, context, 0, rows), k, step=first)
    assert model.decode_ends(rows, context, k, first, 12345) == (12345 + np.cumsum(durations)).tolist()


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1000)), min_size=1, max_size=30))
def test_shape_counts_what_its_rows_do(rows: list[tuple[int, int]]) -> None:
    """n, K, F and P of a batch equal a count over every single token of every row."""
    shape = BatchShape.from_rows(rows)
    assert shape.num_tokens == sum(q for q, _ in rows)
    assert shape.context_tokens == sum(c for q, c in rows if q == 1)
    assert shape.prefill_work == sum(sum(c + i + 1 for i in range(q)) for q, c in rows if q > 1)
    assert shape.has_prefill == any(q > 1 for q, _ in rows)
    assert shape.rows == len(rows)
    assert shape.max_context == max(q + c for q, c in rows)


def test_each_term_by_itself() -> None:
    """Every coefficient multiplies the quantity it is documented for, and nothing else."""
    batch = BatchShape.from_rows([(1, 100), (1, 200), (300, 50)], new_requests=2)
    n, context, work, rows = 302, 300, 300 * 50 + 300 * 301 // 2, 3
    expected = {
        "step": 1000,
        "token": 1000 * n,
        "token_above": 1000 * (n - 256),
        "context": 1000 * context,
        "context_mixed": 1000 * context,
        "work": 1000 * work,
        "row": 1000 * rows,
        "cpu_step": 1000,
        "cpu_row": 1000 * rows,
        "cpu_new": 2000,
    }
    for name, value in expected.items():
        assert StepTime(**{name: 1000.0}).duration(batch) == value, name
    decode_only = BatchShape.from_rows([(1, 100)])
    assert StepTime(step=7.0, context_mixed=1000.0, token_above=1000.0).duration(decode_only) == 7


def test_cpu_and_gpu_add_or_overlap() -> None:
    """One step in flight pays CPU and GPU one after the other; two in flight pay the longer of the two."""
    batch = BatchShape.from_rows([(1, 0)])
    model = StepTime(step=100.0, cpu_step=30.0)
    assert model.with_overlap(1).duration(batch) == 130
    assert model.with_overlap(2).duration(batch) == 100
    assert StepTime(step=10.0, cpu_step=30.0, overlap=True).duration(batch) == 30


def test_padding_goes_up_to_the_next_bucket_only() -> None:
    """With graph buckets, n counts as the next bucket; above the last it counts as itself."""
    model = StepTime(token=10.0, buckets=(1, 2, 4, 8))
    assert [model.tokens_ns(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [10, 20, 40, 40, 80, 80, 90]


def test_noise_depends_on_seed_and_step_alone_and_keeps_the_mean() -> None:
    """Noise is the same for the same (seed, step), differs between them, has mean 1 and the asked-for spread."""
    many = noise_factors(7, 0, 200_000, 0.03)
    assert many[5] == noise_factor(7, 5, 0.03)
    assert noise_factor(8, 5, 0.03) != noise_factor(7, 5, 0.03)
    assert abs(many.mean() - 1) < 0.0005
    assert abs(many.std() - 0.03) < 0.0005
    assert abs(np.corrcoef(many[1:], many[:-1])[0, 1]) < 0.01


def test_scaling_scales_every_step() -> None:
    """A model scaled by 1.05 makes each step 5 % longer, whatever the batch."""
    model = roofline(preset("mixtral-8x7b"), device("h100"), tp=2)
    for rows in ([(1, 500)] * 10, [(512, 0)], [(1, 100), (200, 1000)]):
        batch = BatchShape.from_rows(rows)
        assert model.scaled(1.05).duration(batch) == pytest.approx(1.05 * model.duration(batch), abs=2)
    with pytest.raises(SimError, match="positive"):
        model.scaled(0.0)


def test_wrong_coefficients_are_refused() -> None:
    """Negative, infinite, misnamed or non-numeric coefficients are errors that name the coefficient."""
    with pytest.raises(SimError, match="context"):
        StepTime(context=-1.0)
    with pytest.raises(SimError, match="step"):
        StepTime(step=float("nan"))
    with pytest.raises(SimError, match="noise"):
        StepTime(noise=0.5)
    with pytest.raises(SimError, match="contxt"):
        StepTime.from_coefficients({"contxt": 1.0})
    with pytest.raises(SimError, match="work"):
        StepTime.from_coefficients({"work": "x"})  # type: ignore[dict-item]
    model = StepTime(step=1.0, ridge=64.0, work=2.0)
    assert StepTime.from_coefficients(model.coefficients()) == model


def test_roofline_decodes_at_memory_speed_and_prefills_at_compute_speed() -> None:
    """Llama-3-8B on an A100: one decode takes the weights' read time, a large prefill the operations' time."""
    spec, gpu, assume = preset("llama-3-8b"), device("a100-80g"), Assumptions()
    model = roofline(spec, gpu)
    assert model.label == ROOFLINE_LABEL
    overhead = assume.step_overhead_ns + spec.layers * assume.layer_overhead_ns
    one = model.duration(BatchShape.from_rows([(1, 0)]))
    read = (spec.num_parameters() - spec.vocab * spec.hidden) * 2 / (gpu.memory_bandwidth * 0.85) * 1e9
    assert one == pytest.approx(read + overhead, rel=0.01)
    chunk = model.duration(BatchShape.from_rows([(2048, 0)]))
    compute = 2048 * spec.gemm_flops_per_token() / (gpu.peak_flops * 0.80) * 1e9
    assert compute < chunk < 1.25 * compute
    # 131,072 bytes a token over the bandwidth that attention reaches.
    assert model.context == pytest.approx(131_072 / (2.039e12 * 0.75) * 1e9)


@pytest.mark.parametrize("name", ["rtx4090", "a100-80g", "h100", "h200", "l4", "t4", "b200"])
def test_roofline_orders_devices_by_their_peaks(name: str) -> None:
    """No device is faster than its peaks allow: not in reading the weights, not in operations."""
    spec, gpu = preset("llama-3.1-8b"), device(name)
    model = roofline(spec, gpu)
    assert model.duration(BatchShape.from_rows([(1, 0)])) > 15.0e9 / gpu.memory_bandwidth * 1e9
    prefill = model.duration(BatchShape.from_rows([(4096, 0)]))
    assert prefill > 4096 * spec.gemm_flops_per_token() / gpu.peak_flops * 1e9


def test_tensor_parallelism_adds_two_allreduces_a_layer_and_one() -> None:
    """80 layers mean 161 all-reduces; over NVLink they cost less than what four devices save."""
    spec = preset("llama-2-70b")
    per_step, per_token = allreduce_ns(spec, device("a100-80g"), 4, 2)
    assert per_step == 161 * 5000
    assert per_token == pytest.approx(161 * 8192 * 2 * 1.5 / (300e9 * 0.8) * 1e9)
    assert allreduce_ns(spec, device("a100-80g"), 1, 2) == (0.0, 0.0)
    batch = BatchShape.from_rows([(1, 1000)] * 32)
    assert roofline(spec, device("a100-80g"), tp=4).duration(batch) < roofline(spec, device("a100-80g"), tp=2).duration(
        batch
    )
    lonely = from_description({"peak_tflops": 100, "memory_bandwidth_gb_s": 1000, "memory_gib": 80})
    with pytest.raises(SimError, match="no link"):
        roofline(spec, lonely, tp=2)
    with pytest.raises(ModelError, match="over 3 devices"):
        roofline(spec, device("h100"), tp=3)


def test_mixture_of_experts_reads_more_experts_with_more_tokens() -> None:
    """Mixtral at one token reads 2 of 8 experts a layer, at 64 nearly all; then operations take over."""
    model = roofline(preset("mixtral-8x7b"), device("h100"), tp=2)
    one, many = model.tokens_ns(1), model.tokens_ns(64)
    assert 2.0 < (many - model.step) / (one - model.step) < 4.0
    times = [model.tokens_ns(n) for n in range(1, 5000, 7)]
    assert times == sorted(times)


def test_a_single_step_is_cheap() -> None:
    """One step's time costs a few microseconds of CPU: a simulation asks for millions."""
    model = roofline(preset("llama-3-8b"), device("a100-80g"))
    batch = BatchShape.from_rows([(1, 1000)] * 64)
    model.duration(batch)
    best = min(_time(lambda: [model.duration(batch) for _ in range(2000)]) for _ in range(5))
    assert best / 2000 < 10e-6


def _time(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
