"""What happens where memory runs out, and how to see it: reported cases (see scenarios.py), and one crowd of chats
under options that make another limit bind each.

Times are rooflines', so that only those within one case can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import scenarios
from experiments.experiment import Column, Context, ExperimentResult, Settled, Table
from experiments.limits import REASONS, limit_line
from experiments.metrics import Tables, expand_steps, summarize

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from sim.moves import MoveTime
    from sim.steptime import StepTime
    from traces import Trace

__all__ = ["run"]

CLIENTS = (4, 5, 6, 7, 8, 9, 10, 12)
REPORTED_CLIFF = {6: 107.0, 7: 114.0, 8: 440.0, 12: 423.0}
"""TPOT in ms by clients (vllm-ascend issue 5859)."""
ADMISSIONS: Mapping[str, Mapping[str, Any]] = {
    "first chunk": {},
    "first chunk, cached": {"enable_prefix_caching": True},
    "whole prompt": {"scheduler_reserve_full_isl": True},
    "full length": {"admission_reserve": "max_tokens"},
    "watermark 10 %": {"watermark": 0.1},
}
REPORTED_DRAIN = ((0, 247), (5, 241), (10, 233), (15, 226), (20, 219))
"""Running requests by seconds since the first line of the log (vLLM issue 6737)."""
REPORTED_EVICT = {
    "output_tokens_per_s": (161.0, 95.7),
    "tpot_p99_ms": (122.0, 1111.0),
    "e2e_p99_s": (150.0, 563.0),
    "ttft_p50_s": (35.8, 27.1),
}
"""(GUARANTEED_NO_EVICT, MAX_UTILIZATION) of TensorRT-LLM issue 16827; 574.7 and 576.1 tokens/s off pressure."""
OUTPUTS = (1, 16, 64, 128, 256, 512, 1024)
HOST_FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0)
"""B09: the host's part of a step, as a multiple of the device's in a usual decode step."""
CLAIMED_BUSY = 0.40


def run(context: Context) -> ExperimentResult:
    """Cliff, gate, drain, eviction, closed loop and limits, and row B09."""
    cliff: dict[str, dict[str, Any]] = {}
    for name, options in context.track(list(ADMISSIONS.items()), "cliff"):
        cliff[name] = context.part(f"cliff-{name.replace(' ', '-')}", partial(_cliff, context, name, dict(options)))
    drain = context.part("drain", partial(_drain, context))
    evict = {
        name: context.part(f"evict-{name}", partial(_evict, context, policy, clients))
        for policy in ("no-evict", "max-utilization")
        for name, clients in ((policy, 32), (f"{policy}, off pressure", 16))
    }
    closed = context.part("closed-loop", partial(_closed_loop, context))
    limits = context.part("limits", partial(_limits, context))
    busy = context.part("busy", partial(_busy, context))
    gate = {name: cliff[name]["12"]["duration_s"] for name in ("first chunk", "whole prompt")}
    notes = [
        f"Twelve clients end after {gate['whole prompt']:,.0f} s where the whole prompt has to fit, and after "
        f"{gate['first chunk']:,.0f} s where its first chunk is enough: both end.",
        "In a closed loop TTFT falls as outputs grow, since prompts come further apart: with outputs of 1 token all "
        "clients are always in prefill. It says nothing of an open loop.",
    ]
    summary = {
        "cliff": cliff,
        "drain": drain,
        "evict": evict,
        "closed_loop": closed,
        "limits": limits,
        "busy": busy,
        "makespan_s": gate,
    }
    tables = [
        _cliff_table(cliff),
        _drain_table(drain),
        _evict_table(evict),
        _closed_table(closed),
        _limits_table(
            "limits",
            "One crowd of chats: how long the head of the queue waits, by reason, and the device is busy",
            limits,
        ),
        _limits_table("busy", "The queue for memory, and a device that waits, too: the same shares", busy),
    ]
    return ExperimentResult(
        tables, {"capacity": _picture(cliff, drain, evict, closed, limits)}, summary, [_b09(busy)], notes
    )


# ---- what is computed ----


def _served(
    context: Context, name: str, trace: Trace, options: SchedulerConfig, step_time: StepTime, **more: Any
) -> tuple[Tables, dict[str, Any]]:
    _, tables = context.simulate(name, trace, options, step_time, **more)
    return tables, summarize(tables, options.num_blocks)


def _cliff(context: Context, name: str, options: dict[str, Any]) -> dict[str, Any]:
    step_time = scenarios.step_time("llama-3.1-70b", "h100", 8)
    config = scenarios.cliff(**options)
    found = {}
    for clients in CLIENTS:
        run = f"cliff, {name}, {clients}"
        tables, summary = _served(context, run, scenarios.cliff_load(clients), config, step_time)
        steps = expand_steps(tables)
        lasted = np.diff(steps["start_ns"], append=steps["end_ns"][-1:]).astype(np.float64)
        used = (steps["held"] + steps["tail"]) / (config.num_blocks * config.block_size)
        found[str(clients)] = {
            "tpot_ms": 1e3 * summary["tpot_s"]["mean"],
            "running": float(np.average(steps["num_running"], weights=lasted)),
            "waiting": float(np.average(steps["num_waiting"], weights=lasted)),
            "kv_usage": float(np.average(used, weights=lasted)),
            **{key: summary[key] for key in ("num_preemptions", "recomputed_tokens", "duration_s")},
        }
    return found


def _drain(context: Context) -> dict[str, Any]:
    """From the step at which 247 run, while nobody has finished."""
    trace, options = scenarios.drain_load(), scenarios.drain()
    tables, summary = _served(context, "drain", trace, options, scenarios.step_time("qwen2.5-0.5b", "h100"))
    steps = expand_steps(tables)
    running = steps["num_running"]
    before = np.cumsum(steps["finished"]) == 0
    lost = np.cumsum(steps["preempted"]) > 0
    window = np.flatnonzero(before & lost & (running <= REPORTED_DRAIN[0][1]))
    used = (steps["held"] + steps["tail"])[window] / (options.num_blocks * options.block_size)
    at = window[:: max(1, len(window) // 60)]
    return {
        "steps_after_247": (at - window[0]).tolist(),
        "seconds": ((steps["start_ns"][at] - steps["start_ns"][window[0]]) / 1e9).tolist(),
        "running": running[at].tolist(),
        "waiting": steps["num_waiting"][at].tolist(),
        "sum_is_constant": bool(((running + steps["num_waiting"])[np.flatnonzero(before)] == len(trace)).all()),
        "never_rises": bool((np.diff(running[window]) <= 0).all()),
        "least_usage": float(used.min()),
        "num_preemptions": summary["num_preemptions"],
    }


def _evict(context: Context, policy: str, clients: int) -> dict[str, Any]:
    step_time = scenarios.step_time("llama-3.1-70b", "h200", 1, "fp8")
    options = scenarios.evict_options(policy)
    _, summary = _served(context, f"{policy}, {clients}", scenarios.evict_load(clients), options, step_time)
    return {
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "tpot_p99_ms": 1e3 * summary["tpot_s"]["p99"],
        "e2e_p99_s": summary["e2e_s"]["p99"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "num_preemptions": summary["num_preemptions"],
        "recomputed_tokens": summary["recomputed_tokens"],
    }


def _closed_loop(context: Context) -> dict[str, Any]:
    """TTFT over output length: Llama-3.3-70B on eight H200, prompts of 3,100, 32 clients (vLLM issue 13412)."""
    from engine.core.presets import SchedulerConfig

    step_time = scenarios.step_time("llama-3.1-70b", "h200", 8)
    options = SchedulerConfig(
        num_blocks=100_000, max_model_len=8192, max_num_batched_tokens=8192, enable_prefix_caching=False
    )
    found = {}
    for output in OUTPUTS:
        trace = scenarios.closed(32, 192, 3_100, output, f"outputs of {output}", seed=context.seed)
        _, summary = _served(context, f"closed loop, outputs of {output}", trace, options, step_time)
        found[str(output)] = {"ttft_mean_s": summary["ttft_s"]["mean"], "ttft_p99_s": summary["ttft_s"]["p99"]}
    return found


def _crowd(seed: int) -> Trace:
    from traces import generate

    return generate(
        {
            "kind": "synthetic",
            "name": "chats",
            "num_requests": 300,
            "seed": seed,
            "arrival": {"process": "poisson", "rate_per_s": 25},
            "prompt_tokens": {"dist": "lognormal", "mean": 400, "sigma": 0.8, "low": 8, "high": 3000},
            "output_tokens": {"dist": "lognormal", "mean": 150, "sigma": 0.6, "low": 8, "high": 1000},
        }
    )


def _limit_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ttft_p99_s": summary["ttft_s"]["p99"],
        "gpu_busy": summary["gpu_busy"],
        **{f"waits_for_{reason}": summary["waiting_share"][reason] for reason in REASONS},
        **{key: summary[key] for key in ("num_preemptions", "recomputed_tokens", "zero_progress_steps")},
        "says": limit_line(summary),
    }


def _limits(context: Context) -> dict[str, Any]:
    step_time = scenarios.step_time("llama-3-8b", "a100-80g")
    found = {}
    for name, options in scenarios.limits_by_option().items():
        _, summary = _served(context, f"limits, {name}", _crowd(context.seed), options, step_time)
        found[name] = _limit_figures(summary)
    return found


def _busy(context: Context) -> dict[str, Any]:
    """The queue for memory on a machine whose device does all the work, on one that swaps a layer at a time, and on
    ones with a host that takes HOST_FACTORS as long as the device."""
    plain = scenarios.step_time("llama-3-8b", "a100-80g")
    options = scenarios.limits_by_option()["KV memory"]
    usual = plain.tokens_ns(16) + plain.context * 16 * 500
    swapping = replace(options, preemption_mode="swap", num_host_blocks=4000)
    runs: dict[str, tuple[SchedulerConfig, StepTime, dict[str, Any]]] = {
        "device alone": (options, plain, {}),
        "swap, a layer at a time": (swapping, plain, {"moves": _slow_moves(options.block_size)}),
        **{f"host x {factor:g}": (options, replace(plain, cpu_step=factor * usual), {}) for factor in HOST_FACTORS},
    }
    found = {}
    for name, (config, step_time, more) in runs.items():
        _, summary = _served(context, f"busy, {name}", _crowd(context.seed), config, step_time, **more)
        found[name] = _limit_figures(summary)
    return found


def _slow_moves(block_size: int) -> MoveTime:
    from sim.hardware import device
    from sim.models import preset
    from sim.moves import moves_of_device

    spec = preset("llama-3-8b")
    return moves_of_device(device("a100-80g"), spec.kv_bytes_per_token() * block_size, 2 * spec.layers)


# ---- the row ----


def _b09(busy: Mapping[str, Mapping[str, Any]]) -> Settled:
    alone, swap = busy["device alone"], busy["swap, a layer at a time"]
    queues = all(figures["waits_for_kv"] > 0.5 for figures in busy.values())
    low = [factor for factor in HOST_FACTORS if busy[f"host x {factor:g}"]["gpu_busy"] <= CLAIMED_BUSY]
    status = "reproduced" if alone["gpu_busy"] <= CLAIMED_BUSY else "reproduced-only-if" if low else "does-not-follow"
    needed = f"at least {low[0]:g} times" if low else f"more than {HOST_FACTORS[-1]:g} times"
    shares = ", ".join(f"{busy[f'host x {factor:g}']['gpu_busy']:.0%}" for factor in HOST_FACTORS)
    return Settled(
        "B09",
        status if queues else "open",
        f"the queue waits for blocks {alone['waits_for_kv']:.0%} of the time while the device computes "
        f"{alone['gpu_busy']:.0%} of it, {swap['gpu_busy']:.0%} where preemption swaps, and {shares} where the host's "
        f"part of a step is {', '.join(f'{factor:g}' for factor in HOST_FACTORS)} times the device's",
        condition=f"the device waits for somebody: a host that takes {needed} as long as the device in each step. "
        "Memory alone makes batches small, and the device stays busy with them; waiting_by_reason names what waits",
        numbers={
            f"{name}: {key}": figures[key] for name, figures in busy.items() for key in ("gpu_busy", "waits_for_kv")
        },
    )


# ---- what is shown ----


def _cliff_table(cliff: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [
        Column("admission"),
        Column("clients"),
        Column("reported_tpot_ms", "reported", ".0f"),
        Column("tpot_ms", "TPOT ms", ".1f"),
        Column("running", "run", ".1f"),
        Column("waiting", "wait", ".1f"),
        Column("kv_usage", "KV", ".1%"),
        Column("num_preemptions", "preempted", ",d"),
        Column("recomputed_tokens", "recomputed", ",d"),
        Column("duration_s", "in s", ",.0f"),
    ]
    rows = [
        [name, int(clients), REPORTED_CLIFF.get(int(clients)), *(figures[c.name] for c in columns[3:])]
        for name, by in cliff.items()
        for clients, figures in by.items()
    ]
    return Table("cliff", "32,768 + 1,024 tokens in a closed loop, 13.2 % of the pool each, predicted", columns, rows)


def _drain_table(drain: Mapping[str, Any]) -> Table:
    columns = [Column("seconds", form=".2f"), Column("running"), Column("waiting"), Column("sum")]
    rows = [
        [second, running, waiting, running + waiting]
        for second, running, waiting in zip(drain["seconds"], drain["running"], drain["waiting"], strict=True)
    ]
    title = f"987 open requests, pool at least {drain['least_usage']:.1%} full, nobody finished yet"
    return Table("drain", title, columns, rows, shown=False)


def _evict_table(evict: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [
        Column("policy"),
        Column("output_tokens_per_s", "tokens/s", ".1f"),
        Column("tpot_p99_ms", "TPOT p99 ms", ",.0f"),
        Column("e2e_p99_s", "e2e p99 s", ".0f"),
        Column("ttft_p50_s", "TTFT p50 s", ".2f"),
        Column("num_preemptions", "preempted", ",d"),
        Column("recomputed_tokens", "recomputed tokens", ",d"),
    ]
    rows: list[list[Any]] = [[name, *(figures[c.name] for c in columns[1:])] for name, figures in evict.items()]
    for place, name in enumerate(("no-evict, reported", "max-utilization, reported")):
        rows.append([name, *(REPORTED_EVICT[c.name][place] for c in columns[1:5]), None, None])
    return Table("eviction", "128 requests of 16,384 + 512 tokens, closed loop of 32 (16 off pressure)", columns, rows)


def _closed_table(closed: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [Column("output", "output tokens"), Column("ttft_mean_s", "TTFT mean s", ".3f")]
    columns.append(Column("ttft_p99_s", "p99 s", ".3f"))
    rows = [[int(output), figures["ttft_mean_s"], figures["ttft_p99_s"]] for output, figures in closed.items()]
    return Table("closed_loop", "Prompts of 3,100, 32 clients", columns, rows)


def _limits_table(name: str, title: str, limits: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [
        Column("options"),
        *(Column(f"waits_for_{reason}", reason, ".0%") for reason in REASONS),
        Column("gpu_busy", "busy", ".0%"),
        Column("ttft_p99_s", "TTFT p99 s", ".2f"),
        Column("num_preemptions", "preempted", ",d"),
    ]
    rows = [[option, *(figures[c.name] for c in columns[1:])] for option, figures in limits.items()]
    return Table(name, title, columns, rows)


def _picture(
    cliff: Mapping[str, Mapping[str, Any]],
    drain: Mapping[str, Any],
    evict: Mapping[str, Mapping[str, Any]],
    closed: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, Mapping[str, Any]],
) -> bytes:
    from matplotlib import pyplot as plt

    from experiments.plots import STYLE, to_png

    colours = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7")
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 3, figsize=(15, 8.6), layout="constrained")
        (first, second, third), (fourth, fifth, last) = grid
        for (name, by), colour, style in zip(cliff.items(), colours, ("o-", "s--", "^-", "v--", "D:"), strict=True):
            base = by["6"]["tpot_ms"]
            points = [figures["tpot_ms"] / base for figures in by.values()]
            first.plot(CLIENTS, points, style, color=colour, markersize=5, label=name)
        reported = [value / REPORTED_CLIFF[6] for value in REPORTED_CLIFF.values()]
        first.plot(list(REPORTED_CLIFF), reported, "x", color="black", markersize=9, label="reported")
        first.set(
            title="TPOT in a closed loop, by admission", xlabel="clients", ylabel="TPOT, 6 clients = 1", ylim=(0, None)
        )
        first.legend(fontsize=8, title="a request starts when there is room for", title_fontsize=8)
        usage = [figures["kv_usage"] * 100 for figures in cliff["first chunk"].values()]
        second.plot(CLIENTS, usage, "o-", color=colours[0], label="KV in use, first chunk (%)")
        safe = [figures["kv_usage"] * 100 for figures in cliff["whole prompt"].values()]
        second.plot(CLIENTS, safe, "^-", color=colours[2], label="KV in use, whole prompt (%)")
        second.plot((6, 7, 8, 12), (79.4, 92.4, 98.9, 98.7), "x", color="black", markersize=9, label="reported (%)")
        second.set(title="The same: memory", xlabel="clients", ylabel="time average (%)", ylim=(0, 105))
        second.legend(fontsize=8, loc="lower right")
        third.plot(drain["seconds"], drain["running"], color=colours[2], label="running, simulated")
        third.set(title="987 open requests, nobody finished yet", xlabel="seconds since 247 ran", ylabel="running")
        twin = third.twiny()
        twin.plot(*zip(*REPORTED_DRAIN, strict=True), "x", color="black", markersize=9)
        twin.set_xlabel("seconds of the reported log (crosses)")
        third.plot([], [], "x", color="black", markersize=9, label="running, reported")
        third.set_ylim(0, 260)
        third.legend(fontsize=8, loc="lower left")
        names = {
            "output_tokens_per_s": "tokens/s",
            "tpot_p99_ms": "TPOT p99",
            "e2e_p99_s": "e2e p99",
            "ttft_p50_s": "TTFT p50",
        }
        at = np.arange(len(names))
        ours = [evict["max-utilization"][key] / evict["no-evict"][key] for key in names]
        off = [evict["max-utilization, off pressure"][k] / evict["no-evict, off pressure"][k] for k in names]
        theirs = [b / a for a, b in (REPORTED_EVICT[key] for key in names)]
        for i, (values, label, colour) in enumerate(
            (
                (ours, "simulated", colours[2]),
                (theirs, "reported", "#555555"),
                (off, "simulated, off pressure", "#56B4E9"),
            )
        ):
            fourth.bar(at + (i - 1) * 0.27, values, 0.25, color=colour, label=label)
        fourth.axhline(1, color="black", linewidth=0.8)
        fourth.set_yscale("log")
        fourth.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        fourth.minorticks_off()
        fourth.set_xticks(at, list(names.values()))
        fourth.set(title="MAX_UTILIZATION over GUARANTEED_NO_EVICT", ylabel="ratio")
        fourth.legend(fontsize=8)
        for key, style, label in (("ttft_mean_s", "o-", "mean"), ("ttft_p99_s", "s--", "p99")):
            fifth.plot(OUTPUTS, [closed[str(o)][key] for o in OUTPUTS], style, color=colours[3], label=label)
        fifth.set_xscale("log", base=2)
        fifth.set_xticks(OUTPUTS, [f"{output:,}" for output in OUTPUTS])
        fifth.minorticks_off()
        fifth.set(title="TTFT, 32 clients, prompts of 3,100", xlabel="output tokens", ylabel="s", ylim=(0, None))
        fifth.legend(fontsize=8)
        rows = list(limits)
        left = np.zeros(len(rows))
        for reason, colour in zip(REASONS, ("#0072B2", "#E69F00", "#D55E00", "#999999"), strict=True):
            shares = np.array([100 * limits[row][f"waits_for_{reason}"] for row in rows])
            last.barh(np.arange(len(rows)), shares, left=left, color=colour, label=reason)
            left += shares
        last.set_yticks(np.arange(len(rows)), rows)
        last.invert_yaxis()
        last.set(title="What the head of the queue waits for", xlabel="share of time (%)", xlim=(0, 105))
        last.legend(fontsize=8, ncols=2, loc="lower right")
        return to_png(figure)
