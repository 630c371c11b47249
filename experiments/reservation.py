"""Article B's incident (two A10G, Mistral-7B, 80 and 320 users), and what Hugging Face's caches reserve."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.experiment import Column, Context, Settled, Table
from experiments.metrics import expand_steps

if TYPE_CHECKING:
    from traces import Trace

__all__ = ["claims", "incident", "table", "transformers_caches"]

DEVICES = 2
REGION = 4096
BEFORE_USERS, AFTER_USERS = 80, 320
BEFORE_RATE, AFTER_RATE = 14, 58
BEFORE_WASTE, AFTER_WASTE, SAVED = 0.74, 0.032, 0.75
OUTPUT = 200
"""Tokens of an answer: our assumption, since the article names none."""


def incident(context: Context) -> dict[str, Any]:
    """What the article's figures imply, and simulations of one of the two devices with half of the users."""
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset

    slots = kv_blocks(preset("mistral-7b"), device("a10g"), block_size=16).num_blocks * 16
    tokens = round((1 - BEFORE_WASTE) * REGION)
    room = slots * DEVICES // AFTER_USERS
    shared = max(0, tokens - room)
    found: dict[str, Any] = {
        "slots_per_device": slots,
        "regions": slots // REGION * DEVICES,
        "tokens_by_first_waste": tokens,
        "tokens_by_second_waste": 7.5 * (1 - AFTER_WASTE) / AFTER_WASTE,
        "tokens_by_users": room,
        "rate_ratio": AFTER_RATE / BEFORE_RATE,
        "saved": 1 - BEFORE_RATE / AFTER_RATE,
        "shared_share": shared / tokens,
    }
    runs: dict[str, tuple[int, int, dict[str, Any]]] = {
        "contiguous, 80 users": (BEFORE_USERS, shared, {"allocator": "contiguous-max", "enable_prefix_caching": False}),
        "paged, 320 users": (AFTER_USERS, shared, {"enable_prefix_caching": False}),
        "paged, prefix cache, 320 users": (AFTER_USERS, shared, {"enable_prefix_caching": True}),
        "paged, prefix cache, nothing shared": (AFTER_USERS, 0, {"enable_prefix_caching": True}),
    }
    found["runs"] = {
        name: context.part(f"incident-{at}", partial(_serve, context, name, slots, tokens, *settings), tokens=tokens)
        for at, (name, settings) in enumerate(runs.items())
    }
    return found


def _serve(
    context: Context, name: str, slots: int, tokens: int, users: int, shared: int, more: dict[str, Any]
) -> dict[str, float]:
    from engine.core.presets import SchedulerConfig
    from sim.hardware import device
    from sim.models import preset
    from sim.steptime import roofline

    here = users // DEVICES
    load = _load(here * 12, tokens, shared, here)
    options = SchedulerConfig(num_blocks=slots // 16, max_model_len=REGION, max_num_seqs=512, **more)
    found, tables = context.simulate(name, load, options, roofline(preset("mistral-7b"), device("a10g")))
    steps = expand_steps(tables)
    lasted = np.diff(steps["end_ns"], prepend=steps["start_ns"][:1]).astype(np.float64)
    middle = slice(len(lasted) // 5, 4 * len(lasted) // 5)
    weights = lasted[middle]

    def mean(column: np.ndarray) -> float:
        return float(np.average(column[middle], weights=weights))

    # What is free but cached belongs to nobody, and what fits nobody is nobody's reservation.
    used = slots - steps["free"] - steps["cached"] - steps["external"]
    return {
        "users": users,
        "shared_tokens": shared,
        "running": DEVICES * mean(steps["num_running"]),
        "requests_per_s": DEVICES * len(load) / (found.end_ns / 1e9),
        "waste": 1 - mean(steps["held"]) / mean(used),
        "hit_share": float(np.sum(tables.requests["cached_tokens"]) / np.sum(load.prompt_tokens)),
        "preemptions": int(np.sum(tables.requests["num_preemptions"])),
    }


def _load(count: int, tokens: int, shared: int, concurrency: int) -> Trace:
    """Requests of about `tokens` in all, the first `shared` of which they have in common."""
    from traces import generate

    own = tokens - shared - OUTPUT
    spec: dict[str, Any] = {
        "kind": "synthetic",
        "name": "incident",
        "num_requests": count,
        "arrival": {"process": "closed-loop", "concurrency": concurrency},
        "prompt_tokens": {"dist": "uniform", "low": own // 2, "high": own + own // 2},
        "output_tokens": {"dist": "uniform", "low": OUTPUT // 2, "high": OUTPUT + OUTPUT // 2},
    }
    if shared:
        spec["prefix"] = {"num_prefixes": 1, "tokens": shared, "share": 1.0}
    return generate(spec)


def transformers_caches(tokens: int = 17, longest: int = 8192) -> dict[str, Any]:
    """Slots that transformers' caches hold for a sequence of `tokens`; `version` is None where it is not installed."""
    try:
        import torch
        import transformers
        from transformers import DynamicCache, LlamaConfig, StaticCache
    except ImportError:
        return {"version": None, "tokens": tokens}
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=longest,
    )
    dynamic, static = DynamicCache(), StaticCache(config=config, max_cache_len=longest)
    keys = torch.zeros(1, 2, tokens, 16)
    held = [
        int(cache.update(keys, keys, 0, {"cache_position": torch.arange(tokens)})[0].shape[-2])
        for cache in (dynamic, static)
    ]
    return {"version": transformers.__version__, "tokens": tokens, "dynamic": held[0], "static": held[1]}


def claims(found: dict[str, Any]) -> list[Settled]:
    """B12 and B13."""
    runs = found["runs"]
    before = runs["contiguous, 80 users"]
    after, plain = runs["paged, prefix cache, 320 users"], runs["paged, prefix cache, nothing shared"]
    fits = found["regions"] >= BEFORE_USERS
    first = Settled(
        "B12",
        "does-not-follow" if fits else "reproduced-only-if",
        f"{found['regions']} regions of {REGION:,} tokens fit on both devices, for {BEFORE_USERS} users; simulated, "
        f"{before['running']:.0f} run at once at {before['requests_per_s']:.1f} requests/s",
        "more regions would have to be needed than fit"
        if fits
        else "the server starts a request without asking for room; one that asks lets "
        f"{BEFORE_USERS - found['regions']} users wait",
        {"regions": found["regions"], **{f"before {key}": value for key, value in before.items()}},
    )
    lengths = [found["tokens_by_first_waste"], found["tokens_by_second_waste"], found["tokens_by_users"]]
    ratio = after["requests_per_s"] / before["requests_per_s"]
    plain_ratio = plain["requests_per_s"] / before["requests_per_s"]
    holds = after["waste"] < 0.04 and ratio >= AFTER_RATE / BEFORE_RATE and after["running"] >= 0.9 * AFTER_USERS
    second = Settled(
        "B13",
        "reproduced-only-if" if holds else "does-not-follow",
        f"74 % of {REGION:,} wasted means {lengths[0]:,.0f} tokens a request, 3.2 % of blocks of 16 means "
        f"{lengths[1]:,.0f}, and {AFTER_USERS} users leave room for {lengths[2]:,.0f} each; simulated with "
        f"{lengths[0]:,.0f} tokens of which {found['shared_share']:.0%} are shared: {after['running']:.0f} run at "
        "once, "
        f"{ratio:.1f} times the rate, waste {before['waste']:.0%} to {after['waste']:.1%}; by the article's rates "
        f"{found['saved']:.0%} less cost",
        f"some {found['shared_share']:.0%} of each request is one prefix that all share; with nothing shared "
        f"{plain['running']:.0f} run at once, at {plain_ratio:.1f} times the rate",
        {key: value for key, value in found.items() if key != "runs"}
        | {f"{name}: {key}": value for name, run in runs.items() for key, value in run.items()},
    )
    return [first, second]


def table(found: dict[str, Any]) -> Table:
    """The simulations of the incident, both devices together."""
    columns = [
        Column("run"),
        Column("users", form="d"),
        Column("shared_tokens", "shared", "d"),
        Column("running", form=".1f"),
        Column("requests_per_s", "requests/s", ".2f"),
        Column("waste", form=".1%"),
        Column("hit_share", "hits", ".1%"),
        Column("preemptions", "preempted", "d"),
    ]
    rows = [(name, *(run[column.name] for column in columns[1:])) for name, run in found["runs"].items()]
    return Table("incident", "Two A10G with Mistral-7B", columns, rows)
