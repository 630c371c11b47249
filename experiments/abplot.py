"""The picture of `kvtwin ab`: differences in percent, real with their intervals, simulated beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt

from experiments.paired import METRICS
from experiments.plots import REAL, SIMULATED, STYLE, to_png

__all__ = ["forest"]


def forest(pairs: Sequence[Mapping[str, Any]]) -> bytes:
    """One line a metric for a single pair, or one a pair with its own metric: (B - A) / A in percent, as PNG."""
    if len(pairs) == 1:
        lines = [(METRICS[name][0], entry) for name, entry in pairs[0]["metrics"].items()]
        title = f"A: {pairs[0]['a']}   B: {pairs[0]['b']}"
    else:
        lines = [(f"{_sides(p['a'], p['b'])}\n{METRICS[p['metric']][0]}", p["metrics"][p["metric"]]) for p in pairs]
        title = "A → B, each by the metric named beforehand"
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9, 1.6 + 0.5 * len(lines)), layout="constrained")
        for place, (_, entry) in enumerate(lines):
            real, simulated = entry["real"], entry["simulated"]
            if real is not None and real["difference_pct"] is not None:
                low, high = real["interval_pct"] or (real["difference_pct"],) * 2
                ax.plot([low, high], [place, place], color=REAL, linewidth=2)
                ax.plot(real["difference_pct"], place, "o", color=REAL, label="real, 95 % interval")
            if simulated is not None and simulated["difference_pct"] is not None:
                ax.plot(simulated["difference_pct"], place, "D", color=SIMULATED, markersize=6, label="simulated")
        ax.axvline(0, color="#555555", linewidth=1)
        ax.set_yticks(range(len(lines)), [label for label, _ in lines])
        ax.set_ylim(len(lines) - 0.4, -0.6)
        ax.set_xlabel("difference (B - A) / A (%)")
        ax.set_title(title)
        handles, labels = ax.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        if unique:
            figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=2)
        return to_png(figure)


def _sides(a: str, b: str) -> str:
    """Both sides in at most about 50 characters: a line each where one line is too long, options of both named once."""
    parts = [dict(part.partition("=")[::2] for part in side.split(",")) for side in (a, b)]
    if "=" in a and "=" in b and parts[0].keys() == parts[1].keys():
        changed = [name for name in parts[0] if parts[0][name] != parts[1][name]]
        return "\n".join(f"{name}: {parts[0][name]} → {parts[1][name]}" for name in changed)
    text = f"{a} → {b}"
    return text if len(text) <= 50 else f"{a}\n→ {b}"
