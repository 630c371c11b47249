"""What the core costs, measured: one decode step of many requests, and the admission of one prompt, by block size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.core import RequestSpec, Scheduler, SchedulerConfig, StepOutcome, TokenIdentity

__all__ = ["admission_cost_us", "build", "costs", "step_cost_us"]

_OUTPUT = 700


def build() -> str:
    """Which build of the core runs: `compiled` or `pure`."""
    import engine.core.scheduler as module

    return "pure" if str(module.__file__).endswith(".py") else "compiled"


def costs(sizes: Sequence[int], rounds: int = 3) -> dict[int, dict[str, float]]:
    """`step_us` and `admission_us` by block size: the least of several rounds over all sizes, since other work on the
    machine comes and goes and only ever makes a step longer.
    """
    found: dict[int, dict[str, float]] = {}
    for _ in range(rounds):
        for size in sizes:
            once = {"step_us": step_cost_us(size), "admission_us": admission_cost_us(size)}
            best = found.setdefault(size, once)
            found[size] = {name: min(value, best[name]) for name, value in once.items()}
    return found


def step_cost_us(block_size: int, rows: int = 256, prompt_tokens: int = 512, steps: int = 256) -> float:
    """Lower quartile over steps of schedule + complete in us, for `rows` requests that each decode one token a step.

    Prefix caching is on, with real tokens, so that each block that fills is hashed and listed. Prompts differ by one
    token from request to request, so that every step sees as many of them reach a block's end.
    """
    longest = prompt_tokens + rows + _OUTPUT
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=rows * -(-longest // block_size),
            max_model_len=longest,
            block_size=block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=rows * longest,
        )
    )
    rng = np.random.default_rng(0)
    for row in range(rows):
        prompt = rng.integers(0, 32000, prompt_tokens + row).tolist()
        scheduler.add(RequestSpec(0, len(prompt), _OUTPUT, TokenIdentity(prompt, block_size)), 0)
    tokens = dict.fromkeys(range(rows), 7)
    times = []
    for step in range(steps + 8):
        begin = time.perf_counter_ns()
        plan = scheduler.schedule(step)
        middle = time.perf_counter_ns()
        outcome = StepOutcome(step + 1, tokens)
        again = time.perf_counter_ns()
        scheduler.complete(plan, outcome)
        times.append(middle - begin + time.perf_counter_ns() - again)
    return _quartile(times[8:])


def admission_cost_us(block_size: int, prompt_tokens: int = 2048, repeats: int = 15) -> float:
    """Lower quartile of add + schedule + complete in us for one prompt that nobody had before.

    It is hashed, looked up, given blocks and listed.
    """
    longest = prompt_tokens + 1
    config = SchedulerConfig(
        num_blocks=-(-longest // block_size),
        max_model_len=longest,
        block_size=block_size,
        max_num_batched_tokens=longest,
    )
    scheduler = Scheduler(config)
    rng = np.random.default_rng(0)
    times: list[int] = []
    for turn in range(repeats):
        prompt: list[Any] = rng.integers(0, 32000, prompt_tokens).tolist()
        begin = time.perf_counter_ns()
        request = scheduler.add(RequestSpec(turn, prompt_tokens, 1, TokenIdentity(prompt, block_size)), turn)
        plan = scheduler.schedule(turn)
        scheduler.complete(plan, StepOutcome(turn + 1, {request: 7}))
        times.append(time.perf_counter_ns() - begin)
    return _quartile(times[3:])


def _quartile(times_ns: list[int]) -> float:
    """us."""
    return float(np.percentile(times_ns, 25)) / 1e3
