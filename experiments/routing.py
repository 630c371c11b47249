"""Routers that know where a prompt's prefix is, against those that do not: what they hit, and how evenly they load.

Replicas are Llama-3.1-8B on an A100-80G each. All times are a roofline's, and predicted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.clustermetrics import cluster_summary
from experiments.experiment import Column, Context, ExperimentResult, Settled, Table
from experiments.metrics import Slo, latencies
from experiments.routingplot import picture
from sim.node import NodeSpec
from sim.routers import ROUTERS, PrefixAffinity, Router

if TYPE_CHECKING:
    from traces import Trace

__all__ = ["run"]

MOONCAKE = "traces/mooncake/conversation_trace.jsonl.xz"
MODEL, DEVICE = "llama-3.1-8b", "a100-80g"
BLOCKS = 12_000
"""KV blocks of a replica: 192,000 tokens, as a larger model would leave of such a device; for Mooncake the whole."""
REPLICAS = 4
SIZES = (1, 2, 4, 8)
RATE, REQUESTS = 5.0, 300
"""Of each replica: chat requests a second, and how many."""

MOONCAKE_REQUESTS, MOONCAKE_SCALE = 600, 4.0
"""How many, and how much slower than they came: four replicas cannot serve them as fast."""
MANY = 10**9
STATELESS = ("round-robin", "least-loaded", "power-of-two")


class Unbalanced(PrefixAffinity):
    """Follows prefixes whatever the load."""

    name = "prefix, unbalanced"

    def __init__(self) -> None:
        super().__init__(balance_abs=MANY)


class Tight(PrefixAffinity):
    """Follows prefixes only where load is almost even."""

    name = "prefix, tight"

    def __init__(self) -> None:
        super().__init__(balance_abs=8, balance_rel=1.1)


KINDS: dict[str, type[Router]] = {
    **{name: ROUTERS[name] for name in (*STATELESS, "session", "prefix")},
    Tight.name: Tight,
    Unbalanced.name: Unbalanced,
}


def run(context: Context) -> ExperimentResult:
    """Routers over workloads and over the number of replicas, and row A51."""
    notes = []
    loads = ["chats", "system prompts", "one hot prompt", "nothing shared"]
    if context.has(MOONCAKE):
        loads.append("Mooncake")
    else:
        notes.append(f"Mooncake is left out: there is no {MOONCAKE} in the shared data.")
    found = []
    for load, router in context.track([(load, router) for load in loads for router in KINDS], "workloads"):
        found.append(context.part(_name(load, router, REPLICAS), partial(_serve, context, load, router, REPLICAS)))
    sizes = []
    wanted = [(router, size) for size in SIZES for router in ("round-robin", "least-loaded", "session", "prefix")]
    for router, size in context.track(wanted, "numbers of replicas"):
        sizes.append(context.part(_name("chats", router, size), partial(_serve, context, "chats", router, size)))
    notes += [
        f"Chats: conversations of 1 to 9 turns behind 20 system prompts, {RATE:g} requests/s a replica. System prompts:"
        " 60 of 4,000 tokens, some asked for much more than others, that do not all fit into one replica's cache; hot: "
        f"61 % of {3 * RATE:g} requests/s a replica have the same.",
        f"Uneven: computed tokens of the replica with most of them beside the mean. Mooncake: its first "
        f"{MOONCAKE_REQUESTS:,} requests, {MOONCAKE_SCALE:g} times slower; it names no sessions: each request is one.",
        "prefix has SGLang's thresholds: 64 requests and 1.5 times before load counts; tight: 8 and 1.1.",
        "Times are simulated on a roofline and predicted.",
    ]
    summary = {"workloads": found, "sizes": sizes}
    tables = [_table(found), _sizes_table(sizes)]
    return ExperimentResult(tables, {"routing": picture(found, sizes)}, summary, [_a51(found, sizes)], notes)


def _name(load: str, router: str, size: int) -> str:
    return f"{load}-{router}-{size}".replace(" ", "-").replace(",", "")


# ---- workloads ----


def _chats(seed: int, size: int) -> Trace:
    """Conversations, as many a replica whatever the number of replicas."""
    from traces import generate

    return generate(
        {
            "kind": "synthetic",
            "name": "chats",
            "num_requests": REQUESTS * size,
            "seed": seed,
            "arrival": {"process": "poisson", "rate_per_s": RATE * size / 5},  # of conversations
            "prompt_tokens": {"dist": "lognormal", "mean": 160, "sigma": 0.8, "low": 8, "high": 2000},
            "output_tokens": {"dist": "lognormal", "mean": 250, "sigma": 0.7, "low": 8, "high": 1000},
            "prefix": {"num_prefixes": 20, "tokens": 1200, "share": 0.8, "zipf": 1.0},
            "sessions": {"turns": {"dist": "uniform", "low": 1, "high": 9}, "think_s": 20},
        }
    )


def _system_prompts(seed: int, size: int, load: str) -> Trace:
    """Single requests behind long system prompts; of which most have one in common, or each has one of its own."""
    from traces import generate

    n = REQUESTS * size
    shared = load != "nothing shared"
    zipf, rate = {"system prompts": (0.8, 1.0), "one hot prompt": (2.0, 3.0), "nothing shared": (0.0, 0.8)}[load]
    return generate(
        {
            "kind": "synthetic",
            "name": load,
            "num_requests": n,
            "seed": seed,
            "arrival": {"process": "poisson", "rate_per_s": rate * RATE * size},
            "prompt_tokens": {"dist": "lognormal", "mean": 160, "sigma": 0.8, "low": 8, "high": 2000},
            "output_tokens": {"dist": "lognormal", "mean": 120, "sigma": 0.7, "low": 8, "high": 600},
            "prefix": {
                "num_prefixes": 60 if shared else 50 * n,
                "tokens": 4000 if shared else 1200,
                "share": 1.0,
                "zipf": zipf,
            },
        }
    )


def _load(context: Context, load: str, size: int) -> tuple[Trace, int]:
    """(trace, KV blocks of a replica)."""
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset

    if load == "chats":
        return _chats(context.seed, size), BLOCKS
    if load == "Mooncake":
        blocks = kv_blocks(preset(MODEL), device(DEVICE), 0.9).num_blocks
        return context.trace(MOONCAKE, dequantize=True).head(MOONCAKE_REQUESTS), blocks
    return _system_prompts(context.seed, size, load), BLOCKS


def _serve(context: Context, load: str, router: str, size: int) -> dict[str, Any]:
    """Figures of one workload under one router."""
    from engine.core.presets import SchedulerConfig
    from experiments.scenarios import step_time

    trace, blocks = _load(context, load, size)
    config = SchedulerConfig(num_blocks=blocks, max_model_len=131_072)
    node = NodeSpec(config, step_time(MODEL, DEVICE), name=DEVICE)
    name = f"{load}, {router}, {size} replicas"
    scale = MOONCAKE_SCALE if load == "Mooncake" else 1.0
    found, tables = context.simulate_cluster(name, trace, [node] * size, KINDS[router](), time_scale=scale)
    summary = cluster_summary(found, tables, Slo())
    requests = found.requests()
    work = requests["prompt_tokens"] - np.maximum(requests["cached_tokens"], 0) + requests["output_tokens"]
    by_replica = np.bincount(requests["replica"], weights=work, minlength=size)
    values = latencies(requests)
    return {
        "load": load,
        "router": router,
        "replicas": size,
        "served": summary["num_finished"],
        "requests": summary["num_requests"],
        "hit_share": summary["prefix_hit_tokens"] / summary["prompt_tokens"],
        "uneven": float(by_replica.max() / by_replica.mean()),
        "ttft_mean_s": float(values["ttft_s"].mean()) / 1e9,
        "ttft_p99_s": float(np.percentile(values["ttft_s"], 99)) / 1e9,
        "tpot_mean_ms": float(np.nanmean(values["tpot_s"])) / 1e6,
        "output_tokens": int(requests["output_tokens"].sum()),
    }


# ---- the row ----


def _of(rows: list[dict[str, Any]], load: str, router: str) -> dict[str, Any]:
    return next(row for row in rows if row["load"] == load and row["router"] == router)


def _a51(found: list[dict[str, Any]], sizes: list[dict[str, Any]]) -> Settled:
    whole = all(row["served"] == row["requests"] for row in found)
    same = all(
        len({row["output_tokens"] for row in found if row["load"] == load}) == 1
        for load in {row["load"] for row in found}
    )
    blind, aware = _of(found, "chats", "least-loaded"), _of(found, "chats", "prefix")
    none = [_of(found, "nothing shared", router) for router in ("least-loaded", "prefix")]
    system = [_of(found, "system prompts", router) for router in ("least-loaded", "prefix")]
    hot = [_of(found, "one hot prompt", router) for router in (Unbalanced.name, "prefix", Tight.name)]
    costs = aware["hit_share"] - blind["hit_share"] > 0.05
    largest = [row for row in sizes if row["replicas"] == SIZES[-1]]
    blind_8 = next(row for row in largest if row["router"] == "least-loaded")
    aware_8 = next(row for row in largest if row["router"] == "prefix")
    return Settled(
        "A51",
        ("reproduced-only-if" if costs else "reproduced") if whole and same else "does-not-follow",
        f"any of {len(KINDS)} routers serves every request with all of its tokens; but of chats on {REPLICAS} replicas "
        f"the least-loaded finds {blind['hit_share']:.0%} of prompt tokens cached and one that knows prefixes "
        f"{aware['hit_share']:.0%} (mean TTFT {1e3 * blind['ttft_mean_s']:.0f} and "
        f"{1e3 * aware['ttft_mean_s']:.0f} ms), on {SIZES[-1]} {blind_8['hit_share']:.0%} and "
        f"{aware_8['hit_share']:.0%}",
        condition="prompts share nothing (mean TTFT "
        f"{1e3 * none[0]['ttft_mean_s']:.0f} and {1e3 * none[1]['ttft_mean_s']:.0f} ms), or what they share fits into "
        f"every cache. Of 60 system prompts that do not fit, {system[0]['hit_share']:.0%} of the tokens are found, "
        f"{system[1]['hit_share']:.0%} with prefixes. What following prefixes costs is "
        f"balance: where most ask for one prompt, one replica computes {hot[0]['uneven']:.2f} times the mean (TTFT p99 "
        f"{hot[0]['ttft_p99_s']:.2f} s) unless load counts as well ({hot[1]['uneven']:.2f} and "
        f"{hot[1]['ttft_p99_s']:.2f} s with SGLang's thresholds, {hot[2]['uneven']:.2f} and "
        f"{hot[2]['ttft_p99_s']:.2f} s with tighter ones)",
        numbers={
            f"{row['load']}, {row['router']}": {
                key: row[key] for key in ("hit_share", "uneven", "ttft_mean_s", "ttft_p99_s")
            }
            for row in found
        },
    )


# ---- what is shown ----


def _table(found: list[dict[str, Any]]) -> Table:
    columns = [
        Column("load", "workload"),
        Column("router"),
        Column("hit_share", "hits", ".1%"),
        Column("uneven", form=".2f"),
        Column("ttft_mean_s", "TTFT mean s", ".3f"),
        Column("ttft_p99_s", "p99 s", ".2f"),
        Column("tpot_mean_ms", "TPOT ms", ".1f"),
    ]
    rows = [[row[c.name] for c in columns] for row in found]
    return Table("routers", f"Routers before {REPLICAS} replicas, predicted", columns, rows)


def _sizes_table(sizes: list[dict[str, Any]]) -> Table:
    columns = [
        Column("router"),
        Column("replicas", form="d"),
        Column("hit_share", "hits", ".1%"),
        Column("uneven", form=".2f"),
        Column("ttft_mean_s", "TTFT mean s", ".3f"),
    ]
    rows: list[list[Any]] = sorted(([row[c.name] for c in columns] for row in sizes), key=lambda r: (r[0], r[1]))
    return Table("sizes", "Chats, as many a replica, over the number of replicas, predicted", columns, rows)
