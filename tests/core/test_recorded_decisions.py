"""Recorded decisions of vLLM's own schedulers, repeated by ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.decisions import replay_recorded


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("0.19.1", "vllm-0.19"),
        ("0.19.1.async", "vllm-0.19"),
        ("0.33.0", "vllm-0.33"),
        ("0.33.0.async", "vllm-0.33"),
    ],
)
def test_every_recorded_decision_is_repeated(shared_data: Path, name: str, preset: str) -> None:
    """All 200 workloads of each version, with one and two steps in flight, are the same step by step."""
    result = replay_recorded(shared_data / "vllm_decisions" / f"{name}.json.xz", preset)
    assert result["differences"] == []
    assert result["identical"] == result["workloads"] == 200


def test_the_other_version_is_told_apart(shared_data: Path) -> None:
    """The versions differ on some workloads, and the comparison sees it."""
    result = replay_recorded(shared_data / "vllm_decisions" / "0.33.0.json.xz", "vllm-0.19")
    assert 0 < len(result["differences"]) < 200
    first = result["differences"][0]
    assert set(first) == {"workload", "turn", "field", "recorded", "ours"}
    assert first["recorded"] != first["ours"]
