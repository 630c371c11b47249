"""Pictures of a validation: latencies request by request, their distributions, and the engine over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np

from experiments.plots import REAL, SIMULATED, STYLE, to_png

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from experiments.rundir import RealRun
    from experiments.validate import Predicted

__all__ = ["pictures"]

PUBLIC = "#888888"
_TITLES = {
    "ttft": ("time to first token (s)", 1.0),
    "tpot_s": ("time per output token (ms)", 1e3),
    "e2e": ("latency (s)", 1.0),
}


def pictures(run: RealRun, predicted: Predicted, report: dict[str, Any]) -> dict[str, bytes]:
    """All pictures by file name (without .png)."""
    with plt.rc_context(STYLE):
        return {
            "requests": to_png(_requests(run, predicted, report)),
            "latency": to_png(_distributions(run, predicted)),
            "series": to_png(_series(run, predicted)),
        }


def _sides(run: RealRun, predicted: Predicted) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Real, predicted and public values of each picture's three latencies, from queued where that is known."""
    real = run.latencies()
    suffix = "_s" if run.queued_s is None else "_queued_s"
    public: dict[str, np.ndarray] = {}
    if run.public is not None:
        tokens = run.output_tokens - 1
        ttft, e2e = run.public["ttft_s"], run.public["latency_s"]
        tpot = np.where(tokens > 0, (e2e - ttft) / np.maximum(tokens, 1), np.nan)
        public = {"ttft": ttft, "tpot_s": tpot, "e2e": e2e}
    sides = {}
    for key in _TITLES:
        name = key if key == "tpot_s" else key + suffix
        sides[key] = (real[name], predicted.latencies[name], public.get(key))
    return sides


def _requests(run: RealRun, predicted: Predicted, report: dict[str, Any]) -> Figure:
    """Predicted against real, a point a request; on the line, they are equal."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.9), layout="constrained")
    suffix = "_s" if run.queued_s is None else "_queued_s"
    for ax, (key, (real, ours, public)) in zip(axes, _sides(run, predicted).items(), strict=True):
        title, factor = _TITLES[key]
        if public is not None:
            ax.plot(real * factor, public * factor, ".", color=PUBLIC, markersize=4, label="public simulator")
        ax.plot(real * factor, ours * factor, ".", color=SIMULATED, markersize=5, label="predicted")
        high = float(np.nanmax(np.concatenate([real, ours]))) * factor * 1.05 or 1.0
        ax.plot([0, high], [0, high], color="#000000", linewidth=0.8)
        ax.set_xlim(0, high)
        ax.set_ylim(0, high)
        mape = report["per_request_mape_pct"].get(key if key == "tpot_s" else key + suffix)
        ax.set_title("" if mape is None else f"mean |error| {mape:.1f} %")
        ax.set_xlabel(f"real {title}")
        ax.set_ylabel("predicted")
    axes[0].legend(loc="upper left")
    return figure


def _distributions(run: RealRun, predicted: Predicted) -> Figure:
    """Share of requests at most so slow."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.7), sharey=True, layout="constrained")
    for ax, (key, (real, ours, public)) in zip(axes, _sides(run, predicted).items(), strict=True):
        title, factor = _TITLES[key]
        _cdf(ax, ours * factor, SIMULATED, 4.0, "predicted")
        if public is not None:
            _cdf(ax, public * factor, PUBLIC, 1.4, "public simulator")
        _cdf(ax, real * factor, REAL, 1.4, "real")
        ax.set_xlabel(title)
        ax.set_xlim(left=0)
        ax.set_ylim(0, 1.01)
    axes[0].set_ylabel("share of requests")
    axes[0].legend(loc="lower right")
    return figure


def _cdf(ax: Axes, values: np.ndarray, colour: str, width: float, label: str) -> None:
    ordered = np.sort(values[np.isfinite(values)])
    if len(ordered):
        ax.step(
            ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=colour, lw=width, label=label
        )


def _series(run: RealRun, predicted: Predicted) -> Figure:
    """Running and waiting requests and the KV cache in use, over time."""
    names = {"running": "running requests", "waiting": "waiting requests", "kv_cache_pct": "KV cache in use (%)"}
    end = max(float(np.nanmax(run.last_token_s)), max(result.end_ns for result in predicted.replicas) / 1e9)
    times = np.linspace(0, end, 1200)
    ours = predicted.series(times)
    figure, axes = plt.subplots(3, 1, figsize=(11, 7.2), sharex=True, layout="constrained")
    for ax, (name, title) in zip(axes, names.items(), strict=True):
        ax.plot(times, ours[name], color=SIMULATED, linewidth=2.2, label="predicted")
        if run.series is not None and name in run.series:
            ax.plot(run.series["t"], run.series[name], color=REAL, linewidth=1.1, label="real")
        ax.set_ylabel(title)
        ax.set_ylim(bottom=0)
    axes[0].legend(loc="upper right")
    axes[-1].set_xlabel("time since the first arrival (s)")
    axes[-1].set_xlim(0, end)
    return figure
