"""A real run's decisions, decided again by the core from what the engine recorded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.cli import main
from experiments.replay import replay_differences
from experiments.results import read_table

TRACE = """
kind: synthetic
num_requests: 260
seed: 5
arrival: {process: poisson, rate_per_s: 400}
prompt_tokens: {dist: uniform, low: 8, high: 60}
output_tokens: {dist: uniform, low: 4, high: 60}
prefix: {num_prefixes: 3, tokens: 40, share: 0.8}
"""
MEMORY = ["--num-gpu-blocks-override", "60", "--max-num-seqs", "24", "--max-num-batched-tokens", "192"]


@pytest.fixture(scope="module", params=["one step in flight", "two steps in flight"])
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A real run of the tiny model under pressure: its folder, and the options of its trace and memory."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "trace.yaml").write_text(TRACE)
    options = ["--trace", str(folder / "trace.yaml"), "--model", "tiny", *MEMORY]
    if request.param == "two steps in flight":
        options.append("--async-scheduling")
    assert main(["run", "--device", "cpu", *options, "--out", str(folder / "real")]) == 0
    return folder, options


def simulate(run_dir: tuple[Path, list[str]], name: str, *more: str) -> Path:
    folder, options = run_dir
    out = folder / name
    assert main(["simulate", *options, "--hardware", "a100-80g", *more, "--out", str(out)]) == 0
    return out


def test_the_core_repeats_every_decision_of_a_real_run(run_dir: tuple[Path, list[str]]) -> None:
    """With 50 preemptions and 200 prefix hits or more, order, tokens, blocks, hits and usage are equal at each step."""
    folder, _ = run_dir
    summary = json.loads((folder / "real" / "summary.json").read_text())
    hits = np.concatenate([np.asarray(h) for h in read_table(folder / "real" / "replay.parquet")["hits"]])
    assert summary["num_preemptions"] >= 50
    assert np.count_nonzero(hits) >= 200
    simulated = simulate(run_dir, "same")
    assert replay_differences(folder / "real", simulated) == []
    assert (
        main(["compare", str(folder / "real"), str(simulated), "--decisions", "--out", str(folder / "compared")]) == 0
    )
    assert json.loads((folder / "compared" / "compare.json").read_text())["decision_differences"] == 0


def test_an_altered_policy_is_seen(run_dir: tuple[Path, list[str]]) -> None:
    """Another victim, another free order and another step budget each show up as differences, from their first step."""
    folder, _ = run_dir
    (folder / "first.py").write_text(
        "from engine.core import Victim\n\n\nclass FirstOfThem(Victim):\n"
        "    def choose(self, candidates):\n        return candidates[0].id\n"
    )
    altered = {
        "victim": ["--policy", f"{folder / 'first.py'}:FirstOfThem"],
        "order": ["--free-order", "single-queue"],
        "budget": ["--long-prefill-token-threshold", "30"],
    }
    for name, options in altered.items():
        found = replay_differences(folder / "real", simulate(run_dir, name, *options))
        assert found, name
        assert found[0].real != found[0].ours
    with_budget = replay_differences(folder / "real", folder / "budget")
    assert with_budget[0].field in ("rows", "tokens")
