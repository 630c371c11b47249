"""Measured kernels of one GPU, as public profilers write them: CSV files of microseconds per call.

    dense.csv         layer, tokens, time_us                 matrix products and elementwise kernels of a layer
    per_sequence.csv  layer, sequences, time_us              head and sampler, once a step
    attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us
                                                             one prefill chunk (0: none) with kv_prefill tokens in the
                                                             cache, beside n_decode decodes of kv_decode tokens each
    skew.csv          n, nb, pc, kv_mean, t_mean_us, t_max_us, t_skew_us
                                                             decodes of unequal length: all at the mean, all at the
                                                             longest, and the real mix (sums of equally many runs)
    moe.csv           tokens, activated_experts, time_us     the experts of a layer; `ep` where measured per rank

They lie in a folder `tp<N>` for each tensor-parallel size N, per rank. `embedding` and `final_layernorm` count once a
step, `layernorm` twice a layer, every other dense layer once a layer. Between points everything is linear, and beyond
the last two it goes on along them. A grid's missing points (batches that did not fit the profiled cache) are filled in
along the decodes' context, then the number of decodes, the prefill's context and the chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.errors import CalibrationError
from sim.models import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Curve", "KernelTables", "Skew", "Surface", "read_kernel_tables"]

_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_LEAST_POINTS = 4
"""Of a kernel, or of an axis of the attention's grid, for a table to be one."""


class Curve:
    """A piecewise-linear function through points, which goes on along the outermost pairs; never negative."""

    __slots__ = ("xs", "ys")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.xs = [float(x) for x in xs]
        self.ys = [float(y) for y in ys]

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        left = xs[i - 1]
        value = ys[i - 1] + (ys[i] - ys[i - 1]) * (x - left) / (xs[i] - left)
        return value if value > 0.0 else 0.0


class Surface:
    """Rows of curves: piecewise-linear in y along each, and in x between neighbouring ones."""

    __slots__ = ("_curves", "_xs")

    def __init__(self, rows: dict[float, Curve]) -> None:
        self._xs = sorted(rows)
        self._curves = [rows[x] for x in self._xs]

    def __call__(self, x: float, y: float) -> float:
        xs, curves = self._xs, self._curves
        if len(xs) == 1:
            return curves[0](y)
        i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        value = curves[i - 1](y) * (1.0 - share) + curves[i](y) * share
        return value if value > 0.0 else 0.0


class Skew:
    """(prefill chunk, decodes, their mean context) -> how many decodes it takes to keep the device busy.

    Once fewer are left because the others were shorter, the rest takes as long as if so many were: a step is as long as
    if the k longest decodes were all as long as the longest.

    Linear in the chunk, the number and the logarithm of the context; outside of the table, as at its border.
    """

    __slots__ = ("_axes", "_rows")

    def __init__(self, axes: list[list[float]], rows: list[list[list[float]]]) -> None:
        self._axes = axes  # chunks, decodes, log2 of contexts
        self._rows = rows

    def __call__(self, chunk: float, decodes: float, context: float) -> float:
        point = (chunk, decodes, log2(max(context, 1.0)))
        (i, a), (j, b), (k, c) = (_place(axis, value) for axis, value in zip(self._axes, point, strict=True))
        total = 0.0
        for plane, of_plane in ((i, 1.0 - a), (i + 1, a)):
            for line, of_line in ((j, 1.0 - b), (j + 1, b)):
                if of_plane * of_line:
                    rows = self._rows[plane][line]
                    value = rows[k] if not c else rows[k] * (1.0 - c) + rows[k + 1] * c
                    total += of_plane * of_line * value
        return total


def _place(axis: list[float], value: float) -> tuple[int, float]:
    """The point below a value, and how far from it to the next one, 0 to 1; at the border of the axis beyond it."""
    i = bisect_right(axis, value) - 1
    if i < 0:
        return 0, 0.0
    if i >= len(axis) - 1:
        return len(axis) - 1, 0.0
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@dataclass(frozen=True, slots=True, eq=False)
class KernelTables:
    """What a step's kernels take on one rank, in nanoseconds. Build with `read_kernel_tables`."""

    tp: int
    layers: int
    dense: Curve
    """Of all layers and what comes once a step, against the new tokens of the step."""
    rows: Curve
    """Head and sampler, against rows."""
    axes: tuple[tuple[float, ...], ...]
    """Of the attention's grid: prefill chunk, its cached tokens, decodes, their cached tokens."""
    grid: np.ndarray
    """float64, ns of one layer at every point of the axes."""
    skew: Skew | None
    experts: Surface | None
    """(distinct experts, tokens) -> ns of one layer's experts on one rank."""
    expert_ranks: int
    """Over how many ranks the experts were split in what `experts` was measured on: 1, or the size of the group."""
    source: str
    _flat: list[float] = field(default_factory=list)
    _lists: list[list[float]] = field(default_factory=list)
    _strides: list[int] = field(default_factory=list)
    _decode: dict[int, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flat.extend(self.grid.ravel().tolist())
        self._lists.extend(list(axis) for axis in self.axes)
        sizes = [len(axis) for axis in self.axes]
        self._strides.extend(int(np.prod(sizes[i + 1 :])) for i in range(4))

    def decode_attention(self, decodes: int) -> Curve:
        """A layer's attention of so many decodes without a prefill, against the tokens that each has cached."""
        curve = self._decode.get(decodes)
        if curve is None:
            xs = self._lists[3][1:]
            curve = self._decode[decodes] = Curve(xs, [self._at((0.0, 0.0, float(decodes), x)) for x in xs])
        return curve

    def attention(self, chunk: int, behind: int, decodes: int, context: float) -> float:
        """A layer's attention: a prefill of `chunk` tokens with `behind` in the cache, and decodes of `context` each.

        Fewer tokens than the grid's smallest chunk, or fewer cached than its shortest decode, take as long as those.
        """
        if not chunk:
            return self.decode_attention(decodes)(max(context, self._lists[3][1])) if decodes else 0.0
        point = (
            max(float(chunk), self._lists[0][1]),
            float(behind),
            float(decodes),
            max(context, self._lists[3][1]) if decodes else 0.0,
        )
        return self._at(point)

    def _at(self, point: tuple[float, float, float, float]) -> float:
        corners = [(0, 1.0)]
        for value, axis, stride in zip(point, self._lists, self._strides, strict=True):
            i = min(max(bisect_right(axis, value), 1), len(axis) - 1)
            share = (value - axis[i - 1]) / (axis[i] - axis[i - 1])
            if share == 0.0:
                corners = [(at + (i - 1) * stride, weight) for at, weight in corners]
            elif share == 1.0:
                corners = [(at + i * stride, weight) for at, weight in corners]
            else:
                low, high = (i - 1) * stride, i * stride
                corners = [
                    corner
                    for at, weight in corners
                    for corner in ((at + low, weight * (1.0 - share)), (at + high, weight * share))
                ]
        flat = self._flat
        value = sum(flat[at] * weight for at, weight in corners)
        return value if value > 0.0 else 0.0

    @property
    def prefill_pair_ns(self) -> float:
        """What a pair of (new token, token it sees) takes in a layer's attention of the largest prompt measured."""
        chunk = int(self.axes[0][-1])
        return self.attention(chunk, 0, 0, 0.0) / (chunk * (chunk + 1) / 2)

    @property
    def limits(self) -> tuple[int, int, int, int]:
        """Most new tokens, most decodes, longest cached context, and most rows that were measured."""
        return (
            int(self.dense.xs[-1]),
            int(self.axes[2][-1]),
            int(max(self.axes[1][-1], self.axes[3][-1])),
            int(self.rows.xs[-1]),
        )


def read_kernel_tables(folder: str | Path, spec: ModelSpec, tp: int = 1, expert_ranks: int = 1) -> KernelTables:
    """The tables of a model from a profile's folder (that of all `tp<N>`, or one of those).

    Args:
        tp: tensor-parallel size: tables are per rank.
        expert_ranks: over how many ranks experts are split whole (expert parallelism).

    Raises:
        CalibrationError: no tables for that size, a file or column that is missing or not numeric, or too few points.
    """
    folder = Path(folder)
    root = folder / f"tp{tp}"
    if not root.is_dir():
        if (folder / "dense.csv").is_file() and folder.name == f"tp{tp}":
            root = folder
        else:
            sizes = sorted(path.name for path in folder.glob("tp*")) if folder.is_dir() else []
            has = f"it has {', '.join(sizes)}" if sizes else "there are no tp<N> folders in it"
            raise CalibrationError(f"The profile '{folder}' has no tp{tp} folder ({has}); profile that size.")
    layers = spec.layers
    dense = _table(root / "dense.csv", ("tokens", "time_us"), ("layer",))
    known = set(dense["layer"])
    needed = {"qkv_proj", "o_proj"} if spec.experts else {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    if needed - known:
        raise CalibrationError(f"'{root / 'dense.csv'}' has no layer {min(needed - known)}; profile all of them.")
    per_row = _table(root / "per_sequence.csv", ("sequences", "time_us"), ("layer",))
    axes, grid = _attention_grid(root / "attention.csv")
    experts, ranks = None, 1
    if spec.experts:
        experts, ranks = _experts(root / "moe.csv", folder if root != folder else folder.parent, expert_ranks)
    weights = {name: 1 if name in _ONCE else layers * (2 if name in _TWICE else 1) for name in known}
    return KernelTables(
        tp=tp,
        layers=layers,
        dense=_sum(root / "dense.csv", dense, "tokens", weights),
        rows=_sum(root / "per_sequence.csv", per_row, "sequences", {}),
        axes=axes,
        grid=grid,
        skew=_skew(root / "skew.csv"),
        experts=experts,
        expert_ranks=ranks,
        source=str(folder),
    )


def _table(path: Path, numbers: Sequence[str], texts: Sequence[str] = (), gaps: bool = False) -> pd.DataFrame:
    """A CSV's columns by name, numeric where they must be; with `gaps`, rows that lack a number are left out.

    Raises CalibrationError.
    """
    import pandas as pd

    if not path.is_file():
        raise CalibrationError(f"The profile has no file '{path}'; profile that part, too.")
    try:
        table = pd.read_csv(path)
    except (ValueError, OSError) as error:
        raise CalibrationError(f"'{path}' cannot be read as CSV: {error}.") from error
    missing = [name for name in (*texts, *numbers) if name not in table.columns]
    if missing:
        raise CalibrationError(f"'{path}' has no column {missing[0]}; it needs {', '.join((*texts, *numbers))}.")
    if gaps:
        table = table.dropna(subset=list(numbers)).reset_index(drop=True)
    for name in numbers:
        values = pd.to_numeric(table[name], errors="coerce")
        bad = np.flatnonzero(~np.isfinite(values.to_numpy(float)) | (values.to_numpy(float) < 0))
        if len(bad):
            raise CalibrationError(
                f"'{path}', line {int(bad[0]) + 2}: {name} is {table[name].iloc[int(bad[0])]}; it must be a number "
                "that is not negative."
            )
        table[name] = values.astype(float)
    return table


def _sum(path: Path, table: pd.DataFrame, axis: str, weights: dict[str, int]) -> Curve:
    """The layers' times added up, each as often as `weights` says (else once): ns against `axis`."""
    xs = np.unique(table[axis].to_numpy(float))
    total = np.zeros(len(xs))
    for layer, part in table.groupby("layer"):
        part = part.sort_values(axis, kind="stable").drop_duplicates(axis, keep="last")
        if len(part) < _LEAST_POINTS:
            raise CalibrationError(
                f"'{path}' has {len(part)} points of {layer}; at least {_LEAST_POINTS} are needed to interpolate."
            )
        total += weights.get(str(layer), 1) * np.interp(xs, part[axis], part["time_us"])
    return Curve(xs.tolist(), (total * 1e3).tolist())


def _attention_grid(path: Path) -> tuple[tuple[tuple[float, ...], ...], np.ndarray]:
    """The axes of the attention's table and its times in ns at every point of them."""
    table = _table(path, (*_ATTENTION, "time_us"))
    if "layer" in table.columns:
        table = table[table["layer"] == "attention"]
    if "decode_q_len" in table.columns:
        table = table[table["decode_q_len"] == 1]
    axes = [np.unique(np.append(table[name].to_numpy(float), 0.0)) for name in _ATTENTION]
    for name, axis in zip(_ATTENTION, axes, strict=True):
        if len(axis) < _LEAST_POINTS:
            raise CalibrationError(
                f"'{path}' has {len(axis) - 1} values of {name} above 0; at least {_LEAST_POINTS - 1} are needed."
            )
    grid = np.full([len(axis) for axis in axes], np.nan)
    places = tuple(np.searchsorted(axis, table[name]) for name, axis in zip(_ATTENTION, axes, strict=True))
    grid[places] = table["time_us"].to_numpy(float) * 1e3
    # Without a prefill its context does not matter, nor that of decodes without a decode.
    grid[0] = _first_known(grid[0], 0)[None]
    grid[:, :, 0, :] = _first_known(grid[:, :, 0, :], 2)[..., None]
    grid[0, :, 0, :] = 0.0
    # A decode has at least one cached token; what the smallest has stands for fewer.
    grid[:, :, 1:, 0] = np.where(np.isnan(grid[:, :, 1:, 0]), grid[:, :, 1:, 1], grid[:, :, 1:, 0])
    for index in (3, 2, 1, 0):
        _extend(grid, axes[index], index)
    if np.isnan(grid).any():
        i, j, k, m = (int(place[0]) for place in np.nonzero(np.isnan(grid)))
        where = ", ".join(f"{n} {a[x]:g}" for n, a, x in zip(_ATTENTION, axes, (i, j, k, m), strict=True))
        raise CalibrationError(f"'{path}' has too few points to tell what the attention takes at {where}.")
    return tuple(tuple(axis.tolist()) for axis in axes), grid


def _first_known(values: np.ndarray, axis: int) -> np.ndarray:
    """Along an axis, the first value that is not NaN (NaN where there is none)."""
    index = np.expand_dims(np.argmax(~np.isnan(values), axis=axis), axis)
    result: np.ndarray = np.take_along_axis(values, index, axis=axis).squeeze(axis)
    return result


def _extend(grid: np.ndarray, points: np.ndarray, axis: int) -> None:
    """Fill in NaN along an axis: linear on from the last two known values before it, or between known ones."""
    lines = np.moveaxis(grid, axis, -1)
    for place in zip(*np.nonzero(np.isnan(lines).any(axis=-1) & ~np.isnan(lines).all(axis=-1)), strict=True):
        line = lines[place]
        known = np.flatnonzero(~np.isnan(line))
        if len(known) >= 2:
            curve = Curve(points[known].tolist(), line[known].tolist())
            lines[place] = [curve(x) if np.isnan(y) else y for x, y in zip(points.tolist(), line.tolist(), strict=True)]


def _skew(path: Path) -> Skew | None:
    """The rows it takes to keep the device busy, from mixes of long and short decodes; None without the file.

    A mix of b long decodes in n costs the share max(0, k - b) / (n - b) of the gap between 'all at the mean' and 'all
    at the longest' where k rows keep the device busy. For each (prefill chunk, decodes, power of two of the mean
    context), k is what fits the costs of mixes around it best: least squares, relative to 'all at the mean'. The three
    times may be sums of several runs, which no share depends on.
    """
    if not path.is_file():
        return None
    table = _table(path, ("n", "nb", "pc", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us"), gaps=True)
    if "layer" in table.columns:
        table = table[table["layer"] == "attention"]
    keep = (table["t_mean_us"] > 0) & (table["t_max_us"] > table["t_mean_us"]) & (table["kv_mean"] >= 1)
    table = table[keep & (table["n"] > table["nb"])]
    if not len(table):
        return None
    table = table.assign(
        octave=np.log2(table["kv_mean"]),
        gap=(table["t_max_us"] - table["t_mean_us"]) / table["t_mean_us"],
        cost=(table["t_skew_us"] - table["t_mean_us"]) / table["t_mean_us"],
    )
    axes = [np.unique(table["pc"]), np.unique(table["n"]), np.unique(np.rint(table["octave"]))]
    rows = np.full([len(axis) for axis in axes], np.nan)
    for i, chunk in enumerate(axes[0]):
        for j, number in enumerate(axes[1]):
            part = table[(table["pc"] == chunk) & (table["n"] == number)]
            long, octaves = part["nb"].to_numpy(float), part["octave"].to_numpy(float)
            trials = np.arange(0.0, number + 0.125, 0.25)[:, None]
            predicted = np.maximum(0.0, trials - long) / (number - long) * part["gap"].to_numpy(float)
            squares = (predicted - part["cost"].to_numpy(float)) ** 2
            for k, octave in enumerate(axes[2]):
                near = np.abs(octaves - octave) <= 1.0
                if near.any():
                    best = float(trials[int(np.argmin(squares[:, near].sum(axis=1))), 0])
                    # Mixes with more long decodes than keep the device busy tell no more than that.
                    fewest = float(long[near].min())
                    rows[i, j, k] = best if best > fewest or fewest <= 1.0 else np.nan
    # Where a cell was not measured, the nearest context's stands, then the nearest number's, then the chunk's.
    for axis in (2, 1, 0):
        lines = np.moveaxis(rows, axis, -1)
        for place in np.ndindex(lines.shape[:-1]):
            known = np.flatnonzero(~np.isnan(lines[place]))
            if len(known):
                nearest = np.abs(np.arange(lines.shape[-1])[:, None] - known).argmin(axis=1)
                lines[place] = lines[place][known[nearest]]
    return Skew([axis.tolist() for axis in axes], rows.tolist())


def _experts(path: Path, root: Path, ranks: int) -> tuple[Surface, int]:
    """(a layer's experts on one rank, over how many ranks they were split when measured).

    With experts split over ranks, a table with an `ep` column has rows of that size; one without is of all experts on
    one device, and lies under tp1, as experts are whole.
    """
    if not path.is_file() and ranks > 1:
        path = root / "tp1" / "moe.csv"
    table = _table(path, ("tokens", "activated_experts", "time_us"))
    measured = 1
    if "ep" in table.columns:
        sizes = sorted(set(table["ep"].astype(int)))
        measured = ranks if ranks in sizes else 1
        table = table[table["ep"].astype(int) == measured]
    rows = {}
    for count, part in table.groupby("activated_experts"):
        part = part.sort_values("tokens", kind="stable").drop_duplicates("tokens", keep="last")
        rows[float(str(count))] = Curve(part["tokens"].tolist(), (part["time_us"] * 1e3).tolist())
    if len(rows) < 2 or len(table) < _LEAST_POINTS:
        raise CalibrationError(
            f"'{path}' has {len(table)} points of experts; at least {_LEAST_POINTS} with 2 numbers of activated "
            "experts are needed."
        )
    return Surface(rows), measured
