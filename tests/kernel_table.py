"""Step times from a table of measured kernels (microseconds a call), as a stand-in for an engine on that GPU.

The table is the one that is shared with the RTX 4090 run: dense layers by tokens, head and sampler by rows, attention
by (prefill chunk, its cached tokens, decodes, their cached tokens).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

LAYERS = 32
SKEW = 0.07
"""Decodes of unequal context take this share of the way from 'all average' to 'all longest' (mean of the table's)."""
_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class KernelTable:
    """`step_ns(rows)` for rows of (new tokens, cached tokens)."""

    def __init__(self, folder: Path) -> None:
        tables = folder / "profile" / "tp1"
        dense = pd.read_csv(tables / "dense.csv").pivot(index="tokens", columns="layer", values="time_us")
        once = dense[["embedding", "final_layernorm"]].sum(axis=1)
        layer = dense.drop(columns=["embedding", "final_layernorm"])
        self._dense = (LAYERS * (layer.sum(axis=1) + layer["layernorm"]) + once).sort_index()
        rows = pd.read_csv(tables / "per_sequence.csv").pivot(index="sequences", columns="layer", values="time_us")
        self._rows = rows.sum(axis=1).sort_index()
        attention = pd.read_csv(tables / "attention.csv")
        self._axes = [sorted(attention[name].unique().tolist()) for name in _AXES]
        grid = np.full([len(axis) for axis in self._axes], np.nan)
        places = [{value: i for i, value in enumerate(axis)} for axis in self._axes]
        for *point, time in attention.itertuples(index=False):
            grid[tuple(place[value] for place, value in zip(places, point, strict=True))] = time
        grid[0, 1:] = grid[0, 0]  # without a prefill its context does not matter, and so for decodes
        grid[:, :, 0, :] = np.where(np.isnan(grid[:, :, 0, :]), grid[:, :, 0, :1], grid[:, :, 0, :])
        grid[:, :, 1:, 0] = np.where(np.isnan(grid[:, :, 1:, 0]), grid[:, :, 1:, 1], grid[:, :, 1:, 0])
        grid[0, :, 0, :] = 0.0
        self._grid = grid
        engine = json.loads((folder / "engine.json").read_text())
        self.graph_sizes: list[int] = engine["cudagraph"]["cudagraph_capture_sizes"]

    def step_ns(self, rows: Sequence[tuple[int, int]]) -> float:
        tokens = sum(q for q, _ in rows)
        if tokens <= self.graph_sizes[-1]:
            tokens = self.graph_sizes[bisect_left(self.graph_sizes, tokens)]
        decodes = [c for q, c in rows if q == 1]
        first, *others = [(q, c) for q, c in rows if q > 1] or [(0, 0)]
        attention = self._attention(*first, len(decodes), sum(decodes) / max(1, len(decodes)))
        if decodes:
            attention += SKEW * (self._attention(*first, len(decodes), max(decodes)) - attention)
        attention += sum(self._attention(q, c, 0, 0) for q, c in others)
        dense = np.interp(tokens, self._dense.index, self._dense)
        return 1e3 * float(dense + np.interp(len(rows), self._rows.index, self._rows) + LAYERS * attention)

    def _attention(self, *point: float) -> float:
        """Linear between the table's points, and on beyond the last two."""
        corners = []
        for value, axis in zip(point, self._axes, strict=True):
            i = min(max(bisect_left(axis, value), 1), len(axis) - 1)
            share = (value - axis[i - 1]) / (axis[i] - axis[i - 1])
            corners.append([(i - 1, 1 - share), (i, share)])
        total = 0.0
        for corner in product(*corners):
            weight = np.prod([w for _, w in corner])
            if weight:
                total += weight * self._grid[tuple(i for i, _ in corner)]
        return float(total)
