"""Serve a trace in the simulator.

result = simulate(trace, SchedulerConfig(num_blocks=2587, max_model_len=8192), step_time)
result.requests(), result.steps()
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from engine.core.blockmap import BlockRecorder
from engine.core.drive import Abort, Add
from engine.core.identity import SpanIdentity
from engine.core.presets import SchedulerConfig
from engine.core.records import DecisionLog, Recorder
from engine.core.scheduler import Scheduler
from engine.core.types import NO_LIMIT, Finish, RequestSpec, StepPlan
from sim.busy import busy_columns
from sim.calibration import Hull
from sim.errors import SimError, StalledError
from sim.executor import BEAM_CHURN, SimExecutor
from sim.moves import FREE_MOVES, MoveTime
from sim.replica import Replica
from sim.steptime import StepModel
from traces import NO_ID, Trace, TraceSource

if TYPE_CHECKING:
    from sim.oom import MemoryGuard

__all__ = ["SimResult", "TraceInbox", "TraceSpecs", "share_outside_hull", "simulate", "spec_of"]


@dataclass(frozen=True, slots=True)
class SimResult:
    """A simulation that has run to its end, or was stopped before."""

    recorder: Recorder
    scheduler: Scheduler
    step_time: StepModel
    end_ns: int
    """Simulated time at which nothing was left."""
    complete: bool = True
    """False: it was stopped after a whole step, and requests may be unfinished or not have come yet."""
    moves: MoveTime = FREE_MOVES
    """What block moves cost."""

    def requests(self) -> dict[str, Any]:
        """One row a request: name of a column -> its values."""
        return self.recorder.requests()

    def steps(self) -> dict[str, Any]:
        """One row a step or run of equal decode steps."""
        table = self.recorder.steps()
        return table | busy_columns(table, self.step_time, self.moves, self.scheduler.config.steps_in_flight)

    def gaps(self) -> np.ndarray:
        """ns between tokens that were not sampled in consecutive steps: int64[gaps]."""
        return self.recorder.gaps()


class TraceSpecs:
    """Makes the core's request of a row of a trace; columns as plain Python numbers, for speed."""

    def __init__(
        self, trace: Trace, config: SchedulerConfig, max_tokens: int | None, n: int = 1, beam: bool = False
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise SimError(f"max_tokens must be 1 or more, not {max_tokens}.")
        if n < 1:
            raise SimError(f"n must be 1 or more, not {n}.")
        self.n = n
        self.beam = beam and n > 1
        self.twins = False
        """Whether rows are served as several requests of one prompt."""
        self._trace = trace
        self._block_size = config.block_size
        self._caching = config.caches_prefixes
        self._prompt = trace.prompt_tokens.tolist()
        self.output: list[int] = trace.output_tokens.tolist()
        self._max_tokens = max_tokens
        self._shared = trace.shared_prompt_tokens().tolist() if self._caching else []
        if config.prefix_stats:
            self._shared = self._prompt  # what is nobody else's may still be another tenant's, under another salt
        self._output_id = trace.output_ids.tolist()
        self._priority = trace.priority.tolist()
        self._deadline = trace.deadline.tolist()
        self._tenant = trace.tenant.tolist()

    def make(self, row: int, arrival: int, again: bool = False) -> RequestSpec:
        """The row's request; `again`: a further one with the same prompt, whose output is its own."""
        identity = None
        if self._caching:
            name, shared = NO_ID if again else self._output_id[row], self._shared[row]
            if again:
                shared = min(shared, self._prompt[row])
            if self.twins:
                shared = max(shared, self._prompt[row])  # with the further requests of its own row
            # A prompt of which nobody else has even a block needs no identity.
            if name != NO_ID or shared >= self._block_size:
                identity = SpanIdentity(
                    self._trace.spans(row),
                    self._block_size,
                    output_id=None if name == NO_ID else name,
                    salt=self._tenant[row],
                    shared_tokens=shared,
                )
        deadline = self._deadline[row]
        output = self.output[row]
        max_tokens = self._max_tokens or output
        return RequestSpec(
            arrival,
            self._prompt[row],
            max_tokens,
            identity,
            self._priority[row],
            arrival + deadline if deadline else NO_LIMIT,
            self._tenant[row],
            n=self.n,
            beam=self.beam,
            oracle_tokens=min(output, max_tokens),
        )


def spec_of(
    trace: Trace, row: int, arrival: int, config: SchedulerConfig, max_tokens: int | None = None
) -> RequestSpec:
    """The core's request of one row of a trace, which arrives at `arrival` ns."""
    return TraceSpecs(trace, config, max_tokens).make(row, arrival)


class TraceInbox:
    """Hands a trace's requests to a replica (an `Inbox` of the core), and its outcomes back to the trace."""

    def __init__(
        self,
        trace: Trace,
        source: TraceSource,
        config: SchedulerConfig,
        executor: SimExecutor,
        max_tokens: int | None,
        n: int = 1,
        beam: bool = False,
        forks: bool = True,
    ) -> None:
        self._source = source
        self._copies = 1 if forks or beam else n
        """Requests that a row is served as."""
        self._specs = TraceSpecs(trace, config, max_tokens, n if self._copies == 1 else 1, beam)
        self._specs.twins = self._copies > 1
        self._executor = executor
        self._max_tokens = max_tokens
        self._row_of: dict[int, int] = {}
        self._live: dict[int, int] = {}
        """Row -> its sequences, begun or not, that have not ended; only where rows have several."""

    def drain(self, now: int) -> Iterable[Add | Abort]:
        arrival = self._source.next_ns()
        if arrival is None or arrival > now:
            return ()
        return self._due(now)

    def _due(self, now: int) -> Iterable[Add]:
        # A rejected row may release another that is due at once.
        while due := self._source.due(now):
            for row, arrival in due:
                yield Add(self._specs.make(row, arrival), row)
                for _ in range(self._copies - 1):
                    if row in self._live:
                        yield Add(self._specs.make(row, arrival, again=True), row)

    def accepted(self, row: int, request: int) -> None:
        num = self._specs.n
        for sequence in range(request, request + num):
            self._row_of[sequence] = row
            if self._max_tokens is not None and self._specs.output[row] < self._max_tokens:
                self._executor.stops[sequence] = self._specs.output[row]
        if num > 1:
            self._executor.begin(request, num, self._specs.beam)
        if num > 1 or self._copies > 1:
            self._live[row] = self._live.get(row, 0) + num

    def rejected(self, row: int, reason: str, now: int) -> None:
        self._source.finished(row, now)

    def finished(self, finish: Finish, now: int) -> None:
        """A request has ended, or a sequence of it: when the last has, its row's successors may come."""
        row = self._row_of.pop(finish.request)
        if row in self._live:
            first = finish.request
            begun = self._executor.has_begun(first)
            self._executor.forget(first)
            if not begun:
                for sequence in range(first + 1, first + self._specs.n):
                    del self._row_of[sequence]
                    self._executor.forget(sequence)
            self._live[row] -= 1 if begun else self._specs.n
            if self._live[row]:
                return
            del self._live[row]
        self._source.finished(row, now)

    def next_ns(self) -> int | None:
        return self._source.next_ns()

    def is_open(self) -> bool:
        return self._source.remaining > 0


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is left behind in cycles here, and the collector would walk all that lives again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def simulate(
    trace: Trace,
    config: SchedulerConfig,
    step_time: StepModel,
    *,
    max_tokens: int | None = None,
    time_scale: float = 1.0,
    fast_forward: bool = True,
    log: bool = False,
    record_blocks: int = 0,
    observe: Callable[[StepPlan], None] | None = None,
    check: bool = False,
    stop: Callable[[], bool] | None = None,
    moves: MoveTime = FREE_MOVES,
    n: int = 1,
    beam: bool = False,
    forks: bool = True,
    beam_churn: float = BEAM_CHURN,
    seed: int = 0,
    guard: MemoryGuard | None = None,
) -> SimResult:
    """Serve a whole trace on one replica, in simulated time.

    A request generates the trace's number of tokens. With `max_tokens` it may generate that many, and stops by itself
    at the trace's number if that is smaller; the scheduler only knows max_tokens. `fast_forward` changes the speed and
    nothing else. With `log`, every decision is kept (in `recorder`'s table of steps nothing changes); `observe` sees
    each plan when it is submitted, and needs fast_forward to be off to see all. `record_blocks`: how many changes of
    blocks to record at most, in `recorder.blocks`, which turns fast_forward off; 0: none. `check` walks all state at
    each step. `stop` is asked now and then whether to leave off.

    `guard` checks that each step fits the device, and ends the replica where one does not, if it is to.

    `moves` is what block moves cost. Every row generates `n` sequences, each of the trace's length: forked from one
    prompt (as a `beam`, which is reordered at each step with `beam_churn` and `seed`, see `beam_parents`), or, without
    `forks`, as n requests.

    Raises:
        SimError: an argument is out of range.
        StalledError: requests are left and nothing will ever happen; a bug of ours.
    """
    env = simpy.Environment(initial_time=0)
    if guard is not None:
        observe, stop = guard.watching(lambda: int(env.now), observe), guard.stopping(stop)
        fast_forward = fast_forward and not guard.every_step
    scheduler = Scheduler(config)
    recorder = Recorder(scheduler, BlockRecorder(scheduler, record_blocks) if record_blocks else None)
    executor = SimExecutor(
        step_time.with_overlap(config.steps_in_flight), moves=moves, beam_churn=beam_churn, seed=seed, observe=observe
    )
    source = TraceSource(trace, time_scale)
    inbox = TraceInbox(trace, source, config, executor, max_tokens, n, beam, forks)
    decisions = DecisionLog(scheduler) if log else None
    replica = Replica(
        env,
        scheduler,
        executor,
        inbox,
        recorder,
        finished=inbox.finished,
        fast_forward=fast_forward,
        log=decisions,
        check=check,
        stop=stop,
        foretold=not step_time.needs_rows,  # decodes that finish on the way would leave it rows that nobody told
    )
    with uncollected():
        env.run()
    if replica.process.is_alive:
        raise StalledError(
            f"The simulation stands still at {env.now} ns with {scheduler.num_waiting} requests waiting, "
            f"{scheduler.num_running} running and {source.remaining} to come."
        )
    return SimResult(recorder, scheduler, step_time, int(env.now), not replica.stopped, moves)


def share_outside_hull(result: SimResult, hull: Hull) -> float:
    """The share of simulated step time, 0 to 1, in batches beyond what the calibration has measured.

    From the tables. Where a request's context outgrew the longest measured one is placed by assuming that its tokens
    came evenly.
    """
    steps, requests = result.steps(), result.requests()
    count = np.asarray(steps["num_steps"])
    if not count.sum():
        return 0.0
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    decodes = np.repeat(steps["num_decodes"], count)
    context = np.repeat(steps["decode_context_tokens"], count) + within * decodes
    tokens = decodes + np.repeat(steps["prefill_tokens"], count)
    rows = decodes + np.repeat(steps["num_prefills"], count)
    ends = result.recorder.step_ends()
    starts = np.maximum(np.concatenate([[0], ends[:-1]]), np.where(within == 0, np.repeat(steps["start_ns"], count), 0))
    outside = hull.outside(tokens, context, rows)
    limit = hull.max_context[1]
    prompt, output = np.asarray(requests["prompt_tokens"]), np.asarray(requests["output_tokens"])
    long = np.flatnonzero((prompt + output > limit) & (np.asarray(requests["first_token_ns"]) >= 0))
    for i in long.tolist():
        first, last = int(requests["first_token_ns"][i]), int(requests["finish_ns"][i])
        share = min(1.0, max(0.0, (limit - int(prompt[i])) / max(1, int(output[i]))))
        begin = first + share * (last - first) if prompt[i] <= limit else int(requests["admitted_ns"][i])
        lo, hi = np.searchsorted(ends, [begin, last], side="right")
        outside[lo : max(hi, lo + 1)] = True
    durations = ends - starts
    return float(durations[outside].sum() / durations.sum())
