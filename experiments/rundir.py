"""A real serving run, read back: what was asked of the engine, when each request came and was answered, its settings.

Two kinds of log are read.

A folder with requests.csv (and any of prompt_blocks.npz, timeseries.csv, profile/, a simulator's prediction):

    requests.csv        prompt_tokens, output_tokens, arrival_s, first_token_s, last_token_s; optional scheduled_s and
                        queued_s (when the engine took it in); seconds from any one origin
    prompt_blocks.npz   block_ids, offsets[n + 1]: the identity of each full block of each prompt, from its start on
    timeseries.csv      t, running, waiting, kv_cache_pct: the engine's own log
    engine.json         settings; see `experiments.enginefacts`
    profile/            kernel tables; see `sim.tables`
    llmservingsim_pred.csv   idx, ttft_s, latency_s: what another simulator said of the run

What `vllm bench serve --save-result --save-detailed` writes (the file, or a folder with it and with engine.json):
input_lens, output_lens, ttfts, itls and start_times, a value a request. Requests that failed are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import UsageError
from traces import Trace, make_trace

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RealRun", "read_run"]

_NEEDED = ("prompt_tokens", "output_tokens", "arrival_s", "first_token_s", "last_token_s")
_TIMES = ("arrival_s", "queued_s", "scheduled_s", "first_token_s", "last_token_s")


@dataclass(frozen=True, slots=True)
class RealRun:
    """What a run was asked and how it answered. Rows are in order of arrival; seconds from the first arrival."""

    path: Path
    trace: Trace
    prompt_tokens: np.ndarray
    """int64[n]."""
    output_tokens: np.ndarray
    """int64[n]."""
    arrival_s: np.ndarray
    queued_s: np.ndarray | None
    """When the engine took each request in; None where that is not logged."""
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    series: dict[str, np.ndarray] | None
    """The engine's own log: `t`, and any of `running`, `waiting`, `kv_cache_pct`."""
    public: dict[str, np.ndarray] | None
    """Another simulator's `ttft_s` and `latency_s` of each request."""
    settings: dict[str, Any]
    """engine.json as it is; empty where there is none."""
    profile: Path | None
    """The folder of kernel tables."""
    notes: tuple[str, ...]
    """What was missing, and what was assumed instead."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def latencies(self) -> dict[str, np.ndarray]:
        """`ttft_s`, `ttft_queued_s`, `tpot_s`, `e2e_s`, `e2e_queued_s` of each request, in seconds; NaN where it has
        none. From the arrival, and from when the engine took it in."""
        tokens = self.output_tokens - 1
        decoding = self.last_token_s - self.first_token_s
        unknown = np.full(len(self), np.nan)
        return {
            "ttft_s": self.first_token_s - self.arrival_s,
            "ttft_queued_s": unknown if self.queued_s is None else self.first_token_s - self.queued_s,
            "tpot_s": np.where(tokens > 0, decoding / np.maximum(tokens, 1), np.nan),
            "e2e_s": self.last_token_s - self.arrival_s,
            "e2e_queued_s": unknown if self.queued_s is None else self.last_token_s - self.queued_s,
        }


def read_run(path: str | Path) -> RealRun:
    """Read a run. Raises UsageError naming what is missing or malformed."""
    path = Path(path)
    if path.is_file():
        return _read_bench(path, path.parent)
    if not path.is_dir():
        raise UsageError(f"There is no run '{path}'; name the folder of a run, or what `vllm bench serve` saved.")
    if (path / "requests.csv").is_file():
        return _read_folder(path)
    logs = [file for file in sorted(path.glob("*.json")) if file.name != "engine.json" and _is_bench(file)]
    if len(logs) == 1:
        return _read_bench(logs[0], path)
    if logs:
        raise UsageError(f"'{path}' has {len(logs)} bench results ({logs[0].name}, {logs[1].name}, ...); name one.")
    raise UsageError(
        f"'{path}' has neither requests.csv nor a JSON of `vllm bench serve --save-detailed`; name the folder of a run."
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"'{path}' is not valid JSON: {error}.") from error


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "engine.json"
    if not path.is_file():
        return {}
    content = _json(path)
    if not isinstance(content, dict):
        raise UsageError(f"'{path}' must hold an object of settings, not {type(content).__name__}.")
    return content


def _profile(folder: Path) -> Path | None:
    return folder / "profile" if (folder / "profile").is_dir() else None


def _csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_csv(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"'{path}' cannot be read as CSV: {error}.") from error


def _read_folder(folder: Path) -> RealRun:
    path = folder / "requests.csv"
    table = _csv(path)
    missing = [name for name in _NEEDED if name not in table.columns]
    if missing:
        raise UsageError(f"'{path}' has no column {missing[0]}; it needs {', '.join(_NEEDED)}.")
    if not len(table):
        raise UsageError(f"'{path}' has no requests.")
    columns = {name: _numbers(path, table, name) for name in (*_NEEDED[:2], *_TIMES) if name in table.columns}
    _check_times(path, columns)
    notes = []
    if "queued_s" not in columns:
        notes.append("requests.csv has no queued_s: latencies are from arrivals only")
    ids = _blocks(folder, columns["prompt_tokens"].astype(np.int64))
    if ids is None:
        notes.append("there is no prompt_blocks.npz: no two prompts are taken to share a block")
    public = _public(folder / "llmservingsim_pred.csv", len(table))
    return _run(folder, folder, columns, ids, _series(folder / "timeseries.csv"), public, notes)


def _numbers(path: Path, table: pd.DataFrame, name: str) -> np.ndarray:
    import pandas as pd

    values = pd.to_numeric(table[name], errors="coerce").to_numpy(float)
    least = 1.0 if name.endswith("_tokens") else -np.inf
    bad = np.flatnonzero(~np.isfinite(values) | (values < least))
    if len(bad):
        raise UsageError(
            f"'{path}', line {int(bad[0]) + 2}: {name} is {table[name].iloc[int(bad[0])]!r}; it must be a number"
            f"{' of 1 or more' if least == 1.0 else ''}."
        )
    return np.asarray(values)


def _check_times(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Each request must arrive, be taken in, begin and end in this order (a microsecond of rounding is let pass)."""
    known = [name for name in ("arrival_s", "queued_s", "first_token_s", "last_token_s") if name in columns]
    for before, after in pairwise(known):
        bad = np.flatnonzero(columns[after] < columns[before] - 1e-6)
        if len(bad):
            i = int(bad[0])
            raise UsageError(
                f"'{path}', line {i + 2}: {after} ({columns[after][i]:g}) is before {before} ({columns[before][i]:g})."
            )


def _blocks(folder: Path, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    path = folder / "prompt_blocks.npz"
    if not path.is_file():
        return None
    try:
        with np.load(path) as content:
            ids, offsets = np.asarray(content["block_ids"], np.int64), np.asarray(content["offsets"], np.int64)
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(f"'{path}' must hold block_ids and offsets: {error}.") from error
    if len(offsets) != len(prompts) + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise UsageError(
            f"'{path}' does not fit requests.csv: {len(prompts):,} requests need {len(prompts) + 1:,} ascending "
            f"offsets that end at {len(ids):,}."
        )
    return ids, offsets


def _series(path: Path) -> dict[str, np.ndarray] | None:
    if not path.is_file():
        return None
    table = _csv(path)
    if "t" not in table.columns:
        raise UsageError(f"'{path}' has no column t, the seconds of each row.")
    names = [name for name in ("t", "running", "waiting", "kv_cache_pct") if name in table.columns]
    return {name: _numbers(path, table, name) for name in names}


def _public(path: Path, count: int) -> dict[str, np.ndarray] | None:
    if not path.is_file():
        return None
    table = _csv(path)
    missing = [name for name in ("idx", "ttft_s", "latency_s") if name not in table.columns]
    if missing:
        raise UsageError(f"'{path}' has no column {missing[0]}; it needs idx, ttft_s and latency_s.")
    rows = _numbers(path, table, "idx").astype(np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= count):
        raise UsageError(f"'{path}' has a request {int(rows.max())}, but requests.csv has {count}.")
    found = {}
    for name in ("ttft_s", "latency_s"):
        found[name] = np.full(count, np.nan)
        found[name][rows] = _numbers(path, table, name)
    return found


def _run(
    path: Path,
    folder: Path,
    columns: dict[str, np.ndarray],
    blocks: tuple[np.ndarray, np.ndarray] | None,
    series: dict[str, np.ndarray] | None,
    public: dict[str, np.ndarray] | None,
    notes: list[str],
) -> RealRun:
    order = np.argsort(columns["arrival_s"], kind="stable")
    settings = _settings(folder)
    origin = float(columns["arrival_s"].min())
    prompts = columns["prompt_tokens"].astype(np.int64)
    outputs = columns["output_tokens"].astype(np.int64)
    spans = None
    if blocks is not None:
        spans = _spans(folder, settings, prompts, *blocks)
    arrival_ns = np.rint((columns["arrival_s"] - origin) * 1e9).astype(np.int64)
    trace = make_trace(arrival_ns, prompts, outputs, spans=spans, name=path.name)
    times = {name: (columns[name] - origin)[order] for name in _TIMES if name in columns}
    if series is not None:
        series = {**series, "t": series["t"] - origin}
    return RealRun(
        path=path,
        trace=trace,
        prompt_tokens=prompts[order],
        output_tokens=outputs[order],
        arrival_s=times["arrival_s"],
        queued_s=times.get("queued_s"),
        first_token_s=times["first_token_s"],
        last_token_s=times["last_token_s"],
        series=series,
        public=None if public is None else {name: values[order] for name, values in public.items()},
        settings=settings,
        profile=_profile(folder),
        notes=tuple(notes),
    )


def _spans(
    folder: Path, settings: dict[str, Any], prompts: np.ndarray, ids: np.ndarray, offsets: np.ndarray
) -> tuple[list[int], list[int], list[int]]:
    """Full blocks by their identity, and the rest of each prompt by one of its own."""
    cache = settings.get("kv_cache")
    size = int((cache.get("block_size") if isinstance(cache, dict) else None) or 16)
    private = int(ids.max()) + 1 if len(ids) else 0
    spans: tuple[list[int], list[int], list[int]] = ([0], [], [])
    for row, length in enumerate(prompts.tolist()):
        full = ids[offsets[row] : offsets[row + 1]].tolist()
        if len(full) > length // size:
            raise UsageError(
                f"'{folder / 'prompt_blocks.npz'}' has {len(full)} full blocks of {size} for request {row}, whose "
                f"prompt has {length} tokens."
            )
        spans[1].extend(full)
        spans[2].extend([size] * len(full))
        if length > size * len(full):
            spans[1].append(private + row)
            spans[2].append(length - size * len(full))
        spans[0].append(len(spans[1]))
    return spans


# vLLM's own benchmark


def _is_bench(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError):
        return False
    return isinstance(content, dict) and "input_lens" in content


def _read_bench(path: Path, folder: Path) -> RealRun:
    content = _json(path)
    if not isinstance(content, dict):
        raise UsageError(f"'{path}' is no result of `vllm bench serve`; it must hold an object.")
    names = ("input_lens", "output_lens", "ttfts", "itls")
    missing = [name for name in names if not isinstance(content.get(name), list)]
    if missing:
        raise UsageError(f"'{path}' has no {missing[0]}; save the benchmark with --save-result --save-detailed.")
    if not isinstance(content.get("start_times"), list):
        raise UsageError(
            f"'{path}' has no start_times, so nobody knows when requests were sent; save it with a newer vLLM, which "
            "writes them."
        )
    count = len(content["input_lens"])
    for name in (*names, "start_times"):
        if len(content[name]) != count:
            raise UsageError(f"'{path}' has {len(content[name])} {name} for {count} requests.")
    failed = [bool(text) for text in content.get("errors") or [""] * count]
    served = [i for i in range(count) if not failed[i] and content["output_lens"][i] and content["ttfts"][i]]
    if not served:
        raise UsageError(f"'{path}' has no request that was served.")
    try:
        start = np.array([float(content["start_times"][i]) for i in served])
        first = start + np.array([float(content["ttfts"][i]) for i in served])
        last = first + np.array([float(sum(content["itls"][i])) for i in served])
        prompts = np.array([int(content["input_lens"][i]) for i in served], dtype=float)
        outputs = np.array([int(content["output_lens"][i]) for i in served], dtype=float)
    except (TypeError, ValueError) as error:
        raise UsageError(f"'{path}' has a value that is no number: {error}.") from error
    columns = {
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "arrival_s": start,
        "first_token_s": first,
        "last_token_s": last,
    }
    notes = ["bench results have no identities of blocks: no two prompts are taken to share one"]
    notes.append("times are the client's: the server's own work before and after the engine is in them")
    if len(served) < count:
        notes.append(f"{count - len(served)} requests that failed are left out, so the load was higher than simulated")
    return _run(path, folder, columns, None, _series(folder / "timeseries.csv"), None, notes)
