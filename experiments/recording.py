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
    moves                  block moves, flat (see DecisionLog); empty where nothing moves
    usage                  slots by use after the call, in the order of engine.core.Usage

tokens.parquet has one row a sequence, those that begin by forking included: request, row (of the trace), arrival_ns,
max_tokens, priority, tenant, n (sequences that it forks into; 0: it began by forking), beam (1 or 0), prompt, output
(what it generated, as far as it finished; of a beam, the hypothesis in its place), num_outputs (tokens it was given,
which for a beam are others), parents (of a beam, with its first sequence: for each step the sequences, from 0, that its
sequences continue, flat), outcome.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from experiments.results import write_table

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.exec.engine import Served
    from engine.exec.sampler import SamplingParams

__all__ = ["write_recording"]

_PLAN = ("rows", "starts", "tokens", "taken", "hits", "preempted", "moves", "finished", "usage")


class _Player(Protocol):
    outputs: dict[int, list[list[int]]]
    parents: dict[int, list[list[int]]]
    params: SamplingParams
    """Of every request, as far as the number of sequences goes."""

    def prompt(self, row: int) -> list[int]: ...


def write_recording(folder: Path, served: Served, player: _Player, forks: bool = True) -> None:
    """Writes both files of a run that logged its decisions; `forks`: whether sequences of a prompt began by forking."""
    assert served.log is not None
    write_table(folder / "replay.parquet", _replay(served.log))
    added = {request for _, _, requests, _ in served.log.turns for request in requests}
    write_table(folder / "tokens.parquet", _tokens(served.recorder.requests(), player, added, forks))


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


def _tokens(requests: dict[str, Any], player: _Player, added: set[int], forks: bool) -> pa.Table:
    import pyarrow as pa

    accepted = np.flatnonzero(requests["request"] >= 0)
    rows = requests["row"][accepted].tolist()
    ids = requests["request"][accepted].tolist()
    first: dict[int, int] = {}
    for request, row in zip(ids, rows, strict=True):
        first[row] = min(request, first.get(row, request))
    columns: dict[str, Any] = {
        name: pa.array(requests[name][accepted], pa.int64())
        for name in ("request", "row", "arrival_ns", "max_tokens", "priority", "tenant")
    }
    n = player.params.num_sequences if forks else 1
    beam = int(player.params.use_beam_search)
    columns["n"] = pa.array([n if request in added else 0 for request in ids], pa.int64())
    columns["beam"] = pa.array([beam] * len(ids), pa.int64())
    outputs = []
    for request, row in zip(ids, rows, strict=True):
        of_row = player.outputs.get(row, [])
        index = request - first[row]
        outputs.append(of_row[index] if index < len(of_row) else [])
    columns["prompt"] = _lists([player.prompt(row) for row in rows])
    columns["output"] = _lists(outputs)
    columns["num_outputs"] = pa.array(requests["output_tokens"][accepted], pa.int64())
    parents = [player.parents.get(row, []) if request in added else [] for request, row in zip(ids, rows, strict=True)]
    columns["parents"] = _lists([[index for step in steps for index in step] for steps in parents])
    columns["outcome"] = pa.array([requests["outcome"][i] for i in accepted.tolist()], pa.string())
    return pa.table(columns)


def _lists(values: list[list[int]]) -> pa.Array:
    import pyarrow as pa

    return pa.array(values, pa.list_(pa.int64()))
