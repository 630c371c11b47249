"""Replays recorded decisions of a real scheduler through ours, step by step."""

from __future__ import annotations

import json
import lzma
from collections import deque
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.core import RequestSpec, Scheduler, SchedulerConfig, StepOutcome, StepPlan, TokenIdentity, preset
from experiments.errors import UsageError

__all__ = ["load_recorded", "replay_recorded", "replay_workload"]

_FIELDS = ("turn", "scheduled", "preempted", "free_blocks", "waiting", "running")


def load_recorded(path: str | Path) -> dict[str, Any]:
    """Read a file of recorded decisions (JSON, also .xz).

    Raises:
        UsageError: there is no such file, or it is not of this layout.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        recorded = json.loads(raw)
    except (ValueError, lzma.LZMAError) as error:
        raise UsageError(f"{path} is not a file of recorded decisions: {error}") from error
    missing = {"workloads", "steps_in_flight"} - set(recorded if isinstance(recorded, dict) else ())
    if missing:
        raise UsageError(f"{path} is not a file of recorded decisions: it has no {', '.join(sorted(missing))}")
    if recorded["steps_in_flight"] not in (1, 2):
        raise UsageError(f"{path}: steps_in_flight is {recorded['steps_in_flight']!r}; it must be 1 or 2")
    for i, workload in enumerate(recorded["workloads"]):
        lacking = {"config", "requests", "steps", "total"} - set(workload if isinstance(workload, dict) else ())
        if lacking:
            raise UsageError(f"{path}: workload {i} has no {', '.join(sorted(lacking))}")
    return dict(recorded)


def output_token(request: int, k: int) -> int:
    """Output token k of a recorded request; the recorder's fixed formula."""
    return 3 + (request * 7919 + k * 104729) % 5


def replay_workload(
    workload: dict[str, Any], options: dict[str, Any], steps_in_flight: int, check: bool = False
) -> tuple[list[list[Any]], int]:
    """Our decisions on a recorded workload: its `steps` and `total`, in the recorded layout."""
    config = workload["config"]
    chosen = dict(options)
    known = {f.name for f in fields(SchedulerConfig)}
    chosen.update({k: v for k, v in config.items() if k in known})
    chosen["num_blocks"] = config["num_gpu_blocks"] - 1  # vLLM's null block
    chosen["steps_in_flight"] = steps_in_flight
    scheduler = Scheduler(SchedulerConfig(**chosen))
    waiting = deque(workload["requests"])
    names: list[int] = []
    outputs: dict[int, int] = {}
    flight: deque[tuple[StepPlan, list[int]]] = deque()
    steps: list[list[Any]] = []
    turn = 0
    while waiting or scheduler.has_unfinished:
        while waiting and waiting[0]["step"] <= turn:
            request = waiting.popleft()
            identity = TokenIdentity(request["prompt"], config["block_size"])
            spec = RequestSpec(turn, len(request["prompt"]), request["out"], identity)
            scheduler.add(spec, turn)
            names.append(request["id"])
            outputs[len(names) - 1] = 0
        plan = scheduler.schedule(turn)
        if plan.runs:
            rows = scheduler.scheduled_order(plan)
            steps.append(
                [
                    turn,
                    [[names[row.request], row.num_tokens] for row in rows],
                    sorted(names[id] for id in plan.preempted),
                    scheduler.manager.pool.num_free,
                    scheduler.num_waiting,
                    scheduler.num_running,
                ]
            )
            flight.append((plan, [row.request for row in rows if row.samples]))
        while flight and (len(flight) >= steps_in_flight or not plan.runs):
            oldest, samples = flight.popleft()
            tokens = {}
            for id in samples:
                tokens[id] = output_token(names[id], outputs[id])
                outputs[id] += 1
            scheduler.complete(oldest, StepOutcome(turn, tokens))
            if plan.runs:
                break
        if check:
            scheduler.check()
        turn += 1
        if turn > 100_000:
            break
    return steps, turn


def replay_recorded(path: str | Path, preset_name: str, check: bool = False) -> dict[str, Any]:
    """Replay all workloads of a file: `{"workloads", "identical", "differences"}`.

    A difference names the workload, the turn, the first field that differs there, and both values.
    """
    recorded = load_recorded(path)
    options = preset(preset_name)
    differences: list[dict[str, Any]] = []
    identical = 0
    for number, workload in enumerate(recorded["workloads"]):
        try:
            steps, total = replay_workload(workload, options, recorded["steps_in_flight"], check)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise UsageError(
                f"{path}: workload {number} is not of the layout of recorded decisions: {error}"
            ) from error
        found = _first_difference(workload["steps"], steps)
        if found is None and total != workload["total"]:
            found = {"turn": total, "field": "total", "recorded": workload["total"], "ours": total}
        if found is None:
            identical += 1
        else:
            differences.append({"workload": number, **found})
    return {"workloads": len(recorded["workloads"]), "identical": identical, "differences": differences}


def _first_difference(recorded: list[list[Any]], ours: list[list[Any]]) -> dict[str, Any] | None:
    for theirs, mine in zip(recorded, ours, strict=False):
        for field, a, b in zip(_FIELDS, theirs, mine, strict=True):
            if a != b:
                return {"turn": theirs[0], "field": field, "recorded": a, "ours": b}
    if len(recorded) != len(ours):
        return {"turn": None, "field": "steps", "recorded": len(recorded), "ours": len(ours)}
    return None
