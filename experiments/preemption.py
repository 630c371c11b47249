"""What becomes of requests that lose their blocks: recompute, swap, the cheaper of both, or reject; over block size and
link. And what of "swapping brings 60 tokens/s down to 4" can be true.

The model is of the shape of the PagedAttention paper's 13B (40 layers, 40 KV heads of 128: 800 KiB a token) on an A100
with 40 GB. Step times are a roofline's and copies follow from the link, so all times are predicted, not measured; what
is decided (who is preempted, what is moved) is the core's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.experiment import Column, Context, ExperimentResult, Settled, Table
from experiments.lengths import TRACES, named_trace
from experiments.metrics import Tables

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from sim.moves import MoveTime
    from traces import Trace

__all__ = ["run", "seconds_moving"]

MODEL, DEVICE = "llama-2-13b", "a100-40g"
SHAREGPT = "sharegpt-llama-3.1-8b-300-sps10"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SERVED_SIZES = (8, 16, 32, 64)
LINKS = {"PCIe 3 x16": 15.75e9, "PCIe 4 x16": 31.5e9, "PCIe 5 x16": 63.0e9}
"""Bytes per second and direction, after line coding."""
MODES = ("recompute", "swap", "auto", "reject")
CLAIMED = (60.0, 4.0)
"""Tokens per second and request before and during the swapping, as the article has it."""
POOL_TOKENS = 16384
SWAP_GIB = 4
RATE = 1.5
"""Requests per second before the night."""
CROWD, GATE = 400, 32
"""Requests of the night, and how many of them a gateway lets in at a time."""
_GIB = 1 << 30


def run(context: Context) -> ExperimentResult:
    """Costs of one preemption, served runs under pressure, the election night, and rows A29, A30 and A32 to A37."""
    costs = context.part("costs", _costs)
    notes: list[str] = []
    trace = _trace(context, notes)
    served = _served(context, trace)
    night = _night(context)
    bound = context.part("bound", _bound)
    claims = [
        _a29(night),
        _a30(bound),
        _a32(night, bound),
        _a33(night),
        _a34(night),
        _a35(night),
        _a36(night),
        _a37(night),
    ]
    usual = [
        c for c in costs if 16 <= c["block_size"] <= 64 and c["link"] == "PCIe 4 x16" and c["copies"] != "gathered"
    ]
    ratios = [c["recompute_ms"] / c["swap_ms"] for c in usual]
    notes.append(
        f"On PCIe 4 with copies a layer at a time, recompute takes {min(ratios):.2f} to {max(ratios):.2f} times as "
        "long as a swap at blocks of 16 to 64; the PagedAttention paper finds them comparable there (its section 7.3)."
    )
    summary = {"costs": costs, "served": served, "night": night, "bound": bound}
    tables = [_cost_table(costs), _served_table(served), _night_table(night)]
    return ExperimentResult(tables, {"preemption": _picture(costs, served, night)}, summary, claims, notes)


# ---- what is computed ----


def _shape(block_size: int, bandwidth: float, per_block: bool) -> tuple[Any, MoveTime]:
    """(step time, moves) of the model. `per_block`: each block is copied layer by layer, K and V apart, as vLLM V0."""
    from sim.hardware import device
    from sim.models import preset
    from sim.moves import moves_of_device
    from sim.steptime import roofline

    spec, card = preset(MODEL), device(DEVICE)
    pieces = 2 * spec.layers if per_block else 1
    moves = moves_of_device(replace(card, pcie_bandwidth=bandwidth), spec.kv_bytes_per_token() * block_size, pieces)
    return roofline(spec, card), moves


def _costs() -> list[dict[str, Any]]:
    """One sequence of 1,024 tokens: computed again, or moved out and in, in ms."""
    from sim.moves import cost_model

    found = []
    tokens = 1024
    for link, bandwidth in LINKS.items():
        for per_block in (True, False):
            for size in SIZES:
                step_time, moves = _shape(size, bandwidth, per_block)
                model = cost_model(step_time, moves)
                found.append(
                    {
                        "link": link,
                        "copies": "a layer at a time" if per_block else "gathered",
                        "block_size": size,
                        "recompute_ms": model.recompute_ns(tokens) / 1e6,
                        "swap_ms": model.swap_ns(-(-tokens // size)) / 1e6,
                    }
                )
    return found


def _trace(context: Context, notes: list[str]) -> Trace:
    """Chat lengths, all there at once."""
    if context.has(TRACES[SHAREGPT]):
        return named_trace(context, SHAREGPT).head(200)
    notes.append(f"Lengths are drawn, since there is no {TRACES[SHAREGPT]} in the shared data.")
    return _drawn(200, context.seed, {"process": "poisson", "rate_per_s": 1e6})


def _drawn(count: int, seed: int, arrival: dict[str, Any]) -> Trace:
    """Chats with lengths as in ShareGPT: lognormal, answers longer than questions."""
    from traces import generate

    return generate(
        {
            "kind": "synthetic",
            "name": "chat",
            "num_requests": count,
            "seed": seed,
            "arrival": arrival,
            "prompt_tokens": {"dist": "lognormal", "mean": 190, "sigma": 1.0, "low": 8, "high": 1024},
            "output_tokens": {"dist": "lognormal", "mean": 300, "sigma": 0.7, "low": 8, "high": 1024},
        }
    )


def _options(size: int, mode: str, **more: Any) -> SchedulerConfig:
    """The pool of POOL_TOKENS tokens, and a host of SWAP_GIB where swaps are asked for."""
    from engine.core.cost import LinearCost
    from engine.core.presets import SchedulerConfig
    from sim.models import preset

    block_bytes = preset(MODEL).kv_bytes_per_token() * size
    swaps = mode in ("swap", "auto", "swap-groups")
    options: dict[str, Any] = {
        "num_blocks": POOL_TOKENS // size,
        "max_model_len": 4096,
        "block_size": size,
        "enable_prefix_caching": False,
        "preemption_mode": mode,
        "num_host_blocks": SWAP_GIB * _GIB // block_bytes if swaps else 0,
        "cost_model": LinearCost() if mode == "auto" else None,  # the link's own takes its place in _serve
    }
    return SchedulerConfig(**{**options, **more})


def seconds_moving(tables: Tables, moves: MoveTime) -> float:
    """Seconds that steps spend in moving blocks between the tiers."""
    steps = tables.steps
    out = np.asarray(steps["swap_out_blocks"])
    back = np.asarray(steps["swap_in_blocks"])
    ns = sum(map(moves.store_ns, out.tolist())) + sum(map(moves.load_ns, back.tolist()))
    return ns / 1e9


def _figures(tables: Tables, end_ns: int, moves: MoveTime) -> dict[str, Any]:
    requests, steps = tables.requests, tables.steps
    done = np.array([outcome in ("length", "stop") for outcome in requests["outcome"]])
    output = np.asarray(requests["output_tokens"])
    lasted = np.asarray(requests["finish_ns"]) - np.asarray(requests["first_token_ns"])
    speed = (output - 1)[done] / np.maximum(lasted[done], 1) * 1e9
    many = (output > 1)[done]
    return {
        "tokens_per_s": int(output[done].sum()) / (end_ns / 1e9),
        "tokens_per_s_per_request": float(np.median(speed[many])) if many.any() else 0.0,
        "slowest_tenth": float(np.quantile(speed[many], 0.1)) if many.any() else 0.0,
        "completed": int(done.sum()),
        "given_up": int(sum(outcome == "no-memory" for outcome in requests["outcome"])),
        "preemptions": int(np.asarray(steps["preempted"]).sum()),
        "blocks_swapped": int(np.asarray(steps["swap_out_blocks"]).sum()),
        "moving_share": seconds_moving(tables, moves) / (end_ns / 1e9),
        "duration_s": end_ns / 1e9,
    }


def _serve(
    context: Context, name: str, trace: Trace, options: SchedulerConfig, link: float, per_block: bool, **more: Any
) -> dict[str, Any]:
    from sim.moves import cost_model

    step_time, moves = _shape(options.block_size, link, per_block)
    if options.preemption_mode == "auto":
        options = replace(options, cost_model=cost_model(step_time, moves))
    found, tables = context.simulate(name, trace, options, step_time, moves=moves, **more)
    return _figures(tables, found.end_ns, moves)


def _served(context: Context, trace: Trace) -> list[dict[str, Any]]:
    """All modes over block sizes on PCIe 4, copies a layer at a time; and over links and ways to copy at 16."""
    cells = [(size, "PCIe 4 x16", True) for size in SERVED_SIZES]
    cells += [(16, link, per_block) for link in LINKS for per_block in (True, False)]
    found = []
    for size, link, per_block in context.track(list(dict.fromkeys(cells)), "served runs"):
        for mode in MODES:
            name = f"served-{mode}-{size}-{link.replace(' ', '')}-{'layers' if per_block else 'gathered'}"
            measure = partial(_serve, context, name, trace, _options(size, mode), LINKS[link], per_block)
            figures = context.part(name, measure, pool=POOL_TOKENS)
            copies = "a layer at a time" if per_block else "gathered"
            found.append({"mode": mode, "block_size": size, "link": link, "copies": copies, **figures})
    return found


def _night(context: Context) -> dict[str, dict[str, Any]]:
    """Ten times the users from one second to the next: what each way to lose blocks makes of it."""
    before = _drawn(60, context.seed, {"process": "poisson", "rate_per_s": RATE})
    crowd = _drawn(CROWD, context.seed + 1, {"process": "poisson", "rate_per_s": 10 * RATE})
    pcie4 = "PCIe 4 x16"
    runs: dict[str, tuple[Trace, dict[str, Any], bool]] = {
        "quiet": (before, {"mode": "recompute"}, False),
        "recompute, 256 sequences": (crowd, {"mode": "recompute"}, False),
        "recompute, 128 sequences": (crowd, {"mode": "recompute", "max_num_seqs": 128}, False),
        "recompute, 32 sequences": (crowd, {"mode": "recompute", "max_num_seqs": 32}, False),
        "vllm v0": (crowd, {"mode": "swap-groups"}, True),
        "vllm v0, no swap space": (crowd, {"mode": "swap-groups", "num_host_blocks": 0}, True),
        "swap, a layer at a time": (crowd, {"mode": "swap"}, True),
        "swap, 128 sequences": (crowd, {"mode": "swap", "max_num_seqs": 128}, True),
        "swap, 32 sequences": (crowd, {"mode": "swap", "max_num_seqs": 32}, True),
        "swap, gathered": (crowd, {"mode": "swap"}, False),
        "reject": (crowd, {"mode": "reject"}, False),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (trace, options, per_block) in context.track(list(runs.items()), "election night"):
        more = dict(options)
        config = _options(16, more.pop("mode"), **more)
        part = f"night-{name.replace(' ', '-').replace(',', '')}"
        measure = partial(_serve, context, part, trace, config, LINKS[pcie4], per_block)
        found[name] = context.part(part, measure, pool=POOL_TOKENS)
    measure = partial(_gateway, context, f"night-gateway-{GATE}", GATE, LINKS[pcie4])
    found[f"gateway, {GATE} at once"] = context.part(f"night-gateway-{GATE}", measure, pool=POOL_TOKENS)
    return found


def _gateway(context: Context, name: str, limit: int, link: float) -> dict[str, Any]:
    """The same crowd, of which a gateway lets `limit` into the engine at a time: the next when one is answered."""
    crowd = _drawn(CROWD, context.seed + 1, {"process": "closed-loop", "concurrency": limit})
    return _serve(context, name, crowd, _options(16, "recompute"), link, False)


def _bound() -> dict[str, Any]:
    """What 4 tokens a second need: bytes and copies in a step of 250 ms; and what the swap space holds."""
    from sim.models import preset
    from sim.moves import COPY_NS, LINK_EFFICIENCY

    spec = preset(MODEL)
    step_s = 1 / CLAIMED[1] - 1 / CLAIMED[0]
    bandwidth = LINKS["PCIe 4 x16"] * LINK_EFFICIENCY
    token = spec.kv_bytes_per_token()
    num_bytes = step_s * bandwidth
    llama7 = preset("llama-2-7b")
    return {
        "extra_step_s": step_s,
        "bytes_per_step": num_bytes,
        "tokens_per_step": num_bytes / token,
        "copies_per_step": step_s * 1e9 / COPY_NS,
        "blocks_per_step_a_layer_at_a_time": step_s * 1e9 / (COPY_NS * 2 * spec.layers + 16 * token / bandwidth * 1e9),
        "swap_blocks_of_7b": SWAP_GIB * _GIB // (llama7.kv_bytes_per_token() * 16),
        "blocks_of_50_sequences_of_600": 50 * -(-600 // 16),
    }


# ---- rows of the ledger ----


def _a29(night: Mapping[str, Mapping[str, Any]]) -> Settled:
    plain = night["vllm v0"]
    moved = plain["blocks_swapped"]
    status = "does-not-follow" if plain["preemptions"] and not moved else "reproduced-only-if"
    return Settled(
        "A29",
        status,
        f"{plain['preemptions']} preemptions of single sequences under V0's rule moved {moved} blocks",
        condition="V0 swaps only requests with several sequences (n, best_of, beams); V1 always recomputes",
        numbers={"preemptions": plain["preemptions"], "blocks_swapped": moved},
    )


def _a30(bound: Mapping[str, Any]) -> Settled:
    return Settled(
        "A30",
        "reproduced-only-if",
        f"{SWAP_GIB} GiB hold {bound['swap_blocks_of_7b']} blocks of a 7B, and 50 sequences of 600 tokens take "
        f"{bound['blocks_of_50_sequences_of_600']}",
        condition="vLLM up to 0.17, per GPU; the option is gone in 0.19, and offloading is off by default",
        numbers={name: bound[name] for name in ("swap_blocks_of_7b", "blocks_of_50_sequences_of_600")},
    )


def _a32(night: Mapping[str, Mapping[str, Any]], bound: Mapping[str, Any]) -> Settled:
    quiet, storm = night["quiet"], night["swap, a layer at a time"]
    before, during = quiet["tokens_per_s_per_request"], storm["slowest_tenth"]
    ratio, wanted = before / max(during, 1e-9), CLAIMED[0] / CLAIMED[1]
    numbers = {"before": before, "slowest_tenth": during, "ratio": ratio, "moving_share": storm["moving_share"]}
    numbers |= {name: bound[name] for name in ("bytes_per_step", "tokens_per_step", "copies_per_step")}
    follows = ratio >= wanted
    return Settled(
        "A32",
        "reproduced-only-if" if follows else "does-not-follow",
        f"{before:.0f} tokens/s in quiet, {during:.1f} for the slowest tenth in the storm; 4 take "
        f"{bound['bytes_per_step'] / 1e9:.1f} GB or {bound['copies_per_step']:,.0f} copies in every step",
        condition="every step moves "
        f"{bound['tokens_per_step']:,.0f} tokens' worth of blocks, or copies block by block and layer by layer",
        numbers=numbers,
    )


def _a33(night: Mapping[str, Mapping[str, Any]]) -> Settled:
    recompute, swap = night["recompute, 256 sequences"], night["swap, a layer at a time"]
    silent = recompute["preemptions"] > 0 and recompute["blocks_swapped"] == 0
    return Settled(
        "A33",
        "reproduced-only-if" if silent and swap["blocks_swapped"] else "open",
        f"under recompute {recompute['preemptions']} preemptions and no block swapped; under swap "
        f"{swap['preemptions']} and {swap['blocks_swapped']:,}",
        condition="preemption by swap, which released versions use for groups at most, and V1 never; watch preemptions",
        numbers={"preemptions_recompute": recompute["preemptions"], "preemptions_swap": swap["preemptions"]},
    )


def _a34(night: Mapping[str, Mapping[str, Any]]) -> Settled:
    layers, gathered = night["swap, a layer at a time"], night["swap, gathered"]
    busy = 1 - layers["moving_share"]
    return Settled(
        "A34",
        "reproduced" if busy <= 0.25 else "does-not-follow",
        f"the GPU computes {busy:.0%} of the time with copies a layer at a time, "
        f"{1 - gathered['moving_share']:.0%} with gathered ones",
        condition="copies do not overlap with computing; 20 % takes four times as long in copies as in steps",
        numbers={"computing_layers": busy, "computing_gathered": 1 - gathered["moving_share"]},
    )


def _a35(night: Mapping[str, Mapping[str, Any]]) -> Settled:
    wide, half, few = (night[f"swap, {name}"] for name in ("a layer at a time", "128 sequences", "32 sequences"))
    quiet = night["quiet"]["tokens_per_s_per_request"]
    back = half["slowest_tenth"] >= 0.9 * quiet
    return Settled(
        "A35",
        "reproduced" if back else "reproduced-only-if",
        f"slowest tenth: {wide['slowest_tenth']:.1f} tokens/s with 256 sequences, {half['slowest_tenth']:.1f} with "
        f"128, {few['slowest_tenth']:.1f} with 32; {quiet:.0f} in quiet",
        condition="the limit has to be below what the pool holds; above it, it changes nothing",
        numbers={
            "limit_256": wide["slowest_tenth"],
            "limit_128": half["slowest_tenth"],
            "limit_32": few["slowest_tenth"],
        },
    )


def _a36(night: Mapping[str, Mapping[str, Any]]) -> Settled:
    without, reject = night["vllm v0, no swap space"], night["reject"]
    return Settled(
        "A36",
        "does-not-follow" if without["given_up"] == 0 else "reproduced",
        f"without swap space {without['given_up']} requests are given up ({without['preemptions']} are recomputed); "
        f"a mode that rejects gives up {reject['given_up']}",
        condition="in V0 a group that cannot be swapped ended the whole engine; rejecting is another rule",
        numbers={"given_up": without["given_up"], "given_up_by_reject": reject["given_up"]},
    )


def _a37(night: Mapping[str, Mapping[str, Any]]) -> Settled:
    inside, gate = night["recompute, 256 sequences"], night[f"gateway, {GATE} at once"]
    better = gate["preemptions"] < inside["preemptions"] and gate["tokens_per_s"] >= 0.95 * inside["tokens_per_s"]
    return Settled(
        "A37",
        "reproduced" if better else "reproduced-only-if",
        f"{inside['preemptions']} preemptions and {inside['tokens_per_s']:.0f} tokens/s with the queue in the engine, "
        f"{gate['preemptions']} and {gate['tokens_per_s']:.0f} behind a gateway",
        condition="the gateway's limit fits the pool: too low wastes it, too high preempts",
        numbers={"preemptions_engine": inside["preemptions"], "preemptions_gateway": gate["preemptions"]},
    )


# ---- tables and picture ----

_BARS = ("#0072B2", "#D55E00", "#009E73", "#999999")


def _cost_table(costs: list[dict[str, Any]]) -> Table:
    columns = [
        Column("link"),
        Column("copies"),
        Column("block_size", "block size"),
        Column("recompute_ms", "recompute ms", ".1f"),
        Column("swap_ms", "swap ms", ".1f"),
        Column("ratio", "recompute / swap", ".2f"),
    ]
    rows = [[cost[column.name] for column in columns[:-1]] + [cost["recompute_ms"] / cost["swap_ms"]] for cost in costs]
    return Table("costs", "One sequence of 1,024 tokens, predicted", columns, rows, shown=False)


def _served_table(served: list[dict[str, Any]]) -> Table:
    columns = [
        Column("mode"),
        Column("block_size", "block size"),
        Column("link"),
        Column("copies"),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("slowest_tenth", "slowest tenth, tokens/s", ".1f"),
        Column("preemptions"),
        Column("blocks_swapped", "blocks swapped"),
        Column("moving_share", "time in copies", ".1%"),
        Column("given_up", "given up"),
    ]
    return Table("served", "200 requests at once", columns, [[row[c.name] for c in columns] for row in served])


def _night_table(night: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [
        Column("run"),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("tokens_per_s_per_request", "median, tokens/s", ".1f"),
        Column("slowest_tenth", "slowest tenth, tokens/s", ".1f"),
        Column("preemptions"),
        Column("blocks_swapped", "blocks swapped"),
        Column("moving_share", "time in copies", ".1%"),
        Column("completed"),
        Column("given_up", "given up"),
    ]
    rows = [[name, *(figures[c.name] for c in columns[1:])] for name, figures in night.items()]
    return Table("night", "Ten times the users", columns, rows)


def _picture(
    costs: list[dict[str, Any]], served: list[dict[str, Any]], night: Mapping[str, Mapping[str, Any]]
) -> bytes:
    import matplotlib.pyplot as plt

    from experiments import plots

    with plt.rc_context(plots.STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4), constrained_layout=True)
        colours = dict(zip(LINKS, ("#D55E00", "#0072B2", "#009E73"), strict=True))
        for link, colour in colours.items():
            for copies, style in (("a layer at a time", "-"), ("gathered", "--")):
                rows = [c for c in costs if c["link"] == link and c["copies"] == copies]
                left.plot(
                    [c["block_size"] for c in rows],
                    [c["swap_ms"] for c in rows],
                    style,
                    color=colour,
                    label=f"swap, {link}, {copies}",
                )
        left.axhline(costs[0]["recompute_ms"], color="black", linewidth=1.6, label="recompute")
        left.set_xscale("log", base=2)
        left.set_yscale("log")
        left.set_xticks(SIZES, [str(size) for size in SIZES])
        left.set_xlabel("block size (tokens)")
        left.set_ylabel("one sequence of 1,024 tokens (ms)")
        left.set_title("What a preemption costs (predicted)")
        left.legend(fontsize=7)
        width = 0.2
        for i, mode in enumerate(MODES):
            rows = [
                r
                for r in served
                if r["mode"] == mode and r["link"] == "PCIe 4 x16" and r["copies"] == "a layer at a time"
            ]
            rows.sort(key=lambda r: r["block_size"])
            at = np.arange(len(rows)) + (i - 1.5) * width
            middle.bar(at, [r["tokens_per_s"] for r in rows], width, label=mode, color=_BARS[i])
        middle.set_xticks(range(len(SERVED_SIZES)), [str(size) for size in SERVED_SIZES])
        middle.set_xlabel("block size (tokens)")
        middle.set_ylabel("output tokens/s of completed requests")
        middle.set_title("200 chats at once, PCIe 4, copies a layer at a time")
        middle.set_ylim(0, 1.2 * max(row["tokens_per_s"] for row in served))
        middle.legend(fontsize=8, ncols=4, loc="upper center")
        names = list(night)
        values = [night[name]["slowest_tenth"] for name in names]
        rows_at = np.arange(len(names))
        right.barh(rows_at, values, color="#56B4E9")
        for y, name in enumerate(names):
            note = f" {values[y]:.1f}"
            if night[name]["given_up"]:
                note += f", {night[name]['given_up']} given up"
            right.text(values[y], y, note, va="center", fontsize=7)
        right.axvline(CLAIMED[1], color="#D55E00", linestyle=":", label="4 tokens/s, as claimed")
        right.set_yticks(rows_at, names, fontsize=8)
        right.invert_yaxis()
        right.set_xlim(0, max(values) * 1.5)
        right.set_xlabel("tokens/s of the slowest tenth of requests")
        right.set_title("Ten times the users")
        right.legend(fontsize=7, loc="lower right")
        return plots.to_png(figure)
