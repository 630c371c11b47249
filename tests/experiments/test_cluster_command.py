"""`kvtwin cluster`: several replicas behind a gateway, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import results
from experiments.cli import main
from experiments.errors import ResultsError

WORKLOAD = """
kind: synthetic
num_requests: 60
seed: 3
arrival: {process: poisson, rate_per_s: 20}
prompt_tokens: {dist: uniform, low: 50, high: 400}
output_tokens: {dist: uniform, low: 4, high: 60}
prefix: {num_prefixes: 3, tokens: {dist: fixed, value: 128}, share: 0.8}
"""


@pytest.fixture
def load(tmp_path: Path) -> Path:
    path = tmp_path / "w.yaml"
    path.write_text(WORKLOAD)
    return path


def command(load: Path, out: Path, *more: str) -> int:
    """Runs the command on a small model."""
    base = ["cluster", "--trace", str(load), "--model", "llama-3.1-8b", "--hardware", "h100"]
    return main([*base, "--num-gpu-blocks-override", "400", "--max-model-len", "4096", *more, "--out", str(out)])


def test_a_cluster_is_written_as_its_requests_its_attempts_and_its_replicas(load: Path, tmp_path: Path) -> None:
    """Each replica's folder is that of a simulation; the same command writes the same bytes."""
    options = ["--replicas", "2", "--router", "prefix", "--crash", "1@1.5", "--restart-s", "0.5", "--retries", "2"]
    out, again = tmp_path / "out", tmp_path / "again"
    assert command(load, out, *options) == command(load, again, *options) == 0
    requests, attempts = results.read_table(out / "requests.parquet"), results.read_table(out / "attempts.parquet")
    summary = json.loads((out / "summary.json").read_text())
    assert len(requests["row"]) == summary["num_requests"] == 60
    assert set(requests["replica"]) == {0, 1}
    assert summary["num_retries"] == int(requests["retries"].sum()) == len(attempts["row"]) - 60 > 0
    assert summary["num_finished"] == 60
    assert summary["num_crashes"] == 1
    lives = [results.read_results(out / "replicas" / name, "simulated") for name in ("0", "1", "1.1")]
    assert sum(len(life.tables.requests["row"]) for life in lives) == int((attempts["life"] >= 0).sum())
    assert sum(life.summary["num_steps"] for life in lives) > 0
    for name in ("requests.parquet", "attempts.parquet", "summary.json", "replicas/1/steps.parquet"):
        assert (out / name).read_bytes() == (again / name).read_bytes(), name
    with pytest.raises(ResultsError, match="holds a cluster's results; name one of its replicas"):
        results.read_results(out)


def test_replicas_that_differ_are_listed_in_a_file(load: Path, tmp_path: Path) -> None:
    """A group has its own hardware and options; what a former run left of more replicas goes away."""
    out = tmp_path / "out"
    assert command(load, out, "--replicas", "4") == 0
    assert (out / "replicas" / "3").is_dir()
    file = tmp_path / "replicas.yaml"
    file.write_text("replicas:\n  - {count: 1, weight: 2}\n  - {count: 2, hardware: l4, max-num-seqs: 8}\n")
    assert command(load, out, "--replicas", str(file), "--router", "least-loaded") == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert [replica["name"] for replica in manifest["replicas"]] == ["h100", "l4", "l4"]
    assert sorted(path.name for path in (out / "replicas").iterdir()) == ["0", "1", "2"]
    slow = results.read_results(out / "replicas" / "1")
    assert slow.manifest["configuration"]["hardware"] == "l4"
    assert int(np.max(slow.tables.steps["num_running"])) <= 8
    fast = results.read_results(out / "replicas" / "0")
    assert len(fast.tables.requests["row"]) > len(slow.tables.requests["row"])


def test_prompts_and_outputs_in_different_places(load: Path, tmp_path: Path) -> None:
    """2p1d: prompts on the first two replicas, outputs on the third; a slow link delays the first token."""
    found = {}
    for speed in ("25", "0.2"):
        out = tmp_path / speed
        assert command(load, out, "--replicas", "2p1d", "--kv-link-gb-s", speed) == 0
        attempts, requests = (results.read_table(out / f"{name}.parquet") for name in ("attempts", "requests"))
        assert set(attempts["replica"][attempts["leg"] == 1]) == {0, 1}
        assert set(requests["replica"]) == set(attempts["replica"][attempts["leg"] == 2]) == {2}
        summary = json.loads((out / "summary.json").read_text())
        assert summary["num_finished"] == 60
        assert summary["wasted_tokens"] == 0
        found[speed] = summary["ttft_s"]["mean"]
    assert found["0.2"] > found["25"] + 0.05


def test_a_restart_takes_as_long_as_loading_the_weights(load: Path, tmp_path: Path) -> None:
    """16.06 GB of an 8B model at 2 GB/s, and 10 s beside it."""
    out = tmp_path / "out"
    assert command(load, out, "--crash", "0@1", "--load-gb-s", "2", "--start-s", "10", "--retries", "9") == 0
    lives = json.loads((out / "summary.json").read_text())["replicas"]
    assert lives[1]["started_s"] - lives[0]["ended_s"] == pytest.approx(10 + 16.06 / 2, abs=0.01)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--replicas", "0"], "--replicas must be 1 to 10,000"),
        (["--replicas", "none.yaml"], "neither a whole number nor 2p3d nor a file"),
        (["--replicas", "2p0d"], "takes one or more of each kind"),
        (["--router", "least-load"], "no router 'least-load'; did you mean least-loaded?"),
        (["--router", "nowhere.py:Mine"], "no file nowhere.py"),
        (["--crash", "first@3"], "--crash takes REPLICA@S, such as 0@120"),
        (["--replicas", "2", "--crash", "2@3"], "names replica 2; there are 0 to 1"),
        (["--restart-s", "300..120"], "--restart-s is '300..120'; it takes seconds"),
        (["--kv-link-gb-s", "50"], "--kv-link-gb-s is used by nothing: no replica receives prompts"),
        (["--max-outstanding", "0"], "--max-outstanding must be at least 1"),
        (["--record-blocks"], "`kvtwin cluster` does not take --record-blocks"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    """Exit code 2, one line that names the thing, no traceback."""
    assert command(load, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error
    assert "\n" not in error


def test_a_file_of_replicas_that_cannot_be_is_named(
    load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its unknown keys, counts and shapes."""
    file = tmp_path / "replicas.yaml"
    for content, sentence in (
        ("replicas:\n  - {count: 1, hardwear: l4}\n", "unknown key hardwear; did you mean hardware?"),
        ("replicas:\n  - {count: 0}\n", "count in group 1"),
        ("replicas:\n  - {role: prefill}\n", "must have the role decode"),
        ("replicas:\n  - {role: router}\n", "role in group 1"),
        ("replicas: 3\n", "a list of groups"),
        ("nodes: []\n", "unknown key nodes"),
    ):
        file.write_text(content)
        assert command(load, tmp_path / "out", "--replicas", str(file)) == 2
        assert sentence in capsys.readouterr().err


def test_a_router_of_ones_own_that_names_no_replica_ends_the_run(
    load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence that names the router and what it was offered."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from sim.routers import Router\n\n\nclass Wrong(Router):\n    def choose(self, request, replicas, now):\n"
        "        return 5\n"
    )
    assert command(load, tmp_path / "out", "--replicas", "2", "--router", f"{file}:Wrong") == 2
    assert "Router Wrong chose 5 for request 0, which is none of the replicas" in capsys.readouterr().err
