"""A profile from elsewhere: a CSV with a line a step, what was in its batch, and how long it took.

    step       optional; the order of the steps (default: that of the lines)
    time_ns, time_us, time_ms or time_s

and the batch, as

    batch      its rows, `new:cached` tokens each, separated by spaces or semicolons: 1:512 1:640 256:0

or as columns

    n_decodes, decode_context_tokens    rows of one new token, and the tokens they have in the cache together
    prefill_tokens                      new tokens of the other rows
    prefill_context_tokens              tokens that those have in the cache, together (default 0)
    num_prefills                        their number (default 1 where there are any)

Lines before the header that begin with # may say what else is known: `# model: llama-3-8b`, `# device: a100`,
`# graph_sizes: 1 2 4 8`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sim.errors import CalibrationError
from sim.steptime import BatchShape

__all__ = ["read_step_csv"]

_UNITS = {"time_ns": 1.0, "time_us": 1e3, "time_ms": 1e6, "time_s": 1e9}
_COUNTS = ("n_decodes", "decode_context_tokens", "prefill_tokens")


def read_step_csv(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The batches in the columns of a profile, and what the file says about itself. Raises CalibrationError."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"'{path}' cannot be read as text: {error}.") from error
    about: dict[str, Any] = {}
    skipped = 0
    for line in lines:
        if not line.startswith("#"):
            break
        skipped += 1
        key, colon, value = line.lstrip("# ").partition(":")
        if colon:
            about[key.strip()] = value.strip()
    if "graph_sizes" in about:
        about["graph_sizes"] = re.findall(r"\d+", about["graph_sizes"])
    about["digest"] = hashlib.sha256(content).hexdigest()
    try:
        table = pd.read_csv(path, skiprows=skipped)
    except (ValueError, OSError) as error:
        raise CalibrationError(f"'{path}' cannot be read as CSV: {error}.") from error
    unit = next((name for name in _UNITS if name in table.columns), None)
    if unit is None:
        raise CalibrationError(f"'{path}' has no time; it needs a column {', '.join(_UNITS)}.")
    first = skipped + 2
    time = _numbers(path, table, unit, first) * _UNITS[unit]
    order = _numbers(path, table, "step", first) if "step" in table.columns else np.arange(len(table), dtype=float)
    if "batch" in table.columns:
        shapes = [_shape(path, str(text), first + i) for i, text in enumerate(table["batch"])]
    else:
        shapes = _from_columns(path, table, first)
    rows = [
        {
            "kind": "step",
            "n_tokens": shape.num_tokens,
            "n_rows": shape.rows,
            "n_decodes": shape.num_decodes,
            "decode_context_tokens": shape.context_tokens,
            "prefill_tokens": shape.num_tokens - shape.num_decodes,
            "prefill_context_work": shape.prefill_work,
            "max_context": shape.max_context,
            "wall_ns_median": ns,
            "order": place,
        }
        for shape, ns, place in zip(shapes, time.tolist(), order.tolist(), strict=True)
    ]
    return pd.DataFrame(rows), about


def _numbers(path: Path, table: pd.DataFrame, name: str, first: int) -> np.ndarray:
    values = pd.to_numeric(table[name], errors="coerce").to_numpy(float)
    bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(bad):
        raise CalibrationError(
            f"'{path}', line {first + int(bad[0])}: {name} is {table[name].iloc[int(bad[0])]}; it must be a number "
            "that is not negative."
        )
    return np.asarray(values)


def _shape(path: Path, text: str, line: int) -> BatchShape:
    rows = []
    for part in re.split(r"[\s;]+", text.strip()):
        found = re.fullmatch(r"(\d+):(\d+)", part)
        if found is None or not int(found[1]):
            raise CalibrationError(
                f"'{path}', line {line}: the batch has '{part}'; write each row as new:cached tokens, such as 1:512."
            )
        rows.append((int(found[1]), int(found[2])))
    return BatchShape.from_rows(rows)


def _from_columns(path: Path, table: pd.DataFrame, first: int) -> list[BatchShape]:
    missing = [name for name in _COUNTS if name not in table.columns]
    if missing:
        raise CalibrationError(
            f"'{path}' does not say what was in the batches: it has neither a column batch nor {missing[0]}."
        )
    decodes, context, tokens = (_numbers(path, table, name, first).astype(np.int64) for name in _COUNTS)
    behind = np.zeros(len(table), dtype=np.int64)
    if "prefill_context_tokens" in table.columns:
        behind = _numbers(path, table, "prefill_context_tokens", first).astype(np.int64)
    prefills = (tokens > 0).astype(np.int64)
    if "num_prefills" in table.columns:
        prefills = np.minimum(_numbers(path, table, "num_prefills", first).astype(np.int64), tokens)
    shapes = []
    for n, k, q, c, count in zip(*(a.tolist() for a in (decodes, context, tokens, behind, prefills)), strict=True):
        work = longest = 0
        if count:
            # As if its prefills were equal.
            each, held = q / count, c / count
            work = max(1, round(q * held + q * (each + 1) / 2))
            longest = round(each + held)
        mean = k // n if n else 0
        shapes.append(BatchShape(n + q, n, k, work, n + count, 0, max(longest, mean + 1)))
    return shapes
