"""`kvtwin plot memory DIR`: where every byte of KV memory is, over time and block by block."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import results
from experiments.blocks import BlockHistory, read_blocks
from experiments.config import Config
from experiments.errors import ResultsError, UsageError

if TYPE_CHECKING:
    from experiments.terminal import Terminal

__all__ = ["execute", "parse_times"]

PANELS = 4
FRAMES = 1500
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Writes memory.png and, of a run that recorded its blocks, blocks.png and blocks.html; returns their paths."""
    times = None if args.at is None else parse_times(args.at)
    if times is not None and args.panels is not None:
        raise UsageError("--at names the moments and --panels only their number; give one of the two.")
    panels = _count("--panels", args.panels, PANELS, 16)
    frames = _count("--frames", args.frames, FRAMES, 20000)
    run = results.read_results(args.results)
    lacking = set(_NEEDED) - set(run.tables.steps)
    if lacking:
        raise ResultsError(f"{args.results} is damaged: steps.parquet has no column {min(lacking)}; run it again.")
    history = read_blocks(run.path)
    if history is None and (times is not None or args.panels is not None or args.frames is not None):
        raise UsageError(
            f"{args.results} does not say where blocks were, so there is no block map; run it again with "
            "--record-blocks."
        )
    out = Path(config.out) if config.out is not None else run.path
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder.")

    from experiments import plots
    from experiments.memoryplot import memory_figure

    written = {"memory": out / "memory.png"}
    results.write_bytes(written["memory"], plots.to_png(memory_figure(run)))
    if history is None:
        terminal.note("Run with --record-blocks to see every block too.")
    else:
        written |= _blocks(run, history, out, times, panels, frames, terminal)
    for path in written.values():
        terminal.print(f"Written: {path}")
    return {name: str(path) for name, path in written.items()}


_NEEDED = ("held", "tail", "cached", "free", "shared", "num_waiting", "num_running", "preempted")


def _blocks(
    run: results.Results,
    history: BlockHistory,
    out: Path,
    times: list[float] | None,
    panels: int,
    frames: int,
    terminal: Terminal,
) -> dict[str, Path]:
    """The block map's panels and its animation."""
    from experiments import blockplot, plots

    moments = blockplot.Moments.of(run, history)
    if not len(moments.steps):
        terminal.warn("no step was recorded, so there is no block map.")
        return {}
    if history.truncated:
        end = f"{moments.end_s:.3f} s"
        terminal.warn(f"blocks were recorded up to {end} only, where --record-blocks-limit was reached.")
    chosen = moments.evenly(panels) if times is None else moments.at(times)
    paths = {"blocks": out / "blocks.png", "animation": out / "blocks.html"}
    results.write_bytes(paths["blocks"], plots.to_png(blockplot.panels(history, moments, chosen)))
    results.write_text(paths["animation"], blockplot.animation(run, history, moments, frames))
    return paths


def parse_times(text: str) -> list[float]:
    """Moments in seconds, out of `1.5s,800ms,2`; ascending.

    Raises:
        UsageError: one of them is no time.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", part)
        unit = match.group(2) or "s" if match else ""
        if match is None or unit not in _UNITS:
            raise UsageError(f"--at takes times such as 1.5s,800ms, but {part.strip() or 'an empty one'!r} is none.")
        found.append(float(match.group(1)) * _UNITS[unit])
    return sorted(set(found))


def _count(flag: str, text: str | None, default: int, most: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise UsageError(f"{flag} must be a whole number from 1 to {most:,}, but is {text!r}.")
    return int(text)
