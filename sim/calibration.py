"""From a profile of a real engine to the coefficients of the step-time formula, and how far to trust them.

The fit is non-negative least squares on rows divided by their measured time, so that it minimises relative errors;
its columns are scaled to unit length and a ridge of 1e-6 keeps it defined where two columns look alike. A batch that
was measured several times counts once, with its median, and batches that stick out (another program had the machine)
count less, by Huber's weights. The turning point n*, whether rows have a price of their own, and whether the engine has
stairs (see `sim.stairs`) are chosen by cross-validation. Everything is deterministic.

What is reported is what predictions need: the signed, time-weighted bias per regime on batches that the fit did not see
(bias moves latencies; scatter averages out), the drift of the machine while it was profiled, and the range of batches
that was measured (the hull), outside of which nothing is promised.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import CalibrationError, SimError
from sim.moves import CopyTime, MoveTime
from sim.stairs import Knots, choose_knots, stairs_design, unpack
from sim.steptime import StepTime

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Calibration", "Errors", "Hull", "calibrate", "load_calibration", "nnls", "read_profile"]

FORMAT = "kvtwin-calibration"
VERSION = 1
RIDGE = 1e-6
GPU_TURNS = (128.0, 192.0, 256.0)
"""Candidates for n* on a GPU."""
CPU_TURNS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""A CPU's matrix products turn compute-bound at fewer tokens."""
FOLDS = 5
ROWS_GAIN = 0.97
"""Rows get a price of their own only if that brings the cross-validated error below this share of what it was."""
STAIRS_GAIN = 0.7
"""The piecewise-linear form is used only if that brings the cross-validated error below this share of what it was."""
LEAST_BAND = 0.01
_HUBER = 1.345
"""In units of the residuals' spread: beyond it, a residual's weight falls off."""
_LEAST_SPREAD = 0.005
_REWEIGHTINGS = 4
REFITS = 20
"""Bootstrap refits that are kept."""
LEAST_BATCHES = 20

_COLUMNS = (
    "kind",
    "n_tokens",
    "n_rows",
    "n_decodes",
    "decode_context_tokens",
    "prefill_tokens",
    "prefill_context_work",
    "max_context",
    "wall_ns_median",
)
_HELD_OUT = ("anchor", "replay")


def nnls(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises x'Gx / 2 - m'x, for a positive definite G: float64[k].

    With G = A'A and m = A'b that is least squares of Ax = b. The active-set method of Lawson and Hanson (Solving Least
    Squares Problems, 1974, chapter 23): free the variable with the steepest gradient, solve for the free ones, and step
    back to the boundary where one of them would turn negative.
    """
    count = len(moment)
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    tolerance = 1e-11 * float(np.max(np.abs(moment), initial=0.0))
    for _ in range(10 * count):
        gradient = np.where(free, -np.inf, moment - gram @ x)
        entering = int(np.argmax(gradient)) if count else 0
        if not count or gradient[entering] <= tolerance:
            break
        free[entering] = True
        while True:
            target = np.zeros(count)
            target[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            blocked = free & (target <= 0.0)
            if not blocked.any():
                x = target
                break
            gap = np.maximum(x[blocked] - target[blocked], np.finfo(float).tiny)
            x = x + float(np.min(x[blocked] / gap)) * (target - x)
            free &= x > 1e-14 * float(np.max(x, initial=0.0))
            free &= ~(blocked & (x <= 0.0))
            x = np.where(free, x, 0.0)
    return x


# The profile


def read_profile(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The batches of a profile file and what it says about itself, its digest included. Raises CalibrationError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    if not path.is_file():
        raise CalibrationError(f"There is no profile '{path}'; make one with 'kvtwin profile'.")
    if path.suffix == ".csv":
        from sim.stepcsv import read_step_csv

        return read_step_csv(path)
    content = path.read_bytes()
    try:
        table = pq.read_table(pa.BufferReader(content))
        raw = (table.schema.metadata or {}).get(b"kvtwin", b"{}")
        about = json.loads(raw)
    except (pa.ArrowInvalid, ValueError) as error:
        raise CalibrationError(f"'{path}' is not a profile in Parquet; make one with 'kvtwin profile'.") from error
    about["digest"] = hashlib.sha256(content).hexdigest()
    return table.to_pandas(), about


@dataclass(frozen=True, slots=True)
class _Batches:
    """The columns that the fit needs, as float64 arrays of one length."""

    n: np.ndarray
    rows: np.ndarray
    decodes: np.ndarray
    context: np.ndarray
    work: np.ndarray
    longest: np.ndarray
    time: np.ndarray
    order: np.ndarray

    def take(self, which: np.ndarray) -> _Batches:
        return _Batches(*(getattr(self, name)[which] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.time)

    def merged(self) -> _Batches:
        """Batches of one shape made one, with the median of their times."""
        shape = np.column_stack([self.n, self.rows, self.decodes, self.context, self.work, self.longest])
        _, first, group = np.unique(shape, axis=0, return_index=True, return_inverse=True)
        group = group.reshape(-1)
        medians = np.array([np.median(self.time[group == i]) for i in range(len(first))])
        kept = self.take(first)
        return _Batches(kept.n, kept.rows, kept.decodes, kept.context, kept.work, kept.longest, medians, kept.order)

    def padded(self, buckets: tuple[int, ...]) -> _Batches:
        """n as the engine computes it, padded up to the sizes of its graphs."""
        n = [buckets[bisect_left(buckets, size)] if buckets and size <= buckets[-1] else size for size in self.n]
        return replace(self, n=np.array(n, dtype=float))

    def regimes(self) -> dict[str, np.ndarray]:
        """Masks of batches with decodes only, prefills only, and both."""
        prefill, decode = self.work > 0, self.decodes > 0
        return {"decode": ~prefill, "prefill": prefill & ~decode, "mixed": prefill & decode}


def _batches(profile: pd.DataFrame) -> tuple[_Batches, np.ndarray]:
    """The profile's columns and the kind of each batch. Raises CalibrationError."""
    missing = [name for name in _COLUMNS if name not in profile.columns]
    if missing:
        raise CalibrationError(f"The profile has no column {', '.join(missing)}; make it with 'kvtwin profile'.")
    kinds = profile["kind"].astype(str).to_numpy()
    order = profile["order"] if "order" in profile.columns else np.arange(len(profile))
    try:
        batches = _Batches(
            n=profile["n_tokens"].to_numpy(float),
            rows=profile["n_rows"].to_numpy(float),
            decodes=profile["n_decodes"].to_numpy(float),
            context=profile["decode_context_tokens"].to_numpy(float),
            work=np.where(profile["prefill_tokens"].to_numpy(float) > 0, profile["prefill_context_work"], 0.0).astype(
                float
            ),
            longest=profile["max_context"].to_numpy(float),
            time=profile["wall_ns_median"].to_numpy(float),
            order=np.asarray(order, dtype=float),
        )
    except (TypeError, ValueError) as error:
        raise CalibrationError(f"The profile has a column that is not numeric: {error}.") from error
    bad = np.flatnonzero(~(np.isfinite(batches.time) & (batches.time > 0)))
    if len(bad):
        raise CalibrationError(
            f"Batch {int(bad[0])} of the profile has a time of {batches.time[bad[0]]!r} ns; times must be positive."
        )
    return batches, kinds


# The fit

_TERMS = ("step", "token", "token_above", "context", "context_mixed", "work", "row")


def _design(batches: _Batches, turn: float, with_rows: bool) -> np.ndarray:
    """The columns of the formula: float64[batches, 7], the last all zero where rows have no price."""
    prefill = (batches.work > 0).astype(float)
    return np.column_stack(
        [
            np.ones(len(batches)),
            batches.n,
            np.maximum(0.0, batches.n - turn),
            batches.context,
            batches.context * prefill,
            batches.work,
            batches.rows if with_rows else np.zeros(len(batches)),
        ]
    )


def _solve(design: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Coefficients that minimise Huber's loss of the relative errors: float64[7]."""
    relative = design / time[:, None]
    length = np.sqrt((relative**2).sum(axis=0))
    used = length > 0
    scaled = relative[:, used] / length[used]
    ridge = RIDGE * np.eye(int(used.sum()))
    weights = np.ones(len(time))
    result = np.zeros(design.shape[1])
    for _ in range(_REWEIGHTINGS):
        weighted = scaled * weights[:, None]
        result[used] = nnls(weighted.T @ scaled + ridge, weighted.sum(axis=0)) / length[used]
        # Logarithms, so that twice as long and half as long are as far off.
        residuals = np.abs(np.log(np.maximum(relative @ result, 1e-9)))
        spread = max(1.4826 * float(np.median(residuals)), _LEAST_SPREAD)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
    return result


@dataclass(frozen=True, slots=True)
class _Form:
    """Which formula is fitted: the six terms with a given n* (and a price of rows), or tables with given knots."""

    turn: float
    with_rows: bool = False
    knots: Knots | None = None

    def design(self, batches: _Batches) -> np.ndarray:
        """A column for each number to fit: float64[batches, k]."""
        if self.knots is not None:
            return stairs_design(batches, self.knots)
        return _design(batches, self.turn, self.with_rows)

    def unpack(self, values: np.ndarray) -> tuple[dict[str, float], dict[str, list[list[float]]]]:
        """(coefficients in ns, tables), by the names that StepTime has for them."""
        if self.knots is None:
            return dict(zip(_TERMS, values.tolist(), strict=True)) | {"ridge": self.turn}, {}
        coefficients, tables = unpack(values, self.knots)
        return dict.fromkeys(_TERMS, 0.0) | coefficients, tables


def _held_out_predictions(design: np.ndarray, time: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Each batch's time as predicted by a fit without its fold: float64[batches]."""
    predicted = np.empty(len(time))
    for fold in range(FOLDS):
        out = folds == fold
        predicted[out] = design[out] @ _solve(design[~out], time[~out])
    return predicted


# The result


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predictions were from measurements, as fractions of the measured time."""

    batches: int
    bias: float
    """Signed: total predicted time over total measured time, minus 1. Positive: predicted too slow."""
    mape: float
    """Mean of the absolute relative errors."""
    p90: float
    """Their 90th percentile."""


def _errors(predicted: np.ndarray, measured: np.ndarray) -> Errors:
    relative = np.abs(predicted / measured - 1.0)
    return Errors(
        batches=len(measured),
        bias=float(predicted.sum() / measured.sum() - 1.0),
        mape=float(relative.mean()),
        p90=float(np.quantile(relative, 0.9)),
    )


@dataclass(frozen=True, slots=True)
class Hull:
    """The range of batches that was measured: (low, high) of each quantity, both included."""

    n_tokens: tuple[int, int]
    context_tokens: tuple[int, int]
    rows: tuple[int, int]
    max_context: tuple[int, int]

    def outside(
        self,
        n_tokens: np.ndarray,
        context_tokens: np.ndarray,
        rows: np.ndarray,
        max_context: np.ndarray | None = None,
    ) -> np.ndarray:
        """Which steps lie outside: bool[steps]."""
        result = np.zeros(len(n_tokens), dtype=bool)
        quantities = ((self.n_tokens, n_tokens), (self.context_tokens, context_tokens), (self.rows, rows))
        for (low, high), values in quantities:
            values = np.asarray(values)
            result |= (values < low) | (values > high)
        if max_context is not None:
            result |= np.asarray(max_context) > self.max_context[1]
        return result

    def share_outside(
        self,
        duration_ns: np.ndarray,
        n_tokens: np.ndarray,
        context_tokens: np.ndarray,
        rows: np.ndarray,
        max_context: np.ndarray | None = None,
    ) -> float:
        """The share of simulated time in steps that lie outside, 0 to 1."""
        total = float(np.sum(duration_ns))
        if total <= 0:
            return 0.0
        outside = self.outside(n_tokens, context_tokens, rows, max_context)
        return float(np.sum(np.asarray(duration_ns)[outside])) / total


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibration.json holds."""

    model: str
    device: str
    coefficients: dict[str, float]
    errors: dict[str, Errors]
    """Cross-validated, by regime: decode, prefill, mixed, all; and `replay` where the profile has one."""
    hull: Hull
    drift: float
    """How much slower the machine was at the end of the profile than at its start, by the anchor batch."""
    refits: tuple[dict[str, float], ...]
    """Coefficients refitted to resampled batches."""
    batches: int
    profile_digest: str
    moves: MoveTime | None
    """Fitted to the profile's block moves, where it has any."""
    tables: dict[str, list[list[float]]]
    """`table` and `table_mixed`: (n, ns) points of the piecewise-linear form, where it was chosen."""
    refit_tables: tuple[dict[str, list[list[float]]], ...]
    """Those of the refits."""
    about: dict[str, Any]
    """What the profile says about itself: dtype, threads, block size, versions, date; `graph_sizes` are the numbers of
    tokens that the engine pads up to, where it does."""

    @property
    def band(self) -> float:
        """Predictions are given for step times within this factor of the fit: max(|bias|, |drift|, 1 %)."""
        worst = max(abs(error.bias) for error in self.errors.values())
        return max(worst, abs(self.drift), LEAST_BAND)

    def label(self) -> str:
        """One line that says what the predictions rest on."""
        worst = max(self.errors.values(), key=lambda error: abs(error.bias))
        return (
            f"calibrated on {self.model} on {self.device}, {self.batches} batches: "
            f"bias at most {worst.bias:+.1%}, drift {self.drift:+.1%}"
        )

    def step_time(self) -> StepTime:
        """The fitted model."""
        return self._model(self.coefficients, self.tables, self.label())

    def _model(self, values: dict[str, float], tables: dict[str, list[list[float]]], label: str) -> StepTime:
        points = {name: tuple((int(n), float(ns)) for n, ns in table) for name, table in tables.items()}
        return StepTime.from_coefficients(values, label=label, buckets=_graph_sizes(self.about), **points)

    def move_time(self, block_size: int) -> MoveTime | None:
        """The fitted block moves, for blocks of that many tokens; None where none were measured."""
        if self.moves is None:
            return None
        token_bytes = self.moves.block_bytes / int(self.about["block_size"])
        return replace(self.moves, block_bytes=round(token_bytes * block_size))

    def band_models(self, refits: int | None = None) -> dict[str, StepTime]:
        """Models whose predictions span the band: `low`, `high`, and up to `refits` bootstrap refits."""
        fitted = self.step_time()
        models = {"low": fitted.scaled(max(0.05, 1.0 - self.band)), "high": fitted.scaled(1.0 + self.band)}
        for i, values in enumerate(self.refits[:refits]):
            tables = self.refit_tables[i] if self.refit_tables else {}
            models[f"refit-{i}"] = self._model(values, tables, f"{fitted.label}, refit {i}")
        return models

    def check_model(self, name: str) -> None:
        """Raise CalibrationError where the calibration is of another model than `name`."""
        if self.model and name != self.model:
            raise CalibrationError(
                f"The calibration is of model '{self.model}', not of '{name}'; profile that one, or simulate this one."
            )

    def to_json(self) -> str:
        """The file's text: the same calibration always gives the same bytes."""
        moves = None if self.moves is None else self.moves.to_dict()
        values = asdict(self) | {"moves": moves, "format": FORMAT, "version": VERSION, "band": self.band}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> None:
        """Write calibration.json."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def calibrate(
    profile: str | Path | pd.DataFrame, about: Mapping[str, Any] | None = None, *, stairs: bool = True
) -> Calibration:
    """Fit the step-time formula to a profile file, or to its batches and what is known `about` them.

    Without `stairs`, the six terms are kept whatever the engine's times look like.

    Raises CalibrationError: no such file, a missing column, a time that is not positive, or too few batches.
    """
    if isinstance(profile, str | Path):
        frame, found = read_profile(profile)
        found |= dict(about or {})
    else:
        frame, found = profile, dict(about or {})
        content = frame.to_csv(index=False).encode()
        found.setdefault("digest", hashlib.sha256(content).hexdigest())
    if not len(frame):
        raise CalibrationError("The profile has no batches; make one with 'kvtwin profile'.")
    everything, kinds = _batches(frame)
    buckets = _graph_sizes(found)
    hull = _hull(everything.take(~np.isin(kinds, _HELD_OUT)))
    everything = everything.padded(buckets)
    fitted = everything.take(~np.isin(kinds, _HELD_OUT)).merged()
    regimes = fitted.regimes()
    with_prefill = regimes["prefill"] | regimes["mixed"]
    if len(fitted) < LEAST_BATCHES or min(regimes["decode"].sum(), with_prefill.sum()) < FOLDS:
        counts = ", ".join(f"{int(mask.sum())} {name}" for name, mask in regimes.items())
        raise CalibrationError(
            f"The profile has too few batches to fit ({counts}); it needs at least {LEAST_BATCHES}, "
            f"with {FOLDS} of decodes only and {FOLDS} with prefills."
        )
    device = str(found.get("device", "unknown"))
    turns = CPU_TURNS if device.lower().startswith("cpu") else GPU_TURNS
    form, predicted = _choose(fitted, turns, stairs)
    errors = {name: _errors(predicted[mask], fitted.time[mask]) for name, mask in regimes.items() if mask.any()}
    errors["all"] = _errors(predicted, fitted.time)
    values = _solve(form.design(fitted), fitted.time)
    replay = everything.take(kinds == "replay")
    if len(replay):
        errors["replay"] = _errors(form.design(replay) @ values, replay.time)
    rng = np.random.default_rng(0)
    samples = (fitted.take(rng.integers(0, len(fitted), len(fitted))) for _ in range(REFITS))
    refits = [form.unpack(_solve(form.design(sample), sample.time)) for sample in samples]
    coefficients, tables = form.unpack(values)
    return Calibration(
        model=str(found.get("model", "")),
        device=device,
        coefficients=coefficients,
        errors=errors,
        hull=hull,
        drift=_drift(everything.take(kinds == "anchor")),
        refits=tuple(refit for refit, _ in refits),
        batches=len(fitted),
        profile_digest=str(found.pop("digest")),
        moves=fit_moves(found),
        tables=tables,
        refit_tables=tuple(more for _, more in refits) if tables else (),
        about={key: value for key, value in found.items() if key not in {"model", "device", "copies"}},
    )


def _choose(batches: _Batches, turns: Sequence[float], stairs: bool) -> tuple[_Form, np.ndarray]:
    """The form with the smallest cross-validated relative error, and its held-out predictions.

    Rows get a price, and n gets tables, only if that gains what `ROWS_GAIN` and `STAIRS_GAIN` ask.
    """
    folds = np.random.default_rng(0).permutation(len(batches)) % FOLDS

    def tried(forms: Sequence[_Form]) -> tuple[float, _Form, np.ndarray]:
        found = []
        for form in forms:
            predicted = _held_out_predictions(form.design(batches), batches.time, folds)
            found.append((float(np.mean((predicted / batches.time - 1.0) ** 2)), form, predicted))
        return min(found, key=lambda entry: entry[0])

    best = tried([_Form(turn) for turn in turns])
    richer = tried([_Form(turn, True) for turn in turns])
    if richer[0] < ROWS_GAIN**2 * best[0]:
        best = richer
    if stairs:
        richest = tried([_Form(0.0, knots=choose_knots(batches))])
        if richest[0] < STAIRS_GAIN**2 * best[0]:
            best = richest
    return best[1], best[2]


def fit_moves(about: Mapping[str, Any]) -> MoveTime | None:
    """Latency, cost of a copy and cost of a byte of each direction, fitted to the block moves of a profile.

    Non-negative least squares of relative errors, as for steps. Page-locked memory counts where it was measured. None
    where the profile has no block moves. Raises CalibrationError where they are not what a profile has.
    """
    entries = about.get("copies")
    if not entries:
        return None
    fitted: dict[str, CopyTime] = {}
    worst = 0.0
    try:
        memory = "pinned" if any(entry["memory"] == "pinned" for entry in entries) else entries[0]["memory"]
        for direction in ("store", "load", "local"):
            chosen = [
                e for e in entries if e["direction"] == direction and (e["memory"] == memory or direction == "local")
            ]
            counts = np.array([entry["blocks"] for entry in chosen], dtype=float)
            sizes = np.array([entry["bytes"] for entry in chosen], dtype=float)
            times = np.array([entry["ns_median"] for entry in chosen], dtype=float)
            if len(chosen) < 3 or not (np.isfinite(times) & (times > 0)).all():
                raise ValueError(f"there are {len(chosen)} measurements of {direction}, some perhaps without a time")
            design = np.column_stack([np.ones(len(chosen)), counts, sizes])
            values = _solve(design, times)
            worst = max(worst, float(np.mean(np.abs(design @ values / times - 1.0))))
            fitted[direction] = CopyTime(*values.tolist())
        on_cpu = str(about.get("device", "unknown")).lower().startswith("cpu")
        rates = ", ".join(f"{name} {fitted[name].bandwidth / 1e9:.1f}" for name in fitted)
        return MoveTime(
            int(about["block_bytes"]),
            store=fitted["store"],
            load=fitted["load"],
            local=fitted["local"],
            beside=not on_cpu,
            label=f"block moves fitted to {len(entries)} measurements ({memory} memory): {rates} GB/s, {worst:.0%} off",
        )
    except (KeyError, TypeError, ValueError, SimError) as error:
        raise CalibrationError(f"The block moves of the profile are damaged: {error}.") from error


def _graph_sizes(about: Mapping[str, Any]) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(size) for size in about.get("graph_sizes") or ()}))
    except (TypeError, ValueError) as error:
        raise CalibrationError(f"graph_sizes must be a list of sizes, not {about['graph_sizes']!r}.") from error


def _hull(batches: _Batches) -> Hull:
    def span(values: np.ndarray) -> tuple[int, int]:
        return int(values.min()), int(values.max())

    return Hull(span(batches.n), span(batches.context), span(batches.rows), span(batches.longest))


def _drift(anchors: _Batches) -> float:
    """The median anchor of the last third over that of the first third, minus 1; 0 with fewer than three."""
    if len(anchors) < 3:
        return 0.0
    times = anchors.time[np.argsort(anchors.order, kind="stable")]
    third = len(times) // 3
    return float(np.median(times[-third:]) / np.median(times[:third]) - 1.0)


def load_calibration(path: str | Path) -> Calibration:
    """Read calibration.json. Raises CalibrationError: no such file, another format or version, a wrong value."""
    path = Path(path)
    if not path.is_file():
        raise CalibrationError(f"There is no calibration '{path}'; make one with 'kvtwin calibrate'.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CalibrationError(f"'{path}' is not valid JSON: {error}.") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise CalibrationError(f"'{path}' is not a calibration; make one with 'kvtwin calibrate'.")
    if values.get("version") != VERSION:
        raise CalibrationError(
            f"'{path}' has version {values.get('version')!r} of the format, this program reads {VERSION}; "
            "run 'kvtwin calibrate' again."
        )
    try:
        loaded = Calibration(
            model=str(values["model"]),
            device=str(values["device"]),
            coefficients=dict(values["coefficients"]),
            errors={name: Errors(**error) for name, error in values["errors"].items()},
            hull=Hull(**{name: (int(low), int(high)) for name, (low, high) in values["hull"].items()}),
            drift=float(values["drift"]),
            refits=tuple(dict(refit) for refit in values["refits"]),
            batches=int(values["batches"]),
            profile_digest=str(values["profile_digest"]),
            moves=MoveTime.from_dict(values["moves"]) if values.get("moves") else None,
            tables=dict(values.get("tables") or {}),
            refit_tables=tuple(dict(tables) for tables in values.get("refit_tables") or ()),
            about=dict(values["about"]),
        )
        loaded.step_time()
        for coefficients in (loaded.coefficients, *loaded.refits):
            missing = {"ridge", *_TERMS} - set(coefficients)
            if missing:
                raise KeyError(f"coefficient {min(missing)}")
        if "all" not in loaded.errors:
            raise KeyError("errors of all batches")
        for refit in loaded.refits:
            StepTime.from_coefficients(refit)
        if not math.isfinite(loaded.band):
            raise ValueError("the band is not a number")
    except (KeyError, TypeError, ValueError, AttributeError, SimError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CalibrationError(f"The calibration '{path}' is damaged: {what}.") from error
    return loaded
