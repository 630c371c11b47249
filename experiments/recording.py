"""What a real run leaves behind for its decisions to be repeated: replay.parquet and tokens.parquet.

replay.parquet has one row a call of the scheduler, in order:

    now_ns                 when it was called
    step                   the number of the plan that it made; 0 where nothing could run
    end_ns                 when that step ended; -1 where there was none, or the run was cut off before
    added, aborted         requests taken in and given up before the call, in order
    rows, starts, tokens   the plan: request, tokens in the cache before, new tokens, in the order of scheduling
    taken                  ids of the blocks that were taken, in order
    hits                   tokens found in the prefix cache by each request that was admitted
    preempted, finished    requests
    usage                  slots by use after the call, in the order of engine.core.Usage

tokens.parquet has one row an accepted request, in the order in which they were added: request, row (of the trace),
arrival_ns, max_tokens, priority, tenant, prompt, output (what it generated, as far as it finished), outcome.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from experiments.results import write_table

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.exec.engine import Served

__all__ = ["write_recording"]

_PLAN = ("rows", "starts", "tokens", "taken", "hits", "preempted", "finished", "usage")


class _Player(Protocol):
    outputs: dict[int, list[int]]

    def prompt(self, row: int) -> list[int]: ...


def write_recording(folder: Path, served: Served, player: _Player) -> None:
    """Writes both files of a run that logged its decisions."""
    assert served.log is not None
    write_table(folder / "replay.parquet", _replay(served.log))
    write_table(folder / "tokens.parquet", _tokens(served.recorder.requests(), player))


def _replay(log: Any) -> pa.Table:
    import pyarrow as pa

    plans = {step["step"]: step for step in log.steps}
    ends = log.ends
    empty: dict[str, list[int]] = {}
    columns: dict[str, Any] = {
        "now_ns": pa.array([now for now, _, _, _ in log.turns], pa.int64()),
        "step": pa.array([seq for _, seq, _, _ in log.turns], pa.int64()),
        "end_ns": pa.array(
            [ends[s - 1] if s in plans and s <= len(ends) else -1 for _, s, _, _ in log.turns], pa.int64()
        ),
        "added": _lists([added for _, _, added, _ in log.turns]),
        "aborted": _lists([aborted for _, _, _, aborted in log.turns]),
    }
    for name in _PLAN:
        columns[name] = _lists([plans.get(seq, empty).get(name, []) for _, seq, _, _ in log.turns])
    return pa.table(columns)


def _tokens(requests: dict[str, Any], player: _Player) -> pa.Table:
    import pyarrow as pa

    accepted = np.flatnonzero(requests["request"] >= 0)
    rows = requests["row"][accepted].tolist()
    columns: dict[str, Any] = {
        name: pa.array(requests[name][accepted], pa.int64())
        for name in ("request", "row", "arrival_ns", "max_tokens", "priority", "tenant")
    }
    columns["prompt"] = _lists([player.prompt(row) for row in rows])
    columns["output"] = _lists([player.outputs.get(row, []) for row in rows])
    columns["outcome"] = pa.array([requests["outcome"][i] for i in accepted.tolist()], pa.string())
    return pa.table(columns)


def _lists(values: list[list[int]]) -> pa.Array:
    import pyarrow as pa

    return pa.array(values, pa.list_(pa.int64()))
