"""`kvtwin profile`: batches of many shapes, timed through the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING


from sim.steptime import StepTime
from sim.sweep import Limits, SweepBatch, pick_trace_like

if TYPE_CHECKING:
    from engine.core.types import StepPlan

__all__ = ["trace_like"]

SATURATED_REQUESTS = 160


def trace_like(limits: Limits, estimate: StepTime, count: int = 160, seed: int = 0) -> list[SweepBatch]:
    """Batches as they come up in service: steps of a simulation near saturation, half decodes, half mixed."""
    import traces
    from engine.core.presets import SchedulerConfig
    from sim.simulate import simulate

    prompt, output = max(2, limits.max_context // 4), max(2, limits.max_context // 8)
    trace = traces.generate(
        {
            "kind": "synthetic",
            "num_requests": SATURATED_REQUESTS,
            "seed": seed,
            "arrival": {"process": "closed-loop", "concurrency": max(1, limits.max_rows)},
            "prompt_tokens": {"dist": "lognormal", "mean": prompt, "sigma": 0.6},
            "output_tokens": {"dist": "lognormal", "mean": output, "sigma": 0.6},
        }
    )
    options = SchedulerConfig(
        num_blocks=max(1, limits.pool_tokens // limits.block_size),
        max_model_len=limits.max_context,
        block_size=limits.block_size,
        max_num_seqs=min(limits.max_rows, limits.max_tokens),
        max_num_batched_tokens=limits.max_tokens,
    )
    steps: list[Sequence[tuple[int, int]]] = []

    def observe(plan: StepPlan) -> None:
        rows = [*plan.prefills, *plan.decodes.rows()]
        steps.append([(row.num_tokens, row.start) for row in rows])

    simulate(trace, options, estimate, fast_forward=False, observe=observe)
    # Every request starts at once in such a run; what follows after the first crowd is typical.
    typical = steps[len(steps) // 10 :]
    return pick_trace_like(typical, limits, count // 2, count // 2)
