"""Repeats the decisions of a real run: the core is given what the engine recorded, and decides again.

The input is what came from outside (when the scheduler was called, what had arrived before, which tokens were sampled,
what stopped); the output is every decision. With the same options, any difference is a fault. With other options, it
shows where the two part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from engine.core import (
    Finish,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    StepOutcome,
    StepPlan,
    TokenIdentity,
)
from engine.core.cost import LinearCost
from engine.core.drive import Abort, Add, drive
from engine.core.records import DecisionLog, Recorder
from engine.core.types import PlanView, TransferEnd
from experiments.config import Config
from experiments.errors import ResultsError
from experiments.results import read_results, read_table
from experiments.serving import scheduler_options

__all__ = ["Difference", "replay_differences", "replay_run"]

TOKENS = (
    *("request", "arrival_ns", "max_tokens", "priority", "tenant", "n", "beam", "prompt", "output", "num_outputs"),
    *("parents", "outcome"),
)
FIELDS = ("rows", "starts", "tokens", "taken", "hits", "preempted", "moves", "finished", "usage")


class Difference(NamedTuple):
    """One step in which the two did not do the same."""

    step: int
    field: str
    """The first of `FIELDS` that differs."""
    real: list[int]
    ours: list[int]

    def __str__(self) -> str:
        return f"step {self.step}: {self.field} was {_short(self.real)}, the replay has {_short(self.ours)}"


def _short(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 12 else f"[{', '.join(map(str, values[:12]))}, ... {len(values)} in all]"


class _Group(NamedTuple):
    """A request that forks."""

    num: int
    beam: bool
    parents: list[int]
    """Of a beam, by step: which sequence, from 0, each continues."""


class _Recorded:
    """replay.parquet and tokens.parquet of a real run: an inbox and an executor that repeat what happened then."""

    def __init__(self, folder: Path, block_size: int) -> None:
        turns = read_table(folder / "replay.parquet")
        tokens = read_table(folder / "tokens.parquet")
        wanted = {
            "replay": (turns, ("now_ns", "step", "end_ns", "added", "aborted", *FIELDS)),
            "tokens": (tokens, TOKENS),
        }
        for name, (table, columns) in wanted.items():
            lacking = set(columns) - set(table)
            if lacking:
                raise ResultsError(f"{folder} is damaged: {name}.parquet has no column {min(lacking)}; run it again.")
        self.now = [int(now) for now in turns["now_ns"]]
        self.steps: list[dict[str, Any]] = [
            {"step": int(turns["step"][i]), **{name: [int(v) for v in turns[name][i]] for name in FIELDS}}
            for i in range(len(self.now))
            if turns["step"][i]
        ]
        self._end = {int(seq): int(end) for seq, end in zip(turns["step"], turns["end_ns"], strict=True) if seq}
        self._commands: list[list[Add | Abort]] = []
        row_of = {int(request): i for i, request in enumerate(tokens["request"])}
        self.output: dict[int, list[int]] = {}
        self._length: dict[int, int] = {}
        """Tokens that a sequence was given."""
        self._stops: set[int] = set()
        self._groups: dict[int, _Group] = {}
        """By the first sequence: requests that fork."""
        for request, i in row_of.items():
            self.output[request] = [int(token) for token in tokens["output"][i]]
            self._length[request] = int(tokens["num_outputs"][i])
            if tokens["n"][i] > 1:
                self._groups[request] = _Group(
                    int(tokens["n"][i]), bool(tokens["beam"][i]), [int(p) for p in tokens["parents"][i]]
                )
            if tokens["outcome"][i] == "stop":
                self._stops.add(request)

        def spec(i: int) -> RequestSpec:
            prompt = [int(token) for token in tokens["prompt"][i]]
            tenant = int(tokens["tenant"][i])
            salt = tenant.to_bytes(8, "little", signed=True) if tenant else b""
            return RequestSpec(
                int(tokens["arrival_ns"][i]),
                len(prompt),
                int(tokens["max_tokens"][i]),
                TokenIdentity(prompt, block_size, salt=salt),
                priority=int(tokens["priority"][i]),
                tenant=tenant,
                n=max(1, int(tokens["n"][i])),
                beam=bool(tokens["beam"][i]) and tokens["n"][i] > 1,
                oracle_tokens=int(tokens["max_tokens"][i]),  # a run generates exactly as many as the trace says
            )

        for added, aborted in zip(turns["added"], turns["aborted"], strict=True):
            commands: list[Add | Abort] = [Add(spec(row_of[int(request)]), int(request)) for request in added]
            commands.extend(Abort(int(request)) for request in aborted)
            self._commands.append(commands)
        self._turn = 0
        self._request_of: dict[int, int] = {}
        """Recorded request -> the replay's own number for it."""
        self.recorded_of: dict[int, int] = {}
        self._sampled: dict[int, int] = {}
        self._leader: dict[int, int] = {}
        """Sequence of a beam -> the first one of it."""
        self._outcomes: deque[StepOutcome] = deque()

    # as an inbox

    def drain(self, now: int) -> Iterable[Add | Abort]:
        turn, self._turn = self._turn, self._turn + 1
        for command in self._commands[turn] if turn < len(self._commands) else ():
            if isinstance(command, Add):
                yield command
            elif command.request in self._request_of:
                yield Abort(self._request_of[command.request])

    def accepted(self, row: int, request: int) -> None:
        group = self._groups.get(row)
        for i in range(group.num if group is not None else 1):
            self._request_of[row + i] = request + i
            self.recorded_of[request + i] = row + i
            self._sampled[request + i] = 0
            if group is not None and group.beam:
                self._leader[request + i] = request

    def rejected(self, row: int, reason: str, now: int) -> None:
        """It was accepted then and cannot be served now; the steps will differ."""

    def next_ns(self) -> int | None:
        return self.clock()

    def is_open(self) -> bool:
        return self._turn < len(self._commands)

    def clock(self) -> int:
        """When the scheduler was called for the turn that comes next."""
        return self.now[min(self._turn, len(self.now) - 1)]

    # as an executor

    def submit(self, plan: StepPlan, view: PlanView, now: int) -> None:
        tokens: dict[int, int] = {}
        parents: dict[int, int] = {}
        finished: list[Finish] = []
        for row in (*plan.prefills, *plan.decodes.rows()):
            if not row.samples or row.request in tokens:
                continue
            first = self._leader.get(row.request, row.request)
            group = self._groups.get(self.recorded_of[first])
            sequences: Iterable[int] = (row.request,)
            if group is not None and (group.beam or not self._sampled[first]):
                sequences = range(first, first + group.num)
                if self._sampled[first]:
                    step = group.parents[group.num * self._sampled[first] :][: group.num]
                    parents.update(zip(sequences, (first + parent for parent in step), strict=False))
            for request in sequences:
                self._sample(request, tokens, finished)
        # A run on a CPU has done its transfers in the step that began them.
        ended = tuple(TransferEnd(transfer.id, True) for transfer in plan.transfers)
        end = self._end.get(plan.seq, now)
        self._outcomes.append(StepOutcome(end, tokens, tuple(finished), parents or None, ended))

    def _sample(self, request: int, tokens: dict[int, int], finished: list[Finish]) -> None:
        """The next token that was sampled for `request` then, and whether it stopped there."""
        recorded = self.recorded_of[request]
        k = self._sampled[request]
        output = self.output.get(recorded, [])
        self._sampled[request] = k + 1
        tokens[request] = output[k] if k < len(output) else 0  # beyond a stop: dropped by the core
        if k + 1 == self._length.get(recorded, 0) and recorded in self._stops:
            finished.append(Finish(request, "stop"))

    def collect(self) -> StepOutcome:
        return self._outcomes.popleft()


def replay_run(folder: Path, config: SchedulerConfig, check: bool = False) -> tuple[_Recorded, DecisionLog]:
    """Decide again what the run in `folder` decided, under `config`.

    Raises:
        ResultsError: the folder has no recording of its decisions.
    """
    for name in ("replay.parquet", "tokens.parquet"):
        if not (folder / name).is_file():
            raise ResultsError(f"{folder} has no {name}; only a real run (kvtwin run) records its decisions")
    recorded = _Recorded(folder, config.block_size)
    scheduler = Scheduler(config)
    log = DecisionLog(scheduler)
    loop = drive(scheduler, recorded, recorded, Recorder(scheduler), recorded.clock(), log=log, check=check)
    idle = 0
    try:
        wait = next(loop)
        while True:
            idle = idle + 1 if wait.idle and not recorded.is_open() else 0
            if idle > 1:
                break  # nothing will come any more, and what is left cannot run under these options
            wait = loop.send(recorded.clock())
    except StopIteration:
        pass
    return recorded, log


def replay_differences(real_dir: str | Path, sim_dir: str | Path) -> list[Difference]:
    """The steps in which the run in `real_dir`, decided again with the options of `sim_dir`, does something else.

    Memory is that of the real run (its block count and its longest request), so that policies are compared.

    Raises:
        ResultsError: a folder is not what it should be.
    """
    real = read_results(real_dir, "real")
    options = _configuration(read_results(sim_dir).manifest)
    size = int(real.manifest["configuration"]["block_size"])
    if options.block_size != size:
        raise ResultsError(f"{real_dir} ran with block_size {size} and {sim_dir} with {options.block_size}")
    longest = int(real.manifest["max_model_len"])
    cost = real.manifest.get("cost_model")
    host = scheduler_options(
        options,
        cost_model=None if cost is None else LinearCost(*cost),
        num_host_blocks=int(real.manifest.get("host_blocks", 0)),
    )
    config = SchedulerConfig(num_blocks=int(real.manifest["kv_blocks"]), max_model_len=longest, **host)
    recorded, log = replay_run(Path(real_dir), config)
    return compare_steps(recorded, log)


def compare_steps(recorded: _Recorded, log: DecisionLog) -> list[Difference]:
    """The steps that differ, in any field; a step that only one of the two has differs too."""
    differences = []
    names = recorded.recorded_of
    for i in range(max(len(recorded.steps), len(log.steps))):
        theirs: dict[str, Any] = recorded.steps[i] if i < len(recorded.steps) else {}
        ours: dict[str, Any] = dict(log.steps[i]) if i < len(log.steps) else {}
        for field in ("rows", "preempted", "finished"):
            ours[field] = [names[request] for request in ours.get(field, ())]
        for field in FIELDS:
            if list(theirs.get(field, ())) != list(ours.get(field, ())):
                differences.append(Difference(i + 1, field, list(theirs.get(field, ())), list(ours.get(field, ()))))
                break
    return differences


def _configuration(manifest: dict[str, Any]) -> Config:
    """The options that a results folder was made with."""
    known = {field.name for field in fields(Config)}
    options: dict[str, Any] = manifest["configuration"]
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if k in known}
    return Config(**values)
