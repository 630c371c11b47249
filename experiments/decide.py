"""`kvtwin decisions`: recorded decisions of a real scheduler, replayed through the core."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from experiments.config import Config
from experiments.decisions import replay_recorded

if TYPE_CHECKING:
    from experiments.terminal import Terminal

__all__ = ["execute"]

_SHOWN = 10


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Replays the file; returns `{workloads, identical, differences}`."""
    assert config.preset is not None  # the command has a default
    summary = replay_recorded(args.file, config.preset)
    terminal.print(f"{summary['identical']} of {summary['workloads']} workloads are identical under {config.preset}.")
    differences = summary["differences"]
    if differences:
        rows = [
            (str(d["workload"]), str(d["turn"]), str(d["field"]), _short(d["recorded"]), _short(d["ours"]))
            for d in differences[:_SHOWN]
        ]
        terminal.table("First differences", ("workload", "turn", "field", "recorded", "ours"), rows)
        if len(differences) > _SHOWN:
            terminal.print(f"... and {len(differences) - _SHOWN} more (--json has all).")
    return summary


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
