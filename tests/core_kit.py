"""Executors and programs for testing the core: what a step must have read and written, and a clock without a GPU."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from engine.core import (
    NO_LIMIT,
    Admission,
    BlockIdentity,
    Finish,
    RequestSpec,
    RequestView,
    Scheduler,
    SchedulerConfig,
    SpanIdentity,
    StepEvents,
    StepOutcome,
    StepPlan,
)
from engine.core.blockmap import BlockRecorder
from engine.core.drive import Abort, Add, drive
from engine.core.records import DecisionLog, Recorder
from engine.core.scheduler import Horizon

__all__ = [
    "Case",
    "ClockExecutor",
    "Job",
    "ListInbox",
    "PulseAdmission",
    "aborts_everywhere",
    "beam_parents",
    "decodes_behind_chunks",
    "followers_everywhere",
    "full_prompt",
    "output_token",
    "request_of",
    "simulate",
]


@dataclass(frozen=True)
class Job:
    """A request of a test program."""

    at: int
    """Turn (or time) of its arrival."""
    prompt: tuple[int, ...]
    out: int
    """How many tokens it really generates (a stop), at most `cap`."""
    cap: int
    """max_tokens."""
    follows: int | None = None
    """Its prompt begins with the whole of this earlier job: prompt and output."""
    abort_at: int | None = None
    abort_in_flight: bool = False
    salt: bytes = b""
    private: bool = False
    priority: int = 0
    tenant: int = 0
    patience: int | None = None
    """Its deadline comes so much after its arrival."""
    predicted: int = 0
    early: bool = False
    """It comes at its own time even if it follows a job that has not ended. (Without a clock, all do.)"""
    quote: int | None = None
    """It begins with this much of the output of the job that it follows, and not with all of it."""
    n: int = 1
    beam: bool = False


@dataclass(frozen=True)
class Case:
    """A program: options and jobs."""

    config: SchedulerConfig
    jobs: tuple[Job, ...]
    step_cost: tuple[int, int, int] = (1, 0, 0)
    """ns of a step: constant, per token, per token of decode context."""
    luck: int = 0
    """Decides how long each transfer takes, and whether it fails or is lost."""


def output_token(job: int, k: int, q: int = 0) -> int:
    """Token k of sequence q of a job; from the same small alphabet as prompts, so that contents collide."""
    return (job * 7 + k * k + k // 3 + q * (k + 1)) % 2


def beam_parents(job: int, k: int, n: int) -> list[int]:
    """Which of the n sequences of a beam each continues when it gets its token k."""
    return [(q * (k % 3) + job + k // 2) % n for q in range(n)]


def full_prompt(jobs: tuple[Job, ...], number: int) -> tuple[int, ...]:
    job = jobs[number]
    if job.follows is None:
        return job.prompt
    outputs = tuple(output_token(job.follows, k) for k in range(quoted(jobs, job)))
    return full_prompt(jobs, job.follows) + outputs + job.prompt


def quoted(jobs: tuple[Job, ...], job: Job) -> int:
    """How many tokens of the output of the job that it follows are in the prompt of `job`."""
    assert job.follows is not None
    out = jobs[job.follows].out
    return out if job.quote is None else min(out, job.quote)


def aborts_everywhere() -> list[Case]:
    """One program with an abort of each of its jobs at each point between two calls, under each way to share."""
    found = []
    for size, depth, same_step in product((1, 2), (1, 2), ("share", "off", "defer")):
        config = SchedulerConfig(
            num_blocks=24 // size,
            block_size=size,
            max_model_len=24,
            max_num_seqs=3,
            max_num_batched_tokens=6,
            same_step=same_step,
            steps_in_flight=depth,
        )
        jobs = (
            Job(0, (0, 1, 1), 9, 9),
            Job(0, (0, 1, 1, 1, 0, 0, 1), 7, 9),
            Job(1, (0, 1), 5, 5, follows=0, quote=3),
            Job(4, (1, 0, 0), 6, 6, private=True),
        )
        for victim, turn, in_flight in product(range(len(jobs)), range(14), (False, True)):
            if turn >= jobs[victim].at:
                changed = replace(jobs[victim], abort_at=turn, abort_in_flight=in_flight)
                found.append(Case(config, (*jobs[:victim], changed, *jobs[victim + 1 :])))
    return found


def decodes_behind_chunks() -> list[Case]:
    """A long prompt comes late and is first in the order: its chunks leave too little for those that decode already."""
    found = []
    for size, depth, same_step, threshold, budget, at in product(
        (1, 2, 3), (1, 2), ("share", "off", "defer"), (0, 2), (3, 4), (2, 3)
    ):
        config = SchedulerConfig(
            num_blocks=60,
            block_size=size,
            max_model_len=40,
            max_num_seqs=3,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            scheduling_policy="priority",
            same_step=same_step,
            steps_in_flight=depth,
        )
        first = Job(at, (0, 1, 1, 0, 1) * 3, 3, 3, priority=0)
        others = (Job(0, (1,), 8, 8, priority=1), Job(0, (0,), 8, 8, priority=1))
        found.append(Case(config, (first, *others, Job(9, (1,), 2, 2, follows=1, priority=1))))
    return found


def followers_everywhere() -> list[Case]:
    """A job that quotes the output of one that still runs comes at each time, where there is room and where not."""
    found = []
    for size, depth, same_step, spare, at in product(
        (1, 2, 3), (1, 2), ("share", "off", "defer"), (0, 1, 2, 9), range(3, 11)
    ):
        config = SchedulerConfig(
            num_blocks=-(-20 // size) + spare,
            block_size=size,
            max_model_len=40,
            max_num_seqs=3,
            max_num_batched_tokens=40,
            same_step=same_step,
            steps_in_flight=depth,
        )
        jobs = (Job(0, (0, 1, 1), 18, 18), Job(at, (1,), 2, 2, follows=0, early=True, quote=15))
        found.append(Case(config, jobs))
    return found


def request_of(job: Job, at: int, num_prompt: int, identity: BlockIdentity | None) -> RequestSpec:
    """What the core is told of a job."""
    return RequestSpec(
        at,
        num_prompt,
        job.cap,
        identity,
        job.priority,
        NO_LIMIT if job.patience is None else at + job.patience,
        job.tenant,
        job.n,
        job.beam,
        predicted_tokens=job.predicted,
        oracle_tokens=min(job.out, job.cap),
    )


class ListInbox:
    """Jobs by time; a job that follows another comes when that one has ended."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.heap: list[tuple[int, int, str]] = []
        self.id_of: dict[int, int] = {}
        self.executor: ClockExecutor | None = None
        self.names: dict[tuple[object, ...], int] = {}
        self.now = 0
        for i, job in enumerate(case.jobs):
            if job.follows is None or job.early:
                self._push(job.at, i)
        self.left = len(case.jobs)

    def _push(self, at: int, i: int) -> None:
        heapq.heappush(self.heap, (at, i, "add"))
        abort_at = self.case.jobs[i].abort_at
        if abort_at is not None:
            heapq.heappush(self.heap, (at + abort_at, i, "abort"))

    def drain(self, now: int) -> Iterable[Add | Abort]:
        self.now = now
        commands: list[Add | Abort] = []
        while self.heap and self.heap[0][0] <= now:
            at, i, what = heapq.heappop(self.heap)
            if what == "add":
                commands.append(Add(self._spec(i, at), i))
            elif i in self.id_of:
                commands.append(Abort(self.id_of[i]))
        return commands

    def _spec(self, i: int, at: int) -> RequestSpec:
        job = self.case.jobs[i]
        size = self.case.config.block_size
        prompt = full_prompt(self.case.jobs, i)
        identity: SpanIdentity | None = None
        if not job.private:
            followed = any(other.follows == i for other in self.case.jobs)
            identity = SpanIdentity(self._spans(i), size, output_id=self._name("output", i) if followed else None)
        return request_of(job, at, len(prompt), identity)

    def _spans(self, i: int) -> list[tuple[int, int]]:
        """A name for every prefix of the prompt, the same for all jobs that have it."""
        job = self.case.jobs[i]
        spans: list[tuple[int, int]] = []
        if job.follows is not None:
            spans = self._spans(job.follows)
            tokens = quoted(self.case.jobs, job)
            spans.append((self._name("output", job.follows), tokens))
            return spans + [(self._name(job.follows, tokens, job.prompt[: k + 1]), 1) for k in range(len(job.prompt))]
        return [(self._name(job.prompt[: k + 1]), 1) for k in range(len(job.prompt))]

    def _name(self, *what: object) -> int:
        return self.names.setdefault(what, len(self.names))

    def accepted(self, row: int, request: int) -> None:
        self.id_of[row] = request
        self.left -= 1
        if self.executor is not None:
            self.executor.lengths[request] = self.case.jobs[row].out
            self.executor.caps[request] = self.case.jobs[row].cap

    def rejected(self, row: int, reason: str, now: int) -> None:
        self.left -= 1
        self.ended(row, now)

    def ended(self, row: int, now: int) -> None:
        for i, job in enumerate(self.case.jobs):
            if job.follows == row and not job.early:
                self._push(now + job.at, i)

    def next_ns(self) -> int | None:
        return self.heap[0][0] if self.heap else None

    def is_open(self) -> bool:
        return bool(self.heap)


class ClockExecutor:
    """A FastExecutor with a linear step cost, which knows when each request stops."""

    def __init__(self, cost: tuple[int, int, int], depth: int) -> None:
        self.cost = cost
        self.depth = depth
        self.lengths: dict[int, int] = {}
        self.caps: dict[int, int] = {}
        self.flight: deque[tuple[StepPlan, int, tuple[Finish, ...]]] = deque()
        self.last_end = 0
        self.stop_seq: dict[int, list[int]] = {}
        """Plan -> requests whose last token it samples."""
        self.view: Scheduler | None = None

    def duration(self, plan: StepPlan, step: int = 0) -> int:
        fixed, per_token, per_context = self.cost
        num = plan.decodes.num
        return fixed + per_token * plan.num_tokens + per_context * (plan.decodes.context_tokens + num * step)

    def submit(self, plan: StepPlan, view: Scheduler, now: int) -> None:
        start = max(now, self.last_end)
        self.last_end = start + self.duration(plan)
        self.view = view
        for item in plan.prefills:
            if item.samples and self.lengths[item.request] == 1 < self.caps[item.request]:
                self.stop_seq.setdefault(plan.seq, []).append(item.request)
        for request, _, outputs in plan.joined:
            for due in self.stop_seq.values():
                if request in due:
                    due.remove(request)  # from before it had left the cohort
            if self.lengths[request] < self.caps[request]:
                left = max(0, self.lengths[request] - outputs)
                self.stop_seq.setdefault(plan.seq + left, []).append(request)
        self.flight.append((plan, self.last_end, self._stops(plan)))

    def _stops(self, plan: StepPlan) -> tuple[Finish, ...]:
        """Those due in this plan that have a row in it."""
        due = self.stop_seq.get(plan.seq, [])
        rows = [*plan.prefills, *plan.decodes.rows()] if due else []
        has_row = {row.request for row in rows if row.samples}
        return tuple(Finish(request, "stop") for request in due if request in has_row)

    def _stops_repeated(self, plan: StepPlan) -> tuple[Finish, ...]:
        """The same in a plan that repeats the one before: everybody who runs has a row."""
        due = self.stop_seq.get(plan.seq, [])
        return tuple(Finish(request, "stop") for request in due if self._runs(request))

    def _runs(self, request: int) -> bool:
        """Not preempted by a plan that had no rows, nor aborted."""
        assert self.view is not None
        return request in self.view._requests and bool(self.view.table(request))

    def collect(self) -> StepOutcome:
        plan, end, stops = self.flight.popleft()
        self.stop_seq.pop(plan.seq, None)
        return StepOutcome(end, None, stops)

    def finish_bound(self) -> int:
        oldest = self.flight[0][0].seq
        due = [seq for seq in self.stop_seq if seq >= oldest]
        return min(due) - oldest if due else NO_LIMIT

    def preview(self, turns: int) -> list[int]:
        ends = [end for _, end, _ in self.flight]
        plan = self.flight[-1][0]
        while len(ends) < turns:
            ends.append(ends[-1] + self.duration(plan, len(ends) - len(self.flight) + 1))
        return ends[:turns]

    def advance(self, ends: list[int], plans: list[StepPlan]) -> None:
        flight = self.flight
        old = len(flight)
        all_ends = self.preview(len(ends) + old)
        told = {plan.seq: stops for plan, _, stops in flight}
        self.flight = deque()
        for plan, end in zip(plans, all_ends[len(ends) :], strict=True):
            stops = told[plan.seq] if plan.seq in told else self._stops_repeated(plan)
            self.flight.append((plan, end, stops))
        self.last_end = all_ends[-1]


class PulseAdmission(Admission):
    """Admits in the first half of every 14 ns, and says so."""

    def stable_until(self, now: int) -> int:
        return (now // 7 + 1) * 7 - 1

    def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
        return now // 7 % 2 == 0


@dataclass
class Simulated:
    """What a program did on the clock."""

    scheduler: Scheduler
    recorder: Recorder
    trail: list[tuple[int, int, str]]
    """(plan, time, digest of all state) after each step in which something happened to a request."""
    terms: dict[str, int]
    """How often each term of the horizon was the binding one."""
    runs: list[int]
    """Lengths of the runs that were fast-forwarded."""
    log: DecisionLog | None = None


def simulate(
    case: Case,
    fast_forward: bool,
    scheduler_type: type[Scheduler] = Scheduler,
    log_decisions: bool = False,
    blocks_type: Callable[[Scheduler], BlockRecorder] | None = None,
) -> Simulated:
    """Run a program on the clock; `blocks_type` makes what records its blocks."""
    terms: Counter[str] = Counter()
    runs: list[int] = []

    class Counting(scheduler_type):  # type: ignore[misc,valid-type]
        def horizon(self, finish_bound: int) -> Horizon:
            turns, term = super().horizon(finish_bound)
            terms[term] += 1
            return turns, term

        def stable_until(self, now: int) -> int:
            limit: int = super().stable_until(now)
            terms["policy"] += limit < NO_LIMIT
            return limit

        def advance(self, ends: Sequence[int]) -> list[StepPlan]:
            runs.append(len(ends))
            return super().advance(ends)

    scheduler = Counting(case.config)
    recorder = Recorder(scheduler, None if blocks_type is None else blocks_type(scheduler))
    executor = ClockExecutor(case.step_cost, case.config.steps_in_flight)
    inbox = ListInbox(case)
    inbox.executor = executor
    trail: list[tuple[int, int, str]] = []
    log = DecisionLog(scheduler) if log_decisions else None

    def ended(finish: Finish, now: int) -> None:
        row = next(row for row, request in inbox.id_of.items() if request == finish.request)
        inbox.ended(row, now)

    def on_step(plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        if events.finished or events.first_tokens or events.resumed:
            trail.append((plan.seq, outcome.end, scheduler.digest()))
        for finish in events.finished:
            ended(finish, outcome.end)

    loop = drive(
        scheduler,
        executor,
        inbox,
        recorder,
        0,
        fast_forward=fast_forward,
        log=log,
        on_step=on_step,
        on_abort=lambda finish: ended(finish, inbox.now),
    )
    now = 0
    bound = 100 + 100 * sum(len(full_prompt(case.jobs, i)) + job.cap for i, job in enumerate(case.jobs))
    try:
        wait = next(loop)
        for _ in range(bound):
            arrival = inbox.next_ns()
            if wait.idle:
                assert arrival is not None, "requests wait, nothing runs, and nothing will come"
                now = max(now, arrival)
            elif wait.ends and arrival is not None and arrival <= wait.ends[-1]:
                now = wait.ends[bisect_left(wait.ends, arrival)]
            else:
                assert wait.until is not None
                now = wait.until
            wait = loop.send(now)
        raise AssertionError("no end in sight: " + "; ".join(map(repr, scheduler._requests.values())))
    except StopIteration:
        pass
    return Simulated(scheduler, recorder, trail, dict(terms), runs, log)
