"""The picture of the experiment `routing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from experiments.plots import STYLE, to_png

__all__ = ["picture"]

COLOURS = {
    "round-robin": "#999999",
    "least-loaded": "#0072B2",
    "power-of-two": "#56B4E9",
    "session": "#CC79A7",
    "prefix": "#009E73",
    "prefix, tight": "#E69F00",
    "prefix, unbalanced": "#D55E00",
}
"""By router."""
MARKERS = ("o", "s", "P", "^", "D")
"""By workload."""


def picture(found: Sequence[Mapping[str, Any]], sizes: Sequence[Mapping[str, Any]]) -> bytes:
    """Hits over the number of replicas, hits against how uneven load is, and TTFT by workload."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(14.5, 5.0), layout="constrained")
        _over_sizes(axes[0], sizes)
        _balance(axes[1], found)
        _ttft(axes[2], found)
        handles = [Line2D([], [], color=colour, linewidth=6, label=name) for name, colour in COLOURS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        return to_png(figure)


def _over_sizes(ax: Any, sizes: Sequence[Mapping[str, Any]]) -> None:
    for router in dict.fromkeys(row["router"] for row in sizes):
        rows = sorted((r for r in sizes if r["router"] == router), key=lambda r: r["replicas"])
        x, y = [r["replicas"] for r in rows], [100 * r["hit_share"] for r in rows]
        ax.plot(x, y, "o-", color=COLOURS[router])
    ax.set_xscale("log", base=2)
    ticks = sorted({row["replicas"] for row in sizes})
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.set(xlabel="replicas (load in proportion)", ylabel="prompt tokens from the cache (%)", ylim=(0, 100))
    ax.set_title("Chats over the number of replicas")


def _balance(ax: Any, found: Sequence[Mapping[str, Any]]) -> None:
    loads = list(dict.fromkeys(row["load"] for row in found))
    for load, marker in zip(loads, MARKERS, strict=False):
        for row in found:
            if row["load"] == load:
                ax.plot(row["uneven"], 100 * row["hit_share"], marker, color=COLOURS[row["router"]], markersize=8)
        ax.plot([], [], marker, color="#333333", label=load)
    ax.set(xlabel="tokens computed by the busiest replica, beside the mean", ylim=(-3, 100))
    ax.set_ylabel("prompt tokens from the cache (%)")
    ax.set_title("Hits against balance, four replicas")
    ax.legend(loc="center right", bbox_to_anchor=(1.0, 0.3))


def _ttft(ax: Any, found: Sequence[Mapping[str, Any]]) -> None:
    loads = list(dict.fromkeys(row["load"] for row in found))
    routers = list(COLOURS)
    width = 0.8 / len(routers)
    for at, router in enumerate(routers):
        values = [next(r for r in found if r["load"] == load and r["router"] == router) for load in loads]
        x = np.arange(len(loads)) + (at - (len(routers) - 1) / 2) * width
        ax.bar(x, [1e3 * r["ttft_mean_s"] for r in values], width, color=COLOURS[router])
    ax.set_xticks(range(len(loads)), [load.replace(" ", "\n") for load in loads])
    ax.set(ylabel="mean TTFT (ms)", yscale="log")
    ax.grid(axis="x", visible=False)
    ax.set_title("Time to first token, four replicas")
