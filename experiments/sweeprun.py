"""Configurations computed on many processes: of this machine, or of a Ray cluster. Results come as they are ready."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.config import Config, options
from experiments.errors import UsageError, one_sentence
from experiments.sweepspec import PATHS

if TYPE_CHECKING:
    from traces import Trace

__all__ = ["BACKENDS", "Outcome", "Task", "compute", "flat", "key_of", "outcomes"]

BACKENDS = ("local", "ray")


class Task(NamedTuple):
    """A configuration to compute."""

    key: str
    command: str
    config: Config


class Outcome(NamedTuple):
    """What became of one."""

    key: str
    metrics: dict[str, Any] | None
    """Numbers and words of its summary, flat; None: it could not be."""
    error: str
    """Why it could not be, in a sentence."""
    fault: str = ""
    """The traceback of a fault of ours."""
    complete: bool = True
    """False: it was interrupted, and there is nothing to keep."""


def key_of(command: str, config: Config, code: str) -> str:
    """Equal where everything that results depend on is: options, the content of files that they name, and the code."""
    state = hashlib.sha256(f"{command} {code}".encode())
    for name in options():
        value = getattr(config, name)
        if name in ("out", "fast_forward"):
            continue
        if name in PATHS and value is not None:
            for item in value if isinstance(value, tuple) else (value,):
                file = str(item).partition(":")[0] if name in ("policy", "router") else str(item)
                state.update(f"\n{name}={_content(file)}".encode())
            continue
        state.update(f"\n{name}={value!r}".encode())
    return state.hexdigest()[:24]


def _content(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        return name
    stat = path.stat()
    return _digest(str(path.resolve()), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1024)
def _digest(path: str, changed: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flat(summary: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Numbers and words by dotted name; lists are left out."""
    found: dict[str, Any] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        elif value is None or isinstance(value, bool | int | float | str):
            found[before + name] = value
    return found


def compute(task: Task) -> Outcome:
    """One configuration, in the process that calls. Never raises."""
    try:
        summary, complete = (_simulated if task.command == "simulate" else _cluster)(task.config)
        return Outcome(task.key, flat(summary), "", complete=complete)
    except Exception as error:  # noqa: BLE001 (a fault goes to the process that asked, as text)
        sentence = one_sentence(error)
        if sentence is not None:
            return Outcome(task.key, None, sentence)
        return Outcome(task.key, None, "", fault=traceback.format_exc())


def _simulated(config: Config) -> tuple[dict[str, Any], bool]:
    from experiments.simulate import scheduler_of, simulate_trace

    trace = _trace(config)
    basis, scheduler, assumption = scheduler_of(config)
    found = simulate_trace(config, trace, scheduler, basis, assumption)
    return found.summary, found.complete


def _cluster(config: Config) -> tuple[dict[str, Any], bool]:
    import argparse
    from dataclasses import replace

    from experiments.cluster import execute
    from experiments.terminal import Terminal

    folder = tempfile.mkdtemp(prefix="kvtwin-sweep-")
    try:
        terminal = Terminal(quiet_stdout=True).silent()
        summary = execute(replace(config, out=folder), argparse.Namespace(), terminal)
        return summary, not terminal.interrupted
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _trace(config: Config) -> Trace:
    """The trace of a configuration; the last one is kept, since most configurations of a sweep have the same."""
    assert config.trace is not None  # read_sweep has seen to it
    names = ("trace", "format", "trace_option", "num_requests", "max_concurrency", "dequantize", "seed")
    stat = os.stat(config.trace) if os.path.isfile(config.trace) else None
    return _loaded(tuple(getattr(config, name) for name in names), stat and stat.st_mtime_ns)


@lru_cache(maxsize=2)
def _loaded(values: tuple[Any, ...], changed: int | None) -> Trace:
    from experiments.workload import load_trace

    names = ("trace", "format", "trace_option", "num_requests", "max_concurrency", "dequantize", "seed")
    return load_trace(Config(**dict(zip(names, values, strict=True))))


def outcomes(tasks: Iterable[Task], backend: str, jobs: int, address: str | None = None) -> Iterator[Outcome]:
    """The outcome of each task as it is ready, in any order, from `jobs` processes.

    Args:
        backend: `local` (joblib's processes) or `ray`.
        address: of a Ray cluster; None: one that is started here, and stopped at the end.

    Raises:
        UsageError: the backend is not installed, or the cluster cannot be reached.
    """
    if backend == "ray":
        yield from _on_ray(tasks, jobs, address)
        return
    listed = list(tasks)
    if jobs == 1 or len(listed) < 2:
        yield from map(compute, listed)
        return
    from joblib import Parallel, delayed

    run = Parallel(n_jobs=min(jobs, len(listed)), return_as="generator_unordered", batch_size=1)
    yield from run(delayed(compute)(task) for task in listed)


def _on_ray(tasks: Iterable[Task], jobs: int, address: str | None) -> Iterator[Outcome]:
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError("--backend ray needs Ray: pip install 'kvtwin[ray]'.") from None
    mine = not ray.is_initialized()
    if mine:
        options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False, "logging_level": "ERROR"}
        try:
            ray.init(address=address, **({} if address else {"num_cpus": jobs}), **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"The Ray cluster {address or 'of this machine'} cannot be used: {error}.") from None
    try:
        remote = ray.remote(num_cpus=1)(compute)
        waiting: list[Any] = []
        for task in tasks:
            waiting.append(remote.remote(task))
            if len(waiting) >= 4 * jobs:
                ready, waiting = ray.wait(waiting, num_returns=1)
                yield from ray.get(ready)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            yield from ray.get(ready)
    finally:
        if mine:
            ray.shutdown()


def stored(path: Path) -> dict[str, Any] | None:
    """A point that was computed before; None: it was not, or its file is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "metrics" in content else None
