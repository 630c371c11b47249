"""The picture of the experiment `failover`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from experiments.plots import STYLE, to_png

__all__ = ["picture"]

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"


def picture(runs: Sequence[Mapping[str, Any]], single: Mapping[str, Any], base: str, impatient: str) -> bytes:
    """Good requests over time around the crash, what is lost over restart time, over load, and one replica alone.

    `base` and `impatient` are the clients that are shown.
    """
    load = max(row["load"] for row in runs)
    others = [row for row in runs if row["load"] != load]
    restart = others[0]["restart_s"]
    at_restart = [row for row in runs if row["restart_s"] == restart and row["load"] == load]
    rows = [row for row in runs if row["clients"] == base]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11.5, 7.6), layout="constrained")
        shown = [
            row for row in at_restart if row["clients"] == base or (row["clients"] == impatient and not row["spare"])
        ]
        _over_time(axes[0, 0], shown, base, restart)
        _over_restart(axes[0, 1], [r for r in rows if r["load"] == load], load)
        _over_load(axes[1, 0], [r for r in rows if r["restart_s"] == restart], restart)
        _alone(axes[1, 1], single, restart)
        return to_png(figure)


def _colour(row: Mapping[str, Any]) -> str:
    return GREEN if row["spare"] else ORANGE


def _down(ax: Any, restart: int) -> None:
    ax.axvspan(0, restart, color="#EEEEEE", zorder=0, label=f"replica down ({restart} s)")


def _over_time(ax: Any, rows: Sequence[Mapping[str, Any]], base: str, restart: int) -> None:
    _down(ax, restart)
    for row in rows:
        width = row["bins_s"][1] - row["bins_s"][0]
        middle = np.array(row["bins_s"]) + width / 2
        style = "-" if row["clients"] == base else "--"
        label = f"{row['replicas']} replicas; clients: {row['clients']}"
        ax.plot(middle, 100 * np.array(row["good_share"]), style, color=_colour(row), label=label)
    ax.set(xlabel="arrival, s after the crash", ylabel="good requests (%)", ylim=(0, 103))
    ax.set_title(f"Requests that were good, load {rows[0]['load']:.0%} of three replicas")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8.5)


def _over_restart(ax: Any, rows: Sequence[Mapping[str, Any]], load: float) -> None:
    for spare in (0, 1):
        chosen = sorted((r for r in rows if r["spare"] == spare), key=lambda r: r["restart_s"])
        x = [r["restart_s"] / 60 for r in chosen]
        colour, name = _colour(chosen[0]), f"{chosen[0]['replicas']} replicas"
        ax.plot(x, [r["not_good"] for r in chosen], "o-", color=colour, label=f"{name}: not good")
        ax.plot(x, [r["lost"] for r in chosen], "s--", color=colour, label=f"{name}: lost", markerfacecolor="white")
    ax.set(xlabel="restart (minutes)", ylabel="requests", ylim=(0, None))
    ax.set_title(f"Over the length of the restart, load {load:.0%}")
    ax.legend()


def _over_load(ax: Any, rows: Sequence[Mapping[str, Any]], restart: int) -> None:
    loads = sorted({r["load"] for r in rows})
    for at, spare in ((-0.17, 0), (0.17, 1)):
        chosen = sorted((r for r in rows if r["spare"] == spare), key=lambda r: r["load"])
        x = np.arange(len(chosen)) + at
        values = [100 * r["good_after"] for r in chosen]
        bars = ax.bar(x, values, 0.32, color=_colour(chosen[0]), label=f"{chosen[0]['replicas']} replicas")
        ax.bar_label(bars, fmt="%.0f", padding=2)
    ax.set_xticks(range(len(loads)), [f"{value:.0%}" for value in loads])
    ax.set(xlabel="load, of what three replicas serve", ylabel="good requests (%)", ylim=(0, 122))
    ax.set_title(f"Requests in the minutes after the crash, restart {restart} s")
    ax.legend(loc="upper right", ncols=2)
    ax.grid(axis="x", visible=False)


def _alone(ax: Any, single: Mapping[str, Any], restart: int) -> None:
    _down(ax, restart)
    ax.plot(single["grid_s"], single["running"], color=BLUE, drawstyle="steps-post", label="requests running")
    ax.set(xlabel="s after the crash", ylabel="requests", ylim=(0, None))
    ax.set_title("One replica alone: requests that run")
    ax.legend(loc="upper left")
