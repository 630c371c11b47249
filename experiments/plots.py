"""The pictures: latency distributions, the KV pool over time by use, and what batches were made of.

Colours are Okabe and Ito's, which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np

from experiments import metrics
from experiments.compare import LATENCIES, first_arrival, last_end
from experiments.results import Results

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["batch_composition", "comparison", "kv_pool", "latency_cdfs", "to_png"]

REAL, SIMULATED = "#0072B2", "#E69F00"
USES = {
    "held": ("tokens", "#0072B2"),
    "tail": ("unused tail of last blocks", "#E69F00"),
    "reserved_may": ("reserved, may be needed", "#CC79A7"),
    "reserved_cannot": ("reserved, never needed", "#D55E00"),
    "external": ("free, but fits nobody", "#000000"),
    "transfer": ("held by transfers", "#56B4E9"),
    "cached": ("free, reusable content", "#7FCDB0"),
    "free": ("free, blank", "#ECECEC"),
}
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 110,
}


def to_png(figure: Figure) -> bytes:
    """The figure as PNG, without metadata that would differ from run to run; closes it."""
    sink = io.BytesIO()
    figure.savefig(sink, format="png", metadata={"Software": None})
    plt.close(figure)
    return sink.getvalue()


def comparison(real: Sequence[Results], simulated: Results) -> dict[str, bytes]:
    """All pictures of a comparison by file name (without .png)."""
    with plt.rc_context(STYLE):
        return {
            "latency": to_png(latency_cdfs(real, simulated)),
            "kv_pool": to_png(kv_pool(real[0], simulated)),
            "batches": to_png(batch_composition(real[0], simulated)),
        }


def latency_cdfs(real: Sequence[Results], simulated: Results) -> Figure:
    """Share of requests (or more) at most so slow: each real run a thin line, the simulation a broad one."""
    titles = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "e2e_s": "End-to-end latency"}
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.7), sharey=True, layout="constrained")
    for ax, name in zip(axes, LATENCIES, strict=True):
        unit, factor = ("ms", 1e-6) if name == "tpot_s" else ("s", 1e-9)
        _cdf(ax, metrics.latencies(simulated.tables.requests)[name] * factor, SIMULATED, 4.0, "simulated")
        for index, run in enumerate(real):
            label = "" if index else "real" if len(real) == 1 else f"real, {len(real)} runs"
            _cdf(ax, metrics.latencies(run.tables.requests)[name] * factor, REAL, 1.1, label)
        ax.set_xlabel(f"{titles[name]} ({unit})")
        ax.set_xlim(left=0)
        ax.set_ylim(0, 1.01)
    axes[0].set_ylabel("share of requests")
    axes[0].legend(loc="lower right")
    return figure


def _cdf(ax: Axes, values: np.ndarray, colour: str, width: float, label: str) -> None:
    ordered = np.sort(values[~np.isnan(values)])
    if len(ordered):
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        ax.step(
            np.concatenate([ordered[:1], ordered]),
            np.concatenate([[0], shares]),
            where="post",
            color=colour,
            linewidth=width,
            label=label,
            solid_capstyle="butt",
        )


def kv_pool(real: Results, simulated: Results) -> Figure:
    """Where every slot of the pool is, over time; triangles mark steps that preempted."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.3), sharex=True, sharey=True, layout="constrained")
    end_s = max(_length_ns(real), _length_ns(simulated)) / 1e9
    shown: dict[str, Any] = {}
    for ax, run, title in zip(axes, (real, simulated), ("Real", "Simulated"), strict=True):
        steps = metrics.expand_steps(run.tables)
        if len(steps["start_ns"]):
            shown |= _pool_areas(ax, run, steps, end_s)
        blocks = run.manifest.get("kv_blocks")
        ax.set_title(f"{title}: {blocks:,} blocks of {run.tables.block_size} tokens" if blocks else title)
        ax.set_xlabel("time since the first arrival (s)")
        ax.set_xlim(0, end_s)
        ax.set_ylim(0, 106)
        ax.set_yticks(range(0, 101, 20))
    axes[0].set_ylabel("share of the KV pool (%)")
    order = [key for key in (*USES, "preempted") if key in shown]
    labels = [USES[key][0] if key in USES else "step that preempted" for key in order]
    figure.legend([shown[key] for key in order], labels, loc="outside lower center", ncols=len(order))
    return figure


def _pool_areas(ax: Axes, run: Results, steps: dict[str, np.ndarray], end_s: float) -> dict[str, Any]:
    """Draws the stacked areas of one run; returns what the legend needs."""
    start = first_arrival(run)
    grid = np.linspace(0, end_s, 1600)
    stop = (last_end(run) - start) / 1e9
    total = sum(steps[name] for name in USES)
    layers = {}
    for name in USES:
        share = 100 * steps[name] / np.maximum(total, 1)
        values = metrics.time_weighted((steps["start_ns"] - start) / 1e9, share, grid)
        values = np.where(grid <= stop, values, np.nan)
        if np.nanmax(values) > 0:
            layers[name] = values
    areas = ax.stackplot(grid, *layers.values(), colors=[USES[name][1] for name in layers], linewidth=0)
    found: dict[str, Any] = dict(zip(layers, areas, strict=True))
    when = (steps["start_ns"][steps["preempted"] > 0] - start) / 1e9
    if len(when):
        found["preempted"] = ax.scatter(when, np.full(len(when), 103), marker="v", s=18, color="#000000", linewidths=0)
    return found


def batch_composition(real: Results, simulated: Results) -> Figure:
    """Rows and tokens of the steps, as means over short stretches of time, idle time counted as zero."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 5.6), sharex=True, sharey="row", layout="constrained")
    end_s = max(_length_ns(real), _length_ns(simulated)) / 1e9
    edges = np.linspace(0, end_s, 161)
    for column, (run, title) in enumerate(((real, "Real"), (simulated, "Simulated"))):
        top, bottom = axes[0, column], axes[1, column]
        steps = metrics.expand_steps(run.tables)
        if not len(steps["start_ns"]):
            continue
        mean = _binner(run, steps, edges)
        centres = (edges[1:] + edges[:-1]) / 2
        decodes, prefills = mean(steps["num_decodes"]), mean(steps["num_prefills"])
        top.stackplot(centres, decodes, prefills, colors=["#0072B2", "#E69F00"], labels=["decode", "prefill"])
        top.plot(centres, mean(steps["num_waiting"]), color="#000000", linewidth=1.3, label="waiting")
        tokens = mean(steps["prefill_tokens"])
        bottom.stackplot(centres, decodes, tokens, colors=["#0072B2", "#E69F00"])
        top.set_title(title)
        bottom.set_xlabel("time since the first arrival (s)")
    axes[0, 0].set_xlim(0, end_s)
    axes[0, 0].set_ylabel("requests")
    axes[1, 0].set_ylabel("new tokens a step")
    for row in (0, 1):
        axes[row, 0].set_ylim(bottom=0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _binner(run: Results, steps: dict[str, np.ndarray], edges: np.ndarray) -> Any:
    """A function from a column to its time-weighted mean in each bin, while steps run."""
    start = first_arrival(run)
    ends = (steps["end_ns"] - start) / 1e9
    begins = np.maximum((steps["start_ns"] - start) / 1e9, np.concatenate([[0.0], ends[:-1]]))
    points = np.stack([begins, ends], axis=1).ravel()

    def mean(column: np.ndarray) -> np.ndarray:
        area = np.cumsum(column * (ends - begins))
        filled = np.stack([np.concatenate([[0.0], area[:-1]]), area], axis=1).ravel()
        means: np.ndarray = np.diff(np.interp(edges, points, filled)) / np.diff(edges)
        return means

    return mean


def _length_ns(run: Results) -> int:
    return max(1, last_end(run) - first_arrival(run))
