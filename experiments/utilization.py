"""What gpu_memory_utilization, batch sizes and lengths do to KV blocks, and when an engine runs out of memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from experiments import incidents, memoryclaims
from experiments.experiment import Column, Context, ExperimentResult, Table
from sim.hardware import device
from sim.memory import MemoryRequest, longest, plan
from sim.models import preset

__all__ = ["REAL", "cases", "run", "sweep"]

_GIB = 1 << 30
LLAMA = preset("llama-3-8b")
A100 = device("a100-80g")
VERSIONS = ("0.6.4", "0.19.1", "0.33.0")
UTILIZATIONS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 1.0)
TOKENS = (512, 2048, 4096, 8192, 16384, 32768)
SEQS = (16, 64, 128, 256, 512, 1024)
REAL: tuple[tuple[str, MemoryRequest, int | None, float], ...] = (
    (
        "RTX 4090, Llama-3.1-8B, vLLM 0.19.0",
        MemoryRequest(preset("llama-3.1-8b"), device("rtx4090"), "0.19.0", utilization=0.9, max_model_len=32768),
        2588,
        5427429376 / _GIB,
    ),
    (
        "RTX 3090, Llama-3.1-8B, 0.6.4, 20,000 tokens (vllm#10517)",
        MemoryRequest(preset("llama-3.1-8b"), device("rtx3090"), "0.6.4", max_model_len=20000),
        1952,
        3.81,
    ),
    (
        "the same, 29,000 tokens",
        MemoryRequest(preset("llama-3.1-8b"), device("rtx3090"), "0.6.4", max_model_len=29000),
        1478,
        2.89,
    ),
    (
        "RTX 4060, Qwen2.5-7B in 4 bits, 0.7.3 (vllm#13882)",
        MemoryRequest(
            preset("qwen2.5-7b"), device("rtx4060"), "0.7.3", utilization=0.7, max_model_len=4096, quantization="awq"
        ),
        0,
        -1.05,
    ),
    (
        "A6000, Qwen2.5-32B in 4 bits, 0.6.4 (vllm#10360)",
        MemoryRequest(preset("qwen2.5-32b"), device("a6000"), "0.6.4", max_model_len=4096, quantization="awq"),
        None,
        22.74,
    ),
)
"""(what, request, blocks that the real engine found where it said so, GiB for KV) of public logs."""


def run(context: Context) -> ExperimentResult:
    """Budgets over every knob, incidents served, and the rows that they settle."""
    real = [_real(*case) for case in REAL]
    grid = sweep()
    lengths = _lengths()
    spikes = [
        context.part(
            f"spike-{name}-{tokens}-{share}".replace(" ", "_"), partial(incidents.spike, context, name, tokens, share)
        )
        for name in context.track(incidents.ENGINES, "engines")
        for tokens, share in [*((n, 0.9) for n in incidents.LENGTHS), (28000, 0.8)]
    ]
    hours = context.part("hours", partial(incidents.hours, context))
    figures = {"cases": cases(), "real": real, "grid": grid, "lengths": lengths, "spikes": spikes, "hours": hours}
    claims = memoryclaims.settle(figures)
    return ExperimentResult(_tables(figures), {"utilization": _picture(figures)}, figures, claims)


def _real(what: str, request: MemoryRequest, blocks: int | None, kv_gib: float) -> dict[str, Any]:
    made = plan(request)
    error = None if not blocks else made.num_blocks / blocks - 1
    return {
        "case": what,
        "real_blocks": blocks,
        "blocks": made.num_blocks,
        "error": error,
        "real_kv_gib": kv_gib,
        "kv_gib": made.available / _GIB,
        "refused": made.refusal or "",
    }


def sweep() -> dict[str, list[dict[str, Any]]]:
    """KV blocks, headroom and verdict of Llama-3-8B on an A100-80G over one knob at a time."""
    base = MemoryRequest(LLAMA, A100, "0.19.1", max_num_batched_tokens=2048, max_num_seqs=256)
    return {
        "utilization": [
            _point(replace(base, version=version, utilization=value, max_num_batched_tokens=None), "utilization", value)
            for version in VERSIONS
            for value in UTILIZATIONS
        ],
        "max_num_batched_tokens": [
            _point(replace(base, max_num_batched_tokens=value), "max_num_batched_tokens", value) for value in TOKENS
        ],
        "max_num_seqs": [
            _point(replace(base, max_num_seqs=value, version=version), "max_num_seqs", value)
            for version in VERSIONS
            for value in SEQS
        ],
        "quantization": [
            _point(replace(base, quantization=value), "quantization", value) for value in (None, "fp8", "awq")
        ],
    }


def _point(request: MemoryRequest, knob: str, value: Any) -> dict[str, Any]:
    made = plan(request)
    verdict = "refused" if made.refusal else "out of memory later" if made.headroom < 0 else "starts"
    return {
        "version": request.version,
        knob: value,
        "kv_blocks": made.num_blocks,
        "kv_tokens": made.kv_tokens,
        "layers_gib": made.layers_peak / _GIB,
        "sampler_gib": made.sampler_peak / _GIB,
        "activations_gib": next(t.bytes for t in made.terms if t.name == "activations") / _GIB,
        "outside_gib": made.outside / _GIB,
        "headroom_gib": made.headroom / _GIB,
        "weights_gib": made.terms[0].bytes / _GIB,
        "verdict": verdict,
    }


def _lengths() -> dict[str, Any]:
    """Llama-3.1-8B on the RTX 3090 over max_model_len, with as few sequences as its owner must have had."""
    base = MemoryRequest(preset("llama-3.1-8b"), device("rtx3090"), "0.6.4", max_num_seqs=8)
    points = []
    for length in range(1000, 60001, 1000):
        made = plan(replace(base, max_model_len=length))
        points.append({"max_model_len": length, "kv_tokens": made.kv_tokens, "starts": made.refusal is None})
    return {
        "points": points,
        "ranges": [list(pair) for pair in longest(base)],
        "refusal": plan(replace(base, max_model_len=29000)).refusal,
    }


def cases() -> list[dict[str, Any]]:
    """Public cases that are arithmetic on a budget: what was seen, and what the model says."""
    swaps = [
        plan(MemoryRequest(preset(name), device("a100-40g"), "0.5.2")).num_cpu_blocks
        for name in ("llama-3-8b", "llama-2-7b")
    ]
    small = plan(MemoryRequest(preset("llama-2-7b"), device("t4"), "0.2.7", max_model_len=4096, num_blocks=229))
    spec, card = preset("llama-2-70b"), device("a100-40g")
    slots = 48 * 4096 * spec.kv_bytes_per_token(2)
    each = spec.weights_bytes(2, 4) + slots // 4
    regions = f"{slots / _GIB:.1f} GiB; {each / _GIB:.1f} of {card.memory_bytes / _GIB:.1f} a device with the weights"
    rows = [
        ("C04", "CPU blocks in 4 GiB, Llama-3-8B and Llama-2-7B", "2048; 512", f"{swaps[0]}; {swaps[1]}"),
        ("C04", "bytes a token, Llama-2-7B", "524288", str(preset("llama-2-7b").kv_bytes_per_token(2))),
        (
            "C09",
            "229 blocks on a T4, context 4,096",
            "refused; 3664",
            f"{'refused' if small.refusal else 'starts'}; {longest(small.request)[-1][1]}",
        ),
        ("C36", "48 regions of 4,096 tokens, Llama-2-70B, 4 x A100-40G", "60.0 GiB; out of memory", regions),
    ]
    return [dict(zip(("case", "what", "seen", "ours"), row, strict=True)) for row in rows]


# ---- what is shown ----


def _tables(figures: dict[str, Any]) -> list[Table]:
    def of(rows: list[dict[str, Any]], *names: str) -> list[list[Any]]:
        return [[row.get(name) for name in names] for row in rows]

    real = ("case", "real_blocks", "blocks", "error", "real_kv_gib", "kv_gib")
    knob = ("version", "kv_blocks", "kv_tokens", "activations_gib", "headroom_gib", "verdict")
    spikes = (
        "engine",
        "longest",
        "utilization",
        "kv_blocks",
        "room_gib",
        "need_gib",
        "what",
        "crashed",
        "at_s",
        "lost",
    )
    forms = {
        "error": "+.1%",
        "real_kv_gib": ".2f",
        "kv_gib": ".2f",
        "room_gib": ".2f",
        "need_gib": ".2f",
        "at_s": ".1f",
    }
    forms |= {"activations_gib": ".2f", "headroom_gib": ".2f", "kv_blocks": ",d", "kv_tokens": ",d"}

    def columns(names: tuple[str, ...]) -> list[Column]:
        return [Column(name, form=forms.get(name, "")) for name in names]

    found = [Table("real", "Real engines", columns(real), of(figures["real"], *real))]
    case = ("case", "what", "seen", "ours")
    found.append(Table("cases", "Public cases", columns(case), of(figures["cases"], *case)))
    for name, rows in figures["grid"].items():
        titles = (knob[0], name, *knob[1:])
        found.append(Table(name, f"Llama-3-8B on an A100-80G over {name}", columns(titles), of(rows, *titles)))
    lengths = [[p["max_model_len"], p["kv_tokens"], p["starts"]] for p in figures["lengths"]["points"]]
    names = [Column("max_model_len"), Column("kv_tokens"), Column("starts")]
    found.append(Table("lengths", "", names, lengths, shown=False))
    found.append(
        Table("spikes", "Mistral-7B on an A100-80G, one long prompt", columns(spikes), of(figures["spikes"], *spikes))
    )
    return found


_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")


def _picture(figures: dict[str, Any]) -> bytes:
    from matplotlib import pyplot as plt

    from experiments import plots

    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
        _draw_utilization(axes[0, 0], figures["grid"]["utilization"])
        _draw_knobs(axes[0, 1], figures["grid"])
        _draw_lengths(axes[1, 0], figures["lengths"])
        _draw_spikes(axes[1, 1], figures["spikes"])
        return plots.to_png(figure)


def _draw_utilization(axes: Any, rows: list[dict[str, Any]]) -> None:
    for version, colour in zip(VERSIONS, _COLOURS, strict=False):
        mine = [row for row in rows if row["version"] == version]
        axes.plot([r["utilization"] for r in mine], [r["kv_tokens"] / 1e3 for r in mine], color=colour, label=version)
        for verdict, marker in (("refused", "x"), ("out of memory later", "v")):
            bad = [r for r in mine if r["verdict"] == verdict]
            axes.plot(
                [r["utilization"] for r in bad], [r["kv_tokens"] / 1e3 for r in bad], marker, color=colour, markersize=9
            )
    axes.plot([], [], "x", color="#555555", label="refused at start")
    axes.plot([], [], "v", color="#555555", label="starts, runs out later")
    axes.set_xlabel("gpu_memory_utilization")
    axes.set_ylabel("thousands of KV tokens")
    axes.set_title("Llama-3-8B on an A100-80G, by release of vLLM")
    axes.legend(fontsize=8)


def _draw_knobs(axes: Any, grid: dict[str, list[dict[str, Any]]]) -> None:
    rows = grid["max_num_batched_tokens"]
    axes.plot([r["max_num_batched_tokens"] for r in rows], [r["layers_gib"] for r in rows], "o-", color=_COLOURS[0],
              label="layers, over max_num_batched_tokens")  # fmt: skip
    for version, colour in zip(VERSIONS, _COLOURS[1:], strict=False):
        mine = [r for r in grid["max_num_seqs"] if r["version"] == version]
        axes.plot([r["max_num_seqs"] for r in mine], [r["sampler_gib"] for r in mine], "s--", color=colour,
                  label=f"sampler of {version}, over max_num_seqs")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("tokens of a step, or sequences")
    axes.set_ylabel("GiB at the peak")
    axes.set_title("What grows with tokens, and what with sequences")
    axes.legend(fontsize=8)


def _draw_lengths(axes: Any, lengths: dict[str, Any]) -> None:
    points = lengths["points"]
    x = [p["max_model_len"] / 1e3 for p in points]
    axes.plot(x, [p["kv_tokens"] / 1e3 for p in points], color=_COLOURS[0], label="KV tokens, predicted")
    axes.plot(x, x, ":", color="#555555", label="needed for one request")
    axes.plot([20, 29], [1952 * 16 / 1e3, 1478 * 16 / 1e3], "o", color=_COLOURS[3], label="real (vllm#10517)")
    for low, high in lengths["ranges"]:
        axes.axvspan(low / 1e3, high / 1e3, color="#009E73", alpha=0.10)
    axes.set_xlabel("max_model_len (thousands of tokens)")
    axes.set_ylabel("thousands of tokens")
    axes.set_title("RTX 3090, Llama-3.1-8B, vLLM 0.6.4: green starts")
    axes.legend(fontsize=8, loc="lower right")


def _draw_spikes(axes: Any, spikes: list[dict[str, Any]]) -> None:
    for (name, _), colour in zip(incidents.ENGINES.items(), _COLOURS, strict=True):
        mine = [s for s in spikes if s["engine"] == name and s["utilization"] == 0.9 and not s["refused"]]
        if not mine:
            continue
        style = "--" if name.startswith("whole") else "-"
        for some, marker, label in ((mine, style, name), ([s for s in mine if s["crashed"]], "X", None)):
            x, y = [s["longest"] / 1e3 for s in some], [s["need_gib"] / s["room_gib"] for s in some]
            axes.plot(x, y, marker, color=colour, label=label, markersize=9)
    axes.axhline(1.0, color="#555555", linestyle=":")
    axes.plot([], [], "X", color="#555555", label="the engine died")
    axes.set_yscale("log")
    axes.set_xlabel("the long prompt (thousands of tokens)")
    axes.set_ylabel("need of its step / room")
    axes.set_title("Mistral-7B on an A100-80G at 0.90: one long prompt")
    axes.legend(fontsize=7, loc="upper left")
