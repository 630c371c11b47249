"""The comparison: verdicts, errors and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_results import write_toy

from experiments.cli import main
from experiments.compare import compare, verdict
from experiments.results import read_results, write_json


@pytest.mark.parametrize(
    ("real", "simulated", "word"),
    [
        ([100, 100, 100], 104.9, "within"),
        ([100, 100, 100], 105.1, "outside"),
        ([100, 100, 100], 94.9, "outside"),
        ([95.5, 100, 104.5], 104.4, "within"),
        ([95.1, 95.1, 104.9], 104.8, "within"),  # 6.5 % off the mean, but no slower than a real run
        ([90, 100, 110], 100, "inconclusive"),  # a perfect hit proves nothing here
        ([100], 104, "within"),
        ([100], 106, "outside"),
        ([90, 110], 106, "outside"),  # two runs make no range
    ],
)
def test_verdicts_follow_the_definition(real: list[float], simulated: float, word: str) -> None:
    """Within 5 %, or within a range of at most 10 %; a wider range is inconclusive; else outside."""
    found = verdict(real, simulated)
    assert found["verdict"] == word
    mean = sum(real) / len(real)
    assert found["error_pct"] == pytest.approx((simulated - mean) / mean * 100)
    if len(real) < 3:
        assert found["real_range_pct"] is None
    else:
        assert found["real_range_pct"] == pytest.approx((max(real) - min(real)) / mean * 100)


def test_nothing_measured_is_inconclusive() -> None:
    """Where one side has no value there is no error and no verdict either way."""
    assert verdict([], 1.0)["verdict"] == "inconclusive"
    assert verdict([1.0, 1.0], None)["error_pct"] is None
    assert verdict([0.0, 0.0, 0.0], 0.0)["verdict"] == "within"


def test_a_simulation_equal_to_the_real_run_has_no_error(tmp_path: Path) -> None:
    """Identical tables: every error, per request and over time, is zero."""
    real = read_results(write_toy(tmp_path / "r", "real"))
    simulated = read_results(write_toy(tmp_path / "s", "simulated"))
    content = compare([real], simulated)
    assert {
        entry["error_pct"] for name in ("ttft_s", "tpot_s", "e2e_s") for entry in content["metrics"][name].values()
    } == {0.0}
    assert content["kv_usage"]["mean_abs_error_points"] == 0.0
    assert content["per_request"]["e2e_s"]["mean_abs_error_pct"] == 0.0
    assert any("fewer than 3" in note for note in content["notes"])


def test_a_slower_simulation_has_errors_of_the_right_sign_and_size(tmp_path: Path) -> None:
    """Steps 20 % longer make TPOT about 20 % longer, and throughput no higher."""
    real = read_results(write_toy(tmp_path / "r", "real", rate_per_s=100.0))
    simulated = read_results(write_toy(tmp_path / "s", "simulated", speed=1.2, rate_per_s=100.0))
    content = compare([real], simulated)
    assert content["metrics"]["tpot_s"]["mean"]["error_pct"] == pytest.approx(20, abs=2)
    assert content["metrics"]["output_tokens_per_s"]["error_pct"] < 0
    assert content["metrics"]["tpot_s"]["mean"]["verdict"] == "outside"
    assert content["kv_usage"]["mean_abs_error_points"] > 1


def test_the_command_writes_json_page_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """compare.json has the promised shape; --json prints it and nothing else; the page holds its pictures itself."""
    real = [write_toy(tmp_path / f"r{i}", "real", noise=0.01, noise_seed=i) for i in range(3)]
    simulated = write_toy(tmp_path / "s", "simulated")
    out = tmp_path / "out"
    words = ["compare", str(real[0]), str(simulated), "--again", str(real[1]), "--again", str(real[2])]
    assert main([*words, "--out", str(out), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads((out / "compare.json").read_text())
    entry = {"real", "simulated", "error_pct", "real_range_pct", "verdict"}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert set(content["metrics"][name]) == {"mean", "p50", "p90", "p99"}
        assert all(set(found) == entry for found in content["metrics"][name].values())
    assert set(content["metrics"]["output_tokens_per_s"]) == entry
    assert content["num_real_runs"] == 3
    html = (out / "index.html").read_text()
    assert html.count("data:image/png;base64,") == 3
    assert "http" not in html
    assert {"latency.png", "kv_pool.png", "batches.png"} <= {path.name for path in out.iterdir()}


def test_runs_of_different_traces_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Different traces are refused with one sentence; different options are compared, with a note."""
    real = write_toy(tmp_path / "r", "real")
    other = write_toy(tmp_path / "s", "simulated", seed=1)
    assert main(["compare", str(real), str(other), "--out", str(tmp_path / "o")]) == 2
    assert "different traces" in capsys.readouterr().err
    same = write_toy(tmp_path / "t", "simulated")
    manifest = json.loads((same / "manifest.json").read_text())
    manifest["configuration"]["model"] = "another"
    write_json(same / "manifest.json", manifest)
    notes = compare([read_results(real)], read_results(same))["notes"]
    assert any("differ in model" in note for note in notes)


def test_an_interrupted_run_is_pointed_out(tmp_path: Path) -> None:
    """A run whose manifest says it is not complete gets a note."""
    real, simulated = write_toy(tmp_path / "r", "real"), write_toy(tmp_path / "s", "simulated")
    manifest = json.loads((real / "manifest.json").read_text())
    write_json(real / "manifest.json", {**manifest, "complete": False})
    assert any("interrupted" in note for note in compare([read_results(real)], read_results(simulated))["notes"])
