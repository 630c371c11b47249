"""What becomes of a step that does not fit the device's memory: it is run in parts, down to single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.exec.runner import Row

__all__ = ["SplitStep", "run_split"]

RunRows = Callable[[Sequence[Row], np.ndarray], Tensor]


class SplitStep(NamedTuple):
    """What came of a step that may have been run in parts."""

    logits: dict[int, Tensor]
    """[vocab], by the place of each sampling row in the step that has run."""
    failed: dict[int, int]
    """Place of a row -> its first token's position that no memory was found for, with nothing else in the step."""
    parts: int
    """Forward passes that ended."""


def run_split(
    run: RunRows,
    order: Callable[[Sequence[Row]], list[Row]],
    rows: Sequence[Row],
    tokens: np.ndarray,
    block_size: int,
    release: Callable[[], None] = lambda: None,
) -> SplitStep:
    """Run `rows`, whose new tokens `tokens` int64[T] are in the same order, in halves where memory runs out.

    Rows go from first to last such that a row comes after those that write what it reads (equal prefixes in one step);
    a single row is halved by its tokens; a single token that finds no memory fails its row. `release` is called before
    each new try. Results are those of the whole step up to rounding.
    """
    first = np.concatenate([[0], np.cumsum([row.num for row in rows])])
    waiting = [_writers_first(rows, block_size)]
    pieces: dict[int, list[tuple[int, int]]] = {place: [(row.start, row.num)] for place, row in enumerate(rows)}
    logits: dict[int, Tensor] = {}
    failed: dict[int, int] = {}
    parts = 0
    while waiting:
        part = [place for place in waiting.pop() if place not in failed]
        if not part:
            continue
        now = {place: pieces[place][0] for place in part}
        cut = []
        for place in part:
            start, num = now[place]
            row = rows[place]
            last = start + num == row.start + row.num
            cut.append(row._replace(request=place, start=start, num=num, samples=row.samples and last))
        cut = order(cut)
        text = []
        for piece in cut:
            at = int(first[piece.request]) + piece.start - rows[piece.request].start
            text.append(tokens[at : at + piece.num])
        try:
            found = run(cut, np.concatenate(text))
        except torch.OutOfMemoryError:
            release()
            if len(part) > 1:
                half = len(part) // 2
                waiting += [part[half:], part[:half]]
                continue
            place = part[0]
            start, num = now[place]
            if num > 1:
                half = num // 2
                pieces[place][:1] = [(start, half), (start + half, num - half)]
                waiting += [part, part]
            else:
                failed[place] = start
            continue
        parts += 1
        for place in part:
            pieces[place].pop(0)
        for index, piece in enumerate(piece for piece in cut if piece.samples):
            logits[piece.request] = found[index]
    return SplitStep(logits, failed, parts)


def _writers_first(rows: Sequence[Row], block_size: int) -> list[int]:
    """The places of rows, each after those that write into a block which it reads."""
    writer: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        for block in row.table[row.start // block_size : (row.start + row.num - 1) // block_size + 1].tolist():
            writer.setdefault(block, []).append(place)
    done: list[int] = []
    seen: set[int] = set()
    stack = [(place, False) for place in reversed(range(len(rows)))]
    while stack:
        place, ready = stack.pop()
        if ready:
            done.append(place)
            continue
        if place in seen:
            continue
        seen.add(place)
        stack.append((place, True))
        row = rows[place]
        # What it writes itself it shares with nobody; others' new blocks lie before its first new token.
        for block in row.table[: row.start // block_size].tolist():
            stack += [(other, False) for other in writer.get(block, ()) if other not in seen]
    return done
