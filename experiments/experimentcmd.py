"""`kvtwin experiment NAME`: runs one of `EXPERIMENTS`, and writes what it found and the rows of the ledger it settles.

OUT/manifest.json      code, seed, options, data with digests, usage checks; `complete` when all is written
OUT/summary.json       settings and figures
OUT/timing.json        wall_s, cpu_s
OUT/NAME.csv           tables
OUT/NAME.png           pictures
OUT/parts/NAME.json    what a rerun need not compute again
CLAIMS/ID.json         rows of the ledger
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import results
from experiments.claims import read_claims, show_settled, write_row
from experiments.config import nearest
from experiments.errors import UsageError
from experiments.experiment import Context, ExperimentResult, Table, shared_folder

if TYPE_CHECKING:
    from experiments.config import Config
    from experiments.terminal import Terminal

__all__ = ["EXPERIMENTS", "Entry", "execute"]


@dataclass(frozen=True, slots=True)
class Entry:
    """An experiment that can be run."""

    module: str
    """Has `run(context: Context) -> ExperimentResult`."""
    help: str


EXPERIMENTS: dict[str, Entry] = {
    "arithmetic": Entry("experiments.arithmetic", "rows that need no run: shapes, devices, links and names"),
    "block_size": Entry(
        "experiments.block_size", "what the block size changes, and what 180 -> 245 requests would require"
    ),
    "capacity": Entry(
        "experiments.capacity", "what happens where memory runs out: cliffs, drains, eviction, and which limit binds"
    ),
    "chunked": Entry(
        "experiments.chunked", "what the size of prefill chunks does to TTFT and to the time between tokens"
    ),
    "engine_equality": Entry("experiments.equality", "whether paged attention computes what attention computes"),
    "failover": Entry(
        "experiments.failover", "requests and goodput lost while a replica restarts, with and without a spare"
    ),
    "fork": Entry("experiments.fork", "memory saved where several sequences of a prompt share its blocks"),
    "preemption": Entry(
        "experiments.preemption", "recompute, swap, auto and reject over block size and link; the election night"
    ),
    "prefix": Entry("experiments.prefix", "what prefix caches of every size and policy hit, what it saves and costs"),
    "routing": Entry(
        "experiments.routing",
        "what routers that know prefixes hit, and how evenly they load, against those that do not",
    ),
    "utilization": Entry(
        "experiments.utilization", "KV blocks and out-of-memory events over utilization, batch sizes and lengths"
    ),
    "waste": Entry("experiments.waste", "what share of KV memory holds tokens, paged and contiguous"),
}
"""By name, in alphabetic order."""


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin experiment`: one experiment, or the list of them; returns summary.json."""
    name = args.name
    if name is None:
        terminal.table("Experiments", ("name", "question"), [(n, e.help) for n, e in EXPERIMENTS.items()], left=2)
        return {n: e.help for n, e in EXPERIMENTS.items()}
    name = name.replace("-", "_")
    if name not in EXPERIMENTS:
        close = nearest(name, EXPERIMENTS) or f"; there are {', '.join(EXPERIMENTS)}."
        raise UsageError(f"There is no experiment {args.name}{close}")
    wall, cpu = time.perf_counter(), time.process_time()
    out = Path(config.out if config.out is not None else f"results/{name}")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder.")
    shared = shared_folder(args.shared)
    if args.fresh:
        for file in (out / "parts").glob("*.json"):
            file.unlink()
    run = importlib.import_module(EXPERIMENTS[name].module).run
    with terminal.progress() as progress:
        context = Context(name, config, terminal, out, shared, progress)
        results.write_json(out / "manifest.json", {**context.manifest(), "complete": False})
        found: ExperimentResult = run(context)
    timing = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    _write(out, found, context, timing)
    for settled in found.claims:
        write_row(Path(args.claims), settled, name, context.manifest())
    _show(found, context, terminal)
    terminal.note(f"Written to {out} in {timing['wall_s']:.1f} s.")
    return dict(found.summary)


def _write(out: Path, found: ExperimentResult, context: Context, timing: dict[str, float]) -> None:
    """All files of a run; the manifest last."""
    for table in found.tables:
        results.write_text(out / f"{table.name}.csv", _csv(table))
    for name, picture in found.pictures.items():
        results.write_bytes(out / f"{name}.png", picture)
    results.write_json(out / "summary.json", found.summary)
    results.write_json(out / "timing.json", timing)
    results.write_json(out / "manifest.json", {**context.manifest(), "complete": True})


def _csv(table: Table) -> str:
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    for row in table.rows:
        writer.writerow(["" if value is None else value for value in row])
    return sink.getvalue()


def _show(found: ExperimentResult, context: Context, terminal: Terminal) -> None:
    for table in found.tables:
        if table.shown:
            rows = [
                [_text(value, column.form) for value, column in zip(row, table.columns, strict=True)]
                for row in table.rows
            ]
            texts = sum(1 for column in table.columns if not column.form)
            terminal.table(table.title, [column.title or column.name for column in table.columns], rows, left=texts)
    for note in found.notes:
        terminal.print(note)
    check = context.manifest()["usage_check"]
    if check["runs"]:
        terminal.print(f"The usage summed to the pool at each of {check['steps']:,} steps of {check['runs']:,} runs.")
    if found.claims:
        show_settled(found.claims, terminal)
    settled = {row.id for row in found.claims}
    left = [
        claim.id for claim in read_claims().values() if claim.experiment == context.name and claim.id not in settled
    ]
    if left:
        terminal.warn(f"this run did not settle {', '.join(left)}; their rows stay as they were.")


def _text(value: Any, form: str) -> str:
    if value is None:
        return "–"
    return format(value, form) if form and not isinstance(value, str) else str(value)
