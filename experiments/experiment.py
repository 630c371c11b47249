"""What a module of `kvtwin experiment` is made of. docs/experiments.md shows how to write one.

    def run(context: Context) -> ExperimentResult: ...

The context gives it data, progress, parts that a rerun need not compute again, and simulations whose usage is checked;
the result is tables, pictures, numbers and the rows of the ledger that they settle. Files, the manifest and the ledger
are written by `experimentcmd`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from experiments import results
from experiments.claims import Settled
from experiments.errors import UsageError
from experiments.metrics import USAGE, Tables, expand_steps

if TYPE_CHECKING:
    from rich.progress import Progress

    from engine.core.presets import SchedulerConfig
    from experiments.config import Config
    from experiments.terminal import Terminal
    from sim.cluster import ClusterResult
    from sim.node import NodeSpec
    from sim.simulate import SimResult
    from sim.steptime import StepTime
    from traces import Trace

__all__ = [
    "Column",
    "Context",
    "ExperimentResult",
    "MissingData",
    "Settled",
    "Table",
    "check_usage",
    "shared_folder",
]

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("engine", "sim", "traces", "kernels", "experiments")
_T = TypeVar("_T")


class MissingData(UsageError):
    """A file of the shared data is needed and not there."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    """In the file."""
    title: str = ""
    """On the terminal; default: the name."""
    form: str = ""
    """How numbers are shown on the terminal, as in `format(value, form)`. The file has all digits."""


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers and texts that go to `NAME.csv` and to the terminal."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    """One value a column; None: nothing to show."""
    shown: bool = True
    """Whether the terminal shows it too."""


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """What an experiment found."""

    tables: Sequence[Table] = ()
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """PNG by name."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The content of summary.json: settings and figures."""
    claims: Sequence[Settled] = ()
    """Rows of the ledger."""
    notes: Sequence[str] = ()
    """Sentences below the tables: what was left out and why, what to mind."""


@dataclass(slots=True)
class _Record:
    """What a run, or one part of it, has used and checked."""

    data: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the shared data, by its path there."""
    usage: dict[str, int] = field(default_factory=dict)
    """Steps at which the usage summed to the pool, by run."""

    def add(self, other: _Record) -> None:
        self.data.update(other.data)
        self.usage.update(other.usage)


class Context:
    """What an experiment may use. `config` has the options of the command line, `seed` among them."""

    def __init__(
        self, name: str, config: Config, terminal: Terminal, out: Path, shared: Path, progress: Progress | None = None
    ) -> None:
        self.name = name
        self.config = config
        self.seed = config.seed
        self.terminal = terminal
        self.out = out
        self.shared = shared
        self._progress = progress
        self._records = [_Record()]
        self._traces: dict[str, Trace] = {}
        self._said: set[str] = set()
        """Why parts are computed again, as far as it was said: once for each reason."""

    # ---- data ----

    def path(self, relative: str) -> Path:
        """A file of the shared data, by its path in there; noted in the manifest with its digest.

        Raises:
            MissingData: it is not there.
        """
        path = self.shared / "data" / relative
        if not path.is_file():
            raise MissingData(f"{self.name} needs {path}, which is not there; name the shared folder with --shared.")
        self._records[-1].data[relative] = _digest_of(path)
        return path

    def has(self, *relative: str) -> bool:
        """Whether all these files of the shared data are there."""
        return all((self.shared / "data" / name).is_file() for name in relative)

    def trace(self, relative: str, **options: Any) -> Trace:
        """A trace of the shared data, by its path in there; see `path`."""
        import traces

        path = self.path(relative)
        key = f"{relative} {sorted(options.items())}"
        if key not in self._traces:
            self._traces[key] = traces.load(path, **options)
        return self._traces[key]

    # ---- progress and parts ----

    def track(self, items: Iterable[_T], description: str) -> Iterator[_T]:
        """The items one by one, with a bar on standard error that says how many are done. May be nested."""
        every = list(items)
        if self._progress is None:
            yield from every
            return
        task = self._progress.add_task(description, total=len(every))
        for item in every:
            yield item
            self._progress.advance(task)
        self._progress.remove_task(task)

    def part(self, name: str, compute: Callable[[], Any], **inputs: Any) -> Any:
        """What `compute` returns, kept in OUT/parts, so that a rerun with the same code, data and inputs reads it.

        The value goes through JSON either way: tuples come back as lists, keys as texts. `inputs` are settings that the
        value depends on beside the command line's; what `compute` simulates and reads in here is noted with the part.
        """
        file = self.out / "parts" / f"{name}.json"
        options = {"seed": self.seed, "num_requests": self.config.num_requests}
        wanted = json.loads(json.dumps({"code": code_digest(), "options": options, "inputs": inputs}))
        found = _read_part(file)
        if found is not None:
            changed = self._changed(found, wanted)
            if not changed:
                self._records[-1].add(_Record(found["data"], found["usage"]))
                return found["value"]
            if changed not in self._said:
                self.terminal.note(f"{name} is computed again: {changed} changed since {file} was written.")
                self._said.add(changed)
        with self._recording() as record:
            value = compute()
        content = {**wanted, "data": record.data, "usage": record.usage, "value": value}
        results.write_json(file, content)
        return json.loads(json.dumps(value))

    def _changed(self, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
        """What of a kept part does not hold any more; empty if all does."""
        for key, words in (("code", "the code has"), ("options", "options have"), ("inputs", "settings have")):
            if found.get(key) != wanted[key]:
                return words
        for relative, digest in found["data"].items():
            path = self.shared / "data" / relative
            if not path.is_file() or _digest_of(path) != digest:
                return f"{path} has"
        return ""

    @contextmanager
    def _recording(self) -> Iterator[_Record]:
        record = _Record()
        self._records.append(record)
        try:
            yield record
        finally:
            self._records.pop()
        self._records[-1].add(record)

    # ---- simulation ----

    def simulate(
        self, run: str, trace: Trace, options: SchedulerConfig, step_time: StepTime, **more: Any
    ) -> tuple[SimResult, Tables]:
        """`sim.simulate.simulate`, its tables, and the check that its usage sums to the pool at every step.

        `run` names it in the manifest.
        """
        from sim.simulate import simulate

        found = simulate(trace, options, step_time, **more)
        tables = Tables(
            found.requests(), found.steps(), found.gaps(), options.steps_in_flight, block_size=options.block_size
        )
        self.check_usage(run, tables, options.num_blocks)
        return found, tables

    def simulate_cluster(
        self, run: str, trace: Trace, replicas: Sequence[NodeSpec], *more: Any, **options: Any
    ) -> tuple[ClusterResult, list[Tables]]:
        """`sim.cluster.simulate_cluster`, the tables of each life of each replica, and the check of their usage."""
        from experiments.clustermetrics import life_tables
        from sim.cluster import simulate_cluster

        found = simulate_cluster(trace, replicas, *more, **options)
        tables = [life_tables(record) for record in found.lives]
        steps = 0
        for record, each in zip(found.lives, tables, strict=True):
            steps += check_usage(each, record.life.scheduler.config.num_blocks)
        self._records[-1].usage[run] = steps
        return found, tables

    def check_usage(self, run: str, tables: Tables, num_blocks: int) -> None:
        """`check_usage`, noted in the manifest under `run`. For replays and real runs; `simulate` calls it itself."""
        self._records[-1].usage[run] = check_usage(tables, num_blocks)

    def manifest(self) -> dict[str, Any]:
        """What a result rests on: code, seed, options, data, and the checks that were made."""
        record = self._records[0]
        return {
            "kind": "experiment",
            "experiment": self.name,
            "configuration": {"seed": self.seed, "num_requests": self.config.num_requests},
            "versions": results.versions("simpy", "matplotlib"),
            **version_of_code(),
            "seed": self.seed,
            "data": dict(sorted(record.data.items())),
            "usage_check": {
                "runs": len(record.usage),
                "steps": sum(record.usage.values()),
                "steps_by_run": dict(sorted(record.usage.items())),
                "differences": 0,
            },
        }


def check_usage(tables: Tables, num_blocks: int) -> int:
    """Checks at every step, those within runs included, that no part of the usage is negative and that the parts sum to
    the pool, slot by slot. Returns the number of steps.

    Raises:
        InvariantError: they do not, with the first step at which.
    """
    from engine.core.errors import InvariantError

    slots = num_blocks * tables.block_size
    steps = expand_steps(tables)
    parts = np.stack([np.asarray(steps[name], dtype=np.int64) for name in USAGE])
    total = parts.sum(axis=0)
    wrong = np.flatnonzero((total != slots) | (parts < 0).any(axis=0))
    if len(wrong):
        at = int(wrong[0])
        split = ", ".join(f"{name} {int(value)}" for name, value in zip(USAGE, parts[:, at], strict=True))
        raise InvariantError(
            f"the usage of step {int(steps['step'][at])} is {int(total[at])} slots of {slots} ({len(wrong)} such)",
            split,
        )
    return len(total)


def shared_folder(named: str | None) -> Path:
    """The folder of shared data: as named, or KVTWIN_SHARED, or `shared` beside the checkout. It may be absent.

    Raises:
        UsageError: one was named, and there is none.
    """
    if named is not None:
        if not Path(named).is_dir():
            raise UsageError(f"--shared {named} is not a folder.")
        return Path(named)
    return Path(os.environ.get("KVTWIN_SHARED") or ROOT.parent / "shared")


@cache
def code_digest() -> str:
    """SHA-256 over the sources of all packages, in the order of their names."""
    state = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            state.update(f"{path.relative_to(ROOT).as_posix()}\n".encode())
            state.update(path.read_bytes())
    return state.hexdigest()


@cache
def version_of_code() -> dict[str, Any]:
    """`commit` (None outside a repository), `modified` (whether sources differ from it), and `code`, their digest."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", *_PACKAGES)
    return {"commit": commit or None, "modified": None if commit is None else bool(changes), "code": code_digest()}


def _git(*words: str) -> str | None:
    try:
        ran = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()


def _read_part(file: Path) -> dict[str, Any] | None:
    """A part as it was written; None where there is none, or it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = isinstance(found, dict) and {"data", "usage", "value"} <= found.keys()
    return found if complete else None


@cache
def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
