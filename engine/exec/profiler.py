"""What a step takes on this machine: batches of given shapes through the executor that serves, timed, into a file.

The time of a batch is the wall clock between the outputs of consecutive equal steps, as in service: it holds
scheduling, reading the plan, the forward pass, sampling and records. Contents are random; only shapes matter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from engine.core.drive import Add, drive
from engine.core.errors import InvariantError
from engine.core.identity import TokenIdentity
from engine.core.records import Recorder
from engine.core.scheduler import Scheduler
from engine.core.types import BlockId, PlanItem, PlanView, RequestSpec, StepOutcome, StepPlan
from engine.exec.engine import Engine
from engine.exec.executor import RequestState, TorchExecutor
from engine.exec.sampler import Logprob, SamplingParams
from engine.models.errors import ProfileError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["METADATA_KEY", "ProfileBatch", "profile"]

METADATA_KEY = b"kvtwin"
_COLUMNS = (
    "batch",
    "kind",
    "order",
    "repeats",
    "n_tokens",
    "n_rows",
    "n_decodes",
    "decode_context_tokens",
    "prefill_tokens",
    "prefill_context_work",
    "max_context",
    "wall_ns_median",
    "wall_ns_p25",
    "wall_ns_p75",
)
_LEAST_REPEATS = 3
_VARIES = ("date",)
"""Entries of the metadata that may differ between a profile and its continuation."""


class ProfileBatch(Protocol):
    """A batch to time."""

    @property
    def kind(self) -> str:
        """decode, prefill, mixed, trace, anchor, or replay (neighbours of this kind run once, back to back)."""
        ...

    @property
    def rows(self) -> Sequence[tuple[int, int]]:
        """(new tokens, tokens in the cache before the step) of each row."""
        ...


class _Rows:
    """The decode rows of a made-up plan."""

    def __init__(self, rows: list[PlanItem]) -> None:
        self._rows = rows
        self.num = len(rows)
        self.context_tokens = sum(row.start for row in rows)

    def rows(self) -> list[PlanItem]:
        return self._rows


class _Repeating(RequestState):
    """A request whose next token stays next: the same step can be run again and again."""

    __slots__ = ()

    def append(self, token: int, logprobs: dict[int, Logprob] | None) -> bool:
        stopped = super().append(token, logprobs)
        self.num_tokens -= 1
        return stopped


class _Prepared:
    """A batch as the executor takes it: a plan, and the block tables as a plan view."""

    def __init__(
        self, batch: ProfileBatch, engine: Engine, executor: TorchExecutor, first_request: int, seed: int
    ) -> None:
        config = engine.config
        random = np.random.default_rng(seed)
        vocab = engine.model.config.vocab_size
        needed = [-(-(new + cached) // config.block_size) for new, cached in batch.rows]
        if sum(needed) > config.num_blocks:
            raise ProfileError(
                f"a batch of {len(batch.rows)} rows needs {sum(needed)} blocks, and the pool has {config.num_blocks}; "
                "give it more, or smaller batches"
            )
        blocks = random.permutation(config.num_blocks)[: sum(needed)].tolist()
        self._tables: dict[int, list[BlockId]] = {}
        decodes: list[PlanItem] = []
        prefills: list[PlanItem] = []
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        self.requests = range(first_request, first_request + len(batch.rows))
        for request, (new, cached), count in zip(self.requests, batch.rows, needed, strict=True):
            self._tables[request], blocks = blocks[:count], blocks[count:]
            state = _Repeating(random.integers(0, vocab, new + cached).tolist(), params, 0, (), None)
            executor.adopt(request, state)
            item = PlanItem(request, 0, cached, new, True)
            (decodes if new == 1 else prefills).append(item)
        self.plan = StepPlan(1, 0, tuple(prefills), _Rows(decodes), (), (), (), False)

    def table(self, request: int) -> Sequence[BlockId]:
        return self._tables[request]

    def release(self, executor: TorchExecutor) -> None:
        for request in self.requests:
            executor.forget(request)


def profile(
    engine: Engine,
    batches: Sequence[ProfileBatch],
    path: str | Path,
    *,
    repeats: int = 10,
    warm_ups: int = 3,
    batch_limit_s: float = 20.0,
    stop_after_s: float | None = None,
    seed: int = 0,
    about: dict[str, Any] | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> int:
    """Time `batches` in their order and write a row for each to the Parquet file `path` as it is done.

    A file that an earlier call with equal settings left unfinished is continued; one of other settings is left alone.
    A batch that runs into `batch_limit_s` is repeated less often (at least 3 times). After `stop_after_s` no further
    batch is begun. `about` goes into the file's metadata, `on_batch(done, total)` is called after each batch.

    Returns the number of batches in the file. Raises ProfileError when the file cannot be continued or written, or a
    batch cannot be run.
    """
    path = Path(path)
    batches = list(batches)
    _check(engine, batches)
    metadata = _metadata(engine, batches, repeats, warm_ups, seed, about or {})
    rows = _continued(path, metadata)
    executor = engine.make_executor()
    began = engine.clock()
    try:
        while len(rows) < len(batches):
            if stop_after_s is not None and engine.clock() - began > stop_after_s * 1e9:
                break
            first = len(rows)
            last = first + 1
            if batches[first].kind == "replay":
                while last < len(batches) and batches[last].kind == "replay":
                    last += 1
                times = _run_back_to_back(engine, executor, batches[first:last], seed)
            else:
                times = [
                    _run_repeatedly(engine, executor, batches[first], repeats, warm_ups, batch_limit_s, seed + first)
                ]
            for index, samples in zip(range(first, last), times, strict=True):
                rows.append(_row(index, batches[index], samples))
            _write(path, rows, metadata)
            if on_batch is not None:
                on_batch(len(rows), len(batches))
    finally:
        executor.close()
    return len(rows)


class _Stand:
    """The executor for a scheduler that only keeps the loop's pace: it runs the prepared plans instead of the given.

    So a timed step holds what the loop does between two steps in service: scheduling as many rows, completing them and
    recording both. The scheduler's rows are decodes, whatever the prepared ones are.
    """

    def __init__(self, executor: TorchExecutor, plans: Sequence[_Prepared], rows: int) -> None:
        self._executor = executor
        self._plans = plans
        self._tokens = dict.fromkeys(range(rows), 0)
        self._submitted = 0
        self.ends: list[int] = []

    def submit(self, plan: StepPlan, view: PlanView, now: int) -> None:
        prepared = self._plans[min(self._submitted, len(self._plans) - 1)]
        self._submitted += 1
        self._executor.submit(prepared.plan, prepared, now)

    def collect(self) -> StepOutcome:
        outcome = self._executor.collect()
        self.ends.append(outcome.end)
        return StepOutcome(outcome.end, self._tokens)

    def drain(self) -> None:
        while len(self.ends) < self._submitted:
            self.ends.append(self._executor.collect().end)


def _loop(engine: Engine, stand: _Stand, rows: int, steps: int) -> Iterator[None]:
    """The serving loop over `rows` requests of `steps` tokens each; yields after every completed step."""
    size = engine.config.block_size
    config = dataclasses.replace(
        engine.config,
        num_blocks=rows * -(-(steps + 2) // size),
        max_model_len=steps + 2,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, engine.config.max_num_batched_tokens),
        preemption_mode="recompute",
        num_host_blocks=0,
        host_tier=False,
    )
    scheduler = Scheduler(config)
    inbox = _Once([Add(RequestSpec(0, 1, steps, TokenIdentity([row], size)), row) for row in range(rows)])
    loop = drive(scheduler, stand, inbox, Recorder(scheduler), engine.clock())
    next(loop)
    try:
        while True:
            yield
            loop.send(engine.clock())
    except StopIteration:
        return
    finally:
        loop.close()


class _Once:
    """An inbox whose requests are all there at the start."""

    def __init__(self, commands: list[Add]) -> None:
        self._commands = commands

    def drain(self, now: int) -> list[Add]:
        commands, self._commands = self._commands, []
        return commands

    def accepted(self, row: int, request: int) -> None:
        pass

    def rejected(self, row: int, reason: str, now: int) -> None:
        raise InvariantError(f"the profiler's own request {row} was rejected: {reason}")

    def next_ns(self) -> int | None:
        return None

    def is_open(self) -> bool:
        return False


def _run_repeatedly(
    engine: Engine,
    executor: TorchExecutor,
    batch: ProfileBatch,
    repeats: int,
    warm_ups: int,
    limit_s: float,
    seed: int,
) -> list[int]:
    """ns between consecutive outputs of the batch, warm-ups left out."""
    prepared = _Prepared(batch, engine, executor, 0, seed)
    rows = len(batch.rows)
    stand = _Stand(executor, [prepared], rows)
    # The first end only opens the first interval.
    total = warm_ups + repeats + 1
    began = engine.clock()
    for _ in _loop(engine, stand, rows, total):
        late = engine.clock() - began > limit_s * 1e9
        if late and len(stand.ends) > min(warm_ups, 1) + _LEAST_REPEATS:
            break
    stand.drain()
    prepared.release(executor)
    times = [after - before for before, after in pairwise(stand.ends)]
    skipped = warm_ups if len(times) >= warm_ups + min(repeats, _LEAST_REPEATS) else min(warm_ups, 1)
    return times[skipped:]


def _run_back_to_back(
    engine: Engine, executor: TorchExecutor, batches: Sequence[ProfileBatch], seed: int
) -> list[list[int]]:
    """One time for each batch; the first of them runs once more beforehand, to be compared like with like."""
    plans = []
    first_request = 0
    for index, batch in enumerate([batches[0], *batches]):
        plans.append(_Prepared(batch, engine, executor, first_request, seed + index))
        first_request += len(batch.rows)
    rows = round(sum(len(batch.rows) for batch in batches) / len(batches))
    stand = _Stand(executor, plans, rows)
    for _ in _loop(engine, stand, rows, len(plans)):
        pass
    for one in plans:
        one.release(executor)
    return [[after - before] for before, after in pairwise(stand.ends)]


def _check(engine: Engine, batches: Sequence[ProfileBatch]) -> None:
    if not batches:
        raise ProfileError("there is no batch to profile; the pool or the limits leave no room for any")
    config = engine.config
    for batch in batches:
        for new, cached in batch.rows:
            if new < 1 or cached < 0 or new + cached > config.max_model_len:
                raise ProfileError(
                    f"a batch has a row of {new} new behind {cached} cached tokens; rows need at least 1 new token and "
                    f"at most {config.max_model_len} in all"
                )


def _row(index: int, batch: ProfileBatch, times: Sequence[int]) -> dict[str, Any]:
    decodes = [cached for new, cached in batch.rows if new == 1]
    prefills = [(new, cached) for new, cached in batch.rows if new > 1]
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return {
        "batch": index,
        "kind": batch.kind,
        "order": index,
        "repeats": len(times),
        "n_tokens": sum(new for new, _ in batch.rows),
        "n_rows": len(batch.rows),
        "n_decodes": len(decodes),
        "decode_context_tokens": sum(decodes),
        "prefill_tokens": sum(new for new, _ in prefills),
        "prefill_context_work": sum(new * (2 * cached + new + 1) for new, cached in prefills) // 2,
        "max_context": max(new + cached for new, cached in batch.rows),
        "wall_ns_median": round(statistics.median(times)),
        "wall_ns_p25": round(quartiles[0]),
        "wall_ns_p75": round(quartiles[2]),
    }


def _metadata(
    engine: Engine, batches: Sequence[ProfileBatch], repeats: int, warm_ups: int, seed: int, about: dict[str, Any]
) -> dict[str, Any]:
    shapes = json.dumps([[batch.kind, [list(row) for row in batch.rows]] for batch in batches])
    return {
        **about,
        "model": engine.model.name,
        "device": engine.args.device,
        "machine": _machine(),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "threads": engine.num_threads,
        "block_size": engine.config.block_size,
        "kv_blocks": engine.config.num_blocks,
        "steps_in_flight": engine.config.steps_in_flight,
        "max_model_len": engine.config.max_model_len,
        "num_batches": len(batches),
        "batches_sha256": hashlib.sha256(shapes.encode()).hexdigest(),
        "repeats": repeats,
        "warm_ups": warm_ups,
        "seed": seed,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _machine() -> str:
    """The processor as the operating system calls it, and how many cores there are."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def _continued(path: Path, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that an earlier, unfinished run of the same profile left in `path`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        return []
    try:
        table = pq.read_table(path)
        stored = json.loads((table.schema.metadata or {})[METADATA_KEY])
    except (OSError, pa.ArrowInvalid, KeyError, ValueError):
        raise ProfileError(f"{path} exists and is not a profile; name another file or remove it") from None
    for name in sorted({*stored, *metadata} - {*_VARIES}):
        if stored.get(name) != metadata.get(name):
            raise ProfileError(
                f"{path} holds a profile with {name} = {stored.get(name)!r} and cannot be continued with "
                f"{metadata.get(name)!r}; name another file or remove it"
            )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _write(path: Path, rows: Sequence[dict[str, Any]], metadata: dict[str, Any]) -> None:
    """Replace the file in one go, so that whoever reads it meanwhile sees a whole one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table: pa.Table = pa.table({name: [row[name] for row in rows] for name in _COLUMNS})
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(metadata).encode()})
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, partial)
        partial.replace(path)
    except OSError as error:
        raise ProfileError(f"cannot write the profile {path}: {error}") from None
