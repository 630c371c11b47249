"""When the device computes: of the time that steps take, what is left without the host's part and block moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.moves import MoveTime
from sim.steptime import StepModel

__all__ = ["busy_columns", "idle_ns"]


def idle_ns(table: dict[str, Any], step_time: StepModel, moves: MoveTime, steps_in_flight: int) -> np.ndarray:
    """ns of each step of a row in which its device does not compute: int64[rows].

    With one step in flight the host's part of a step comes before or after the device's (see steptime.py). Swaps and
    copies of a step come before it computes. The same for all steps of a run, which moves nothing and admits nobody.
    """
    out = np.asarray(table["swap_out_blocks"]), moves.store_ns
    back = np.asarray(table["swap_in_blocks"]), moves.load_ns
    local = np.asarray(table["copied_blocks"]), moves.local_ns
    idle = np.zeros(len(table["step"]), dtype=np.int64)
    for blocks, time in (out, back, local):
        for row in np.flatnonzero(blocks).tolist():
            idle[row] += time(int(blocks[row]))
    if steps_in_flight > 1:
        return idle
    rows = table["num_decodes"] + table["num_prefills"]
    step, each, new = (float(getattr(step_time, name, 0.0)) for name in ("cpu_step", "cpu_row", "cpu_new"))
    host = np.where(rows > 0, step + each * rows + new * table["admitted"] + 0.5, 0.0)
    total: np.ndarray = idle + host.astype(np.int64)
    return total


def busy_columns(
    table: dict[str, Any], step_time: StepModel, moves: MoveTime, steps_in_flight: int
) -> dict[str, np.ndarray]:
    """`gpu_busy_ns` of each row of the steps table, a run's in all: int64[rows].

    A step has the device from the end of the step before, or from its own decision if that is later, to its own end,
    less `idle_ns`. Where two steps are in flight and the host is the slower of the two, the device counts as busy
    although it waits for the host now and then.
    """
    ends = np.asarray(table["end_ns"])
    starts = np.maximum(np.asarray(table["start_ns"]), np.concatenate([[0], ends[:-1]])) if len(ends) else ends
    idle = idle_ns(table, step_time, moves, steps_in_flight) * table["num_steps"]
    computes = table["num_decodes"] + table["num_prefills"] > 0
    return {"gpu_busy_ns": np.where(computes, np.maximum(ends - starts - idle, 0), 0)}
