"""Pictures of a sweep: how objectives answer to what varies, and what cannot be had together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt

from experiments.plots import REAL, SIMULATED, STYLE, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from experiments.sweep import Row
    from experiments.sweepspec import Axis, Sweep

__all__ = ["pareto", "responses"]

MOST = 5
"""Options and objectives that are drawn."""
GREY = "#B8C4CE"


def responses(sweep: Sweep, rows: Sequence[Row], objectives: Sequence[tuple[str, bool]]) -> bytes:
    """A panel for each objective (rows) and option (columns): every configuration, and the median at each value."""
    axes_drawn, drawn = sweep.axes[:MOST], objectives[:MOST]
    size = (3.6 * len(axes_drawn) + 0.6, 2.7 * len(drawn) + 0.3)
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            len(drawn), len(axes_drawn), figsize=size, squeeze=False, sharey="row", layout="constrained"
        )
        for line, (name, less) in zip(panels, drawn, strict=True):
            for panel, axis in zip(line, axes_drawn, strict=True):
                _response(panel, axis, rows, name)
            line[0].set_ylabel(f"{name}\n({'less' if less else 'more'} is better)")
        for panel, axis in zip(panels[-1], axes_drawn, strict=True):
            panel.set_xlabel(axis.name + (f" ({axis.option.unit})" if axis.option.unit else ""))
        return to_png(figure)


def _response(panel: Axes, axis: Axis, rows: Sequence[Row], metric: str) -> None:
    having = [row for row in rows if row["metrics"] is not None and row["metrics"].get(metric) is not None]
    values = [row["point"][axis.name] for row in having]
    y = np.array([row["metrics"][metric] for row in having], dtype=float)
    numeric = axis.option.kind in (int, float) and all(value is not None for value in values)
    if numeric:
        x = np.array(values, dtype=float)
    else:
        labels = [_label(value) for value in axis.values]
        x = np.array([labels.index(_label(value)) for value in values], dtype=float)
        panel.set_xticks(range(len(labels)), labels, rotation=20 if max(map(len, labels)) > 8 else 0)
        panel.set_xlim(-0.5, len(labels) - 0.5)
    panel.scatter(x, y, s=14, color=GREY, linewidths=0, label="a configuration")
    places = np.unique(x)
    if len(places) < len(x) or len(places) <= 12:
        middle = [float(np.median(y[x == place])) for place in places]
        panel.plot(places, middle, color=REAL, marker="o", markersize=4, linewidth=1.4 if numeric else 0)
    if numeric and axis.low > 0 and axis.log:
        panel.set_xscale("log")
    elif numeric and not axis.is_range and len(places) > 2 and places[0] > 0 and places[-1] / places[0] >= 8:
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [f"{place:g}" for place in places])
        panel.minorticks_off()
    if len(y) and y.min() > 0 and y.max() / y.min() > 50:
        panel.set_yscale("log")


def _label(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.rpartition("/")[2]


def pareto(rows: Sequence[Row], objectives: Sequence[tuple[str, bool]], front: Sequence[int]) -> bytes:
    """The first two objectives of every configuration; those that no other beats are joined and numbered."""
    (first, first_less), (second, second_less) = objectives[:2]
    points = [
        (row["metrics"][first], row["metrics"][second])
        for row in rows
        if row["metrics"] is not None and None not in (row["metrics"].get(first), row["metrics"].get(second))
    ]
    best = [(rows[index]["metrics"][first], rows[index]["metrics"][second], index) for index in front]
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
        panel.scatter(
            [x for x, _ in points], [y for _, y in points], s=16, color=GREY, linewidths=0, label="a configuration"
        )
        best.sort()
        title = "no other is better in both" if len(objectives) == 2 else "no other is better in all objectives"
        panel.plot(
            [x for x, _, _ in best],
            [y for _, y, _ in best],
            color=SIMULATED,
            marker="o",
            markersize=5,
            linewidth=1.4 if len(objectives) == 2 else 0,
            label=title,
        )
        for x, y, index in best[:: max(1, len(best) // 12)]:
            panel.annotate(str(index), (x, y), textcoords="offset points", xytext=(4, 5), fontsize=8)
        panel.set_xlabel(f"{first} ({'less' if first_less else 'more'} is better)")
        panel.set_ylabel(f"{second} ({'less' if second_less else 'more'} is better)")
        for values, scale in ((0, panel.set_xscale), (1, panel.set_yscale)):
            column = [point[values] for point in points]
            if min(column) > 0 and max(column) / min(column) > 50:
                scale("log")
        panel.legend(loc="best", fontsize=9)
        panel.set_title("numbers: row of sweep.parquet", fontsize=9)
        return to_png(figure)
