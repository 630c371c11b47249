"""The folder that a run leaves behind, written so that the same input gives the same bytes, and read back.

    manifest.json      kind (`real` or `simulated`), configuration, versions, seed, trace digest, complete, ...
    requests.parquet   one row a request
    steps.parquet      one row a step, or a run of identical decode steps
    gaps.parquet       gaps between two tokens of a request that were not sampled in consecutive steps
    summary.json       the metrics (see metrics.py)
    timing.json        wall_s, cpu_s: what the command itself took
    attempts.parquet   a cluster: one row an attempt; its replicas' own folders are in replicas/ (see cluster.py)
    replay.parquet     a real run: when each step was decided and ended, and what was taken in before it
    tokens.parquet     a real run: output tokens, stops and aborts
    prefix.parquet     with --prefix-stats: what each prompt found in the prefix cache (see prefixtable.py)
    blocks.parquet     with --record-blocks: where every block was after each step (see blocks.py)

Files appear whole or not at all. manifest.json says `complete: false` from the start, and `true` when all is written.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.cost import LinearCost
from engine.core.records import Lists
from experiments.config import options
from experiments.errors import ResultsError, UsageError
from experiments.metrics import Tables

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.core.presets import SchedulerConfig
    from experiments.config import Config
    from traces import Trace

__all__ = [
    "Results",
    "begin",
    "configuration",
    "finish",
    "identity",
    "read_json",
    "read_results",
    "read_table",
    "versions",
    "write_bytes",
    "write_json",
    "write_table",
    "write_text",
]

_SECTIONS = ("model", "memory", "scheduler", "workload", "time", "slo")
"""Of the options, those that results depend on."""

_LISTS: dict[str, type[np.integer[Any]]] = {
    "step_ends_ns": np.int64,
    "run_takes": np.int32,
    "step_cached": np.int64,
    "step_finished": np.int32,
    "step_reserved_may": np.int64,
    "step_reserved_cannot": np.int64,
}
_TEXTS = ("outcome", "reason")


@dataclass(frozen=True, slots=True)
class Results:
    """What `read_results` found in a folder."""

    path: Path
    manifest: dict[str, Any]
    summary: dict[str, Any]
    tables: Tables


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file whole or not at all."""
    _replace(Path(path), text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file whole or not at all."""
    _replace(Path(path), content)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Writes JSON, keys in the order given. NaN and infinity are faults, not values."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_table(
    path: str | os.PathLike[str], columns: Mapping[str, Any] | pa.Table, meta: Mapping[str, str] | None = None
) -> None:
    """Writes columns as Parquet. The bytes depend on the content and pyarrow's version only."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = columns if isinstance(columns, pa.Table) else _table(columns)
    if meta:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **dict(meta)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_statistics=True, row_group_size=1 << 20)
    _replace(Path(path), sink.getvalue())


def _table(columns: Mapping[str, Any]) -> pa.Table:
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    for name, column in columns.items():
        if name in _LISTS:
            arrays[name] = _list_array(column, _LISTS[name])
        elif name in _TEXTS:
            arrays[name] = _text_array(column)
        else:
            arrays[name] = _number_array(np.asarray(column))
    return pa.table(arrays)


# Arrays are made from buffers: `pa.array` would import pandas to ask whether its argument is one of its own, and that
# takes longer than a short simulation.


def _number_array(values: np.ndarray) -> pa.Array:
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _text_array(texts: Sequence[str]) -> pa.Array:
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def _list_array(column: Any, kind: type[np.integer[Any]]) -> pa.Array:
    import pyarrow as pa

    if isinstance(column, Lists):
        offsets, values = column.offsets.astype(np.int32), column.values.astype(kind)
        return pa.ListArray.from_arrays(_number_array(offsets), _number_array(values))
    lengths = np.fromiter(map(len, column), dtype=np.int64, count=len(column))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.fromiter(chain.from_iterable(column), dtype=kind, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(_number_array(offsets), _number_array(flat))


def _replace(path: Path, content: Any) -> None:
    """Writes beside `path`, then renames: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as stream:
            stream.write(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file.

    Raises:
        ResultsError: it is not JSON.
    """
    with open(path, encoding="utf-8") as stream:
        try:
            return json.load(stream)
        except ValueError as error:
            raise ResultsError(f"{path} is not valid JSON.") from error


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The columns of a Parquet file: numpy arrays, list columns as lists of arrays, texts as object arrays.

    Raises:
        ResultsError: it is no Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(2, "No such file or directory", str(path)) from error
        raise ResultsError(f"{path} is not a Parquet file.") from error
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks else pa.array([], type=column.type)
        if pa.types.is_list(column.type):
            offsets = column.offsets.to_numpy()
            flat = column.values.to_numpy(zero_copy_only=False)
            columns[name] = [flat[a:b] for a, b in pairwise(offsets)]
        elif pa.types.is_string(column.type):
            columns[name] = np.array(column.to_pylist(), dtype=object)
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    return columns


def versions(*names: str) -> dict[str, str]:
    """Versions of Python and of the packages named, where installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("kvtwin", "numpy", "pyarrow", *names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def configuration(config: Config) -> dict[str, Any]:
    """The configuration as the manifest keeps it."""
    known = options()
    return {name: value for name, value in asdict(config).items() if known[name].section in _SECTIONS}


def identity(config: Config, trace: Trace, scheduler: SchedulerConfig, *packages: str) -> dict[str, Any]:
    """The part of the manifest that every run has: what was served, with which options, by which `packages`."""
    return {
        "configuration": configuration(config),
        "versions": versions(*packages),
        "seed": config.seed,
        "trace": trace.name,
        "trace_digest": trace.digest(),
        "num_requests": len(trace),
        "kv_blocks": scheduler.num_blocks,
        "max_model_len": scheduler.max_model_len,
        "host_blocks": scheduler.num_host_blocks,
        "cost_model": list(scheduler.cost_model) if isinstance(scheduler.cost_model, LinearCost) else None,
    }


def begin(out: str, manifest: Mapping[str, Any]) -> Path:
    """Claims the folder for a run: a manifest that says it is not complete, and nothing left from an earlier run.

    Raises:
        UsageError: `out` is a file.
    """
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder.")
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "manifest.json", {**manifest, "complete": False})
    for name in ("requests", "steps", "gaps", "replay", "tokens", "blocks", "prefix", "attempts"):
        (path / f"{name}.parquet").unlink(missing_ok=True)
    for name in ("summary", "timing", "prediction"):
        (path / f"{name}.json").unlink(missing_ok=True)
    return path


def finish(
    path: Path,
    manifest: Mapping[str, Any],
    tables: Tables,
    summary: Mapping[str, Any],
    timing: Mapping[str, float],
    complete: bool = True,
) -> None:
    """Writes everything that every run writes; the manifest last."""
    write_table(path / "requests.parquet", tables.requests)
    write_table(path / "steps.parquet", tables.steps)
    write_table(path / "gaps.parquet", {"gap_ns": np.asarray(tables.gaps_ns, dtype=np.int64)})
    write_json(path / "summary.json", summary)
    write_json(path / "timing.json", timing)
    write_json(path / "manifest.json", {**manifest, "complete": complete})


def read_results(path: str | os.PathLike[str], kind: str | None = None) -> Results:
    """What a run wrote into `path`.

    Args:
        kind: `real` or `simulated`, if only that will do.

    Raises:
        ResultsError: there is no such folder, it is not finished, or of the other kind.
    """
    folder = Path(path)
    if not (folder / "manifest.json").is_file():
        raise ResultsError(f"{path} holds no results: there is no manifest.json in it.")
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict):
        raise ResultsError(f"{path} is damaged: its manifest.json is not one of ours; run it again.")
    if manifest.get("kind") == "cluster":
        raise ResultsError(
            f"{path} holds a cluster's results; name one of its replicas, such as {folder / 'replicas/0'}."
        )
    if kind is not None and manifest.get("kind") != kind:
        command = "run" if kind == "real" else "simulate"
        raise ResultsError(
            f"{path} holds {manifest.get('kind')} results, where those of `kvtwin {command}` are needed."
        )
    missing = [n for n in ("requests.parquet", "steps.parquet", "summary.json") if not (folder / n).is_file()]
    if missing:
        raise ResultsError(f"{path} is unfinished: {missing[0]} is missing; run it again.")
    options = manifest.get("configuration")
    if not isinstance(options, dict):
        raise ResultsError(f"{path} is damaged: its manifest.json names no configuration; run it again.")
    summary = read_json(folder / "summary.json")
    if not isinstance(summary, dict):
        raise ResultsError(f"{path} is damaged: its summary.json is not one of ours; run it again.")
    gaps = folder / "gaps.parquet"
    tables = Tables(
        read_table(folder / "requests.parquet"),
        read_table(folder / "steps.parquet"),
        read_table(gaps)["gap_ns"] if gaps.is_file() else np.empty(0, dtype=np.int64),
        steps_in_flight=2 if options.get("async_scheduling") else 1,
        block_size=int(options.get("block_size", 16)),
    )
    for name, table, columns in (
        ("requests", tables.requests, ("arrival_ns", "first_token_ns", "finish_ns", "output_tokens", "outcome")),
        ("steps", tables.steps, ("step", "num_steps", "start_ns", "end_ns", "num_decodes")),
    ):
        lacking = set(columns) - set(table)
        if lacking:
            raise ResultsError(f"{path} is damaged: {name}.parquet has no column {min(lacking)}; run it again.")
    return Results(folder, manifest, summary, tables)
