"""The fit: it finds planted coefficients, it is the constrained optimum, it reports errors honestly, it is a file."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.calibration import Calibration, Hull, calibrate, load_calibration, nnls, read_profile
from sim.errors import CalibrationError
from sim.steptime import BatchShape, StepTime
from sim.sweep import Limits, sweep

PLANTED = StepTime(
    step=9e6, token=4e4, token_above=1.1e5, ridge=192.0, context=90.0, context_mixed=60.0, work=6.0, row=0.0
)


def profile(model: StepTime, noise: float = 0.0, seed: int = 0, drift: float = 0.0) -> pd.DataFrame:
    """A made-up profile of an engine that behaves as `model`, with relative noise and a drift over its run."""
    rng = np.random.default_rng(seed)
    limits = Limits(max_rows=256, max_tokens=2048, max_context=8192, pool_tokens=400_000)
    rows = []
    batches = sweep(limits)
    for i, batch in enumerate(batches):
        shape = batch.shape()
        factor = (1 + noise * rng.standard_normal()) * (1 + drift * i / len(batches))
        rows.append(
            {
                "batch": i,
                "kind": batch.kind,
                "n_tokens": shape.num_tokens,
                "n_rows": shape.rows,
                "n_decodes": shape.num_decodes,
                "decode_context_tokens": shape.context_tokens,
                "prefill_tokens": shape.num_tokens - shape.num_decodes,
                "prefill_context_work": shape.prefill_work,
                "max_context": shape.max_context,
                "wall_ns_median": model.duration(shape) * factor,
                "order": i,
            }
        )
    return pd.DataFrame(rows)


ABOUT = {"model": "llama-3-8b", "device": "cuda test", "dtype": "bfloat16", "block_size": 16}


@given(
    st.integers(1, 6).flatmap(
        lambda k: st.tuples(
            st.lists(st.lists(st.integers(-5, 5), min_size=k, max_size=k), min_size=k, max_size=10),
            st.lists(st.integers(-9, 9), min_size=10, max_size=10),
        )
    )
)
def test_nnls_is_the_best_of_all_subsets(case) -> None:
    """The active-set method finds the optimum that trying every set of free variables finds, and meets the KKT rule."""
    matrix, target = np.array(case[0], float), np.array(case[1], float)[: len(case[0])]
    count = matrix.shape[1]
    gram, moment = matrix.T @ matrix + 1e-3 * np.eye(count), matrix.T @ target
    x = nnls(gram, moment)

    def value(v):
        return v @ gram @ v / 2 - moment @ v

    best = 0.0
    for size in range(1, count + 1):
        for free in itertools.combinations(range(count), size):
            part = list(free)
            candidate = np.zeros(count)
            candidate[part] = np.linalg.solve(gram[np.ix_(part, part)], moment[part])
            if (candidate >= 0).all():
                best = min(best, value(candidate))
    assert (x >= 0).all()
    assert value(x) <= best + 1e-7 * (1 + abs(best))
    gradient = gram @ x - moment
    assert (gradient >= -1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6


def test_the_fit_finds_planted_coefficients() -> None:
    """From exact times of a known model, the fit gets n* and every coefficient back, with errors near zero."""
    fitted = calibrate(profile(PLANTED), ABOUT)
    assert fitted.coefficients["ridge"] == 192.0
    for name, value in PLANTED.coefficients().items():
        if value and name != "ridge":
            assert fitted.coefficients[name] == pytest.approx(value, rel=0.01), name
    assert fitted.errors["all"].mape < 1e-3
    assert fitted.band == 0.01
    assert fitted.drift == pytest.approx(0.0, abs=1e-9)


def test_noise_makes_scatter_and_little_bias() -> None:
    """With 5 % noise on each batch the errors show the scatter, while the bias of each regime stays under 2 %."""
    fitted = calibrate(profile(PLANTED, noise=0.05), ABOUT)
    assert set(fitted.errors) == {"decode", "prefill", "mixed", "all"}
    for error in fitted.errors.values():
        assert abs(error.bias) < 0.02
        assert 0.02 < error.mape < 0.07
        assert error.p90 > error.mape


def test_a_price_of_rows_is_found_only_where_there_is_one() -> None:
    """Rows enter the formula when the engine charges for them, and stay out when it does not."""
    assert calibrate(profile(PLANTED, noise=0.01), ABOUT).coefficients["row"] == 0.0
    charging = StepTime(**{**PLANTED.coefficients(), "row": 1.5e5})
    fitted = calibrate(profile(charging, noise=0.01), ABOUT)
    assert fitted.coefficients["row"] == pytest.approx(1.5e5, rel=0.1)


def test_the_reported_bias_is_held_out() -> None:
    """Errors come from fits that did not see the batch: one absurd batch shows up as an absurd error."""
    frame = profile(PLANTED)
    victim = frame.index[(frame["kind"] == "decode") & (frame["n_decodes"] == 256)][-1]
    frame.loc[victim, "wall_ns_median"] *= 3
    errors = calibrate(frame, ABOUT).errors["decode"]
    assert errors.bias < -0.01
    assert errors.mape > 0.005


def test_padding_to_graph_sizes_is_part_of_the_fit() -> None:
    """Of an engine that pads its steps, told of the sizes, the fit is exact; the calibrated model pads as it does."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16)]
    padding = StepTime(**PLANTED.coefficients(), buckets=tuple(sizes))
    fitted = calibrate(profile(padding), ABOUT | {"graph_sizes": sizes})
    assert fitted.errors["all"].mape < 1e-3
    assert calibrate(profile(padding), ABOUT).errors["all"].mape > 1e-3
    batch = BatchShape.from_rows([(1, 300)] * 33)
    assert fitted.step_time().duration(batch) == pytest.approx(padding.duration(batch), rel=2e-3)
    with pytest.raises(CalibrationError, match="graph_sizes"):
        calibrate(profile(padding), ABOUT | {"graph_sizes": "many"})


def test_a_few_disturbed_batches_hardly_move_the_fit() -> None:
    """When another program makes one batch in twelve two to four times slower, predictions stay within 3 %."""
    frame = profile(PLANTED, noise=0.02)
    rng = np.random.default_rng(5)
    disturbed = rng.random(len(frame)) < 1 / 12
    frame.loc[disturbed, "wall_ns_median"] *= rng.uniform(2, 4, disturbed.sum())
    fitted = calibrate(frame, ABOUT).step_time()
    for rows in ([(1, 500)] * 4, [(1, 1500)] * 64, [(512, 0)], [(1, 700)] * 32 + [(900, 100)]):
        batch = BatchShape.from_rows(rows)
        assert fitted.duration(batch) == pytest.approx(PLANTED.duration(batch), rel=0.03)


def test_repeated_batches_count_once_with_their_median() -> None:
    """Three passes of which one was disturbed throughout give the fit of the undisturbed ones."""
    frame = profile(PLANTED)
    slow = frame.assign(wall_ns_median=frame["wall_ns_median"] * 1.7)
    fitted = calibrate(pd.concat([frame, slow, frame], ignore_index=True), ABOUT)
    assert fitted.batches == (~frame["kind"].isin(["anchor"])).sum()
    assert fitted.coefficients["context"] == pytest.approx(PLANTED.context, rel=0.01)


def test_drift_is_read_off_the_anchors() -> None:
    """A machine that slows down by 9 % over the profile shows a drift of about two thirds of that."""
    fitted = calibrate(profile(PLANTED, drift=0.09), ABOUT)
    assert 0.04 < fitted.drift < 0.09
    assert fitted.band >= fitted.drift


def test_anchor_and_replay_are_kept_out_of_the_fit() -> None:
    """Absurd anchors and replayed steps change no coefficient; the replay's bias is reported."""
    frame = profile(PLANTED)
    replay = frame[frame["kind"] == "decode"].head(10).assign(kind="replay")
    replay["wall_ns_median"] *= 1.25
    both = pd.concat([frame, replay], ignore_index=True)
    both.loc[both["kind"] == "anchor", "wall_ns_median"] *= 7
    fitted, plain = calibrate(both, ABOUT), calibrate(frame, ABOUT)
    assert fitted.coefficients == plain.coefficients
    assert fitted.errors["replay"].bias == pytest.approx(1 / 1.25 - 1, abs=0.01)
    assert fitted.band >= 0.19


def test_small_turning_points_are_for_cpus_only() -> None:
    """A CPU whose GEMMs turn at 16 tokens is fitted so; the same profile of a GPU only gets a GPU's candidates."""
    cpu = StepTime(**{**PLANTED.coefficients(), "ridge": 16.0})
    assert calibrate(profile(cpu), ABOUT | {"device": "cpu"}).coefficients["ridge"] == 16.0
    assert calibrate(profile(cpu), ABOUT).coefficients["ridge"] != 16.0


def test_fits_are_deterministic_and_fast(tmp_path) -> None:
    """The same profile gives the same file, byte for byte, in well under a second for all fits together."""
    frame = profile(PLANTED, noise=0.03)
    start = time.process_time()
    first = calibrate(frame, ABOUT).to_json()
    assert time.process_time() - start < 2.0
    assert calibrate(frame, ABOUT).to_json() == first


def test_files_round_trip(tmp_path) -> None:
    """A profile in Parquet becomes a calibration that names the profile's digest and reads back as it was written."""
    path = tmp_path / "profile.parquet"
    table = pa.Table.from_pandas(profile(PLANTED, noise=0.02), preserve_index=False)
    pq.write_table(table.replace_schema_metadata({b"kvtwin": json.dumps(ABOUT).encode()}), path)
    frame, about = read_profile(path)
    assert about["model"] == "llama-3-8b"
    fitted = calibrate(path)
    assert fitted.profile_digest == about["digest"]
    assert fitted.about["dtype"] == "bfloat16"
    saved = tmp_path / "calibration.json"
    fitted.save(saved)
    loaded = load_calibration(saved)
    assert loaded == fitted
    batch = BatchShape.from_rows([(1, 100)] * 4)
    assert loaded.step_time().duration(batch) == fitted.step_time().duration(batch)
    assert len(frame) == len(table)


def test_bands_lie_around_the_prediction() -> None:
    """The band's models are slower and faster by the band, and the refits lie close to the fit."""
    fitted = calibrate(profile(PLANTED, noise=0.03), ABOUT)
    models = fitted.band_models(refits=5)
    assert list(models) == ["low", "high", "refit-0", "refit-1", "refit-2", "refit-3", "refit-4"]
    batch = BatchShape.from_rows([(1, 700)] * 40)
    middle = fitted.step_time().duration(batch)
    assert models["low"].duration(batch) == pytest.approx(middle * (1 - fitted.band), rel=1e-6)
    assert models["high"].duration(batch) == pytest.approx(middle * (1 + fitted.band), rel=1e-6)
    for i in range(5):
        assert models[f"refit-{i}"].duration(batch) == pytest.approx(middle, rel=0.05)


def test_hull_reports_the_share_of_time_outside() -> None:
    """Time in steps with more tokens, rows, cached tokens or a longer context than measured counts as outside."""
    hull = Hull(n_tokens=(1, 100), context_tokens=(0, 1000), rows=(1, 8), max_context=(16, 512))
    ones = np.ones(4, int)
    share = hull.share_outside(
        duration_ns=np.array([10, 20, 30, 40]),
        n_tokens=np.array([50, 101, 50, 50]),
        context_tokens=np.array([500, 500, 1001, 500]),
        rows=ones,
        max_context=np.array([100, 100, 100, 513]),
    )
    assert share == pytest.approx(0.9)
    assert hull.share_outside(ones, ones, ones, ones * 9) == 1.0
    assert hull.share_outside(ones[:0], ones[:0], ones[:0], ones[:0]) == 0.0


def test_unusable_profiles_are_clear_errors(tmp_path) -> None:
    """A missing file, column or kind of batch, or an impossible time, is one sentence that says what to do."""
    with pytest.raises(CalibrationError, match="no profile"):
        calibrate(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(CalibrationError, match="not a profile"):
        calibrate(tmp_path / "bad.parquet")
    frame = profile(PLANTED)
    with pytest.raises(CalibrationError, match="n_decodes"):
        calibrate(frame.drop(columns="n_decodes"))
    with pytest.raises(CalibrationError, match="too few batches"):
        calibrate(frame.head(10))
    with pytest.raises(CalibrationError, match="0 prefill"):
        calibrate(frame[frame["prefill_tokens"] == 0])
    with pytest.raises(CalibrationError, match="must be positive"):
        calibrate(frame.assign(wall_ns_median=0.0))


def test_damaged_calibrations_are_clear_errors(tmp_path) -> None:
    """A file of another kind or version, with a missing or impossible value, is refused with the reason."""
    path = tmp_path / "calibration.json"
    with pytest.raises(CalibrationError, match="no calibration"):
        load_calibration(path)
    path.write_text("{")
    with pytest.raises(CalibrationError, match="not valid JSON"):
        load_calibration(path)
    path.write_text("{}")
    with pytest.raises(CalibrationError, match="not a calibration"):
        load_calibration(path)
    good = json.loads(calibrate(profile(PLANTED), ABOUT).to_json())
    for change, message in (
        ({"version": 99}, "version 99"),
        ({"hull": {}}, "damaged"),
        ({"coefficients": good["coefficients"] | {"work": -1}}, "work"),
        ({"coefficients": good["coefficients"] | {"wrk": 1}}, "wrk"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(CalibrationError, match=message):
            load_calibration(path)
    del good["drift"]
    path.write_text(json.dumps(good))
    with pytest.raises(CalibrationError, match="drift"):
        load_calibration(path)


def test_a_calibration_is_of_one_model() -> None:
    """Simulating another model than the one that was profiled is refused."""
    fitted: Calibration = calibrate(profile(PLANTED), ABOUT)
    fitted.check_model("llama-3-8b")
    with pytest.raises(CalibrationError, match="llama-2-7b"):
        fitted.check_model("llama-2-7b")


STAIRS = StepTime(
    table=((1, 5e6), (8, 5e6), (9, 9e6), (64, 9e6), (65, 16e6), (256, 40e6)),
    table_mixed=((2, 12e6), (512, 14e6), (513, 40e6), (2048, 160e6)),
    context=60.0,
    work=4.0,
)


def test_stairs_are_found_and_only_there() -> None:
    """An engine whose times have steps gets the piecewise-linear form, within 2 %; one without keeps the six terms.
    The form is saved and read back as it is."""
    found = calibrate(profile(STAIRS), ABOUT)
    assert set(found.tables) == {"table", "table_mixed"}
    assert abs(found.errors["all"].bias) < 0.02
    model = found.step_time()
    for rows in ([(1, 300)] * 4, [(1, 500)] * 40, [(1, 400)] * 150):
        shape = BatchShape.from_rows(rows)
        assert model.duration(shape) == pytest.approx(STAIRS.duration(shape), rel=0.12)
    assert not calibrate(profile(PLANTED, noise=0.02), ABOUT).tables
    assert len(found.band_models(3)) == 5


def test_a_table_of_its_own_for_steps_with_a_prefill() -> None:
    """With `table_mixed`, a step with a prefill is looked up there, a decode step in `table`; scaling scales both."""
    mixed, decode = BatchShape.from_rows([(512, 0)]), BatchShape.from_rows([(1, 0)] * 8)
    assert STAIRS.duration(mixed) == 14_000_000 + 4 * (512 * 513 // 2)
    assert STAIRS.duration(decode) == 5_000_000
    assert STAIRS.scaled(2.0).duration(mixed) == 2 * STAIRS.duration(mixed)


def test_a_profile_from_elsewhere(tmp_path: Path) -> None:
    """A CSV of steps, their batches and times is fitted as well as our own profile is, by rows or by columns."""
    limits = Limits(max_rows=256, max_tokens=2048, max_context=8192, pool_tokens=400_000)
    lines = ["# model: llama-3-8b", "# device: some gpu", "step,batch,time_ms"]
    columns = ["n_decodes,decode_context_tokens,prefill_tokens,prefill_context_tokens,num_prefills,time_us"]
    for i, batch in enumerate(sweep(limits)):
        shape = batch.shape()
        ns = PLANTED.duration(shape)
        lines.append(f"{i},{' '.join(f'{q}:{c}' for q, c in batch.rows)},{ns / 1e6!r}")
        prefills = [(q, c) for q, c in batch.rows if q > 1]
        if len(prefills) < 2:
            tokens, behind = (sum(column) for column in zip(*prefills, strict=True)) if prefills else (0, 0)
            counts = (shape.num_decodes, shape.context_tokens, tokens, behind, len(prefills))
            columns.append(",".join(map(str, (*counts, ns / 1e3))))
    for name, content in (("rows.csv", lines), ("columns.csv", columns)):
        path = tmp_path / name
        path.write_text("\n".join(content) + "\n")
        found = calibrate(path)
        assert abs(found.errors["all"].bias) < 0.005
        assert found.coefficients["context"] == pytest.approx(PLANTED.context, rel=0.05)
    assert calibrate(tmp_path / "rows.csv").model == "llama-3-8b"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step,batch\n0,1:2\n", "has no time"),
        ("step,time_ms\n0,1\n", "neither a column batch nor n_decodes"),
        ("batch,time_ms\n1:2 3,1\n", "line 2: the batch has '3'"),
        ("batch,time_ms\n0:2,1\n", "line 2: the batch has '0:2'"),
        ("batch,time_ms\n1:2,soon\n", "line 2: time_ms is soon"),
        ("# a note\nbatch,time_ms\n1:2,-1\n", "line 3: time_ms is -1"),
        ("batch,time_ms\n" + "1:2,1\n" * 4, "too few batches"),
    ],
)
def test_a_csv_that_cannot_be_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    """What is missing or wrong is named, with its line."""
    path = tmp_path / "steps.csv"
    path.write_text(content)
    with pytest.raises(CalibrationError, match=message):
        calibrate(path)
