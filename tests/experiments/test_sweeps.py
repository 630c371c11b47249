"""Sweeps: what varies, the table, interruption, backends, and what is said of a file that cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.cli import main
from experiments.errors import UsageError
from experiments.sweep import Row, front_of
from experiments.sweepspec import read_sweep

ROOT = Path(__file__).resolve().parents[2]
TRACE = """
kind: synthetic
num_requests: 60
seed: 3
arrival: {process: poisson, rate_per_s: 30}
prompt_tokens: {dist: lognormal, mean: 300, sigma: 0.8}
output_tokens: {dist: lognormal, mean: 60, sigma: 0.7}
prefix: {num_prefixes: 3, tokens: 128, share: 0.7}
"""
BASE: dict[str, Any] = {
    "model": "llama-3-8b",
    "hardware": "a100-80g",
    "num_gpu_blocks_override": 400,
    "max_model_len": 2048,
    "trace": "trace.yaml",
}
OBJECTIVES = {"ttft_s.p99": "min", "output_tokens_per_s": "max"}


def write(folder: Path, **content: Any) -> Path:
    """A sweep file beside its trace."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.yaml").write_text(TRACE)
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": BASE, "objectives": OBJECTIVES, **content}, sort_keys=False))
    return path


def sweep(path: Path, out: Path, *words: str) -> Path:
    """Run it; returns the table's path."""
    assert main(["sweep", str(path), "--out", str(out), *words]) == 0
    return out / "sweep.parquet"


GRID = {"block_size": [16, 32], "max_num_seqs": {"low": 4, "high": 64, "num": 3, "log": True}}


def test_a_grid_has_a_row_for_each_combination_in_order(tmp_path: Path) -> None:
    """Rows are all combinations, the metrics of each are those of `kvtwin simulate` with the same options."""
    import pandas as pd

    table = pd.read_parquet(sweep(write(tmp_path, vary=GRID), tmp_path / "out", "--jobs", "1"))
    assert list(table["block_size"]) == [16, 16, 16, 32, 32, 32]
    assert list(table["max_num_seqs"]) == [4, 16, 64] * 2
    assert set(table["error"]) == {""}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in BASE.items() if name != "trace"]
    words += ["--trace", str(tmp_path / "trace.yaml"), "--block-size", "32", "--max-num-seqs", "16", "--no-bands"]
    assert main(["simulate", *words, "--out", str(tmp_path / "one")]) == 0
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    row = table.iloc[4]
    assert row["ttft_s.p99"] == summary["ttft_s"]["p99"]
    assert row["num_preemptions"] == summary["num_preemptions"]
    assert row["output_tokens_per_s"] == summary["output_tokens_per_s"]
    assert len(set(table["ttft_s.p99"])) > 2
    for name in ("responses.png", "pareto.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_the_table_does_not_depend_on_processes(tmp_path: Path) -> None:
    """One process and two give the same bytes, and a rerun computes nothing."""
    path = write(tmp_path, vary=GRID)
    one, two = sweep(path, tmp_path / "one", "--jobs", "1"), sweep(path, tmp_path / "two", "--jobs", "2")
    assert one.read_bytes() == two.read_bytes()
    points = sorted((tmp_path / "one" / "points").iterdir())
    stamps = [point.stat().st_mtime_ns for point in points]
    before = one.read_bytes()
    sweep(path, tmp_path / "one", "--jobs", "1")
    assert [point.stat().st_mtime_ns for point in points] == stamps
    assert one.read_bytes() == before


def test_a_changed_trace_is_computed_anew(tmp_path: Path) -> None:
    """What was computed for another content of the trace is not taken for this one's."""
    path = write(tmp_path, vary={"block_size": [16, 32]})
    first = sweep(path, tmp_path / "out", "--jobs", "1").read_bytes()
    (tmp_path / "trace.yaml").write_text(TRACE.replace("rate_per_s: 30", "rate_per_s: 3"))
    assert sweep(path, tmp_path / "out", "--jobs", "1").read_bytes() != first


def test_a_longer_random_search_begins_with_the_shorter_one(tmp_path: Path) -> None:
    """The i-th configuration depends on the seed and on i alone, and lies in its range."""
    vary = {"max_num_seqs": {"low": 2, "high": 100, "log": True}, "watermark": {"low": 0, "high": 0.5}}
    short = list(read_sweep(write(tmp_path, vary=vary, search="random", num=5)).points())
    long = list(read_sweep(write(tmp_path, vary=vary, search="random", num=300)).points())
    other = list(read_sweep(write(tmp_path, vary=vary, search="random", num=5, seed=1)).points())
    assert long[:5] == short != other
    assert {type(point["max_num_seqs"]) for point in long} == {int}
    assert all(2 <= point["max_num_seqs"] <= 100 and 0 <= point["watermark"] < 0.5 for point in long)
    below = sum(point["max_num_seqs"] < 14 for point in long)
    assert 0.35 < below / 300 < 0.65  # the middle of the logarithm


def test_a_configuration_that_cannot_be_is_a_row_with_its_reason(tmp_path: Path) -> None:
    """Others go on; where none can be, the command says the first reason."""
    import pandas as pd

    vary = {"max_num_batched_tokens": [64, 2048], "max_num_seqs": [8, 128]}
    table = pd.read_parquet(sweep(write(tmp_path, vary=vary), tmp_path / "out", "--jobs", "1"))
    assert [bool(error) for error in table["error"]] == [False, True, False, False]
    assert "--max-num-batched-tokens" in table["error"][1]
    assert table["ttft_s.p99"].isna().tolist() == [False, True, False, False]


def test_none_of_the_configurations_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then the command ends with the first reason."""
    path = write(tmp_path, vary={"max_num_batched_tokens": [16, 32]})
    assert main(["sweep", str(path), "--out", str(tmp_path / "out"), "--jobs", "1"]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("None of the 2 configurations")
    assert "--max-num-seqs" in message


def test_a_cluster_is_swept_by_the_same_file(tmp_path: Path) -> None:
    """`command: cluster` varies replicas and routers."""
    import pandas as pd

    path = write(tmp_path, command="cluster", vary={"replicas": [1, 2], "router": ["round-robin", "least-loaded"]})
    table = pd.read_parquet(sweep(path, tmp_path / "out", "--jobs", "1"))
    assert list(table["replicas"]) == ["1", "1", "2", "2"]
    assert table["ttft_s.p99"][2] < table["ttft_s.p99"][0]


def test_the_front_has_what_nothing_beats() -> None:
    """At least as good in each and better in one beats; equals are named once; what failed is not there."""
    values = [(1, 5), (2, 9), (2, 8), (3, 9), (0.5, 1), (1, 5), None]
    rows = [Row(point={}, metrics=None if pair is None else {"a": pair[0], "b": pair[1]}, error="") for pair in values]
    assert front_of(rows, [("a", True), ("b", False)]) == [4, 0, 1]
    assert front_of(rows, [("a", False)]) == [3]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"vary": {"blok_size": [16]}}, "unknown option blok_size; did you mean block_size"),
    ({"vary": {"temperature": [0.5]}}, "`kvtwin simulate` does not take"),
    ({"vary": {"block_size": ["many"]}}, "block_size in .* must be a whole number, but is 'many'"),
    ({"vary": {"block_size": [0]}}, "must be at least 1"),
    ({"vary": {"block_size": []}}, "is an empty list"),
    ({"vary": {"block_size": [16, 16]}}, "names a value twice"),
    ({"vary": {"block_size": 16}}, "must be a list of values or a range"),
    ({"vary": {}}, "varies nothing"),
    ({"vary": {"block_size": {"low": 16, "high": 8, "num": 2}}}, "low below its high"),
    ({"vary": {"block_size": {"low": 8, "high": 16}}}, "needs num"),
    ({"vary": {"watermark": {"low": 0, "high": 0.5, "num": 2, "log": True}}}, "low above 0"),
    ({"vary": {"router": ["round-robin"]}}, "does not take"),
    ({"vary": {"scheduling_policy": {"low": 1, "high": 2}}}, "is no number"),
    ({"vary": {"out": ["a"]}}, "vary has out|varies out"),
    ({"vary": {"block_size": [16]}, "search": "annealing"}, "must be one of grid, random, optuna"),
    ({"vary": {"block_size": [16]}, "search": "random"}, "needs num"),
    ({"vary": {"block_size": [16]}, "num": 3}, "a grid does not use"),
    ({"vary": {"block_size": [16]}, "objectives": {"ttft_s.p99": "least"}}, "must be min or max"),
    ({"vary": {"block_size": [16]}, "search": "optuna", "num": 3, "objectives": {}}, "needs objectives"),
    ({"vary": {"block_size": [16]}, "serach": "grid"}, "unknown key serach; did you mean search"),
    ({"vary": {"block_size": [16]}, "command": "run"}, "must be one of simulate, cluster"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_sweep_that_cannot_be_is_one_sentence(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    """It names the thing, and what is allowed."""
    with pytest.raises(UsageError, match=message) as error:
        read_sweep(write(tmp_path, **content))
    assert "\n" not in str(error.value)


def test_an_objective_that_no_run_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt metric is told with the nearest one."""
    path = write(tmp_path, vary={"block_size": [16]}, objectives={"ttft.p99": "min"})
    assert main(["sweep", str(path), "--out", str(tmp_path / "out"), "--jobs", "1"]) == 2
    assert "there is no metric ttft.p99; did you mean ttft_s.p99" in capsys.readouterr().err


def test_a_folder_with_something_else_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is the command run with no process, or with an address for this machine."""
    path = write(tmp_path / "in", vary={"block_size": [16]})
    for words, message in (
        (["--out", str(tmp_path)], "has something else in it"),
        (["--out", str(tmp_path / "out"), "--jobs", "0"], "--jobs must be at least 1"),
        (["--out", str(tmp_path / "out"), "--address", "a:1"], "add --backend ray"),
    ):
        assert main(["sweep", str(path), *words]) == 2
        assert message in capsys.readouterr().err


LARGE = {
    "block_size": [8, 16, 32, 64],
    "max_num_seqs": [4, 8, 16, 32, 64],
    "max_num_batched_tokens": [256, 512, 1024, 2048, 4096],
    "enable_prefix_caching": [True, False],
}
"""200 configurations."""


def begun(path: Path, out: Path, *words: str) -> subprocess.Popen[bytes]:
    """A sweep in a process of its own, whose standard error goes to a file: processes of a killed one hold a pipe."""
    command = [sys.executable, "-m", "experiments.cli", "sweep", str(path), "--out", str(out), *words]
    with (path.parent / "errors.txt").open("wb") as errors:
        return subprocess.Popen(command, cwd=ROOT, stderr=errors, stdout=subprocess.DEVNULL)


def wait_for_points(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        if sum(1 for _ in (out / "points").glob("*.json")) >= count:
            return
        time.sleep(0.05)
    raise AssertionError("the sweep gave no points")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(
    "vary",
    [
        pytest.param({"block_size": [8, 16, 32], "max_num_seqs": [2, 4, 8, 16, 32, 64]}, id="18"),
        pytest.param(LARGE, id="200", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_sweep_goes_on_and_gives_the_same_table(
    tmp_path: Path, how: signal.Signals, vary: dict[str, Any]
) -> None:
    """Ctrl-C and a killed process lose nothing that was computed; the rest comes with the next run."""
    path = write(tmp_path, vary=vary)
    out = tmp_path / "cut"
    process = begun(path, out, "--jobs", "2")
    wait_for_points(process, out, 4)
    process.send_signal(how)
    process.wait(timeout=120)
    known = {point.name: point.stat().st_mtime_ns for point in (out / "points").glob("*.json")}
    assert len(known) < len(read_sweep(path))
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "goes on from there" in (tmp_path / "errors.txt").read_text()
    assert not (out / "sweep.parquet").exists()
    cut = sweep(path, out, "--jobs", "2")
    assert all((out / "points" / name).stat().st_mtime_ns == stamp for name, stamp in known.items())
    assert cut.read_bytes() == sweep(path, tmp_path / "whole", "--jobs", "2").read_bytes()


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_table(tmp_path: Path) -> None:
    """200 configurations on a local Ray of two workers, interrupted and resumed there, and on two processes."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'kvtwin[ray]')")
    path = write(tmp_path, vary=LARGE)
    out = tmp_path / "ray"
    process = begun(path, out, "--backend", "ray", "--jobs", "2")
    wait_for_points(process, out, 10)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=120)
    assert 10 <= sum(1 for _ in (out / "points").glob("*.json")) < 200
    environment = {**os.environ}
    command = [sys.executable, "-m", "experiments.cli", "sweep", str(path), "--out", str(out)]
    subprocess.run([*command, "--backend", "ray", "--jobs", "2"], cwd=ROOT, env=environment, check=True, timeout=900)
    local = sweep(path, tmp_path / "local", "--jobs", "2")
    assert (out / "sweep.parquet").read_bytes() == local.read_bytes()


@pytest.mark.slow
def test_optuna_finds_what_a_grid_finds(tmp_path: Path) -> None:
    """With 24 trials in batches it comes within 5 % of the best of a fine grid, the same with one process and two."""
    pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'kvtwin[optuna]')")
    import pandas as pd

    objective = {"output_tokens_per_s": "max"}
    vary = {"max_num_seqs": {"low": 2, "high": 64, "log": True}}
    path = write(tmp_path / "o", vary=vary, search="optuna", num=24, objectives=objective)
    one, two = sweep(path, tmp_path / "one", "--jobs", "1"), sweep(path, tmp_path / "two", "--jobs", "2")
    assert one.read_bytes() == two.read_bytes()
    fine = {"max_num_seqs": {"low": 2, "high": 64, "num": 40, "log": True}}
    grid = pd.read_parquet(sweep(write(tmp_path / "g", vary=fine, objectives=objective), tmp_path / "grid"))
    best = pd.read_parquet(one)["output_tokens_per_s"].max()
    assert best >= 0.95 * grid["output_tokens_per_s"].max()
