"""What the size of prefill chunks does to those who wait for their first token, and to those who decode meanwhile.

Times are rooflines', but for the reported table of 16 requests, whose two coefficients come from two of its own figures
and predict the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.experiment import Column, Context, ExperimentResult, Settled, Table
from experiments.metrics import distribution, expand_steps, inter_token_gaps, latencies

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from sim.steptime import StepTime
    from traces import Trace

__all__ = ["run"]

CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DECODERS, HEAVY, HEAVY_PROMPT = 16, 12, 16_384
LONG_PROMPT = 65_535
"""Of the reported pair (local-inference-lab/vllm issue 541)."""
REPORTED_PAIR = {"alone_tokens_per_s": 272.6, "during_tokens_per_s": 6.62, "ttft_s": 16.5, "ttft_alone_s": 9.35}
REPORTED_TABLE = {
    "ttft_mean_ms": 2634.0,
    "ttft_p99_ms": 4610.0,
    "tpot_mean_ms": 51.8,
    "itl_p50_ms": 46.6,
    "itl_p99_ms": 258.0,
    "duration_s": 20.87,
}
"""gemma-3-27b, 16 requests of 1,024 + 350 tokens at once (vLLM issue 33743)."""
TABLE_CHUNK = 2048
PROMPTS = (16, 32, 64, 128, 256, 400, 512, 1024, 2048, 4096)
REPORTED_FLOOR_MS, REPORTED_KNEE = 100.0, 400
"""Llama-3-8B on a V100 (vLLM issue 7635): TTFT is flat below the knee and linear above."""


def run(context: Context) -> ExperimentResult:
    """The sweep, the reported pair and table, TTFT over prompt length, and row A49."""
    sweep = {}
    for chunk in context.track((*CHUNKS, None), "chunk sizes"):
        sweep[_name(chunk)] = context.part(f"sweep-{_name(chunk)}", partial(_mixed, context, chunk))
    pair = {}
    for chunk in context.track(CHUNKS, "one decodes, one long prompt"):
        pair[_name(chunk)] = context.part(f"pair-{_name(chunk)}", partial(_pair, context, chunk))
    alone = context.part("pair-alone", partial(_alone, context))
    table = context.part("table", partial(_table, context))
    floor = context.part("floor", partial(_floor, context))
    claims = [_a49(sweep)]
    notes = [
        f"Reported pair: {REPORTED_PAIR['alone_tokens_per_s']:g} tokens/s fall to "
        f"{REPORTED_PAIR['during_tokens_per_s']:g}, TTFT {REPORTED_PAIR['ttft_s']:g} s against "
        f"{REPORTED_PAIR['ttft_alone_s']:g} alone; ours is another model: what carries over is that each token of the "
        "one that decodes takes as long as a chunk.",
        f"In the reported table {table['share_of_long_gaps']:.2%} of all gaps lie beside a prefill, so that the p99 of "
        "ITL stands at the very edge of those: it is what two coefficients predict worst.",
        f"TTFT of one prompt is flat up to about {floor['knee_tokens']:.0f} tokens at {floor['floor_ms']:.0f} ms on "
        f"the roofline of a V100, {REPORTED_KNEE} at {REPORTED_FLOOR_MS:g} ms as reported: the same max(floor, a n), "
        "with a floor that has the report's engine overhead in it.",
    ]
    summary = {"sweep": sweep, "pair": pair, "pair_alone": alone, "table": table, "floor": floor}
    tables = [_sweep_table(sweep), _pair_table(pair, alone), _reported_table(table)]
    return ExperimentResult(tables, {"chunked": _picture(sweep, pair, alone, floor)}, summary, claims, notes)


def _name(chunk: int | None) -> str:
    return "whole prompts" if chunk is None else str(chunk)


def _options(chunk: int | None, **more: Any) -> SchedulerConfig:
    """Steps of `chunk` tokens; None: whole prompts in steps of their own, before any decode, as vLLM V0."""
    from engine.core.presets import SchedulerConfig

    given: dict[str, Any] = {"num_blocks": 40_000, "max_model_len": 131_072, "enable_prefix_caching": False}
    given |= {"max_num_seqs": 256, "max_num_batched_tokens": 131_072 if chunk is None else chunk}
    given |= {"batching": "prefill-first"} if chunk is None else {}
    return SchedulerConfig(**(given | more))


def _step_time() -> StepTime:
    from experiments.scenarios import step_time

    return step_time("llama-3.1-70b", "h100", 4)


def _load(seed: int) -> Trace:
    """Some who decode all the time, and long prompts that come among them."""
    from traces import make_trace

    rng = np.random.default_rng(seed)
    at = np.concatenate([np.zeros(DECODERS), 2e9 + np.cumsum(rng.exponential(4e9, HEAVY))]).astype(np.int64)
    prompt = np.concatenate([np.full(DECODERS, 512), np.full(HEAVY, HEAVY_PROMPT)])
    output = np.concatenate([np.full(DECODERS, 2500), np.full(HEAVY, 32)])
    return make_trace(at, prompt, output, name="decodes and long prompts")


def _mixed(context: Context, chunk: int | None) -> dict[str, Any]:
    found, tables = context.simulate(f"sweep {_name(chunk)}", _load(context.seed), _options(chunk), _step_time())
    requests = tables.requests
    values = latencies(requests)
    heavy = np.asarray(requests["prompt_tokens"]) == HEAVY_PROMPT
    itl = distribution(*inter_token_gaps(tables))
    gaps, counts = inter_token_gaps(tables)
    steps = expand_steps(tables)
    beside = (steps["num_prefills"] > 0) & (steps["num_decodes"] > 0)
    lasted = np.diff(steps["end_ns"], prepend=steps["start_ns"][:1])
    return {
        "itl_p50_ms": 1e3 * (itl["p50"] or 0.0),
        "itl_p99_ms": 1e3 * (itl["p99"] or 0.0),
        "itl_max_ms": float(gaps[counts > 0].max()) / 1e6,
        "mixed_step_ms": float(lasted[beside].mean()) / 1e6 if beside.any() else None,
        "tpot_ms": float(np.nanmean(values["tpot_s"][~heavy])) / 1e6,
        "ttft_mean_s": float(np.nanmean(values["ttft_s"][heavy])) / 1e9,
        "ttft_max_s": float(np.nanmax(values["ttft_s"][heavy])) / 1e9,
        "duration_s": found.end_ns / 1e9,
    }


def _pair(context: Context, chunk: int) -> dict[str, Any]:
    """One decodes, and one prompt of LONG_PROMPT tokens comes."""
    from traces import make_trace

    trace = make_trace(np.array([0, 10**9]), np.array([512, LONG_PROMPT]), np.array([2000, 16]))
    _, tables = context.simulate(f"pair {chunk}", trace, _options(chunk), _step_time())
    steps = expand_steps(tables)
    mixed = (steps["num_prefills"] > 0) & (steps["num_decodes"] > 0)
    lasted = np.diff(steps["end_ns"], prepend=steps["start_ns"][:1])
    ttft = latencies(tables.requests)["ttft_s"][1] / 1e9
    return {"during_tokens_per_s": float(mixed.sum() / (lasted[mixed].sum() / 1e9)), "ttft_s": float(ttft)}


def _alone(context: Context) -> dict[str, Any]:
    """Each of the two by itself, in chunks of 8,192."""
    from traces import make_trace

    found = {}
    for name, prompt, output in (("decodes", 512, 2000), ("prompt", LONG_PROMPT, 16)):
        trace = make_trace(np.array([0]), np.array([prompt]), np.array([output]))
        _, tables = context.simulate(f"pair, {name} alone", trace, _options(8192), _step_time())
        values = latencies(tables.requests)
        if name == "decodes":
            found["alone_tokens_per_s"] = 1e9 / float(values["tpot_s"][0])
        else:
            found["ttft_alone_s"] = float(values["ttft_s"][0]) / 1e9
    return found


def _table(context: Context) -> dict[str, float]:
    """The reported table from two of its figures: the step of 16 decodes is the median ITL, and what a prompt token
    costs more is such that the mean TTFT comes out, which rises in a line with it."""
    chunks = 16 * 1024 // TABLE_CHUNK
    wanted = REPORTED_TABLE["ttft_mean_ms"]
    step = REPORTED_TABLE["itl_p50_ms"] * 1e6
    first = (wanted * 1e6 / ((chunks + 1) / 2) - step) / (TABLE_CHUNK - 16)
    tries = [(token, _table_at(context, step, token)) for token in (first, 0.8 * first)]
    (t0, f0), (t1, f1) = tries
    slope = (f1["ttft_mean_ms"] - f0["ttft_mean_ms"]) / (t1 - t0)
    return _table_at(context, step, t0 + (wanted - f0["ttft_mean_ms"]) / slope)


def _table_at(context: Context, step: float, token: float) -> dict[str, float]:
    """The figures where a step takes `step` ns and `token` ns more for each token beyond 16."""
    from sim.steptime import StepTime
    from traces import make_trace

    model = StepTime(step=step, token_above=token, ridge=16.0, label="two points")
    zeros = np.zeros(16, dtype=np.int64)
    trace = make_trace(zeros, zeros + 1024, zeros + 350)
    found, tables = context.simulate("reported table", trace, _options(TABLE_CHUNK), model)
    values = latencies(tables.requests)
    ttft, tpot = distribution(values["ttft_s"]), distribution(values["tpot_s"])
    gaps, counts = inter_token_gaps(tables)
    itl = distribution(gaps, counts)
    return {
        "ttft_mean_ms": 1e3 * (ttft["mean"] or 0.0),
        "ttft_p99_ms": 1e3 * (ttft["p99"] or 0.0),
        "tpot_mean_ms": 1e3 * (tpot["mean"] or 0.0),
        "itl_p50_ms": 1e3 * (itl["p50"] or 0.0),
        "itl_p99_ms": 1e3 * (itl["p99"] or 0.0),
        "duration_s": found.end_ns / 1e9,
        "share_of_long_gaps": float(counts[gaps > 2 * step].sum() / counts.sum()),
    }


def _floor(context: Context) -> dict[str, Any]:
    """TTFT of single prompts, and where max(floor, a n) bends: the crossing of both lines."""
    from experiments.scenarios import step_time
    from traces import make_trace

    model = step_time("llama-3-8b", "v100-32g", 1, "float16")
    found = []
    for prompt in PROMPTS:
        trace = make_trace(np.array([0]), np.array([prompt]), np.array([2]))
        options = _options(8192, num_blocks=2000, max_model_len=8192)
        _, tables = context.simulate(f"one prompt of {prompt}", trace, options, model)
        found.append(float(latencies(tables.requests)["ttft_s"][0]) / 1e6)
    slope = (found[-1] - found[-2]) / (PROMPTS[-1] - PROMPTS[-2])
    return {"ttft_ms": found, "floor_ms": found[0], "slope_ms": slope, "knee_tokens": found[0] / slope}


# ---- the row ----


def _a49(sweep: Mapping[str, Mapping[str, Any]]) -> Settled:
    whole, chunks, small = sweep[_name(None)], sweep["2048"], sweep["512"]
    rises = whole["itl_max_ms"] / whole["itl_p50_ms"]
    smooths = whole["itl_max_ms"] / chunks["itl_max_ms"]
    numbers = {
        f"{name}_{key}": figures[key]
        for name, figures in (("whole", whole), ("chunks_2048", chunks), ("chunks_512", small))
        for key in ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "tpot_ms", "ttft_mean_s")
    }
    return Settled(
        "A49",
        "reproduced" if rises > 2 and smooths > 2 else "does-not-follow",
        f"a prompt of {HEAVY_PROMPT:,} tokens stops {DECODERS} decodes for {whole['itl_max_ms']:,.0f} ms (median gap "
        f"{whole['itl_p50_ms']:.0f} ms); in chunks of 2,048 the longest gap is {chunks['itl_max_ms']:.0f} ms, in "
        f"chunks of 512 {small['itl_max_ms']:.0f}; its TTFT goes from {whole['ttft_mean_s']:.2f} s to "
        f"{chunks['ttft_mean_s']:.2f} and {small['ttft_mean_s']:.2f} s",
        condition="the gap is the time of a chunk: smooth decodes are paid for by the TTFT of the prompt, and mean "
        f"TPOT hardly changes ({whole['tpot_ms']:.1f}, {chunks['tpot_ms']:.1f} and {small['tpot_ms']:.1f} ms); the "
        "flag is --enable-chunked-prefill, on by default in V1",
        numbers=numbers,
    )


# ---- what is shown ----


def _sweep_table(sweep: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = [
        Column("chunk"),
        Column("itl_p50_ms", "ITL p50 ms", ".1f"),
        Column("itl_p99_ms", "p99 ms", ".1f"),
        Column("itl_max_ms", "longest ms", ",.1f"),
        Column("tpot_ms", "TPOT ms", ".1f"),
        Column("ttft_mean_s", "TTFT mean s", ".2f"),
        Column("ttft_max_s", "longest s", ".2f"),
    ]
    rows = [[name, *(figures[c.name] for c in columns[1:])] for name, figures in sweep.items()]
    title = f"{DECODERS} decodes and {HEAVY} prompts of {HEAVY_PROMPT:,} tokens, predicted"
    return Table("chunks", title, columns, rows)


def _pair_table(pair: Mapping[str, Mapping[str, Any]], alone: Mapping[str, Any]) -> Table:
    columns = [
        Column("chunk"),
        Column("during_tokens_per_s", "tokens/s of the one that decodes", ".1f"),
        Column("ttft_s", "TTFT of the prompt, s", ".2f"),
    ]
    rows = [[name, figures["during_tokens_per_s"], figures["ttft_s"]] for name, figures in pair.items()]
    rows.append(["each alone", alone["alone_tokens_per_s"], alone["ttft_alone_s"]])
    return Table("pair", f"One decodes while a prompt of {LONG_PROMPT:,} tokens is computed, predicted", columns, rows)


def _reported_table(table: Mapping[str, float]) -> Table:
    rows = [
        [name, REPORTED_TABLE[name], value, value / REPORTED_TABLE[name] - 1, name in ("itl_p50_ms", "ttft_mean_ms")]
        for name, value in table.items()
        if name in REPORTED_TABLE
    ]
    columns = [
        Column("metric"),
        Column("reported", form=",.2f"),
        Column("simulated", form=",.2f"),
        Column("error", form="+.1%"),
        Column("fitted"),
    ]
    return Table("reported", "16 requests of 1,024 + 350 tokens at once, from two of the figures", columns, rows)


def _picture(
    sweep: Mapping[str, Mapping[str, Any]],
    pair: Mapping[str, Mapping[str, Any]],
    alone: Mapping[str, Any],
    floor: Mapping[str, Any],
) -> bytes:
    from matplotlib import pyplot as plt

    from experiments.plots import STYLE, to_png

    blue, orange, green = "#0072B2", "#D55E00", "#009E73"
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
        figures = [sweep[str(chunk)] for chunk in CHUNKS]
        for key, label, style in (("itl_max_ms", "longest", "o-"), ("itl_p99_ms", "p99", "o--")):
            left.plot(CHUNKS, [f[key] for f in figures], style, color=blue, markersize=4, label=f"ITL, {label}")
        left.axhline(
            sweep[_name(None)]["itl_max_ms"], color=blue, linestyle=":", label="longest ITL, whole prompts first"
        )
        left.plot(
            CHUNKS, [1e3 * f["ttft_mean_s"] for f in figures], "s-", color=orange, markersize=4, label="TTFT, mean"
        )
        left.set(yscale="log", ylim=(3, None), ylabel="ms", title=f"{DECODERS} decodes, prompts of {HEAVY_PROMPT:,}")
        pairs = [pair[str(chunk)] for chunk in CHUNKS]
        rate = [f["during_tokens_per_s"] for f in pairs]
        middle.plot(CHUNKS, rate, "o-", color=blue, markersize=4, label="tokens/s of the one that decodes")
        middle.axhline(alone["alone_tokens_per_s"], color=blue, linestyle=":", label="the same, alone")
        middle.plot(
            CHUNKS, [f["ttft_s"] for f in pairs], "s-", color=orange, markersize=4, label="TTFT of the prompt (s)"
        )
        middle.axhline(alone["ttft_alone_s"], color=orange, linestyle=":", label="the same, alone, chunks of 8,192")
        middle.set(yscale="log", title=f"One decodes, one prompt of {LONG_PROMPT:,}", ylabel="tokens/s; s")
        right.plot(PROMPTS, floor["ttft_ms"], "o-", color=green, markersize=4, label="simulated (roofline)")
        model = [max(floor["floor_ms"], floor["slope_ms"] * n) for n in PROMPTS]
        right.plot(PROMPTS, model, color="black", linewidth=1, linestyle="--", label="max(floor, a n)")
        reported = [REPORTED_FLOOR_MS * max(1.0, n / REPORTED_KNEE) for n in PROMPTS]
        right.plot(PROMPTS, reported, color=orange, linestyle=":", label="as reported: 100 ms up to 400 tokens")
        right.set(yscale="log", ylabel="TTFT (ms)", title="One prompt alone, Llama-3-8B on a V100")
        for axes, ticks, label in (
            (left, CHUNKS, "tokens a step (chunk)"),
            (middle, CHUNKS, "tokens a step (chunk)"),
            (right, PROMPTS, "prompt (tokens)"),
        ):
            axes.set_xscale("log", base=2)
            shown = [tick for tick in ticks if tick & (tick - 1) == 0]
            axes.set_xticks(shown, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in shown])
            axes.minorticks_off()
            axes.set_xlabel(label)
            axes.legend(fontsize=8)
        return to_png(figure)
