"""`kvtwin validate`: real runs are read, simulated from what they were asked, compared; malformed ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from profile_kit import MODEL, MOE, settings, write_profile, write_run

from experiments.cli import main
from experiments.config import Config
from experiments.enginefacts import engine_facts
from experiments.errors import UsageError
from experiments.rundir import read_run
from experiments.validate import basis_of, predict


def serve_here(folder: Path) -> dict[str, np.ndarray]:
    """The times of a run as our own simulation has them: a log whose prediction is known."""
    run = read_run(folder)
    requests = predict(run, basis_of(run, Config())).requests
    names = {"queued_s": "queued_ns", "first_token_s": "first_token_ns", "last_token_s": "finish_ns"}
    return {name: requests[column] / 1e9 for name, column in names.items()}


def validated(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["validate", str(folder), "--json", "--no-bands", *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_run_that_was_simulated_is_predicted_exactly(tmp_path: Path) -> None:
    """A log that our simulation wrote has no error in any metric, and the report has every key that is promised."""
    folder = tmp_path / "run"
    write_profile(folder / "profile")
    write_run(folder, settings(), serve_here)
    assert main(["validate", str(folder), "--out", str(tmp_path / "out")]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "out" / "validate.json").read_text())
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "validate.json",
        "requests.png",
        "latency.png",
        "series.png",
    }
    for name in ("ttft_s", "ttft_queued_s", "tpot_s", "e2e_s"):
        assert set(report["metrics"][name]) == {"mean", "p50", "p90", "p99"}
        for entry in report["metrics"][name].values():
            assert set(entry) == {"real", "predicted", "error_pct"}
            assert abs(entry["error_pct"]) < 1e-3
        assert report["per_request_mape_pct"][name] < 1e-3
    assert report["kv_blocks"] == 800
    assert report["kv_blocks_source"] == "recorded"
    assert report["num_preemptions"] >= 0
    assert report["band"] >= 0.01
    low, high = report["bands"]["e2e_s"]
    assert low < report["metrics"]["e2e_s"]["mean"]["predicted"] < high
    assert report["elasticity"]["tpot_s"] == pytest.approx(1.0, abs=0.3)
    assert 0.0 <= report["share_outside_hull"] <= 1.0


def test_a_mixture_of_experts_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with moe.csv, two data-parallel ranks and experts split over them is read and predicted: twice the
    recorded blocks are those of both, collectives come from the link, and the busier half does not starve the other."""
    folder = tmp_path / "run"
    write_profile(folder / "profile", moe=True)
    engine = settings(
        model_dims=MOE,
        kv_cache__num_gpu_blocks=1602,
        engine_kwargs__data_parallel_size=2,
        engine_kwargs__enable_expert_parallel=True,
    )
    write_run(folder, engine, serve_here)
    report = validated(folder, capsys)
    assert report["data_parallel_size"] == 2
    assert report["kv_blocks"] == 800
    assert any("measured between two rtxpro6000" in note for note in report["notes"])
    assert abs(report["metrics"]["e2e_s"]["mean"]["error_pct"]) < 1e-3
    run = read_run(folder)
    found = predict(run, basis_of(run, Config())).requests["replica"]
    assert 10 <= int(found.sum()) <= 30


def test_tensor_parallel_tables_are_those_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With tensor_parallel_size 2, tp2's tables and the link's all-reduces make the step; without tp2 it says so."""
    folder = tmp_path / "run"
    write_profile(folder / "profile", tp=2)
    write_run(folder, settings(engine_kwargs__tensor_parallel_size=2), serve_here)
    report = validated(folder, capsys)
    assert report["tensor_parallel_size"] == 2
    assert "tp2" in report["step_time"]


def test_blocks_by_the_memory_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no blocks are recorded, or with --predict-blocks, the memory model supplies them for the named device."""
    folder = tmp_path / "run"
    write_profile(folder / "profile")
    write_run(folder, settings(kv_cache__gpu_memory_utilization=0.08))
    recorded = validated(folder, capsys, "--predict-blocks")
    assert recorded["kv_blocks_source"] == "predicted"
    assert recorded["kv_blocks_recorded"] == 801
    assert recorded["kv_blocks"] > 1_000
    engine = settings(kv_cache__num_gpu_blocks=None)
    engine["kv_cache"]["gpu_memory_utilization"] = 0.08
    (folder / "engine.json").write_text(json.dumps(engine))
    assert validated(folder, capsys)["kv_blocks"] == recorded["kv_blocks"]
    (folder / "engine.json").write_text(json.dumps(engine | {"hardware": None}))
    capsys.readouterr()
    assert main(["validate", str(folder)]) == 2
    assert "records no KV blocks" in capsys.readouterr().err


def test_six_terms_of_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--step-time six-terms fits the formula to a sweep of the run's tables, whose errors it tells."""
    folder = tmp_path / "run"
    write_profile(folder / "profile")
    write_run(folder, settings(), serve_here)
    report = validated(folder, capsys, "--step-time", "six-terms")
    assert "calibrated on" in report["step_time"]
    assert abs(report["metrics"]["tpot_s"]["mean"]["error_pct"]) < 5


def bench(count: int = 30) -> dict[str, Any]:
    """What `vllm bench serve --save-result --save-detailed` saves."""
    rng = np.random.default_rng(0)
    outputs = rng.integers(2, 40, count).tolist()
    return {
        "model_id": "test/model",
        "input_lens": rng.integers(10, 200, count).tolist(),
        "output_lens": outputs,
        "ttfts": rng.uniform(0.05, 0.2, count).tolist(),
        "itls": [[0.01] * (n - 1) for n in outputs],
        "start_times": (1000.0 + np.arange(count) * 0.2).tolist(),
        "errors": [""] * count,
    }


def test_vllms_own_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON of `vllm bench serve` with engine.json beside it is a run; failed requests are left out and told of."""
    folder = tmp_path / "run"
    write_profile(folder / "profile")
    content = bench()
    content["errors"][3] = "timed out"
    (folder / "result.json").write_text(json.dumps(content))
    (folder / "engine.json").write_text(json.dumps(settings()))
    report = validated(folder, capsys)
    assert report["num_requests"] == 29
    assert report["metrics"]["tpot_s"]["mean"]["real"] == pytest.approx(0.01, rel=1e-6)
    assert "ttft_queued_s" not in report["metrics"]
    assert any("1 requests that failed" in note for note in report["notes"])


def test_a_run_without_a_profile_is_a_roofline_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step times then come from the device's description, and the report says how far off that is."""
    folder = write_run(tmp_path / "run", settings())
    report = validated(folder, capsys)
    assert "not calibrated" in report["step_time"]
    assert report["band"] == 0.27
    assert report["share_outside_hull"] is None


def test_the_public_simulators_answer_stands_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a prediction of another simulator in the folder, its errors are in the report, against the same values."""
    folder = tmp_path / "run"
    write_profile(folder / "profile")
    write_run(folder, settings(), serve_here)
    table = pd.read_csv(folder / "requests.csv")
    ttft = 1.1 * (table["first_token_s"] - table["queued_s"])
    latency = 1.1 * (table["last_token_s"] - table["queued_s"])
    pd.DataFrame({"idx": table["idx"], "ttft_s": ttft, "latency_s": latency}).to_csv(
        folder / "llmservingsim_pred.csv", index=False
    )
    public = validated(folder, capsys)["public_simulator"]
    assert public["metrics"]["ttft_queued_s"]["mean"]["error_pct"] == pytest.approx(10)
    assert public["per_request_mape_pct"]["e2e_queued_s"] == pytest.approx(10)


def _edit(folder: Path, name: str, value: object) -> None:
    table = pd.read_csv(folder / "requests.csv", dtype=object)
    table.loc[3, name] = value
    table.to_csv(folder / "requests.csv", index=False)


BROKEN = {
    "no folder": (lambda f: f.rename(f.parent / "gone"), "There is no run"),
    "no log": (lambda f: (f / "requests.csv").unlink(), "neither requests.csv nor"),
    "no column": (lambda f: (f / "requests.csv").write_text("idx\n1\n"), "no column prompt_tokens"),
    "no requests": (
        lambda f: (f / "requests.csv").write_text("prompt_tokens,output_tokens,arrival_s,first_token_s,last_token_s\n"),
        "has no requests",
    ),
    "no number": (lambda f: _edit(f, "first_token_s", "soon"), "line 5: first_token_s is 'soon'"),
    "no tokens": (lambda f: _edit(f, "output_tokens", 0), "line 5: output_tokens is"),
    "time runs back": (lambda f: _edit(f, "last_token_s", -1.0), "line 5: last_token_s .* is before first_token_s"),
    "blocks of others": (
        lambda f: np.savez(f / "prompt_blocks.npz", block_ids=np.zeros(3), offsets=np.array([0, 3])),
        "does not fit requests.csv",
    ),
    "no blocks": (lambda f: np.savez(f / "prompt_blocks.npz", x=np.zeros(3)), "must hold block_ids and offsets"),
    "no JSON": (lambda f: (f / "engine.json").write_text("{"), "engine.json' is not valid JSON"),
    "no object": (lambda f: (f / "engine.json").write_text("[]"), "must hold an object"),
    "no size": (
        lambda f: (f / "engine.json").write_text(json.dumps(settings(engine_kwargs__tensor_parallel_size=0))),
        "tensor_parallel_size must be an integer of 1 or more, not 0",
    ),
    "no flag": (
        lambda f: (f / "engine.json").write_text(json.dumps(settings(scheduler__async_scheduling="yes"))),
        "async_scheduling must be true or false",
    ),
    "no model": (
        lambda f: (f / "engine.json").write_text(json.dumps(settings(model=None, model_dims=None))),
        "names no model",
    ),
    "other model": (
        lambda f: (f / "engine.json").write_text(json.dumps(settings(model_dims=MODEL | {"model_type": "bert"}))),
        "model_type 'bert'",
    ),
    "other device": (
        lambda f: (f / "engine.json").write_text(json.dumps(settings(hardware="RTX9999"))),
        "Unknown hardware 'RTX9999'",
    ),
    "other size": (
        lambda f: (f / "engine.json").write_text(json.dumps(settings(engine_kwargs__tensor_parallel_size=2))),
        "has no tp2 folder",
    ),
    "few points": (
        lambda f: (f / "profile" / "tp1" / "dense.csv").write_text(
            "layer,tokens,time_us\nqkv_proj,1,2\no_proj,1,2\ngate_up_proj,1,2\ndown_proj,1,2\n"
        ),
        "points of .*at least 4 are needed",
    ),
    "log of an engine": (lambda f: (f / "timeseries.csv").write_text("time\n1\n"), "no column t"),
    "prediction": (lambda f: (f / "llmservingsim_pred.csv").write_text("idx\n1\n"), "no column ttft_s"),
}


@pytest.mark.parametrize("case", BROKEN, ids=list(BROKEN))
def test_a_malformed_folder_is_one_sentence(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong with a folder, the command names it in one sentence and ends with exit code 2."""
    folder = tmp_path / "run"
    write_profile(folder / "profile")
    write_run(folder, settings())
    change, message = BROKEN[case]
    change(folder)
    assert main(["validate", str(folder)]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"itls": None}, "no itls; save the benchmark with --save-result --save-detailed"),
        ({"start_times": None}, "no start_times"),
        ({"ttfts": [0.1]}, "1 ttfts for 30 requests"),
        ({"errors": ["no"] * 30}, "no request that was served"),
        ({"itls": [["x"]] * 30}, "no number"),
    ],
)
def test_a_malformed_benchmark_is_one_sentence(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """What a benchmark's JSON lacks is named."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(bench() | change))
    with pytest.raises(UsageError, match=message):
        read_run(path)


def test_what_is_not_recorded_is_vllms_default_and_told() -> None:
    """A bare engine.json gets vLLM's defaults, each with a note; a driver's name for a device is understood."""
    facts = engine_facts({"model_dims": MODEL, "hardware_facts": {"device_name": "NVIDIA GeForce RTX 4090"}})
    assert facts.hardware is not None
    assert facts.hardware.name == "rtx4090"
    assert (facts.tp, facts.dp, facts.block_size, facts.max_num_batched_tokens) == (1, 1, 16, 2048)
    assert facts.max_model_len == 8192
    assert facts.steps_in_flight == 2
    assert facts.graph_sizes[:5] == (1, 2, 4, 8, 16)
    assert facts.graph_sizes[-1] == 512
    assert len(facts.notes) >= 4
    pro = engine_facts(
        {"model_dims": MODEL, "hardware": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "vllm_version": "0.10.2"}
    )
    assert pro.hardware is not None
    assert pro.hardware.name == "rtxpro6000"
    assert pro.steps_in_flight == 1
    assert engine_facts({"model_dims": MODEL, "enforce_eager": True}).graph_sizes == ()


def test_kernel_tables_simulate_a_trace(tmp_path: Path) -> None:
    """`kvtwin simulate --calibration FOLDER` takes step times from tables, with band, elasticity and share outside."""
    write_profile(tmp_path / "profile")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    workload = tmp_path / "w.yaml"
    workload.write_text(
        "kind: synthetic\nnum_requests: 20\nseed: 0\narrival: {process: poisson, rate_per_s: 20}\n"
        "prompt_tokens: {dist: uniform, low: 16, high: 200}\noutput_tokens: {dist: uniform, low: 4, high: 40}\n"
    )
    words = ["--trace", str(workload), "--model", str(tmp_path / "config.json"), "--num-gpu-blocks-override", "500"]
    out = tmp_path / "out"
    assert main(["simulate", *words, "--calibration", str(tmp_path / "profile"), "--out", str(out)]) == 0
    about = json.loads((out / "prediction.json").read_text())
    assert about["basis"] == "kernel tables"
    assert about["band"] == 0.01
    assert about["elasticity"]["tpot_s"]["mean"] == pytest.approx(1.0, abs=0.2)
    assert about["share_outside_hull"] == 0.0
