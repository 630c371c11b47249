"""`kvtwin calibrate`: from a profile to calibration.json, and how far to trust it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from experiments.config import Config
from experiments.results import write_text

if TYPE_CHECKING:
    from experiments.terminal import Terminal
    from sim.calibration import Calibration

__all__ = ["execute", "show"]


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Fits, writes --out, shows the errors; returns the content of calibration.json."""
    from sim.calibration import calibrate

    calibration = calibrate(args.profile)
    assert config.out is not None  # the command has a default
    text = calibration.to_json()
    write_text(config.out, text)
    show(calibration, terminal)
    terminal.note(f"Written to {config.out}.")
    content: dict[str, Any] = json.loads(text)
    return content


def show(calibration: Calibration, terminal: Terminal) -> None:
    """The cross-validated errors and the hull."""
    rows = [
        (name, str(error.batches), f"{error.bias:+.1%}", f"{error.mape:.1%}", f"{error.p90:.1%}")
        for name, error in calibration.errors.items()
    ]
    title = f"Step time of {calibration.model} on {calibration.device}, cross-validated"
    terminal.table(title, ("batches", "number", "bias (time-weighted)", "mean |error|", "90 % below"), rows)
    hull = calibration.hull
    terminal.print(
        f"Drift of the machine while profiling: {calibration.drift:+.1%}; band on step times: ±{calibration.band:.1%}. "
        f"Measured range: {hull.n_tokens[0]:,} to {hull.n_tokens[1]:,} new tokens, up to {hull.rows[1]:,} rows and "
        f"{hull.context_tokens[1]:,} cached tokens a step."
    )
    if calibration.moves is not None:
        text = calibration.moves.label
        terminal.print(f"{text[:1].upper()}{text[1:]}.")
