"""`kvtwin sweep`: many configurations of a command, and what they are worth.

OUT/points/KEY.json   what each configuration gave, written as it is ready; a rerun reads those that it has
OUT/sweep.json        the sweep, and the best configuration by each objective
OUT/sweep.parquet     one row a configuration: what varies, `error`, and every metric of summary.json
OUT/responses.png     each objective over each option that varies
OUT/pareto.png        the first two objectives against each other

The table depends on the sweep alone, and not on processes, their number, interruptions or the order of results.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import results
from experiments.config import nearest
from experiments.errors import UsageError
from experiments.experiment import code_digest
from experiments.sweeprun import Outcome, Task, key_of, outcomes, stored
from experiments.sweepspec import Sweep, read_sweep

if TYPE_CHECKING:
    from experiments.config import Config
    from experiments.terminal import Terminal

__all__ = ["Row", "execute", "front_of", "num_jobs"]

SHOWN = 10
"""Rows of the table on the terminal."""
DEFAULT_OBJECTIVES = (("ttft_s.p99", True), ("output_tokens_per_s", False))


class Row(dict[str, Any]):
    """A configuration: `point` by option, `metrics` (or None), `error`."""


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin sweep`: the folder --out; returns sweep.json."""
    began = time.perf_counter()
    sweep = read_sweep(args.file)
    jobs = num_jobs(args.jobs)
    if args.address and args.backend != "ray":
        raise UsageError("--address is of a Ray cluster; add --backend ray.")
    assert config.out is not None  # required by the command line
    folder = _folder(config.out, args.fresh)
    runner = _Runner(sweep, folder, args.backend, jobs, args.address, terminal)
    try:
        rows = runner.optuna() if sweep.search == "optuna" else runner.listed()
    except KeyboardInterrupt:
        terminal.interrupted = True
        known = sum(1 for _ in (folder / "points").glob("*.json"))
        terminal.warn(f"interrupted: {folder} has {known} configurations; the same command goes on from there.")
        return {"complete": False, "known": known}
    return _finish(sweep, rows, folder, runner, terminal, time.perf_counter() - began)


def num_jobs(given: int | None) -> int:
    """Processes: as named, or one for each core that this process may use. Raises UsageError: below 1."""
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if given < 1:
        raise UsageError(f"--jobs must be at least 1, but is {given}.")
    return given


def _folder(out: str, fresh: bool) -> Path:
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder.")
    points = folder / "points"
    if folder.is_dir() and any(folder.iterdir()) and not points.is_dir():
        raise UsageError(f"--out {out} has something else in it than a sweep; name another folder.")
    points.mkdir(parents=True, exist_ok=True)
    if fresh:
        for path in points.glob("*.json"):
            path.unlink()
    return folder


class _Runner:
    """Computes what is not known yet."""

    def __init__(
        self, sweep: Sweep, folder: Path, backend: str, jobs: int, address: str | None, terminal: Terminal
    ) -> None:
        self.sweep = sweep
        self.known_before = 0
        """Configurations that were not computed, since an earlier run had."""
        self._points = folder / "points"
        self._backend, self._jobs, self._address = backend, jobs, address
        self._terminal = terminal
        self._code = code_digest()

    def listed(self) -> list[Row]:
        """All configurations of a grid or a random search, in order."""
        points = list(self.sweep.points())
        with self._terminal.progress() as progress:
            task = progress.add_task("Configurations", total=len(points))
            return self._computed(points, lambda: progress.advance(task))

    def optuna(self) -> list[Row]:
        """Configurations that optuna proposes, `batch` at a time, each batch after the results of the one before."""
        from experiments.sweepoptuna import propose

        rows: list[Row] = []
        with self._terminal.progress() as progress:
            task = progress.add_task("Configurations", total=self.sweep.num)
            search = propose(self.sweep)
            points = next(search)
            while points:
                found = self._computed(points, lambda: progress.advance(task))
                rows += found
                points = search.send([_objectives_of(row, self.sweep) for row in found])
        return rows

    def _computed(self, points: Sequence[dict[str, Any]], advance: Any) -> list[Row]:
        configs = [self.sweep.config(point) for point in points]
        keys = [key_of(self.sweep.command, config, self._code) for config in configs]
        found: dict[str, dict[str, Any]] = {}
        missing: dict[str, Task] = {}
        for key, config in zip(keys, configs, strict=True):
            if key in found or key in missing:
                continue
            content = stored(self._points / f"{key}.json")
            if content is None:
                missing[key] = Task(key, self.sweep.command, config)
            else:
                found[key] = content
                self.known_before += 1
                advance()
        for outcome in outcomes(missing.values(), self._backend, self._jobs, self._address):
            found[outcome.key] = self._keep(outcome)
            advance()
        return [
            Row(point=point, metrics=found[key]["metrics"], error=found[key]["error"])
            for point, key in zip(points, keys, strict=True)
        ]

    def _keep(self, outcome: Outcome) -> dict[str, Any]:
        if outcome.fault:
            raise RuntimeError(f"a configuration of the sweep ended with a fault of ours:\n{outcome.fault}")
        if not outcome.complete:
            raise KeyboardInterrupt
        content = {"metrics": outcome.metrics, "error": outcome.error}
        results.write_json(self._points / f"{outcome.key}.json", content)
        return content


def _objectives_of(row: Row, sweep: Sweep) -> list[float] | None:
    """The values of a row's objectives; None where it has none."""
    if row["metrics"] is None:
        return None
    values = [row["metrics"].get(name) for name, _ in sweep.objectives]
    return None if any(value is None for value in values) else [float(value) for value in values]


def _finish(
    sweep: Sweep, rows: list[Row], folder: Path, runner: _Runner, terminal: Terminal, seconds: float
) -> dict[str, Any]:
    served = [row for row in rows if row["metrics"] is not None]
    if not served:
        raise UsageError(
            f"None of the {len(rows)} configurations of {sweep.path} can be; the first: {rows[0]['error']}"
        )
    metrics = list(dict.fromkeys(name for row in served for name in row["metrics"]))
    objectives = sweep.objectives or tuple(item for item in DEFAULT_OBJECTIVES if item[0] in metrics)
    for name, _ in objectives:
        if name not in metrics:
            raise UsageError(f"{sweep.path}: there is no metric {name}{nearest(name, metrics) or '.'}")
    _write_table(folder, sweep, rows, metrics)
    front = front_of(rows, objectives)
    summary = {
        "complete": True,
        "command": sweep.command,
        "search": sweep.search,
        "num": len(rows),
        "num_failed": len(rows) - len(served),
        "base": sweep.base,
        "vary": [axis.name for axis in sweep.axes],
        "objectives": {name: "min" if less else "max" for name, less in objectives},
        "best": {name: _described(_best(served, name, less), objectives) for name, less in objectives},
        "pareto": [_described(rows[index], objectives) for index in front],
        "code": code_digest(),
    }
    results.write_json(folder / "sweep.json", summary)
    _draw(folder, sweep, rows, objectives, front)
    _show(sweep, rows, objectives, front, terminal)
    known = f" ({runner.known_before} were known)" if runner.known_before else ""
    terminal.note(f"{len(rows)} configurations{known} in {seconds:.1f} s; written to {folder}.")
    return summary


def _best(rows: Sequence[Row], name: str, less: bool) -> Row:
    having = [row for row in rows if row["metrics"].get(name) is not None]
    if not having:
        raise UsageError(f"No configuration has a value of {name}; choose another objective.")
    return min(having, key=lambda row: row["metrics"][name] if less else -row["metrics"][name])


def _described(row: Row, objectives: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    return {"options": row["point"], "metrics": {name: row["metrics"].get(name) for name, _ in objectives}}


def front_of(rows: Sequence[Row], objectives: Sequence[tuple[str, bool]]) -> list[int]:
    """Rows that no other is better than: at least as good in each objective and better in one; by the first one."""
    having: dict[int, tuple[float, ...]] = {}
    for index, row in enumerate(rows):
        values = [None if row["metrics"] is None else row["metrics"].get(name) for name, _ in objectives]
        known = [value for value in values if value is not None]
        if objectives and len(known) == len(objectives):
            having[index] = tuple(v if less else -v for v, (_, less) in zip(known, objectives, strict=True))
    front: list[int] = []
    for index, mine in having.items():
        beaten = any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in having.values()
        )
        twin = any(having[kept] == mine for kept in front)
        if not beaten and not twin:
            front.append(index)
    return sorted(front, key=lambda index: having[index])


def _write_table(folder: Path, sweep: Sweep, rows: Sequence[Row], metrics: Sequence[str]) -> None:
    import pandas as pd
    import pyarrow as pa

    columns: dict[str, list[Any]] = {"configuration": list(range(len(rows)))}
    for axis in sweep.axes:
        values = [row["point"][axis.name] for row in rows]
        plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
        columns[axis.name] = values if plain else [str(value) for value in values]
    columns["error"] = [row["error"] for row in rows]
    for name in metrics:
        columns[name] = [None if row["metrics"] is None else row["metrics"].get(name) for row in rows]
    results.write_table(folder / "sweep.parquet", pa.Table.from_pandas(pd.DataFrame(columns), preserve_index=False))


def _draw(
    folder: Path, sweep: Sweep, rows: Sequence[Row], objectives: Sequence[tuple[str, bool]], front: Sequence[int]
) -> None:
    from experiments.sweepplot import pareto, responses

    if objectives:
        results.write_bytes(folder / "responses.png", responses(sweep, rows, objectives))
    if len(objectives) > 1:
        results.write_bytes(folder / "pareto.png", pareto(rows, objectives, front))


def _show(
    sweep: Sweep, rows: Sequence[Row], objectives: Sequence[tuple[str, bool]], front: Sequence[int], terminal: Terminal
) -> None:
    names = [axis.name for axis in sweep.axes]
    shown = list(front[:SHOWN])
    many = len(objectives) > 1
    title = "No other is better in all objectives" if many else f"Best by {objectives[0][0]}" if objectives else ""
    if shown:
        terminal.table(
            title,
            tuple(_heading(name) for name in (*names, *(name for name, _ in objectives))),
            list(_cells(rows, shown, names, objectives)),
            left=len(names),
        )
    if len(front) > SHOWN:
        terminal.print(f"and {len(front) - SHOWN} more in sweep.json.")
    failed = [row for row in rows if row["metrics"] is None]
    if failed:
        terminal.warn(f"{len(failed)} of {len(rows)} configurations cannot be; the first: {failed[0]['error']}")


def _cells(
    rows: Sequence[Row], shown: Sequence[int], names: Sequence[str], objectives: Sequence[tuple[str, bool]]
) -> Iterator[tuple[str, ...]]:
    for index in shown:
        row: Mapping[str, Any] = rows[index]
        yield (
            *(_short(row["point"][name]) for name in names),
            *(_short(row["metrics"].get(name)) for name, _ in objectives),
        )


def _heading(name: str) -> str:
    """A long name over two lines, parted where a word ends near its middle."""
    places = [index + 1 for index, letter in enumerate(name) if letter in "_."]
    if len(name) <= 12 or not places:
        return name
    middle = min(places, key=lambda place: abs(2 * place - len(name)))
    return f"{name[:middle]}\n{name[middle:]}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
