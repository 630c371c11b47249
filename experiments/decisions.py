"""Replays workloads with the decisions of a real scheduler through ours, step by step."""

from __future__ import annotations

import json
import lzma
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from engine.core import (
    Finish,
    PlanItem,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    StepOutcome,
    StepPlan,
    TokenIdentity,
    preset,
)
from engine.core.types import BlockId
from experiments.errors import UsageError

__all__ = [
    "END_TOKEN",
    "FIELDS",
    "Decisions",
    "first_difference",
    "load_recorded",
    "replay_recorded",
    "replay_workload",
]

FIELDS = ("turn", "scheduled", "preempted", "free_blocks", "waiting", "running", "hits", "taken", "evicted")
"""Of a step. Recorded files have the first six. Blocks are numbered from 0, without vLLM's null block."""
END_TOKEN = 2
_MOST_TURNS = 100_000


class Decisions(NamedTuple):
    """What a scheduler decided on a workload, turn by turn."""

    steps: list[list[Any]]
    """`FIELDS` of every turn that scheduled or preempted anything."""
    finished: list[list[Any]]
    """[turn, request, reason, outputs], in order; several of one turn by number."""
    total: int
    """Turns until nothing was left."""


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


def output_token(request: Mapping[str, Any], k: int) -> int:
    """Output token k of a recorded request: the recorder's fixed formula, or the end token where it stops."""
    return END_TOKEN if k + 1 == request.get("stop") else 3 + (int(request["id"]) * 7919 + k * 104729) % 5


def replay_workload(
    workload: Mapping[str, Any], options: Mapping[str, Any], steps_in_flight: int, check: bool = False
) -> Decisions:
    """Our decisions on a recorded workload, by vLLM's loop for one or two steps in flight.

    A request is `{"id", "step", "prompt", "out"}`: the turn at which it comes, its prompt's tokens, max_tokens; and
    perhaps `stop` (the output at which it meets its end token) and `abort` (the turn at which its sender leaves).
    """
    config = workload["config"]
    known = {f.name for f in fields(SchedulerConfig)}
    chosen = {**options, **{k: v for k, v in config.items() if k in known}}
    chosen["num_blocks"] = config["num_gpu_blocks"] - 1  # vLLM's null block
    chosen["steps_in_flight"] = steps_in_flight
    scheduler = Scheduler(SchedulerConfig(**chosen))
    requests: list[dict[str, Any]] = []
    """By our number."""
    numbers: dict[int, int] = {}
    num_outputs: dict[int, int] = {}
    """Of unfinished requests, by our number."""
    pending = deque(workload["requests"])
    aborts = [request for request in pending if "abort" in request]
    flight: deque[tuple[StepPlan, list[int]]] = deque()
    steps: list[list[Any]] = []
    finished: list[list[Any]] = []
    turn = 0
    while (pending or scheduler.has_unfinished) and turn < _MOST_TURNS:
        while pending and pending[0]["step"] <= turn:
            request = pending.popleft()
            identity = TokenIdentity(request["prompt"], config["block_size"])
            id = scheduler.add(RequestSpec(turn, len(request["prompt"]), request["out"], identity), turn)
            numbers[request["id"]] = id
            requests.append(request)
            num_outputs[id] = 0
        for request in aborts:
            if request["abort"] == turn and numbers.get(request["id"]) in num_outputs:
                id = numbers[request["id"]]
                scheduler.abort(id)
                finished.append([turn, request["id"], "abort", num_outputs.pop(id)])
        taken: list[BlockId] = []
        evicted: list[BlockId] = []
        scheduler.manager.taken, scheduler.manager.evicted = taken, evicted
        plan = scheduler.schedule(turn)
        rows = scheduler.scheduled_order(plan) if plan.num_rows else []
        if rows or plan.preempted:
            admitted = set(plan.admitted)
            steps.append(
                [
                    turn,
                    [[requests[row.request]["id"], row.num_tokens] for row in rows],
                    sorted(requests[id]["id"] for id in plan.preempted),
                    scheduler.manager.pool.num_free,
                    scheduler.num_waiting,
                    scheduler.num_running,
                    [_hit(scheduler, row, requests) for row in rows if row.request in admitted],
                    taken,
                    evicted,
                ]
            )
        if rows:
            flight.append((plan, [row.request for row in rows if row.samples]))
        while flight and (len(flight) >= steps_in_flight or not rows):
            oldest, samples = flight.popleft()
            tokens = {}
            stops = []
            for id in samples:
                if id in num_outputs:
                    tokens[id] = output_token(requests[id], num_outputs[id])
                    num_outputs[id] += 1
                    if tokens[id] == END_TOKEN:
                        stops.append(Finish(id, "stop"))
            events = scheduler.complete(oldest, StepOutcome(turn, tokens, tuple(stops)))
            ends = [[turn, requests[end.request]["id"], end.reason, end.num_output_tokens] for end in events.finished]
            finished += sorted(ends)
            for end in events.finished:
                del num_outputs[end.request]
            if rows:
                break
        if check:
            scheduler.check()
        turn += 1
    return Decisions(steps, finished, turn)


def _hit(scheduler: Scheduler, row: PlanItem, requests: list[dict[str, Any]]) -> list[Any]:
    """[request, cached tokens that it starts with, the blocks that hold them]."""
    num_blocks = row.start // scheduler.config.block_size
    return [requests[row.request]["id"], row.start, list(scheduler.table(row.request)[:num_blocks])]


def first_difference(recorded: Mapping[str, Any], ours: Decisions) -> dict[str, Any] | None:
    """The turn and the first field there that differ, with both values; None: the same decisions throughout.

    What `recorded` leaves out (files of an older layout have fewer fields in a step, no steps without rows, and no
    `finished`) is not compared.
    """
    theirs = recorded["steps"]
    width = min((len(step) for step in theirs), default=0)
    steps = ours.steps if width == len(FIELDS) else [step for step in ours.steps if step[1]]
    for a, b in zip(theirs, steps, strict=False):
        for field, x, y in zip(FIELDS, a, b, strict=False):
            if x != y:
                return {"turn": a[0], "field": field, "recorded": x, "ours": y}
    if len(theirs) != len(steps):
        return {"turn": None, "field": "steps", "recorded": len(theirs), "ours": len(steps)}
    for a, b in zip_longest(recorded.get("finished", ours.finished), ours.finished):
        if a != b:
            return {"turn": (a or b)[0], "field": "finished", "recorded": a, "ours": b}
    if recorded["total"] != ours.total:
        return {"turn": ours.total, "field": "total", "recorded": recorded["total"], "ours": ours.total}
    return None


def replay_recorded(path: str | Path, preset_name: str, check: bool = False) -> dict[str, Any]:
    """Replay all workloads of a file: `{"workloads", "identical", "differences"}`.

    A difference names the workload, the turn, the first field that differs there, and both values.
    """
    recorded = load_recorded(path)
    options = preset(preset_name)
    differences: list[dict[str, Any]] = []
    for number, workload in enumerate(recorded["workloads"]):
        try:
            found = first_difference(workload, replay_workload(workload, options, recorded["steps_in_flight"], check))
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise UsageError(
                f"{path}: workload {number} is not of the layout of recorded decisions: {error}"
            ) from error
        if found is not None:
            differences.append({"workload": number, **found})
    num = len(recorded["workloads"])
    return {"workloads": num, "identical": num - len(differences), "differences": differences}
