"""The experiment on memory: its sweeps and cases, a served incident, and verdicts that follow from figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.config import Config
from experiments.experiment import Context
from experiments.incidents import spike
from experiments.memoryclaims import _all_of_it, _hour_four, _legal, _reserves
from experiments.terminal import Terminal
from experiments.utilization import REAL, _real, cases, sweep


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("utilization", Config(), Terminal(quiet_stdout=True), tmp_path, tmp_path)


def test_sweeps_move_as_they_must() -> None:
    """More utilization, fewer tokens a step, fewer sequences and smaller weights each give more KV."""
    grid = sweep()
    for version in ("0.6.4", "0.19.1", "0.33.0"):
        blocks = [row["kv_blocks"] for row in grid["utilization"] if row["version"] == version]
        assert blocks == sorted(blocks)
        assert [r for r in grid["utilization"] if r["version"] == version][-1]["verdict"] != "starts"
    tokens = [row["kv_blocks"] for row in grid["max_num_batched_tokens"]]
    assert tokens == sorted(tokens, reverse=True)
    small = [row["kv_blocks"] for row in grid["quantization"]]
    assert small == sorted(small)


def test_cases_are_met() -> None:
    """CPU blocks and bytes a token are exact, 229 blocks are 3,664 tokens, and 48 regions are 60.0 GiB."""
    ours = {(case["case"], case["what"]): case["ours"] for case in cases()}
    seen = {(case["case"], case["what"]): case["seen"] for case in cases()}
    for key in ours:
        if key[0] != "C36":
            assert ours[key] == seen[key]
    regions = next(value for key, value in ours.items() if key[0] == "C36")
    assert regions.startswith("60.0 GiB; 47.1 of 39.4")


def test_an_incident_is_served(context: Context) -> None:
    """A chunk's score matrix kills the engine at 0.90 and not at 0.80; a fused attention serves all 40 requests."""
    calm = spike(context, "cut prompts, fused", 28000)
    assert (calm["crashed"], calm["served"]) == (False, 40)
    died = spike(context, "cut prompts, score matrix", 28000)
    assert died["crashed"]
    assert died["need_gib"] > died["room_gib"]
    assert died["lost"] + died["served"] == 40
    assert not spike(context, "cut prompts, score matrix", 28000, 0.8)["crashed"]


def test_verdicts_follow_from_figures() -> None:
    """Other figures give other verdicts."""
    real = [_real(*case) for case in REAL]
    assert _reserves(real).status == "reproduced"
    assert _reserves([{**case, "error": 0.2} for case in real if case["error"]]).status == "open"
    rows = [{"version": "1", "utilization": 1.0, "verdict": verdict} for verdict in ("refused", "starts")]
    assert _all_of_it(rows[:1]).status == "reproduced"
    assert _all_of_it(rows[1:]).status == "does-not-follow"
    served = {"engine": "cut prompts, fused", "longest": 28000, "kv_blocks": 100, "crashed": False}
    assert _legal([{**served, "utilization": share} for share in (0.9, 0.8)]).status == "does-not-follow"
    hours = {
        "room_gib": 8.0,
        "largest_step_gib": 0.5,
        "growth_gib_per_hour": 1.9,
        "score_matrix_gib": 2.0,
        "logprobs_gib": 1.0,
        "calm": {"crashed": True, "served": 10},
        "growing": {"crashed": True, "at_h": 4.0},
    }
    assert _hour_four(hours).status == "does-not-follow"
    assert _hour_four({**hours, "calm": {"crashed": False, "served": 10}}).status == "reproduced-only-if"
