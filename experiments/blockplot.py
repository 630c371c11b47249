"""The block map: one cell a block, coloured by owner. As panels at chosen moments, and as a page that plays.

Colour means an owner, and grey that there is no single one, so that states can be told apart by lightness alone: black
for blocks in several tables, greys for those in none. A block that is promised to a request but carries no token yet is
a pale version of the request's colour. There are twelve colours; see `colours_of_requests`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from engine.core.blockmap import CUT, SET, BlockMap
from experiments import metrics, plots
from experiments.blocks import BlockHistory
from experiments.compare import first_arrival
from experiments.errors import UsageError
from experiments.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STATES", "Moments", "animation", "colours", "colours_of_requests", "panels", "states_of"]

STATES = ("free", "cached", "owned", "reserved", "shared", "transfer")
FREE, CACHED, OWNED, RESERVED, SHARED, TRANSFER = range(6)
GREYS = {"free": "#F3F3F3", "cached": "#BDBDBD", "shared": "#000000", "transfer": "#767676"}
PALETTE = (
    *("#E69F00", "#0072B2", "#CC79A7", "#009E73", "#D55E00", "#56B4E9"),
    *("#882255", "#F0E442", "#332288", "#44AA99", "#AA4499", "#999933"),
)
"""Okabe and Ito's colours and some of Paul Tol's muted ones, neighbours far apart in lightness."""
PALE = 0.65
"""How much white is in the colour of a reserved block."""
MOST_BLOCKS = 1 << 18
EDGED = 6000
"""Up to so many blocks, cells have a margin."""
_ASPECT = 1.7


@dataclass(frozen=True, slots=True)
class Moments:
    """The recorded steps: when each was decided, and what the queue was then."""

    steps: np.ndarray
    times_s: np.ndarray
    """Since the first arrival."""
    running: np.ndarray
    waiting: np.ndarray
    preempted: np.ndarray
    end_s: float
    """When the last of them ended."""

    @classmethod
    def of(cls, run: Results, history: BlockHistory) -> Moments:
        """Of a run and its record.

        Raises:
            UsageError: the pool has too many blocks to be drawn one by one.
        """
        if history.num_blocks > MOST_BLOCKS:
            raise UsageError(
                f"{run.path} has {history.num_blocks:,} blocks; a block map can show {MOST_BLOCKS:,} at most."
            )
        steps = metrics.expand_steps(run.tables)
        known = steps["step"] <= history.last_step
        start = first_arrival(run)
        kept = {name: steps[name][known] for name in ("step", "num_running", "num_waiting", "preempted")}
        ends = (steps["end_ns"][known] - start) / 1e9
        times = (steps["start_ns"][known] - start) / 1e9
        end = float(ends.max()) if len(ends) else 0.0
        return cls(kept["step"], times, kept["num_running"], kept["num_waiting"], kept["preempted"], end)

    def at(self, times_s: Sequence[float]) -> list[int]:
        """The places of the steps that were decided last at these times (or first, for times before any).

        Raises:
            UsageError: a time is after the last of them has ended.
        """
        for time in times_s:
            if time > self.end_s:
                raise UsageError(f"--at {time:g}s is after the end of what was recorded, which is {self.end_s:.6g} s.")
        found = np.searchsorted(self.times_s, np.asarray(times_s), side="right") - 1
        return [max(0, int(place)) for place in found]

    def evenly(self, count: int) -> list[int]:
        """The places of steps at about so many evenly spaced times between the first step and the end."""
        begin = float(self.times_s[0])
        times = [begin + (self.end_s - begin) * (i + 1) / (count + 1) for i in range(count)]
        return sorted(set(self.at(times)))


def states_of(state: BlockMap) -> tuple[np.ndarray, np.ndarray]:
    """(what each block is: uint8 places in STATES; a request that holds it: int64, -1: none)."""
    owner = np.full(state.num_blocks, -1, dtype=np.int64)
    for request, table in state.tables.items():
        owner[table] = request
    found = np.where(state.owners > 1, SHARED, np.where(state.owners == 1, OWNED, FREE)).astype(np.uint8)
    for request, first in state.reserved.items():
        later = np.asarray(state.tables[request][first:])
        found[later[state.owners[later] == 1]] = RESERVED
    found[(found == FREE) & (state.cached == 1)] = CACHED
    for block in state.held:
        if not state.owners[block]:
            found[block] = TRANSFER
    return found, owner


def colours_of_requests(history: BlockHistory) -> dict[int, int]:
    """The place in PALETTE of each request's colour, the same in every picture of the run.

    A request gets the colour that the fewest of those have who hold blocks when it first does; among these, the one
    that comes next.
    """
    found: dict[int, int] = {}
    holders = [0] * len(PALETTE)
    holding: set[int] = set()
    columns = (history.changes[name].tolist() for name in ("event", "request", "index"))
    turn = 0
    for event, request, index in zip(*columns, strict=True):
        if event == SET and request not in holding:
            if request not in found:
                order = range(turn, turn + len(PALETTE))
                found[request] = min(order, key=lambda place: holders[place % len(PALETTE)]) % len(PALETTE)
                turn = found[request] + 1
            holding.add(request)
            holders[found[request]] += 1
        elif event == CUT and index == 0:
            holding.remove(request)
            holders[found[request]] -= 1
    return found


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float64) / 255


def colours(state: BlockMap, places: dict[int, int]) -> np.ndarray:
    """float64 [num_blocks, 3]: each block's colour; `places` is of `colours_of_requests`."""
    what, owner = states_of(state)
    palette = np.stack([_rgb(colour) for colour in PALETTE])
    found: np.ndarray = palette[[places.get(request, 0) for request in owner.tolist()]]
    found[what == RESERVED] = found[what == RESERVED] * (1 - PALE) + PALE
    for name, colour in GREYS.items():
        found[what == STATES.index(name)] = _rgb(colour)
    return found


def panels(history: BlockHistory, moments: Moments, chosen: Sequence[int]) -> Figure:
    """The block map after each chosen step, by its place among the moments; ascending."""
    width = _width(history.num_blocks)
    height = ceil(history.num_blocks / width)
    across = 1 if len(chosen) == 1 else 2 if len(chosen) in (2, 4) else 3 if len(chosen) < 10 else 4
    down = ceil(len(chosen) / across)
    panel_w = 11 / across
    panel_h = panel_w * min(1.2, height / width) + 0.55
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(
            down, across, figsize=(11, down * panel_h + 1.15), squeeze=False, layout="constrained"
        )
        places = colours_of_requests(history)
        seen: set[int] = set()
        for ax in axes.flat[len(chosen) :]:
            ax.set_axis_off()
        for ax, place, state in zip(
            axes.flat, chosen, history.states([int(moments.steps[i]) for i in chosen]), strict=False
        ):
            what, _ = states_of(state)
            seen |= set(np.unique(what).tolist())
            _panel(ax, colours(state, places), width, height, history.num_blocks)
            used = int((what > CACHED).sum())
            ax.set_title(
                f"{moments.times_s[place]:.4g} s, step {moments.steps[place]:,}: {used:,} blocks in use\n"
                f"{moments.running[place]:,} running, {moments.waiting[place]:,} waiting",
                loc="left",
                fontsize=9,
            )
        figure.suptitle(
            f"Block map: one cell a block, {history.num_blocks:,} blocks of {history.block_size} tokens, "
            f"{width} to a row, coloured by owner",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        handles = [
            Patch(facecolor=colour, edgecolor="#999999", linewidth=0.5) for colour in _legend_colours(seen).values()
        ]
        figure.legend(handles, list(_legend_colours(seen)), loc="outside lower center", ncols=len(handles), fontsize=9)
        return figure


def _legend_colours(seen: set[int]) -> dict[str, str]:
    """Label to colour, of the states that occur. Requests have many colours; the first stands for them."""
    pale = "#" + "".join(f"{round(255 * (c * (1 - PALE) + PALE)):02X}" for c in _rgb(PALETTE[1]))
    entries = {
        OWNED: ("a request's (each in its colour)", PALETTE[1]),
        RESERVED: ("a request's, reserved for later (pale)", pale),
        SHARED: ("shared by several requests", GREYS["shared"]),
        TRANSFER: ("held by a transfer only", GREYS["transfer"]),
        CACHED: ("free, reusable content", GREYS["cached"]),
        FREE: ("free", GREYS["free"]),
    }
    return {label: colour for code, (label, colour) in entries.items() if code in seen}


def _width(num_blocks: int) -> int:
    """Blocks in a row: a round number where there are many."""
    width = max(1, ceil(sqrt(num_blocks * _ASPECT)))
    return min(num_blocks, -(-width // 8) * 8) if num_blocks >= 64 else width


def _panel(ax: Axes, rgb: np.ndarray, width: int, height: int, num: int) -> None:
    image = np.ones((height * width, 4))
    image[:num, :3] = rgb
    image[num:, 3] = 0.0
    cells = image.reshape(height, width, 4)
    ax.set_facecolor("#FFFFFF")
    ax.grid(visible=False)
    if num <= EDGED:
        ax.pcolormesh(cells, edgecolors="#FFFFFF", linewidth=0.7 if num <= 1500 else 0.3)
        ax.set_aspect("equal")
        ax.invert_yaxis()
        middle = 0.5
    else:
        ax.imshow(cells, interpolation="nearest", aspect="equal")
        middle = 0.0
    ax.spines[:].set_visible(False)
    ax.set_xticks([])
    rows = sorted({0, height // 4, height // 2, 3 * height // 4, height - 1})
    ax.set_yticks([row + middle for row in rows], [f"{row * width:,}" for row in rows], fontsize=7)
    ax.tick_params(length=0)


def animation(run: Results, history: BlockHistory, moments: Moments, frames: int) -> str:
    """A page that plays the block map: everything is in it, nothing is fetched.

    Its frames are the steps at which something changed, or, if they are more than `frames`, as many of them, evenly
    chosen.
    """
    changed = np.unique(np.searchsorted(moments.steps, np.unique(history.changes["step"])))
    changed = changed[changed < len(moments.steps)]
    places = np.unique(np.concatenate([[0], changed, [len(moments.steps) - 1]]))
    total = len(places)
    if total > frames:
        places = places[np.unique(np.linspace(0, total - 1, frames).round().astype(int))]
    shown = BlockMap(history.num_blocks)
    rows: list[tuple[int, int, int, int]] = []
    offsets = [0]
    for state in history.states(moments.steps[places].tolist()):
        rows += shown.follow(
            [(request, table, state.reserved.get(request, len(table))) for request, table in state.tables.items()],
            state.held,
            state.cached,
        )
        offsets.append(len(rows))
    requests = run.tables.requests
    data: dict[str, Any] = {
        "title": _page_title(run),
        "numBlocks": history.num_blocks,
        "blockSize": history.block_size,
        "numSteps": len(moments.steps),
        "numChanged": total,
        "endTime": moments.end_s,
        "step": moments.steps[places].tolist(),
        "time": [round(time, 9) for time in moments.times_s[places].tolist()],
        "running": moments.running[places].tolist(),
        "waiting": moments.waiting[places].tolist(),
        "preempted": _sums(moments.preempted, places),
        "offsets": offsets,
        "changes": base64.b64encode(np.array(rows, dtype="<i4").reshape(-1, 4).tobytes()).decode(),
        "row": {
            str(request): row
            for request, row in zip(requests["request"].tolist(), requests["row"].tolist(), strict=True)
            if request >= 0 and request != row
        },
        "palette": list(PALETTE),
        "colour": {str(request): place for request, place in colours_of_requests(history).items()},
        "greys": GREYS,
        "pale": PALE,
        "states": list(STATES),
    }
    page = files("experiments").joinpath("blockmap.html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return page.replace("@DATA@", text.replace("</", "<\\/"))


def _sums(column: np.ndarray, places: np.ndarray) -> list[int]:
    """The column's sum over the steps after the place before, up to each place."""
    totals: list[int] = np.diff(np.cumsum(column)[places], prepend=0).tolist()
    return totals


def _page_title(run: Results) -> str:
    kind = {"real": "real run", "simulated": "simulation"}.get(str(run.manifest.get("kind")), "run")
    model = run.manifest["configuration"].get("model")
    return f"Block map of a {kind}{f' of {model}' if model else ''}"
