"""Every hypothesis strategy of the suite.

What makes such tests find things: unit step costs, so that ties happen; tiny blocks and pools; an alphabet of two
letters, so that prefixes collide; follow-up prompts built from earlier outputs; aborts everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core_kit import Case, Job, PulseAdmission, full_prompt
from hypothesis import strategies as st

from engine.core import LinearCost, SchedulerConfig
from engine.core.batching import BATCHINGS
from engine.core.orders import ORDERS
from engine.core.victims import VICTIMS

__all__ = [
    "cases",
    "contiguous_cases",
    "fast_cases",
    "free_orders",
    "host_options",
    "jobs_after",
    "machine_options",
    "policies",
    "same_jobs_twice",
]


@st.composite
def policies(draw: st.DrawFn, plain: bool = False) -> dict[str, str]:
    """Options that name built-in policies; most often, or with `plain` always, the usual ones."""
    if plain or draw(st.booleans()):
        return {"scheduling_policy": draw(st.sampled_from(["fcfs", "fcfs", "priority"]))}
    return {
        "scheduling_policy": draw(st.sampled_from(sorted(ORDERS))),
        "victim_policy": draw(st.sampled_from(["last-in", *VICTIMS])),
        "batching": draw(st.sampled_from(["mixed", "mixed", *BATCHINGS])),
        "admission_reserve": draw(st.sampled_from(["prompt", "prompt", "max_tokens"])),
    }


def _host_and_policies(host: dict[str, Any], chosen: dict[str, str], jobs: tuple[Job, ...] = ()) -> dict[str, Any]:
    """Both, as far as they go together with each other and with the jobs."""
    if any(job.n > 1 for job in jobs):
        chosen = chosen | {"admission_reserve": "prompt"}
    if any(job.beam for job in jobs):
        chosen = chosen | {"batching": "mixed"}
    return host | chosen | ({"host_tier": False} if chosen.get("batching", "mixed") != "mixed" else {})


def _options(draw: st.DrawFn, of: str, blocks: Sequence[int] = (*range(2, 17), 20, 24, 30)) -> SchedulerConfig:
    """Options under which everything collides; the pool has one of `blocks`."""
    size = draw(st.sampled_from([1, 2, 2, 3, 4]))
    num_blocks = draw(st.sampled_from(blocks))
    seqs = draw(st.integers(1, 6))
    capacity = num_blocks * size
    lookahead = draw(st.sampled_from([0, 0, 0, 1, 3]))
    if capacity <= lookahead + 2:
        lookahead = 0
    caching = of == "tiers" or draw(st.sampled_from([True, True, True, False]))
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=draw(st.sampled_from([capacity, capacity, max(2, capacity // 2), 1000])),
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, draw(st.integers(1, 12))),
        enable_prefix_caching=caching,
        **_host_and_policies(draw(host_options(caching, of=of)), draw(policies(plain=bool(of)))),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.4])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 2, 3])),
        num_lookahead_tokens=lookahead,
        scheduler_reserve_full_isl=draw(st.sampled_from([True, True, False])),
        same_step=draw(st.sampled_from(["share", "share", "off", "defer"])),
        **draw(free_orders()),
        prefix_index=draw(st.sampled_from(["hash", "hash", "radix"])),
        steps_in_flight=draw(st.sampled_from([1, 2])),
    )


def _next_job(
    draw: st.DrawFn,
    config: SchedulerConfig,
    jobs: Sequence[Job],
    roots: list[list[int]],
    at: int,
    aborts: bool,
    of: str,
) -> Job | None:
    """One more job, which the pool can hold alone; None: what was drawn is too long."""
    limit = min(config.num_blocks * config.block_size - config.num_lookahead_tokens + 1, config.max_model_len)
    seqs = config.max_num_seqs
    tail = draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
    follows = draw(st.sampled_from([None, *range(len(jobs))])) if jobs and draw(st.booleans()) else None
    start = draw(st.sampled_from([[], *roots])) if follows is None else []
    cap = max(draw(st.integers(1, 10)), draw(st.integers(1, 10)))
    job = Job(
        at,
        tuple(start + tail),
        draw(st.one_of(st.just(cap), st.integers(1, cap))),
        cap,
        follows=follows,
        abort_at=draw(st.integers(at, at + 9)) if aborts and draw(st.integers(0, 5)) == 0 else None,
        abort_in_flight=draw(st.booleans()),
        salt=draw(st.sampled_from([b"", b"", b"t"])),
        private=draw(st.sampled_from([False, False, False, True])),
        priority=draw(st.integers(0, 2)),
        n=draw(st.sampled_from([1, 2, 3, 4] if of == "forks" else [1, 1, 1, 2, 3, 4])),
        beam=draw(st.booleans()),
        tenant=draw(st.integers(0, 2)),
        patience=draw(st.sampled_from([None, 1, 9])),
        predicted=draw(st.sampled_from([0, 1, 5, 20])),
    )
    job = replace(job, n=1 if config.admission_reserve == "max_tokens" else min(job.n, seqs))
    if follows is not None and jobs[follows].private:
        job = Job(at, job.prompt, job.out, cap)
    length = len(full_prompt((*jobs, job), len(jobs)))
    if length + 1 > limit:
        return None
    if length + cap > limit:
        cap = limit - length  # the last output needs no slot
        job = replace(job, out=min(job.out, cap), cap=cap)
    if _blocks(config, (*jobs, job), len(jobs)) > config.num_blocks:
        job = replace(job, beam=False)
    return replace(job, beam=job.beam and job.n > 1 and config.batching == "mixed")


_ROOTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=2)
"""Prompts begin with one of these."""


@st.composite
def cases(draw: st.DrawFn, *, aborts: bool = True, min_jobs: int = 1, max_jobs: int = 8, of: str = "") -> Case:
    """A program for the shadow executor: everything collides, memory is short, and each request fits alone.

    `of`: `forks`, `swaps` or `tiers` makes these the rule.
    """
    config = _options(draw, of)
    roots = draw(_ROOTS)
    jobs: list[Job] = []
    at = 0
    for _ in range(draw(st.integers(min_jobs, max_jobs))):
        at += draw(st.sampled_from([0, 0, 0, 1, 2, 5]))
        job = _next_job(draw, config, jobs, roots, at, aborts, of)
        if job is not None:
            jobs.append(job)
    if not jobs:
        jobs.append(Job(0, (0,), 1, 1))
    if of or draw(st.booleans()):
        config = _tight(config, jobs, draw(st.sampled_from([0, 0, 1, 2])))
    return Case(config, tuple(jobs), luck=draw(st.integers(0, 30)))


@st.composite
def machine_options(draw: st.DrawFn, of: str = "") -> tuple[SchedulerConfig, list[list[int]]]:
    """Options for a state machine, and beginnings for the prompts of its jobs; `of` as in `cases`."""
    config = _options(draw, of, range(3, 11))
    return config, draw(_ROOTS)


@st.composite
def jobs_after(
    draw: st.DrawFn, config: SchedulerConfig, jobs: Sequence[Job], roots: list[list[int]], at: int, of: str = ""
) -> Job | None:
    """One more job behind `jobs`, which ends when it is told and not by itself; None: what was drawn is too long."""
    job = _next_job(draw, config, jobs, roots, at, False, of)
    return None if job is None else replace(job, out=job.cap)


@st.composite
def contiguous_cases(draw: st.DrawFn, *, fast: bool = False) -> Case:
    """A program of `cases` (or `fast_cases`) under a contiguous allocator; the pool has room for each run alone."""
    case = draw(fast_cases() if fast else cases())
    allocator = draw(st.sampled_from(["contiguous-max", "contiguous-pow2", "contiguous-oracle"]))
    placement = draw(st.sampled_from(["first-fit", "best-fit", "buddy"]))
    jobs = tuple(replace(job, n=1, beam=False) for job in case.jobs)
    config = case.config
    longest = max(len(full_prompt(jobs, i)) + job.cap for i, job in enumerate(jobs))
    if config.max_model_len > 2 * longest:
        config = replace(config, max_model_len=longest + draw(st.integers(0, 5)))
    most = 1
    for i, job in enumerate(jobs):
        out = config.max_model_len
        if allocator == "contiguous-pow2":
            out = next(1 << k for k in range(20) if 1 << k >= job.out)
        elif allocator == "contiguous-oracle":
            out = job.out
        tokens = min(len(full_prompt(jobs, i)) + out + config.num_lookahead_tokens, config.max_model_len)
        most = max(most, -(-tokens // config.block_size))
    if placement == "buddy":
        most = 1 << (most - 1).bit_length()
    blocks = most + draw(st.sampled_from([0, 1, 2, 3, most, 2 * most + 1]))
    config = replace(config, allocator=allocator, placement=placement, num_blocks=blocks, host_tier=False)
    return replace(case, config=config, jobs=jobs)


@st.composite
def free_orders(draw: st.DrawFn, plain: bool = False) -> dict[str, Any]:
    """Which block is given out next; with `plain` no block is ranked."""
    order = draw(st.sampled_from(["blank-first", "blank-first", "single-queue"]))
    ranked = order == "blank-first" and not plain
    policies = ["lru", "lru", "fifo", "lfu", "2q", "cost-aware", "priority"] if ranked else ["lru"]
    return {"free_order": order, "eviction_policy": draw(st.sampled_from(policies))}


@st.composite
def host_options(draw: st.DrawFn, caching: bool, reject: bool = True, of: str = "") -> dict[str, Any]:
    """What becomes of the preempted, and whether there is a host tier."""
    num = draw(st.sampled_from([2, 4, 9, 40] if of in ("swaps", "tiers") else [0, 0, 1, 2, 4, 9, 40]))
    modes = ["recompute", "recompute", "swap-groups"]
    if reject:
        modes.append("reject")
    if num:
        modes += ["swap"] * 3 + ["auto"]
    if of == "swaps":
        modes = ["swap", "swap", "swap", "auto"]
    mode = draw(st.sampled_from(modes))
    return {
        "num_host_blocks": num,
        "preemption_mode": mode,
        "cost_model": LinearCost(token_ns=4, swap_latency_ns=5, block_ns=2) if mode == "auto" else None,
        "host_tier": bool(num and caching and (of == "tiers" or draw(st.booleans()))),
        "transfer_lease_ns": draw(st.sampled_from([2, 5, 9, 30])),
    }


def _blocks(config: SchedulerConfig, jobs: tuple[Job, ...], i: int) -> int:
    """Blocks that job `i` may need at once, alone."""
    job = jobs[i]
    tokens = len(full_prompt(jobs, i)) + job.cap - 1 + config.num_lookahead_tokens
    return -(-min(tokens, config.max_model_len) // config.block_size) * (job.n if job.beam else 1)


def _tight(config: SchedulerConfig, jobs: list[Job], spare: int) -> SchedulerConfig:
    """The pool is only just large enough for each job alone, and a few blocks more."""
    return replace(config, num_blocks=max(_blocks(config, tuple(jobs), i) for i in range(len(jobs))) + spare)


@st.composite
def same_jobs_twice(draw: st.DrawFn) -> tuple[Case, Case]:
    """The same jobs under two configurations, both of which hold each job alone; often only just."""
    case = draw(cases(aborts=False))
    config = case.config
    if config.preemption_mode == "reject":
        config = replace(config, preemption_mode="recompute")
    case = replace(case, config=config)
    seqs = draw(st.integers(max(job.n for job in case.jobs), 6))
    caching = draw(st.booleans())
    other = replace(
        config,
        block_size=draw(st.sampled_from([1, 2, 3, 4, 7])),
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(seqs, 12)),
        enable_prefix_caching=caching,
        num_lookahead_tokens=draw(st.sampled_from([0, 0, 0, 2])),
        **_host_and_policies(draw(host_options(caching, reject=False)), draw(policies()), case.jobs),
        same_step=draw(st.sampled_from(["share", "off", "defer"])),
        **draw(free_orders()),
        steps_in_flight=draw(st.sampled_from([1, 2])),
    )
    other = _tight(other, list(case.jobs), draw(st.sampled_from([0, 0, 1, 2, 5, 50])))
    return case, replace(case, config=other)


@st.composite
def fast_cases(draw: st.DrawFn) -> Case:
    """A program for fast-forward: longer outputs and rare arrivals, so that there is something to skip."""
    size = draw(st.sampled_from([1, 2, 3, 4, 4, 8]))
    num_blocks = draw(st.integers(6, 40))
    seqs = draw(st.integers(1, 5))
    capacity = num_blocks * size
    model_len = draw(st.sampled_from([capacity, max(4, capacity // 2), max(4, capacity // 3)]))
    lookahead = draw(st.sampled_from([*[0] * 12, 1, 3])) if capacity > 6 else 0
    most = draw(st.sampled_from([True, True, True, False]))  # what has to be asked at each step leaves nothing to skip
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(seqs, 30)),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 2])),
        num_lookahead_tokens=lookahead,
        same_step=draw(st.sampled_from(["share", "share", "off", "defer"])),
        **draw(free_orders(plain=most)),
        steps_in_flight=draw(st.sampled_from([1, 2])),
        **draw(policies(plain=most)),
        policies=draw(st.sampled_from([*[()] * 5, (PulseAdmission(),)])),
    )
    limit = min(capacity - lookahead, model_len)
    jobs: list[Job] = []
    at = 0
    for _ in range(draw(st.integers(1, 6))):
        at += draw(st.sampled_from([0, 0, 5, 20, 50]))
        prompt = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)))
        followable = [i for i, job in enumerate(jobs) if not job.private]
        follows = draw(st.sampled_from(followable)) if followable and draw(st.booleans()) else None
        early = follows is not None and draw(st.booleans())
        job = Job(
            draw(st.sampled_from([0, 2])) if follows is not None and not early else at,
            prompt,
            1,
            1,
            follows=follows,
            early=early,
            quote=draw(st.sampled_from([None, *range(1, 13)])) if early else None,
            abort_at=draw(st.sampled_from([None, None, None, None, 4, 11])),
            private=follows is None and draw(st.booleans()),
            priority=draw(st.integers(0, 2)),
            tenant=draw(st.integers(0, 1)),
            patience=draw(st.sampled_from([None, 9])),
            predicted=draw(st.sampled_from([0, 3])),
        )
        most = limit - len(full_prompt((*jobs, job), len(jobs)))
        if most < 1:
            continue
        longest = min(most, 60)
        out = max(draw(st.integers(1, longest)), draw(st.integers(1, longest)))
        cap = draw(st.sampled_from([out, out, min(most, out + 7), most]))
        if limit == model_len and draw(st.booleans()):
            out, cap = most, most + 9  # the model's length ends it, not max_tokens
        jobs.append(replace(job, out=out, cap=cap))
    if not jobs:
        jobs.append(Job(0, (0,), 1, 1))
    if draw(st.integers(0, 2)) == 0:
        config = _tight(config, jobs, draw(st.sampled_from([0, 1, 2])))
    cost = draw(st.sampled_from([(1, 0, 0), (1, 0, 0), (3, 1, 0), (5, 2, 1)]))
    return Case(config, tuple(jobs), step_cost=cost)
