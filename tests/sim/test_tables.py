"""Kernel tables: read as they stand, interpolated, and made into step times that a run can be fast-forwarded by."""

from __future__ import annotations

from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_kit import MODEL, MOE, attention_us, skew_table, write_profile

from engine.core.presets import SchedulerConfig, preset
from sim.errors import CalibrationError, SimError
from sim.fleet import simulate_fleet
from sim.hardware import device
from sim.links import allreduce_curve
from sim.models import ModelSpec, from_config
from sim.simulate import simulate
from sim.steptime import BatchShape
from sim.tables import Curve, KernelTables, read_kernel_tables
from sim.tabletime import ExpertGroup, TableTime
from traces import Trace, make_trace


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return from_config(MODEL, "test")


@pytest.fixture(scope="module")
def moe() -> ModelSpec:
    return from_config(MOE, "test-moe")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def tables(profile: Path, spec: ModelSpec) -> KernelTables:
    return read_kernel_tables(profile, spec)


@pytest.fixture(scope="module")
def model(tables: KernelTables, spec: ModelSpec) -> TableTime:
    return TableTime(spec, tables, buckets=(1, 2, 4, 8, 16, 32, 64), launch_saving=500.0)


def trace(count: int = 80, gap_ns: int = 30_000_000) -> Trace:
    rng = np.random.default_rng(1)
    return make_trace(
        np.cumsum(rng.integers(0, 2 * gap_ns, count)), rng.integers(10, 900, count), rng.integers(1, 300, count)
    )


def options(num_blocks: int = 700, **more: object) -> SchedulerConfig:
    chosen = dict(preset("vllm-0.19")) | {"max_num_seqs": 32} | more
    return SchedulerConfig(num_blocks=num_blocks, max_model_len=4096, **chosen)


@given(st.integers(0, 4096), st.integers(0, 8192), st.integers(0, 300), st.floats(0, 20000, allow_nan=False))
def test_attention_is_linear_between_the_points_of_its_grid(
    tables: KernelTables, chunk: int, behind: int, decodes: int, context: float
) -> None:
    """The quick lookup equals a plain sum over the corners of the cell, weighted by how near they are."""
    if not chunk and not decodes:
        return
    point = [
        max(float(chunk), 16.0) if chunk else 0.0,
        float(behind) if chunk else 0.0,
        float(decodes),
        max(context, 16.0) if decodes else 0.0,
    ]
    sides = []
    for value, axis in zip(point, tables.axes, strict=True):
        i = min(max(int(np.searchsorted(axis, value, side="right")), 1), len(axis) - 1)
        share = (value - axis[i - 1]) / (axis[i] - axis[i - 1])
        sides.append([(i - 1, 1 - share), (i, share)])
    expected = sum(
        float(np.prod([weight for _, weight in corner])) * tables.grid[tuple(i for i, _ in corner)]
        for corner in product(*sides)
    )
    assert tables.attention(chunk, behind, decodes, context) == pytest.approx(max(0.0, expected), rel=1e-9, abs=1e-6)


def test_points_of_the_table_are_what_it_says(tables: KernelTables) -> None:
    """At a point of the grid the attention takes what was measured, and dense layers count as often as they run."""
    assert tables.attention(256, 512, 8, 2048) == pytest.approx(1e3 * attention_us(256, 512, 8, 2048))
    assert tables.attention(0, 0, 64, 256) == pytest.approx(1e3 * attention_us(0, 0, 64, 256))
    layer = 40 + 30 + 90 + 50 + 2 * 3 + 3 + 2
    assert tables.dense(8) == pytest.approx(1e3 * 1.01 * (4 * layer + 4 + 3))
    assert tables.rows(8) == pytest.approx(1e3 * (230 + 1.6))


def test_missing_points_go_on_along_their_neighbours(tmp_path: Path, spec: ModelSpec) -> None:
    """Batches that did not fit the profiled cache are filled in linearly: here, exactly."""
    write_profile(tmp_path)
    path = tmp_path / "tp1" / "attention.csv"
    table = pd.read_csv(path)
    table[~((table["n_decode"] == 256) & (table["kv_decode"] > 256))].to_csv(path, index=False)
    found = read_kernel_tables(tmp_path, spec)
    assert found.attention(0, 0, 256, 16384) == pytest.approx(1e3 * attention_us(0, 0, 256, 16384))


@pytest.mark.parametrize("rows", [0.0, 2.5, 6.0])
def test_skew_finds_how_many_rows_keep_the_device_busy(tmp_path: Path, spec: ModelSpec, rows: float) -> None:
    """From times of mixes that are sums of any number of runs, the number of rows that made them comes out again."""
    write_profile(tmp_path, rows_to_fill=rows)
    skew_table(rows, repetitions=5).to_csv(tmp_path / "tp1" / "skew.csv", index=False)
    skew = read_kernel_tables(tmp_path, spec).skew
    assert skew is not None
    assert skew(0, 32, 512) == pytest.approx(rows, abs=0.3)
    assert skew(256, 128, 2048) == pytest.approx(rows, abs=0.3)


def test_unequal_contexts_cost_what_the_longest_rows_make_wait(tables: KernelTables, spec: ModelSpec) -> None:
    """Equal decodes cost their mean; with one that is longer, it is as if six were as long as it."""
    model = TableTime(spec, tables)
    equal = model.duration(BatchShape.from_rows([(1, 512)] * 32))
    longer = model.duration(BatchShape.from_rows([(1, 512)] * 31 + [(1, 1536)]))
    six = model.duration(BatchShape.from_rows([(1, 512)] * 26 + [(1, 1536)] * 6))
    assert longer == pytest.approx(six, rel=0.01)
    assert longer > equal * 1.01


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=70), st.integers(2, 90))
def test_a_run_is_its_single_steps(model: TableTime, contexts: list[int], k: int) -> None:
    """k steps at once, one by one, and their ends added up are the same to the nanosecond."""
    batch = BatchShape.from_rows([(1, c) for c in contexts])
    rows = len(contexts)
    single = [model.duration(BatchShape.from_rows([(1, c + i) for c in contexts])) for i in range(k)]
    assert model.durations(batch, k).tolist() == single
    ends = model.decode_ends(rows, batch.context_tokens, k, 0, 77, batch.contexts)
    assert ends == list(accumulate(single, initial=77))[1:]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_fast_forward_is_the_explicit_step(model: TableTime, in_flight: int) -> None:
    """A simulation on kernel tables, saturated and with preemptions, is the same with and without fast-forward."""
    config = options(250, steps_in_flight=in_flight)
    fast, slow = (simulate(trace(gap_ns=3_000_000), config, model, fast_forward=f).requests() for f in (True, False))
    assert int(np.sum(fast["num_preemptions"])) > 0
    for name in fast:
        assert list(fast[name]) == list(slow[name]), name


def test_graphs_pad_and_save(tables: KernelTables, spec: ModelSpec) -> None:
    """n counts as its bucket in dense layers, and each of 10 L + 4 kernels takes less in a graph; none above it."""
    plain = TableTime(spec, tables, buckets=(1, 2, 4, 8))
    saving = TableTime(spec, tables, buckets=(1, 2, 4, 8), launch_saving=1000.0)
    seven, eight = (BatchShape.from_rows([(1, 100)] * n) for n in (7, 8))
    assert plain._dense_ns(7) == plain._dense_ns(8) == tables.dense(8)
    assert plain.duration(eight) - saving.duration(eight) == 44_000
    assert plain.duration(seven) - saving.duration(seven) == 44_000
    mixed = BatchShape.from_rows([(1, 100), (5, 0)])
    assert plain.duration(mixed) - saving.duration(mixed) == 36_000
    beyond = BatchShape.from_rows([(1, 100)] * 9)
    assert plain.duration(beyond) == saving.duration(beyond)


def test_tensor_parallel_ranks_add_their_all_reduces(tmp_path: Path, spec: ModelSpec) -> None:
    """A rank of two takes its own tables' time and 2 L + 1 all-reduces of n hidden states."""
    write_profile(tmp_path, tp=2)
    tables = read_kernel_tables(tmp_path, spec, tp=2)
    link = Curve([0, 1 << 20], [10_000, 110_000])
    batch = BatchShape.from_rows([(1, 100)] * 8)
    alone = TableTime(spec, tables, allreduce=Curve([0, 1], [0, 0])).duration(batch)
    together = TableTime(spec, tables, allreduce=link).duration(batch)
    assert together - alone == pytest.approx(9 * link(8 * 1024 * 2), abs=2)
    with pytest.raises(SimError, match="name the link"):
        TableTime(spec, tables)


def test_experts_are_looked_up_at_the_expected_distinct_ones(tmp_path: Path, moe: ModelSpec) -> None:
    """A layer of experts takes the table's time at (n, E (1 - (1 - k / E)^n)), and with half of them on each of two
    ranks, half of the tokens and of the experts."""
    tables = read_kernel_tables(write_profile(tmp_path, moe=True), moe)
    distinct = 16 * (1 - (1 - 2 / 16) ** 8)
    expected = 10.0 + 6.0 * distinct + 0.05 * 8
    model = TableTime(moe, tables)
    assert model._experts_ns(8) == pytest.approx(4 * 1e3 * expected, rel=1e-6)
    group = ExpertGroup(2)
    split = TableTime(moe, tables, allreduce=Curve([0, 1], [0, 0]), expert_ranks=2)
    assert split._experts_ns(64) == pytest.approx(4 * 1e3 * (10 + 6 * 8 + 0.05 * 32), rel=0.01)
    ranks = [split.of_rank(group, i) for i in range(2)]
    small, large = BatchShape.from_rows([(1, 100)] * 4), BatchShape.from_rows([(1, 900)] * 32)
    first = ranks[0].duration(small)
    second = ranks[1].duration(large)
    assert ranks[0].duration(small) == second > first  # a rank waits for the slowest


def test_experts_that_were_measured_per_rank_are_taken_as_they_are(tmp_path: Path, moe: ModelSpec) -> None:
    """A table with an `ep` column has rows of each size of a group, against all its tokens and a rank's experts."""
    write_profile(tmp_path, moe=True)
    path = tmp_path / "tp1" / "moe.csv"
    whole = pd.read_csv(path)
    half = whole[whole["activated_experts"] <= 8].assign(time_us=lambda t: 1000 + t["activated_experts"])
    pd.concat([whole.assign(ep=1), half.assign(ep=2)]).to_csv(path, index=False)
    tables = read_kernel_tables(tmp_path, moe, expert_ranks=2)
    assert tables.expert_ranks == 2
    split = TableTime(moe, tables, allreduce=Curve([0, 1], [0, 0]), expert_ranks=2)
    assert split._experts_ns(64) == pytest.approx(4 * 1e3 * (1000 + 8), rel=1e-3)
    assert read_kernel_tables(tmp_path, moe, expert_ranks=4).expert_ranks == 1


def test_a_mix_without_a_time_is_left_out(tmp_path: Path, spec: ModelSpec) -> None:
    """Mixes that the profiler could not measure do not spoil the rest of skew.csv."""
    write_profile(tmp_path)
    path = tmp_path / "tp1" / "skew.csv"
    table = pd.read_csv(path)
    table.loc[0, "t_skew_us"] = np.nan
    table.to_csv(path, index=False)
    assert read_kernel_tables(tmp_path, spec).skew is not None


def test_a_group_that_shares_experts_serves_a_trace_together(tmp_path: Path, moe: ModelSpec) -> None:
    """Two ranks share the load evenly, serve everything, and are slower than with experts of their own elsewhere."""
    tables = read_kernel_tables(write_profile(tmp_path, moe=True), moe)
    link = Curve([0, 1 << 20], [10_000, 110_000])
    base = TableTime(moe, tables, allreduce=link, expert_ranks=2)
    group = ExpertGroup(2)
    config = options(steps_in_flight=2)
    together = simulate_fleet(trace(), config, [base.of_rank(group, i) for i in range(2)], group=group).requests()
    assert sorted(together["row"]) == list(range(80))
    assert abs(int(np.sum(together["replica"])) - 40) <= 12
    assert set(together["outcome"]) == {"length"}
    again = simulate_fleet(
        trace(), config, [base.of_rank(g, i) for g in [ExpertGroup(2)] for i in range(2)], group=None
    )
    assert again.requests()["finish_ns"].max() > 0


def test_a_fleet_of_one_is_a_replica(model: TableTime) -> None:
    """One replica behind the entrance serves a trace to the nanosecond as it would without."""
    alone = simulate(trace(), options(), model).requests()
    fleet = simulate_fleet(trace(), options(), [model]).requests()
    for name in ("first_token_ns", "finish_ns", "num_preemptions", "queued_ns"):
        assert list(alone[name]) == list(fleet[name]), name


def test_each_request_goes_to_the_replica_with_the_fewest(model: TableTime) -> None:
    """Requests that come at once are dealt out in turn."""
    burst = make_trace([0] * 9, [100] * 9, [50] * 9)
    found = simulate_fleet(burst, options(), [model] * 3).requests()
    assert list(found["replica"]) == [0, 1, 2] * 3


def test_links(tmp_path: Path) -> None:
    """A measured link is interpolated; one that is described has latency and bandwidth; the profile's own wins."""
    pro = device("RTXPRO6000")
    curve, source = allreduce_curve(pro, 2)
    assert "measured" in source
    assert curve(139_264) == pytest.approx(22_780)
    described, source = allreduce_curve(device("h100"), 4)
    assert source.startswith("assumed")
    assert described(450e9 * 0.8 / 1e9 * 1000 / 1.5) == pytest.approx(5_000 + 1000, rel=1e-6)
    (tmp_path / "allreduce.csv").write_text("bytes,time_us\n1000,5\n2000,7\n")
    curve, source = allreduce_curve(pro, 2, tmp_path)
    assert curve(1500) == pytest.approx(6_000)
    (tmp_path / "allreduce.csv").unlink()
    (tmp_path / "hardware.yaml").write_text(
        "measured: {interconnect: {samples: [{collective: all_gather, bytes: 10, us: 1},"
        " {collective: all_reduce, bytes: 1000, us: 8}, {collective: all_reduce, bytes: 3000, us: 10}]}}"
    )
    curve, source = allreduce_curve(pro, 2, tmp_path)
    assert "hardware.yaml" in source
    assert curve(2000) == pytest.approx(9_000)
    (tmp_path / "hardware.yaml").write_text("measured: {interconnect: {samples: [{bytes: x}]}}")
    with pytest.raises(CalibrationError, match="not a description of hardware"):
        allreduce_curve(pro, 2, tmp_path)
    with pytest.raises(SimError, match="no link"):
        allreduce_curve(device("rtx4090").__class__("x", 1e12, 1e11, 1 << 30), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "dense.csv").unlink(), "no file .*dense.csv"),
        (lambda root: (root / "dense.csv").write_text("layer,tokens\nqkv_proj,1\n"), "no column time_us"),
        (lambda root: (root / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,2\n"), "no layer down_proj"),
        (
            lambda root: (root / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,5\nlm_head,2,6\n"),
            "2 points of lm_head; at least 4",
        ),
        (
            lambda root: (root / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,5\nlm_head,2,-6\n"),
            "line 3: time_us is -6",
        ),
        (
            lambda root: (root / "attention.csv").write_text(
                "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,9\n16,0,0,0,9\n"
            ),
            "1 values of prefill_chunk above 0; at least 3",
        ),
    ],
)
def test_a_profile_that_cannot_be_is_one_sentence(tmp_path: Path, spec: ModelSpec, change, message: str) -> None:
    """What is missing or malformed is named, with the file."""
    write_profile(tmp_path)
    change(tmp_path / "tp1")
    with pytest.raises(CalibrationError, match=message):
        read_kernel_tables(tmp_path, spec)


def test_a_profile_of_another_size_says_which_it_has(tmp_path: Path, spec: ModelSpec, moe: ModelSpec) -> None:
    """Tables are per rank: a size that was not profiled cannot be had; nor experts where there is no table of them."""
    write_profile(tmp_path)
    with pytest.raises(CalibrationError, match=r"no tp2 folder \(it has tp1\)"):
        read_kernel_tables(tmp_path, spec, tp=2)
    with pytest.raises(CalibrationError, match=r"no file .*moe.csv"):
        read_kernel_tables(tmp_path, moe)
