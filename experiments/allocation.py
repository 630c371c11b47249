"""Saturated pools: what an allocator holds, wastes and keeps free while requests queue for memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.experiment import Context
from experiments.lengths import TRACES, final_tokens, named_trace
from experiments.metrics import USAGE, Tables, expand_steps

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from traces import Trace

__all__ = ["ALLOCATORS", "Load", "loads", "saturate", "shares"]

ALLOCATORS: Mapping[str, Mapping[str, Any]] = {
    "max": {"allocator": "contiguous-max", "placement": "buddy"},
    "pow2": {"allocator": "contiguous-pow2", "placement": "buddy"},
    "oracle": {"allocator": "contiguous-oracle", "placement": "buddy"},
    "oracle, best fit": {"allocator": "contiguous-oracle", "placement": "best-fit"},
    "paged 128": {"block_size": 128},
    "paged 32": {"block_size": 32},
    "paged 16": {"block_size": 16},
    "paged 8": {"block_size": 8},
}
"""Options of the scheduler by the name that tables and pictures use. Contiguous lengths are rounded up to 16 slots.
Buddy placement is what the PagedAttention paper assumes of Orca."""

PAPER_SLOTS = 15_700
"""Slots of KV of OPT-13B on an A100 with 40 GB (PagedAttention paper, table 1)."""
PAPER_MEANS = (161.31, 337.99)
"""Mean prompt and output of its ShareGPT requests (figure 11)."""
PAPER_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and the pool that they queue for."""

    name: str
    title: str
    trace: Callable[[], Trace]
    model: str
    hardware: str
    slots: int
    longest: int
    """max_model_len, which is what `max` reserves."""


def loads(context: Context) -> list[Load]:
    """The paper's setting, and those traces that are there."""
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset

    def room(model: str, hardware: str) -> int:
        return kv_blocks(preset(model), device(hardware), block_size=128).num_blocks * 128

    def cut(name: str, longest: int, count: int) -> Callable[[], Trace]:
        return lambda: _fitting(named_trace(context, name), longest, count)

    # OPT-13B has the KV shape of Llama-2-13B: 40 layers of 40 heads of 128.
    small = ("llama-2-13b", "a100-40g", PAPER_SLOTS // 128 * 128)
    large = ("llama-3-8b", "a100-80g", room("llama-3-8b", "a100-80g"))
    long = ("llama-3.1-8b", "a100-80g", room("llama-3.1-8b", "a100-80g"))
    found = [
        Load("paper", "the paper's means, OPT-13B's pool", lambda: _paper_trace(context.seed), *small, PAPER_LONGEST)
    ]
    rows: list[tuple[str, str, tuple[str, str, int], int, int]] = [
        ("sharegpt-llama-3.1-8b-300-sps10", "ShareGPT file, OPT-13B's pool", small, PAPER_LONGEST, 300),
        ("azure2023_conv", "Azure conversation", large, 8192, 1500),
        ("azure2023_code", "Azure code", large, 8192, 1500),
        ("mooncake_conversation", "Mooncake conversation", long, 131072, 400),
    ]
    for name, title, machine, longest, count in rows:
        if context.has(TRACES[name]):
            found.append(Load(name, title, cut(name, longest, count), *machine, longest))
    return found


def _paper_trace(seed: int, count: int = 600) -> Trace:
    """Requests with exponential lengths of the paper's means, those beyond 2,048 tokens in all left out."""
    from traces import make_trace

    rng = np.random.default_rng(seed)
    prompt = np.ceil(rng.exponential(PAPER_MEANS[0], 2 * count)).astype(np.int64)
    output = np.ceil(rng.exponential(PAPER_MEANS[1], 2 * count)).astype(np.int64)
    keep = np.flatnonzero(prompt + output <= PAPER_LONGEST)[:count]
    return make_trace(np.zeros(count, dtype=np.int64), prompt[keep], output[keep], name="paper's means")


def _fitting(trace: Trace, longest: int, count: int) -> Trace:
    """The first `count` requests of at most `longest` tokens in all, there from the start, nothing shared."""
    from traces import make_trace

    keep = np.flatnonzero(final_tokens(trace) <= longest)[:count]
    zeros = np.zeros(len(keep), dtype=np.int64)
    return make_trace(zeros, trace.prompt_tokens[keep], trace.output_tokens[keep], name=trace.name)


def options_of(load: Load, allocator: str) -> SchedulerConfig:
    """The scheduler for `load`: memory is its only limit, sequences and tokens a step are not."""
    from engine.core.presets import SchedulerConfig

    chosen: dict[str, Any] = {"block_size": 16, **ALLOCATORS[allocator]}
    return SchedulerConfig(
        num_blocks=load.slots // chosen["block_size"],
        max_model_len=load.longest,
        max_num_seqs=8192,
        max_num_batched_tokens=max(8192, load.slots),
        enable_prefix_caching=False,
        **chosen,
    )


def saturate(context: Context, load: Load, allocator: str, max_tokens: int | None = None) -> dict[str, float]:
    """Serves `load`, all of it queueing from the start, and averages over the time in which the pool is saturated.

    Reserved slots are split at prompt + max_tokens: at the true final length, unless `max_tokens` says what senders ask
    for while outputs end where they end.
    """
    from sim.hardware import device
    from sim.models import preset
    from sim.steptime import roofline

    trace = load.trace()
    options = options_of(load, allocator)
    step_time = roofline(preset(load.model), device(load.hardware))
    asked = "" if max_tokens is None else f", asking for {max_tokens}"
    found, tables = context.simulate(
        f"{load.name}, {allocator}{asked}", trace, options, step_time, max_tokens=max_tokens
    )
    return {
        **shares(tables),
        "requests_per_s": len(trace) / (found.end_ns / 1e9),
        "preemptions": int(np.sum(tables.requests["num_preemptions"])),
    }


def shares(tables: Tables) -> dict[str, float]:
    """Time averages while the pool is saturated: each part of the usage as a share of the pool, and `running`.

    Saturated is from when as many requests have finished as the first fill admitted (they began together, which no
    traffic does) until nobody waits any more.
    """
    steps = expand_steps(tables)
    lasted = np.diff(steps["end_ns"], prepend=steps["start_ns"][:1]).astype(np.float64)
    waiting = np.flatnonzero(steps["num_waiting"] > 0)
    first = int(np.max(steps["num_running"][: np.argmax(np.cumsum(steps["finished"]) > 0) + 1]))
    begin = int(np.argmax(np.cumsum(steps["finished"]) >= first))
    end = int(waiting[-1]) + 1 if len(waiting) else 0
    if end <= begin:
        raise ValueError("the load is too short to saturate the pool")
    weights = lasted[begin:end]
    pool = sum(int(steps[name][0]) for name in USAGE)
    found = {name: float(np.average(steps[name][begin:end], weights=weights)) / pool for name in USAGE}
    return {
        **found,
        "running": float(np.average(steps["num_running"][begin:end], weights=weights)),
        "saturated_steps": end - begin,
    }
