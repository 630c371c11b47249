"""The picture of KV memory over time: what every byte is used for, who waits for some, and who lost some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from experiments import metrics, plots
from experiments.compare import first_arrival
from experiments.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LABELS", "Unit", "columns_of", "memory_figure", "unit_of"]

COLUMNS = 1100
"""Of time in the picture, each about a pixel wide. More steps than these are reduced to as many, or fewer."""
PEAKS = tuple(name for name in metrics.USAGE if name not in ("cached", "free"))
"""Uses whose highest points must be seen."""
LABELS = {
    "held": "held: carry a token",
    "tail": "tail: unused end of last blocks",
    "reserved_may": "reserved, may be needed",
    "reserved_cannot": "reserved, cannot be needed",
    "external": "external: free, fits nobody",
    "transfer": "transfer: held by copies only",
    "cached": "cached: free, reusable content",
    "free": "free",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """What amounts of memory are shown in."""

    name: str
    per_slot: float

    def text(self, slots: float) -> str:
        value = slots * self.per_slot
        return f"{value:,.0f} {self.name}" if value >= 100 or self.name == "slots" else f"{value:.3g} {self.name}"


def unit_of(run: Results, pool_slots: int) -> Unit:
    """GiB (or MiB, for a pool below one GiB) of all layers on one device where the model is known, slots if not."""
    from sim.errors import SimError
    from sim.models import load_model

    options = run.manifest["configuration"]
    try:
        spec = load_model(str(options.get("model", "")))
        named = [options.get("kv_cache_dtype"), run.manifest.get("engine", {}).get("dtype"), options.get("dtype")]
        dtype = next((name for name in named if name not in (None, "auto")), spec.dtype)
        slot_bytes = spec.kv_bytes_per_token(dtype, int(options.get("tensor_parallel_size", 1)))
    except (SimError, OSError, ValueError):
        return Unit("slots", 1.0)
    if pool_slots * slot_bytes >= 1 << 30:
        return Unit("GiB", slot_bytes / (1 << 30))
    return Unit("MiB", slot_bytes / (1 << 20))


@dataclass(frozen=True, slots=True)
class Columns:
    """A run's steps laid out in time, one after another; where nothing ran there is none."""

    begin_s: np.ndarray
    end_s: np.ndarray
    values: dict[str, np.ndarray]
    reduced: bool
    """Whether each stands for several steps."""


def columns_of(steps: dict[str, np.ndarray], start_ns: int, limit: int = COLUMNS) -> Columns:
    """What to draw: every step; or, where there are too many, of each stretch of time the step with the most in use,
    and the steps at which single uses are at their highest, if that is higher by a hundredth of the pool.

    The steps that are chosen share the stretch evenly, in order. Usage is always that of one real step, so that it sums
    to the pool; `num_waiting` and `num_running` are the most of any step of the stretch.
    """
    names = (*metrics.USAGE, "shared", "num_waiting", "num_running")
    begin = (steps["start_ns"] - start_ns) / 1e9
    end = np.maximum((steps["end_ns"] - start_ns) / 1e9, begin)
    # A step is decided while the one before runs, if two are in flight: each is shown until the next is decided.
    follows = np.concatenate([begin[1:], end[-1:]])
    pause = (end[-1] - begin[0]) / 400
    end = np.where(follows - end > pause, end, follows)
    if len(begin) <= limit:
        return Columns(begin, end, {name: steps[name] for name in names}, False)
    edges = np.linspace(begin[0], end[-1], limit // 2 + 1)
    stretch = np.clip(np.searchsorted(edges, begin, side="right") - 1, 0, len(edges) - 2)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    place = np.cumsum(np.diff(stretch, prepend=-1) > 0) - 1  # of each step's stretch among those that have any

    def highest(values: np.ndarray) -> np.ndarray:
        """The first step with the most of each stretch."""
        found: np.ndarray = np.lexsort((-values, stretch))[first]
        return found

    fullest = highest(np.sum([steps[name] for name in PEAKS], axis=0))
    pool = sum(steps[name][0] for name in metrics.USAGE)
    chosen = [fullest]
    for name in PEAKS:
        peak = highest(steps[name])
        chosen.append(peak[steps[name][peak] - steps[name][fullest] >= pool / 100])
    kept = np.unique(np.concatenate(chosen))
    values = {name: steps[name][kept] for name in (*metrics.USAGE, "shared")}
    values |= {name: np.maximum.reduceat(steps[name], first)[place[kept]] for name in ("num_waiting", "num_running")}
    last = np.concatenate([first[1:], [len(begin)]]) - 1
    share = 1 / np.bincount(place[kept])[place[kept]]
    number = np.arange(len(kept)) - np.searchsorted(place[kept], place[kept])
    left = begin[first][place[kept]]
    width = (end[last][place[kept]] - left) * share
    starts = left + number * width
    # To the bit where the next begins, unless nothing ran in between.
    stops = np.where(np.diff(place[kept], append=-1) == 0, np.append(starts[1:], 0.0), end[last][place[kept]])
    return Columns(starts, stops, values, True)


def memory_figure(run: Results) -> Figure:
    """The stacked uses of the pool over time, and beneath, in step with it, the queue and the preemptions."""
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(
            3, 1, figsize=(11, 7.2), sharex=True, height_ratios=[5, 1.6, 1], layout="constrained"
        )
        steps = metrics.expand_steps(run.tables)
        axes[0].set_title(_title(run), loc="left")
        axes[2].set_xlabel("time since the first arrival (s)")
        if not len(steps["start_ns"]):
            axes[0].text(0.5, 0.5, "No step was run.", ha="center", transform=axes[0].transAxes)
            return figure
        shown = columns_of(steps, first_arrival(run))
        pool = int(sum(steps[name][0] for name in metrics.USAGE))
        unit = unit_of(run, pool)
        _areas(axes[0], shown, steps, pool, unit)
        _queue(axes[1], shown)
        _preemptions(axes[2], steps, first_arrival(run))
        axes[0].set_xlim(min(0.0, float(shown.begin_s[0])), float(shown.end_s[-1]))
        return figure


def _title(run: Results) -> str:
    blocks = run.manifest.get("kv_blocks")
    kind = {"real": "Real run", "simulated": "Simulation"}.get(str(run.manifest.get("kind")), "Run")
    model = run.manifest["configuration"].get("model")
    pool = f"{blocks:,} blocks of {run.tables.block_size} tokens" if blocks else f"blocks of {run.tables.block_size}"
    cut = "" if run.manifest.get("complete", True) else " (interrupted)"
    return f"KV memory by use over time. {kind}{cut}{f' of {model}' if model else ''}, {pool}"


def _outline(shown: Columns, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two points a column, so that a line through them is level within each; a gap where nothing ran."""
    times = np.stack([shown.begin_s, shown.end_s], axis=1).ravel()
    heights = np.repeat(values.astype(np.float64), 2)
    gaps = np.flatnonzero(shown.begin_s[1:] > shown.end_s[:-1]) * 2 + 2
    return np.insert(times, gaps, times[gaps]), np.insert(heights, gaps, np.nan)


def _areas(ax: Axes, shown: Columns, steps: dict[str, np.ndarray], pool: int, unit: Unit) -> None:
    handles: list[Any] = []
    labels: list[str] = []
    base = np.zeros(len(shown.begin_s))
    for name in metrics.USAGE:
        top = base + shown.values[name]
        peak = int(steps[name].max())
        if peak:
            times, low = _outline(shown, base * unit.per_slot)
            _, high = _outline(shown, top * unit.per_slot)
            area = ax.fill_between(times, low, high, color=plots.USES[name][1], linewidth=0)
            handles.append(area)
            labels.append(f"{LABELS[name]}\n  at most {unit.text(peak)}")
        base = top
    handles.reverse()
    labels.reverse()
    if steps["shared"].max() > 0:
        times, line = _outline(shown, shown.values["shared"] * unit.per_slot)
        handles += ax.plot(times, line, color="#000000", linewidth=1.1, linestyle=(0, (4, 1.5)))
        labels.append(
            f"shared: saved by sharing\n  (not in the sum)\n  at most {unit.text(int(steps['shared'].max()))}"
        )
    most = max(pool, float(shown.values["shared"].max()))
    ax.set_ylim(0, most * unit.per_slot * 1.01)
    ax.set_ylabel(f"KV memory ({unit.name})")
    title = "from top to bottom"
    if shown.reduced:
        title += f"\n({len(steps['step']):,} steps, of which the\nfullest and peaks are shown)"
    ax.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), title=title, alignment="left", fontsize=8.5
    )


def _queue(ax: Axes, shown: Columns) -> None:
    for name, colour, label in (("num_running", "#0072B2", "running"), ("num_waiting", "#D55E00", "waiting")):
        times, line = _outline(shown, shown.values[name])
        ax.plot(times, line, color=colour, linewidth=1.2, label=label)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("requests")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), alignment="left", fontsize=8.5)


def _preemptions(ax: Axes, steps: dict[str, np.ndarray], start_ns: int) -> None:
    """How many in each of 200 stretches of the time."""
    when = (steps["start_ns"] - start_ns) / 1e9
    edges = np.linspace(min(0.0, float(when[0])), float((steps["end_ns"].max() - start_ns) / 1e9), 201)
    counts, _ = np.histogram(when, edges, weights=steps["preempted"])
    ax.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color="#000000", linewidth=0)
    ax.set_ylim(0, max(1.0, float(counts.max()) * 1.05))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    ax.set_ylabel("preempted")
    total = int(steps["preempted"].sum())
    ax.text(1.01, 1.0, f"{total:,} in all", transform=ax.transAxes, va="top", fontsize=8.5)
