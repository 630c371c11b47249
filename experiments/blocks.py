"""blocks.parquet: where every block was after each step of a run with --record-blocks, written and read back.

One row a change, in order: step (int64), event (int8), request, index and block (int32). engine/core/blockmap.py says
what each event means and expands them. The file's metadata holds, as JSON under `kvtwin.blocks`, num_blocks,
block_size, last_step (after which nothing was recorded) and truncated (whether --record-blocks-limit was reached).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.blockmap import EVENTS, BlockMap, BlockRecorder
from experiments.errors import ResultsError
from experiments.results import read_table, write_table

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from experiments.terminal import Terminal

__all__ = ["BlockHistory", "mind_truncated", "read_blocks", "write_blocks"]

METADATA_KEY = "kvtwin.blocks"
FILE = "blocks.parquet"
_KINDS = {"step": np.int64, "event": np.int8, "request": np.int32, "index": np.int32, "block": np.int32}


@dataclass(frozen=True, slots=True)
class BlockHistory:
    """What was recorded of a run's blocks."""

    num_blocks: int
    block_size: int
    last_step: int
    """Nothing is known of later steps."""
    truncated: bool
    changes: dict[str, np.ndarray]
    """The columns of the file."""

    def states(self, steps: Sequence[int]) -> Iterator[BlockMap]:
        """Where every block was after each of these steps, which must ascend.

        The same object is changed and given again: use it before asking for the next.
        """
        state = BlockMap(self.num_blocks)
        rows = zip(*(self.changes[name].tolist() for name in ("event", "request", "index", "block")), strict=True)
        done = 0
        for until in np.searchsorted(self.changes["step"], np.asarray(steps), side="right").tolist():
            for _ in range(until - done):
                state.apply(next(rows))
            done = until
            yield state


def write_blocks(folder: Path, recorder: BlockRecorder, options: SchedulerConfig) -> None:
    """Writes blocks.parquet into a results folder."""
    table = recorder.table()
    about = {
        "num_blocks": options.num_blocks,
        "block_size": options.block_size,
        "last_step": recorder.last_step,
        "truncated": recorder.truncated,
        "events": list(EVENTS),
    }
    columns = {name: table[name].astype(kind) for name, kind in _KINDS.items()}
    write_table(folder / FILE, columns, {METADATA_KEY: json.dumps(about)})


def read_blocks(folder: Path) -> BlockHistory | None:
    """What `folder` holds of its blocks; None: they were not recorded.

    Raises:
        ResultsError: the file is not one of ours.
    """
    import pyarrow.parquet as pq

    path = folder / FILE
    if not path.is_file():
        return None
    columns = read_table(path)
    about: Any = (pq.read_schema(path).metadata or {}).get(METADATA_KEY.encode())
    if about is None or set(_KINDS) - set(columns):
        raise ResultsError(f"{path} is damaged: it does not say what it holds; run it again.")
    about = json.loads(about)
    return BlockHistory(about["num_blocks"], about["block_size"], about["last_step"], about["truncated"], columns)


def mind_truncated(recorder: BlockRecorder | None, terminal: Terminal) -> None:
    """Says where the record of blocks ends early."""
    if recorder is not None and recorder.truncated:
        terminal.warn(
            f"blocks are recorded up to step {recorder.last_step:,} only, where --record-blocks-limit was reached."
        )
