"""Rows that arithmetic settles, and the small pieces that they are computed with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import arithmetic
from experiments.alone import serve_alone
from experiments.config import Config
from experiments.experiment import Context
from experiments.promql import histogram_quantile, rate
from experiments.terminal import Terminal


def series(text: str) -> list[float]:
    """A series in promtool's notation: `a`, `axN` (N more times the same), `a+bxN` (N more, each b higher)."""
    values: list[float] = []
    for word in text.split():
        start, times, count = word.partition("x")
        first, _, slope = start.partition("+")
        repeated = int(count) if times else 0
        values += [float(first) + float(slope or 0) * i for i in range(repeated + 1)]
    return values


def test_alerts_as_promtool_decides_them(shared_data: Path) -> None:
    """On the series of a rules file that promtool accepts, our rate is above 0 where its alerts are expected."""
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((shared_data / "traces" / "prometheus" / "rules_test.yml").read_text())
    (case,) = found["tests"]
    samples = {}
    for entry in case["input_series"]:
        name = entry["series"].partition("{")[0]
        samples[name] = [(15.0 * i, value) for i, value in enumerate(series(entry["values"]))]
    metrics = {"SWAP": "vllm:num_requests_swapped", "PREEMPT": "vllm:num_preemptions_total"}
    checked = 0
    for expected in case["alert_rule_test"]:
        if expected["alertname"] in metrics:
            at = 60.0 * int(expected["eval_time"].removesuffix("m"))
            value = rate(samples[metrics[expected["alertname"]]], at, 60)
            assert value is not None
            assert (value > 0) == bool(expected["exp_alerts"])
            checked += 1
    assert checked == 3


def test_rate_of_a_steady_counter_is_its_slope() -> None:
    """A counter that rises by 3 every 15 s has a rate of 0.2/s, also where the window does not end at a sample."""
    samples = [(15.0 * i, 100 + 3.0 * i) for i in range(20)]
    assert rate(samples, 240, 60) == pytest.approx(0.2)
    assert rate(samples, 247, 60) == pytest.approx(0.2)
    assert rate(samples, 10, 60) is None


def test_a_fall_counts_as_a_restart() -> None:
    """30, 20, 10 is taken for a counter that restarted twice: 20 + 10 more."""
    assert rate([(0, 30.0), (20, 20.0), (40, 10.0)], 40, 40.000001) == pytest.approx(30 / 40, rel=1e-6)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_an_estimated_quantile_is_in_the_bucket_of_the_true_one(values: list[float], quantile: float) -> None:
    """The estimate lies between the bounds of the bucket that holds the value of that rank."""
    bounds = [0.5, 1.0, 2.5, 5.0, 10.0]
    buckets = [(bound, float(sum(v <= bound for v in values))) for bound in bounds]
    found = histogram_quantile(quantile, [*buckets, (math.inf, float(len(values)))])
    true = sorted(values)[max(0, math.ceil(quantile * len(values) - 1e-9) - 1)]
    at = next(i for i, bound in enumerate(bounds) if true <= bound)
    assert (bounds[at - 1] if at else 0.0) <= found <= bounds[at]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16))
def test_a_request_alone_has_the_blocks_it_needs(prompt: int, output: int, size: int) -> None:
    """At each step its table covers its tokens with less than a block to spare, and only grows, without copies."""
    steps = serve_alone(prompt, output, size)
    assert [step.tokens for step in steps] == list(range(prompt, prompt + output))
    before: tuple[int, ...] = ()
    for step in steps:
        assert len(step.table) == -(-step.tokens // size)
        assert step.table[: len(before)] == before
        assert step.copies == 0
        assert step.usage.tail == len(step.table) * size - step.tokens
        before = step.table


def test_what_the_rows_say(tmp_path: Path) -> None:
    """Rows that need no data are settled without it, with the figures known from elsewhere."""
    found = arithmetic.run(Context("arithmetic", Config(), Terminal(quiet_stdout=True), tmp_path, tmp_path / "none"))
    rows = {row.id: row for row in found.claims}
    assert set(rows) == {"A13", "A19", "A31", "A38", "A39", "A44", "A45", "A46", "B10"}
    assert rows["A13"].numbers == {"token_bytes": 131072, "block_bytes": 2097152}
    assert rows["A38"].numbers["allreduces"] == 161
    assert rows["A44"].numbers["largest_share"] == 1
    assert rows["A45"].numbers["silent_s"] == 570  # 40 samples at 30, of which the first window still sees the rise
    assert {id: row.status for id, row in rows.items() if row.status.startswith("rep")} == {
        "A13": "reproduced",
        "A31": "reproduced-only-if",
        "A39": "reproduced-only-if",
        "A46": "reproduced-only-if",
    }
    assert any("A52" in note for note in found.notes)


def test_other_shapes_give_another_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts follow from figures: a model with other KV heads does not have 128 KB a token."""
    monkeypatch.setattr(arithmetic, "preset", lambda name: arithmetic_preset("llama-2-7b"))
    assert arithmetic.kv_bytes().status == "does-not-follow"


def arithmetic_preset(name: str) -> object:
    """The real lookup."""
    from sim.models import preset

    return preset(name)
