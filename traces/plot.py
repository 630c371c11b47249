"""The picture of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from traces.errors import TraceError
from traces.schema import Trace
from traces.stats import BLOCK_SIZES, arrivals_per_window, stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"
_CACHE_SIZES = tuple(62_500 * 2**i for i in range(9))
_WINDOWS_S = (1, 10, 60, 600, 3600, 21600)


def draw(trace: Trace, path: Path) -> None:
    """Four panels into a PNG (or what else the name's ending says)."""
    from matplotlib.figure import Figure  # without pyplot, which keeps state and may want a screen

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (top_left, top_right), (low_left, low_right) = figure.subplots(2, 2)
    figure.suptitle(f"{trace.name}: {len(trace):,} requests", fontsize=13)
    _draw_lengths(top_left, trace)
    _draw_arrivals(top_right, trace)
    _draw_gaps(low_left, trace)
    if len(trace.span_ids):
        _draw_reuse(low_right, trace)
    else:
        _draw_waste(low_right, trace)
    for axes in (top_left, top_right, low_left, low_right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, alpha=0.25)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be written ({error})") from None


def _draw_lengths(axes: Axes, trace: Trace) -> None:
    share = np.arange(1, len(trace) + 1) / len(trace)
    for tokens, color, label in (
        (trace.prompt_tokens, _BLUE, "prompt"),
        (trace.output_tokens, _ORANGE, "output"),
    ):
        name = f"{label} (mean {tokens.mean():,.0f}, median {np.median(tokens):,.0f})"
        axes.step(np.sort(tokens), share, where="post", color=color, label=name)
    axes.set(xscale="log", ylim=(0, 1.25), yticks=np.linspace(0, 1, 6))  # room for the legend above the curves
    axes.set(title="Lengths", xlabel="tokens", ylabel="share of requests up to")
    axes.legend(loc="upper left", fontsize=9)


def _draw_arrivals(axes: Axes, trace: Trace) -> None:
    if trace.concurrency is not None:
        _say(axes, "Arrivals", f"closed loop: {trace.concurrency} requests outstanding at any time")
        return
    duration = float(trace.arrival_ns[-1]) / 1e9
    window = next((w for w in _WINDOWS_S if duration / w <= 600), _WINDOWS_S[-1])
    rate = arrivals_per_window(trace.arrival_ns, window) / window
    axes.stairs(rate, np.arange(len(rate) + 1) * window, fill=True, color=_BLUE, alpha=0.75)
    if duration:
        mean = len(trace) / duration
        axes.axhline(mean, color=_ORANGE, linewidth=1.2, label=f"mean {mean:,.3g}/s")
        axes.legend(loc="upper right", fontsize=9)
    title = f"Arrivals, windows of {window} s"
    axes.set(title=title, xlabel="time (s)", ylabel="requests per second", xlim=(0, None), ylim=(0, 1.15 * rate.max()))


def _draw_gaps(axes: Axes, trace: Trace) -> None:
    gaps = np.sort(np.diff(trace.arrival_ns)) / 1e9
    if not len(gaps) or gaps[-1] == 0 or trace.concurrency is not None:
        _say(axes, "Gaps between arrivals", "no gaps: requests come when others finish, or all at once")
        return
    mean, cv = gaps.mean(), gaps.std() / gaps.mean()
    longer = 1 - np.arange(len(gaps)) / len(gaps)
    positive = gaps > 0
    label = f"trace (CV {cv:.2f}" + (f", {1 - positive.mean():.0%} are 0)" if not positive.all() else ")")
    # The few gaps far below the others would take up most of a logarithmic axis.
    left = max(min(np.quantile(gaps[positive], 0.02), mean / 30), mean / 1e4)
    axes.step(np.append(left, gaps[positive]), np.append(positive.mean(), longer[positive]), color=_BLUE, label=label)
    grid = np.geomspace(left, gaps[-1], 300)
    axes.plot(grid, np.exp(-grid / mean), color=_GREY, linestyle="--", label="Poisson of the same rate (CV 1)")
    axes.set(xscale="log", yscale="log", xlim=(left, gaps[-1] * 1.5), ylim=(0.5 / len(gaps), 1.5))
    axes.set_title("Gaps between arrivals")
    axes.set(xlabel="gap (s)", ylabel="share of gaps at least as long")
    axes.legend(loc="lower left", fontsize=9)


def _draw_reuse(axes: Axes, trace: Trace) -> None:
    numbers = stats(trace, _CACHE_SIZES)
    shares = [100 * numbers["lru_hit_share"][str(size)]["all_ids"] for size in _CACHE_SIZES]
    unlimited = 100 * numbers["prefix_reuse_share"]["all_ids"]
    axes.plot(
        np.array(_CACHE_SIZES) / 1e6, shares, marker="o", markersize=4, color=_BLUE, label="LRU cache of this size"
    )
    axes.axhline(unlimited, color=_ORANGE, linestyle="--", label=f"unlimited cache: {unlimited:.1f} %")
    axes.set(xscale="log", ylim=(0, max(unlimited, 1) * 1.25), title="Reuse of prompt prefixes, served in no time")
    axes.set(xlabel="cache (million tokens)", ylabel="ids hit (%)")
    axes.set_xticks([size / 1e6 for size in _CACHE_SIZES[::2]], [f"{size / 1e6:g}" for size in _CACHE_SIZES[::2]])
    axes.minorticks_off()
    axes.legend(loc="upper left", fontsize=9)


def _draw_waste(axes: Axes, trace: Trace) -> None:
    waste = stats(trace)["waste_fixed_block"]
    bars = axes.bar([str(size) for size in BLOCK_SIZES], [100 * waste[str(size)] for size in BLOCK_SIZES], color=_BLUE)
    axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set(
        title="Slots left empty in last blocks", xlabel="block size (tokens)", ylabel="share of allocated slots (%)"
    )


def _say(axes: Axes, title: str, text: str) -> None:
    axes.set(title=title, xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=_GREY)
