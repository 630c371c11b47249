"""Why prompts were not hit, on paper: prefix.parquet (a row a request), a part of summary.json, a table a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.types import PrefixRow
from experiments.results import write_table

if TYPE_CHECKING:
    from experiments.terminal import Terminal

__all__ = ["by_tenant", "show_prefix", "write_prefix"]

_SUMS = tuple(name for name in PrefixRow._fields if name.endswith("_tokens"))
_TITLES = ("asked", "hit", "host hit", "never seen", "evicted", "other salt", "short")


def write_prefix(folder: Path, rows: Sequence[PrefixRow]) -> None:
    """prefix.parquet: the columns of `engine.core.types.PrefixRow`, in the order of admission; tokens."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(PrefixRow._fields))
    write_table(folder / "prefix.parquet", {name: columns[:, i] for i, name in enumerate(PrefixRow._fields)})


def by_tenant(rows: Sequence[PrefixRow]) -> list[dict[str, int]]:
    """Sums of tokens, one entry a tenant, with the number of its requests."""
    sums: dict[int, dict[str, int]] = {}
    for row in rows:
        entry = sums.setdefault(row.tenant, {"tenant": row.tenant, "requests": 0, **dict.fromkeys(_SUMS, 0)})
        entry["requests"] += 1
        for name in _SUMS:
            entry[name] += getattr(row, name)
    return [sums[tenant] for tenant in sorted(sums)]


def show_prefix(rows: Sequence[PrefixRow], terminal: Terminal) -> None:
    """A line a tenant: prompt tokens, and the share of them that was hit or missed for each reason."""
    found: list[dict[str, Any]] = [*by_tenant(rows)]
    if len(found) > 1:
        total: dict[str, Any] = {name: sum(entry[name] for entry in found) for name in ("requests", *_SUMS)}
        found.append({"tenant": "all", **total})
    lines = []
    for entry in found:
        asked = entry["asked_tokens"]
        shares = [f"{entry[name] / asked:.1%}" for name in _SUMS[1:]]
        lines.append((str(entry["tenant"]), f"{entry['requests']:,}", f"{asked:,}", *shares))
    terminal.table("Prompt tokens and the prefix cache", ("tenant", "requests", *_TITLES), lines)
