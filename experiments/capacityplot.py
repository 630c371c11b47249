"""The picture of a capacity search: each objective over the rate, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib import pyplot as plt

from experiments.plots import REAL, SIMULATED, STYLE, to_png

if TYPE_CHECKING:
    from experiments.capacitysearch import Knee, Objective

__all__ = ["picture"]


def picture(knees: Sequence[Knee], objectives: Sequence[Objective], rate: float, ends: Sequence[float]) -> bytes:
    """A panel for each objective, a line for each trace; the band of step times is shaded."""
    count = len(objectives)
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, count, figsize=(5.2 * count, 3.9), squeeze=False, layout="constrained")
        for panel, objective in zip(panels[0], objectives, strict=True):
            everything = []
            for index, knee in enumerate(knees):
                points = sorted(
                    (one.rate_per_s, value)
                    for one in knee.tried
                    if (value := one.metrics.get(objective.metric)) is not None
                )
                everything += [value for _, value in points]
                label = "a trace" if not index else None
                panel.plot(*zip(*points, strict=True), color=REAL, marker="o", markersize=3, linewidth=1, label=label)
            panel.axhline(objective.value, color="#666666", linestyle="--", linewidth=1, label=f"objective {objective}")
            if len(ends) > 1:
                panel.axvspan(ends[0], ends[-1], color=SIMULATED, alpha=0.18, linewidth=0, label="step times' band")
            panel.axvline(rate, color=SIMULATED, linewidth=1.6, label=f"{rate:.4g} requests per s")
            panel.set_xscale("log")
            if everything and min(everything) > 0 and max(everything) / min(everything) > 20:
                panel.set_yscale("log")
            panel.set_xlabel("requests per s")
            panel.set_ylabel(objective.metric)
            panel.legend(loc="best", fontsize=8)
        return to_png(figure)
