"""Prefix caching: what a cache of a given size hits under each eviction policy, what that saves, and what it costs.

Hit curves are offline replays through the core (offline.py); times are simulated with a roofline and predicted, except
the cost of the lookup, which is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.experiment import Context, ExperimentResult, Settled
from experiments.offline import replay
from experiments.prefixplot import curve_table, cycle_table, picture, served_table

if TYPE_CHECKING:
    from traces import Trace

__all__ = ["documents", "run"]

MOONCAKE = "traces/mooncake/conversation_trace.jsonl.xz"
CAPACITIES = (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000)
"""Tokens."""
CURVE_REQUESTS = 1000
CHAT_BLOCK = 32
"""Tokens of a block in the curves of chats. A ranked block costs the replay the same, whatever its size."""
SLICE = 2000
ORDERS = ("fcfs", "sjf", "lpm")
SYSTEM_TOKENS, SYSTEM_RATE = 4000, 100
"""A22: tokens that all prompts have in common, and requests per second."""
SUPPORT_TOKENS = 3200
CLAIMED_TTFT_S = (0.850, 0.120)
CLAIMED_LOOKUP_MS = 2.0
NUM_USERS, PREFIX_TOKENS = 64, 4008
"""B06: users at once, and the prefix of all of them: 250 blocks of 16 and a half."""
DOCUMENT_TOKENS, DEVICE_DOCUMENTS, HOST_DOCUMENTS = 8192, 8, 30
CYCLES = (8, 16, 32, 64)
"""Documents that are asked about in turn, as in a report of such a load; the device holds 8 of them, the host 30."""


def run(context: Context) -> ExperimentResult:
    """Curves, served runs, the document cycle, and rows A21 to A26, A28 and B06."""
    notes: list[str] = []
    curves = _curves(context, notes)
    served = _served(context, notes)
    cycle = _cycle(context)
    support = context.part("support", partial(_support, context))
    system = context.part("system", partial(_system, context))
    unique = context.part("unique", partial(_unique, context))
    users = context.part("users", partial(_users, context))
    lookup = context.part("lookup", _lookup)
    claims = [
        _a21(),
        _a22(system),
        _a23(system),
        _a24(curves, served),
        _a25(lookup),
        _a26(unique),
        _a28(support),
        _b06(users),
    ]
    summary = {
        "curves": curves,
        "served": served,
        "documents": cycle,
        "support": support,
        "system": system,
        "unique": unique,
        "users": users,
        "lookup": lookup,
        "floor_rule": _floor_rule(),
    }
    holds = {"device": DEVICE_DOCUMENTS, "host": HOST_DOCUMENTS}
    tables = [curve_table(curves), served_table(served), cycle_table(cycle, holds)]
    notes.append("Times are simulated on a roofline and predicted; the lookup is measured on this machine.")
    return ExperimentResult(tables, {"prefix": picture(curves, served, cycle, holds)}, summary, claims, notes)


# ---- hit curves ----


def _policies() -> tuple[str, ...]:
    from engine.core.eviction import EVICTIONS

    return ("lru", *(name for name in EVICTIONS if name != "lru"))


def _workloads(context: Context, notes: list[str]) -> dict[str, tuple[Trace, int]]:
    """(trace, block size) by name."""
    found = {"chats of several turns": (_chats(context.seed), CHAT_BLOCK)}
    if context.has(MOONCAKE):
        found["Mooncake conversation"] = (context.trace(MOONCAKE).head(CURVE_REQUESTS), 512)
    else:
        notes.append(f"Mooncake is left out: there is no {MOONCAKE} in the shared data.")
    return found


def _chats(seed: int) -> Trace:
    """Sessions of about five turns behind one of 20 system prompts, whose popularity falls off."""
    from traces import generate

    return generate(
        {
            "kind": "synthetic",
            "name": "chats",
            "num_requests": 1200,
            "seed": seed,
            "arrival": {"process": "poisson", "rate_per_s": 2.0},
            "prompt_tokens": {"dist": "lognormal", "mean": 120, "sigma": 0.8, "low": 8, "high": 800},
            "output_tokens": {"dist": "lognormal", "mean": 200, "sigma": 0.7, "low": 8, "high": 800},
            "prefix": {"num_prefixes": 20, "tokens": 600, "share": 0.8, "zipf": 1.0},
            "sessions": {"turns": {"dist": "uniform", "low": 1, "high": 9}, "think_s": 60},
        }
    )


def _curves(context: Context, notes: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, (trace, block_size) in _workloads(context, notes).items():
        largest = int(trace.prompt_tokens.sum())
        sizes = [c for c in CAPACITIES if c < largest]
        if name.startswith("chats"):
            sizes = [c // 25 for c in CAPACITIES]
        cells = [(policy, index, c) for policy in _policies() for index in ("hash",) for c in sizes]
        cells += [("lru", "radix", c) for c in sizes]
        for policy, index, capacity in context.track(cells, f"curves of {name}"):

            def measure(
                trace: Trace = trace,
                size: int = block_size,
                capacity: int = capacity,
                options: Mapping[str, Any] = {"eviction_policy": policy, "prefix_index": index},
            ) -> float:
                return replay(trace, capacity, size, **options).share

            part = f"curve-{name.split()[0]}-{policy}-{index}-{capacity}"
            share = context.part(part, measure)
            found.append(
                {"workload": name, "policy": policy, "index": index, "capacity_tokens": capacity, "hit_share": share}
            )
    return found


# ---- served runs ----


def _machine(model: str, card: str) -> tuple[Any, int]:
    """(step time, slots of KV) of a model on a device."""
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset
    from sim.steptime import roofline

    spec, hardware = preset(model), device(card)
    return roofline(spec, hardware), kv_blocks(spec, hardware, block_size=16).num_blocks * 16


def _figures(tables: Any, end_ns: int) -> dict[str, float]:
    requests = tables.requests
    first = (np.asarray(requests["first_token_ns"]) - np.asarray(requests["arrival_ns"])) / 1e9
    return {
        "ttft_mean_s": float(first.mean()),
        "ttft_p99_s": float(np.quantile(first, 0.99)),
        "hit_share": float(np.sum(requests["cached_tokens"]) / np.sum(requests["prompt_tokens"])),
        "requests_per_s": len(first) / (end_ns / 1e9),
        "preemptions": int(np.sum(requests["num_preemptions"])),
    }


def _serve(
    context: Context, name: str, trace: Trace, model: str, card: str, slots: int = 0, size: int = 16, **options: Any
) -> dict[str, float]:
    from engine.core.presets import SchedulerConfig

    step_time, room = _machine(model, card)
    longest = int((trace.prompt_tokens + trace.output_tokens).max()) + 1
    config = SchedulerConfig(
        num_blocks=(slots or room) // size,
        block_size=size,
        max_model_len=longest,
        max_num_batched_tokens=8192,
        **options,
    )
    found, tables = context.simulate(name, trace, config, step_time)
    return _figures(tables, found.end_ns)


def _served(context: Context, notes: list[str]) -> list[dict[str, Any]]:
    """2,000 requests, with the cache off, by hash and by radix, for each order."""
    trace = context.trace(MOONCAKE, dequantize=True).head(SLICE) if context.has(MOONCAKE) else _chats(context.seed)
    found = []
    cells = [(order, cache) for order in ORDERS for cache in ("off", "hash", "radix")]
    cells.remove(("lpm", "off"))  # without a cache it is first come, first served
    for order, cache in context.track(cells, "served runs"):
        options: dict[str, Any] = {
            "scheduling_policy": order,
            "enable_prefix_caching": cache != "off",
            "prefix_index": "radix" if cache == "radix" else "hash",
        }
        name = f"served-{order}-{cache}"
        size = 512 if trace.name != "chats" else 16
        measure = partial(_serve, context, name, trace, "llama-3.1-8b", "h100", size=size, **options)
        found.append({"order": order, "cache": cache, **context.part(name, measure)})
    return found


def documents(num: int, rounds: int = 3, question: int = 64) -> Trace:
    """`num` documents that are asked about one after another, `rounds` times; one question at a time."""
    from traces import make_trace

    rows = num * rounds
    ids = np.empty(2 * rows, dtype=np.int64)
    ids[0::2] = np.arange(rows) % num
    ids[1::2] = 1_000_000 + np.arange(rows)
    tokens = np.tile([DOCUMENT_TOKENS, question], rows)
    after = np.arange(-1, rows - 1)
    return make_trace(
        np.zeros(rows, dtype=np.int64),
        np.full(rows, DOCUMENT_TOKENS + question),
        np.full(rows, 16),
        spans=(np.arange(0, 2 * rows + 1, 2), ids, tokens),
        name="documents",
        after=after,
    )


def _cycle(context: Context) -> list[dict[str, Any]]:
    """The document cycle: no cache, the device's, and a host tier behind it."""
    found = []
    cells = [(num, cache) for num in CYCLES for cache in ("off", "device", "device and host")]
    for num, cache in context.track(cells, "documents"):
        name = f"documents-{num}-{cache.replace(' ', '-')}"
        measure = partial(_ask, context, name, num, cache)
        found.append({"documents": num, "cache": cache, **context.part(name, measure)})
    return found


def _ask(context: Context, name: str, num: int, cache: str) -> dict[str, float]:
    from engine.core.presets import SchedulerConfig
    from sim.hardware import device
    from sim.models import preset
    from sim.moves import moves_of_device

    spec, card = preset("llama-3.1-8b"), device("a100-40g")
    step_time, _ = _machine("llama-3.1-8b", "a100-40g")
    per_document = -(-DOCUMENT_TOKENS // 16)
    config = SchedulerConfig(
        num_blocks=DEVICE_DOCUMENTS * per_document + 64,
        max_model_len=DOCUMENT_TOKENS + 128,
        max_num_batched_tokens=DOCUMENT_TOKENS,
        enable_prefix_caching=cache != "off",
        num_host_blocks=HOST_DOCUMENTS * per_document if cache == "device and host" else 0,
        host_tier=cache == "device and host",
    )
    moves = moves_of_device(card, spec.kv_bytes_per_token() * 16)
    found, tables = context.simulate(name, documents(num), config, step_time, moves=moves)
    return _figures(tables, found.end_ns) | {"seconds": found.end_ns / 1e9}


def _shared(context: Context, shared: int, own: tuple[int, int], rate: float, count: int, output: int = 16) -> Trace:
    """Prompts that begin with the same `shared` tokens (0: nothing)."""
    from traces import generate

    spec: dict[str, Any] = {
        "kind": "synthetic",
        "name": "shared prefix",
        "num_requests": count,
        "seed": context.seed,
        "arrival": {"process": "poisson", "rate_per_s": rate},
        "prompt_tokens": {"dist": "uniform", "low": own[0], "high": own[1]},
        "output_tokens": output,
    }
    if shared:
        spec["prefix"] = {"num_prefixes": 1, "tokens": shared, "share": 1.0}
    return generate(spec)


def _support(context: Context) -> dict[str, Any]:
    """A28: a support bot on an A100, a request every two seconds."""
    trace = _shared(context, SUPPORT_TOKENS, (50, 300), 0.5, 60)
    found: dict[str, Any] = {}
    for cache in (False, True):
        from engine.core.presets import SchedulerConfig

        step_time, room = _machine("qwen2.5-14b", "a100-80g")
        config = SchedulerConfig(num_blocks=room // 16, max_model_len=8192, enable_prefix_caching=cache)
        _, tables = context.simulate(f"support-{'on' if cache else 'off'}", trace, config, step_time)
        first = (np.asarray(tables.requests["first_token_ns"]) - np.asarray(tables.requests["arrival_ns"])) / 1e9
        found["on" if cache else "off"] = {
            "first_s": float(first[0]),
            "later_p95_s": float(np.quantile(first[1:], 0.95)),
            "later_median_s": float(np.median(first[1:])),
        }
    return found


def _system(context: Context) -> dict[str, Any]:
    """A22, A23: 4,000 tokens in common at 100 requests a second."""
    from sim.hardware import device
    from sim.models import preset

    spec, card = preset("llama-3-8b"), device("a100-80g")
    flops = spec.gemm_flops_per_token() * SYSTEM_TOKENS * SYSTEM_RATE
    trace = _shared(context, SYSTEM_TOKENS, (20, 200), SYSTEM_RATE, 600)
    found: dict[str, Any] = {"flops_per_s": flops, "devices": flops / card.peak_flops}
    for cache in (False, True):
        name = f"system-{'on' if cache else 'off'}"
        found["on" if cache else "off"] = _serve(
            context, name, trace, "llama-3-8b", "a100-80g", enable_prefix_caching=cache
        )
    crowd = _shared(context, 0, (500, 1500), 60.0, 900)
    found["queue"] = _serve(context, "queue-alone", crowd, "llama-3-8b", "a100-80g", enable_prefix_caching=True)
    return found


def _unique(context: Context) -> dict[str, Any]:
    """A26: nothing in common, more prompts than the cache holds."""
    trace = _shared(context, 0, (500, 1500), 30.0, 1500, output=64)
    return {
        name: _serve(
            context, f"unique-{name}", trace, "llama-3-8b", "a100-40g", slots=60_000, enable_prefix_caching=name == "on"
        )
        for name in ("off", "on")
    }


def _users(context: Context) -> dict[str, Any]:
    """B06: users who ask at once behind one prefix, as one tenant and each as its own: blocks at the peak, and hits."""
    from engine.core.presets import SchedulerConfig
    from traces import make_trace

    shared = PREFIX_TOKENS
    own = 100
    config = SchedulerConfig(
        num_blocks=NUM_USERS * 300, max_model_len=8192, max_num_batched_tokens=8192, enable_prefix_caching=True
    )
    step_time, _ = _machine("llama-3-8b", "a100-80g")
    found: dict[str, Any] = {"users": NUM_USERS, "shared_tokens": shared, "own_tokens": own}
    for name, tenants in (("one tenant", np.zeros(NUM_USERS)), ("a tenant each", np.arange(NUM_USERS))):
        trace = make_trace(
            np.zeros(NUM_USERS, dtype=np.int64),
            np.full(NUM_USERS, shared + own),
            np.full(NUM_USERS, 200),
            spans=(
                np.arange(0, 2 * NUM_USERS + 1, 2),
                np.stack([np.zeros(NUM_USERS, dtype=np.int64), 1 + np.arange(NUM_USERS)], axis=1).ravel(),
                np.tile([shared, own], NUM_USERS),
            ),
            tenant=tenants.astype(np.int64),
        )
        _, tables = context.simulate(f"users-{name.replace(' ', '-')}", trace, config, step_time)
        taken = np.asarray(tables.steps["held"]) + np.asarray(tables.steps["tail"])
        found[name] = {
            "peak_blocks": int(taken.max()) // config.block_size,
            "hit_share": _figures(tables, 1)["hit_share"],
        }
    return found


def _lookup() -> dict[str, float]:
    """A25: us to hash a prompt of 4,096 tokens in blocks of 16 and look it up in vain."""
    import time

    from engine.core import TokenIdentity
    from engine.core.index import HashIndex

    tokens = np.random.default_rng(0).integers(0, 32000, 4096).tolist()
    index = HashIndex()
    times = []
    for _ in range(30):
        begin = time.perf_counter_ns()
        identity = TokenIdentity(tokens, 16)
        identity.key(255)
        index.match(identity.key, 256)
        times.append(time.perf_counter_ns() - begin)
    return {"us": float(np.percentile(times, 25)) / 1e3, "tokens": 4096.0}


def _floor_rule() -> list[dict[str, int]]:
    """C30: a common prefix of n tokens can hit floor(n / B) B of them, whatever the cache; none below a block."""
    found = []
    for size in (16, 528, 784, 2096):
        for shared in (240, 552, 561, 979):
            trace = documents_of(shared)
            reached = replay(trace, max(64, -(-16384 // size)) * size, size)
            found.append({"block_size": size, "shared_tokens": shared, "hit_tokens": reached.hit_tokens})
    return found


def documents_of(shared: int) -> Trace:
    """Two prompts with `shared` tokens in common, and 3,000 of their own each."""
    from traces import make_trace

    return make_trace(
        [0, 1], [shared + 3000] * 2, [1, 1], spans=([0, 2, 4], [1, 2, 1, 3], [shared, 3000, shared, 3000])
    )


# ---- rows of the ledger ----


def _a21() -> Settled:
    from engine.core.presets import PRESETS

    names = [name for name in PRESETS if name.startswith("vllm-") and name != "vllm-v1"]
    on = [name for name in names if PRESETS[name].get("enable_prefix_caching", True)]
    off = [name for name in names if name not in on]
    return Settled(
        "A21",
        "reproduced-only-if" if off else "does-not-follow",
        f"on in {', '.join(on)}" + (f"; off in {', '.join(off)}" if off else ""),
        condition="vLLM before V1 (0.8.0)",
        numbers={"presets_on": len(on), "presets_off": len(off)},
    )


def _a22(system: Mapping[str, Any]) -> Settled:
    off, on = system["off"], system["on"]
    tokens = SYSTEM_TOKENS * SYSTEM_RATE
    return Settled(
        "A22",
        "reproduced" if off["hit_share"] == 0 and system["devices"] > 1 else "does-not-follow",
        f"{tokens:,} tokens/s of prefill, {system['flops_per_s'] / 1e15:.1f} PFLOP/s: {system['devices']:.0f} A100 at "
        f"their peak; simulated mean TTFT {off['ttft_mean_s']:.1f} s without the cache, {on['ttft_mean_s']:.2f} s with",
        numbers={"devices": system["devices"], "ttft_off_s": off["ttft_mean_s"], "ttft_on_s": on["ttft_mean_s"]},
    )


def _a23(system: Mapping[str, Any]) -> Settled:
    queue = system["queue"]
    also = queue["ttft_p99_s"] > 1.0
    return Settled(
        "A23",
        "reproduced-only-if" if also else "reproduced",
        f"p99 of TTFT is {system['off']['ttft_p99_s']:.1f} s without the cache, and {queue['ttft_p99_s']:.1f} s on a "
        "load that shares nothing and merely queues",
        condition="queueing is ruled out: compare time in queue with time in prefill",
        numbers={"without_cache_s": system["off"]["ttft_p99_s"], "queue_alone_s": queue["ttft_p99_s"]},
    )


def _a24(curves: Sequence[Mapping[str, Any]], served: Sequence[Mapping[str, Any]]) -> Settled:
    by: dict[tuple[str, int], dict[str, float]] = {}
    for row in curves:
        if row["policy"] == "lru":
            by.setdefault((row["workload"], row["capacity_tokens"]), {})[row["index"]] = row["hit_share"]
    pairs = [(cell["hash"], cell["radix"]) for cell in by.values() if len(cell) == 2]
    for order in ORDERS:
        pair = {row["cache"]: row["hit_share"] for row in served if row["order"] == order}
        pairs.append((pair["hash"], pair["radix"]))
    same = sum(a == b for a, b in pairs)
    return Settled(
        "A24",
        "does-not-follow" if same == len(pairs) else "open",
        f"vLLM's decisions are repeated with a dictionary of chained hashes; a radix tree hits the same in {same} of "
        f"{len(pairs)} runs",
        condition="it is SGLang that has the radix tree",
        numbers={"runs": len(pairs), "same": same},
    )


def _a25(lookup: Mapping[str, float]) -> Settled:
    ms = lookup["us"] / 1e3
    return Settled(
        "A25",
        "reproduced" if ms >= CLAIMED_LOOKUP_MS else "does-not-follow",
        f"{ms:.2f} ms to hash 4,096 tokens in 256 blocks and find none of them (measured here)",
        condition="a prompt of "
        f"{lookup['tokens'] * CLAIMED_LOOKUP_MS / ms:,.0f} tokens, at this machine's speed, for 2 ms",
        numbers={"ms": ms},
    )


def _a26(unique: Mapping[str, Mapping[str, float]]) -> Settled:
    off, on = unique["off"], unique["on"]
    ratio = on["requests_per_s"] / off["requests_per_s"]
    return Settled(
        "A26",
        "does-not-follow" if ratio >= 0.99 else "reproduced",
        f"{ratio:.3f} times the rate with the cache on, {on['preemptions']} preemptions against {off['preemptions']}",
        condition="cached blocks would have to be kept from requests; they are free, and given out when needed",
        numbers={"rate_ratio": ratio, "preemptions_on": on["preemptions"], "preemptions_off": off["preemptions"]},
    )


def _a28(support: Mapping[str, Mapping[str, float]]) -> Settled:
    off, on = support["off"], support["on"]
    fell = on["first_s"] / on["later_p95_s"]
    claimed = CLAIMED_TTFT_S[0] / CLAIMED_TTFT_S[1]
    return Settled(
        "A28",
        "reproduced" if fell >= claimed / 2 else "does-not-follow",
        f"first {on['first_s'] * 1e3:.0f} ms, then p95 {on['later_p95_s'] * 1e3:.0f} ms (predicted, Qwen2.5-14B on an "
        f"A100); without the cache p95 {off['later_p95_s'] * 1e3:.0f} ms",
        numbers={"first_s": on["first_s"], "later_p95_s": on["later_p95_s"], "without_p95_s": off["later_p95_s"]},
    )


def _b06(users: Mapping[str, Any]) -> Settled:
    one, each = users["one tenant"], users["a tenant each"]
    shared, blocks = users["shared_tokens"], users["shared_tokens"] // 16
    # What the prefix takes beyond what the users' own tokens take.
    saved = each["peak_blocks"] - one["peak_blocks"]
    return Settled(
        "B06",
        "reproduced-only-if" if saved == (users["users"] - 1) * blocks else "does-not-follow",
        f"{users['users']} users with {shared:,} tokens in common take {one['peak_blocks']:,} blocks at the peak as "
        f"one tenant and {each['peak_blocks']:,} as a tenant each: {saved / blocks:g} copies of the prefix less; hits "
        f"{one['hit_share']:.1%} and {each['hit_share']:.1%}",
        condition=f"the prefix is the very beginning of all prompts, token by token, and they have one tenant and one "
        f"adapter; whole blocks only, here {blocks} of {shared / 16:g}",
        numbers={"one_tenant": one, "tenant_each": each, "copies_saved": saved / blocks},
    )
