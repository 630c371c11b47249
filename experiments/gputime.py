"""How long a call takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

__all__ = ["time_ns"]


def time_ns(call: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Median ns of a call after two that are not counted; on a GPU by its own events, with its queue filled."""
    for _ in range(2):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        return 1e6 * float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)))
    times = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - began)
    return float(statistics.median(times))
