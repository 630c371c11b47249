"""Recorded decisions of vLLM's own schedulers, repeated by ours."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from engine.core import preset
from experiments.decisions import FIELDS, first_difference, replay_recorded, replay_workload


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


CROWDED: dict[str, Any] = {
    "config": {
        "block_size": 4,
        "num_gpu_blocks": 9,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "enable_prefix_caching": True,
    },
    "requests": [
        {"id": 5, "step": 0, "prompt": [3, 4, 5, 6, 7, 3, 4, 5, 3], "out": 12},
        {"id": 6, "step": 1, "prompt": [3, 4, 5, 6, 7, 3, 4, 5, 4], "out": 12, "stop": 9},
        {"id": 7, "step": 2, "prompt": [3, 4, 5, 6, 5], "out": 9},
        {"id": 9, "step": 3, "prompt": [6] * 9, "out": 9, "abort": 9},
        {"id": 11, "step": 40, "prompt": [4] * 14, "out": 19},
    ],
}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_field_that_differs_is_named(steps_in_flight: int) -> None:
    """Whatever is changed in a record, the comparison names its turn and field; unchanged, it finds nothing."""
    ours = replay_workload(CROWDED, preset("vllm-0.33"), steps_in_flight, check=True)
    record = {"steps": ours.steps, "finished": ours.finished, "total": ours.total}
    assert first_difference(deepcopy(record), ours) is None
    assert {reason for _, _, reason, _ in ours.finished} == {"stop", "length", "abort"}
    for at, field in enumerate(FIELDS):
        eventful = [i for i, step in enumerate(ours.steps) if step[at]]
        assert eventful, f"nothing happens to {field}"
        changed = deepcopy(record)
        step = changed["steps"][eventful[-1]]
        step[at] = step[at][:-1] if isinstance(step[at], list) else step[at] + 1
        found = first_difference(changed, ours)
        assert found is not None
        assert found["field"] == field
    assert first_difference({**record, "total": ours.total + 1}, ours)["field"] == "total"  # type: ignore[index]
    assert first_difference({**record, "finished": ours.finished[:-1]}, ours)["field"] == "finished"  # type: ignore[index]
    assert first_difference({**record, "steps": ours.steps[:-1]}, ours)["field"] == "steps"  # type: ignore[index]


def test_records_of_fewer_fields_are_compared_by_those() -> None:
    """A record of the older layout has six fields of a step and no ends; what it lacks is not compared."""
    ours = replay_workload(CROWDED, preset("vllm-0.33"), 1)
    older = {"steps": [step[:6] for step in ours.steps if step[1]], "total": ours.total}
    assert first_difference(older, ours) is None
    older["steps"][-1][3] += 1
    assert first_difference(older, ours)["field"] == "free_blocks"  # type: ignore[index]
