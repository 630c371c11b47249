"""The six-term formula, fitted to a sweep of kernel tables: what a calibration would find on that machine."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from engine.core.presets import SchedulerConfig
from engine.core.types import StepPlan
from sim.calibration import Calibration, calibrate
from sim.simulate import simulate
from sim.sweep import Limits, SweepBatch, pick_trace_like, sweep
from sim.tabletime import TableTime
from traces import Trace

__all__ = ["MOST_CONTEXT", "fit_six_terms", "fit_sweep"]

MOST_CONTEXT = 8192
"""Longest context of the sweep, where the model and the pool allow as much."""


def fit_sweep(table: TableTime, batches: Sequence[SweepBatch], device: str = "kernel tables") -> Calibration:
    """The formula fitted to the times that the tables give the batches. Raises CalibrationError."""
    rows = []
    for batch in batches:
        shape = batch.shape()
        rows.append(
            {
                "kind": batch.kind,
                "n_tokens": shape.num_tokens,
                "n_rows": shape.rows,
                "n_decodes": shape.num_decodes,
                "decode_context_tokens": shape.context_tokens,
                "prefill_tokens": sum(q for q, _ in batch.rows if q > 1),
                "prefill_context_work": shape.prefill_work,
                "max_context": shape.max_context,
                "wall_ns_median": table.duration(shape),
            }
        )
    about = {"model": table.spec.name, "device": device, "graph_sizes": list(table.buckets)}
    return calibrate(pd.DataFrame(rows), about, stairs=False)


def fit_six_terms(table: TableTime, trace: Trace, config: SchedulerConfig) -> Calibration:
    """The formula for an engine with these options: a sweep of shapes, a simulation with what it gives, and 160 batches
    of that simulation more (see `sim.sweep`); at most 300 in all."""
    limits = Limits(
        max_rows=config.max_num_seqs,
        max_tokens=config.max_num_batched_tokens,
        max_context=min(MOST_CONTEXT, config.max_model_len),
        pool_tokens=config.num_blocks * config.block_size,
        block_size=config.block_size,
    )
    first = fit_sweep(table, sweep(limits))
    steps: list[list[tuple[int, int]]] = []

    def observe(plan: StepPlan) -> None:
        steps.append([(row.num_tokens, row.start) for row in (*plan.prefills, *plan.decodes.rows())])

    simulate(trace, config, first.step_time(), fast_forward=False, observe=observe)
    return fit_sweep(table, sweep(limits, trace_like=pick_trace_like(steps, limits)))
