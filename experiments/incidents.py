"""Engines that run out of memory: long prompts among short ones, and memory that is lost over hours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.hardware import device
from sim.memory import MemoryRequest, plan
from sim.models import preset
from sim.steptime import roofline

if TYPE_CHECKING:
    from experiments.experiment import Context
    from sim.memory import Plan
    from sim.oom import Transients

__all__ = ["ENGINES", "LENGTHS", "hours", "spike"]

_GIB = 1 << 30
LENGTHS = (2000, 8000, 16000, 28000)
"""Tokens of the one long prompt."""
MISTRAL = preset("mistral-7b")
A100 = device("a100-80g")
SHORT = 2000
ENGINES: dict[str, dict[str, Any]] = {
    "whole prompts, fused": {"version": "0.6.4", "chunked": False},
    "cut prompts, fused": {"version": "0.19.1"},
    "whole prompts, log-probabilities": {"version": "0.6.4", "chunked": False, "logprobs": 1.0},
    "cut prompts, log-probabilities": {"version": "0.19.1", "logprobs": 1.0},
    "whole prompts, score matrix": {"version": "0.6.4", "chunked": False, "attention": "eager"},
    "cut prompts, score matrix": {"version": "0.19.1", "attention": "eager"},
    "cut prompts, score matrix, profiled": {"version": "0.19.1", "attention": "eager", "profiled": True},
}
"""What serves the incident of Mistral-7B on an A100: a release of each kind, its attention, and what is asked of it."""


def spike(context: Context, name: str, longest: int, utilization: float = 0.9) -> dict[str, Any]:
    """40 prompts of 2,000 tokens, two a second, and one of `longest` among them; the engine of that name."""
    from sim.oom import MemoryGuard, Transients
    from traces import make_trace

    how = ENGINES[name]
    request = MemoryRequest(
        MISTRAL,
        A100,
        how["version"],
        utilization=utilization,
        max_model_len=32768,
        max_num_seqs=256,
        chunked=how.get("chunked"),
    )
    attention, share = how.get("attention", "flash"), how.get("logprobs", 0.0)
    made = plan(request)
    if how.get("profiled"):
        made = plan(replace(request, extra_peak=Transients(made, attention, share).unprofiled()))
    if made.refusal:
        return {"engine": name, "utilization": utilization, "longest": longest, "refused": made.refusal}
    prompts = np.full(40, SHORT)
    prompts[20] = longest
    trace = make_trace(np.arange(40) * 500_000_000, prompts, np.full(40, 100), name="spike")
    guard = MemoryGuard(Transients(made, attention, share))
    found, _ = context.simulate(
        f"spike-{name}-{longest}-{utilization}", trace, _options(made), roofline(MISTRAL, A100), guard=guard
    )
    event = guard.events[0] if guard.events else None
    outcomes = found.requests()["outcome"]
    need, what = _most(guard.transients, longest)
    return {
        "engine": name,
        "utilization": utilization,
        "longest": longest,
        "refused": "",
        "kv_blocks": made.num_blocks,
        "room_gib": guard.room / _GIB,
        "need_gib": need / _GIB,
        "what": what,
        "crashed": guard.crashed,
        "at_s": event.time_ns / 1e9 if event else None,
        "lost": sum(outcome == "unfinished" for outcome in outcomes) + 40 - len(outcomes) if event else 0,
        "running_then": event.requests if event else 0,
        "served": sum(outcome in ("length", "stop") for outcome in outcomes),
    }


def _most(transients: Transients, longest: int) -> tuple[int, str]:
    """The most that a chunk of the long prompt needs, served alone."""
    from engine.core.types import PlanItem

    size = transients.plan.max_num_batched_tokens
    starts = range(0, longest, size)
    return max(transients.need([PlanItem(0, 0, at, min(size, longest - at), True)], 0, 0) for at in starts)


def _options(made: Plan) -> Any:
    from engine.core.presets import SchedulerConfig
    from engine.core.presets import preset as scheduler_preset

    options: dict[str, Any] = dict(scheduler_preset("vllm-v0" if made.rules.engine == "V0" else "vllm-0.19"))
    options |= {"max_num_batched_tokens": made.max_num_batched_tokens, "max_num_seqs": made.max_num_seqs}
    options |= {"enable_prefix_caching": False, "preemption_mode": "recompute"}
    return SchedulerConfig(num_blocks=made.usable_blocks, max_model_len=made.max_model_len, **options)


def hours(context: Context) -> dict[str, Any]:
    """Llama-2-70B on four A100-80G for four hours and a quarter: calm, and with memory lost at the rate that ends "
    "it."""
    from sim.oom import MemoryGuard, Transients
    from traces import make_trace

    spec = preset("llama-2-70b")
    made = plan(MemoryRequest(spec, A100, "0.4.0", tp=4, utilization=0.9))
    step_time = roofline(spec, A100, 4)
    rng = np.random.default_rng(context.seed)
    num = int(4.25 * 3600 / 12)
    arrivals = np.cumsum(rng.exponential(12.0, num) * 1e9).astype(np.int64)
    prompts, outputs = rng.integers(200, 3500, num), rng.integers(40, 160, num)
    trace = make_trace(arrivals, prompts, outputs, name="hours")
    # A test at full load, with nothing lost: as many as the pool holds.
    full = make_trace(np.zeros(300, dtype=np.int64), np.full(300, 2000), np.full(300, 400), name="stress")
    calm = MemoryGuard(Transients(made))
    stress, _ = context.simulate("hours-stress", full, _options(made), step_time, guard=calm)
    rate = int(stress.requests()["output_tokens"].sum()) / (stress.end_ns / 1e9)
    most = _most(calm.transients, 4096)[0]
    hourly = (calm.room - most) // 4
    figures: dict[str, Any] = {
        "room_gib": calm.room / _GIB,
        "largest_step_gib": most / _GIB,
        "weights_gib": made.terms[0].bytes / _GIB,
        "kv_tokens": made.kv_tokens,
        "contexts": made.kv_tokens / 4096,
        "stress_tokens_per_s": rate,
        "stress_events": len(calm.events),
        "score_matrix_gib": _most(Transients(made, "eager"), 4096)[0] / _GIB,
        "logprobs_gib": _most(Transients(made, prompt_logprobs=1.0), 4096)[0] / _GIB,
        "growth_gib_per_hour": hourly / _GIB,
    }
    for name, growth in (("calm", 0), ("growing", hourly)):
        guard = MemoryGuard(Transients(made), growth_per_hour=growth)
        found, tables = context.simulate(f"hours-{name}", trace, _options(made), step_time, guard=guard)
        event = guard.events[0] if guard.events else None
        outcomes = found.requests()["outcome"]
        figures[name] = {
            "crashed": guard.crashed,
            "at_h": event.time_ns / 3.6e12 if event else None,
            "running_then": event.requests if event else 0,
            "lost": sum(outcome == "unfinished" for outcome in outcomes),
            "served": sum(outcome in ("length", "stop") for outcome in outcomes),
            "steps_after": int((np.asarray(tables.steps["start_ns"]) > event.time_ns).sum()) if event else 0,
        }
    return figures
