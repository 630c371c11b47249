"""The loop: in which order things happen, what it waits for, and that the records say what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from core_kit import Case, ClockExecutor, simulate
from hypothesis import given, settings
from strategies import fast_cases

from engine.core import (
    Finish,
    InvariantError,
    PlanItem,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    StepEvents,
    StepOutcome,
    StepPlan,
)
from engine.core.drive import Abort, Add, Wait, drive
from engine.core.records import REQUEST_COLUMNS, STEP_COLUMNS, DecisionLog, Recorder


def config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 20, "max_model_len": 30, "block_size": 2, "max_num_seqs": 4, **changes})


def spec(prompt: int = 3, max_tokens: int = 3, arrival: int = 0) -> RequestSpec:
    return RequestSpec(arrival, prompt, max_tokens)


@dataclass
class Script:
    """An inbox that delivers commands at given times."""

    commands: list[tuple[int, Add | Abort]]
    told: list[str] = field(default_factory=list)
    known: bool = True
    """Whether it can say when the next comes."""

    def drain(self, now: int) -> Iterable[Add | Abort]:
        self.told.append(f"drain {now}")
        due = [command for at, command in self.commands if at <= now]
        self.commands = [entry for entry in self.commands if entry[0] > now]
        return due

    def accepted(self, row: int, request: int) -> None:
        self.told.append(f"accepted {row} as {request}")

    def rejected(self, row: int, reason: str, now: int) -> None:
        self.told.append(f"rejected {row} at {now}")

    def next_ns(self) -> int | None:
        return self.commands[0][0] if self.commands and self.known else None

    def is_open(self) -> bool:
        return bool(self.commands)


class Loud(Scheduler):
    """Says what it is asked."""

    told: list[str]

    def schedule(self, now: int) -> StepPlan:
        plan = super().schedule(now)
        self.told.append(f"schedule {plan.seq} at {now}")
        return plan

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> StepEvents:
        self.told.append(f"complete {plan.seq}")
        return super().complete(plan, outcome)


class LoudClock(ClockExecutor):
    """10 ns a step; nobody stops."""

    def __init__(self, depth: int, told: list[str]) -> None:
        super().__init__((10, 0, 0), depth)
        self.lengths = self.caps = Counter(dict.fromkeys(range(99), 99))
        self.told = told

    def submit(self, plan: StepPlan, view: Scheduler, now: int) -> None:
        self.told.append(f"submit {plan.seq}")
        super().submit(plan, view, now)

    def collect(self) -> StepOutcome:
        self.told.append(f"collect {self.flight[0][0].seq}")
        return super().collect()


@dataclass
class Ran:
    told: list[str]
    waits: list[Wait]
    plans: dict[int, StepPlan]
    aborted: list[Finish]
    recorder: Recorder
    log: DecisionLog
    scheduler: Scheduler


def run(options: SchedulerConfig, commands: list[tuple[int, Add | Abort]], known: bool = True) -> Ran:
    """Drive a script to its end; where the inbox cannot say when the next comes, it is found by looking."""
    told: list[str] = []
    scheduler = Loud(options)
    scheduler.told = told
    recorder, log = Recorder(scheduler), DecisionLog(scheduler)
    inbox = Script(sorted(commands, key=lambda entry: entry[0]), told, known)
    plans: dict[int, StepPlan] = {}
    aborted: list[Finish] = []

    def on_step(plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
        plans[plan.seq] = plan

    executor = LoudClock(options.steps_in_flight, told)
    loop = drive(scheduler, executor, inbox, recorder, 0, log=log, on_step=on_step, on_abort=aborted.append, check=True)
    waits: list[Wait] = []
    try:
        wait = next(loop)
        while True:
            waits.append(wait)
            wait = loop.send(inbox.commands[0][0] if wait.until is None else wait.until)
    except StopIteration:
        pass
    return Ran(told, waits, plans, aborted, recorder, log, scheduler)


def test_one_step_in_flight_is_drain_schedule_run_complete() -> None:
    """With one step in flight, each step is decided on what had come when the one before it ended."""
    assert run(config(), [(0, Add(spec(max_tokens=2), 5))]).told == [
        "drain 0", "accepted 5 as 0", "schedule 1 at 0", "submit 1", "collect 1", "complete 1",
        "drain 10", "schedule 2 at 10", "submit 2", "collect 2", "complete 2",
        "drain 20", "schedule 0 at 20",
    ]  # fmt: skip


def test_two_steps_in_flight_schedule_before_completing() -> None:
    """With two in flight, the next step is decided while one runs, and completions come in the order of plans."""
    assert run(config(steps_in_flight=2), [(0, Add(spec(max_tokens=3), 5))]).told == [
        "drain 0", "accepted 5 as 0", "schedule 1 at 0", "submit 1",
        "drain 0", "schedule 2 at 0", "submit 2", "collect 1", "complete 1",
        "drain 10", "schedule 3 at 10", "submit 3", "collect 2", "complete 2",
        "drain 20", "schedule 0 at 20", "collect 3", "complete 3",
        "drain 30", "schedule 0 at 30",
    ]  # fmt: skip


@pytest.mark.parametrize(("depth", "runs_in", "start"), [(1, 3, 20), (2, 4, 30)])
def test_an_arrival_waits_for_what_is_decided(depth: int, runs_in: int, start: int) -> None:
    """Arriving during step k = 2: with one in flight it runs in k + 1; with two, after all of k + 1, in k + 2."""
    ran = run(config(steps_in_flight=depth), [(0, Add(spec(max_tokens=8), 0)), (15, Add(spec(arrival=15), 1))])
    first = min(seq for seq, plan in ran.plans.items() if 1 in plan.admitted)
    assert first == runs_in
    assert ran.recorder.step_ends()[first - 2] == start
    table = ran.recorder.requests()
    assert table["queued_ns"].tolist() == [0, 20]
    assert table["admitted_ns"].tolist() == [0, 20]
    assert table["first_token_ns"].tolist() == [10, start + 10]


def test_an_idle_loop_waits_for_the_next_arrival() -> None:
    """With nothing to run it waits for the time of the next arrival, or for any if that is not known, then ends."""
    commands: list[tuple[int, Add | Abort]] = [(7, Add(spec(max_tokens=1), 0)), (40, Add(spec(max_tokens=1), 1))]
    assert run(config(), list(commands)).waits == [
        Wait(7, idle=True),
        Wait(17),
        Wait(40, idle=True),
        Wait(50),
    ]
    waits = run(config(), list(commands), known=False).waits
    assert [wait.until for wait in waits] == [None, 17, None, 50]
    assert run(config(), []).waits == []


def test_a_rejected_request_is_recorded_and_others_go_on() -> None:
    """Rule 7: a request that can never be served is refused to its sender and in the records, with the reason."""
    ran = run(
        config(),
        [
            (0, Add(spec(max_tokens=2), 0)),
            (5, Add(spec(40, 1, arrival=5), 1)),
            (5, Add(spec(max_tokens=2, arrival=5), 2)),
        ],
    )
    assert "rejected 1 at 10" in ran.told
    table = ran.recorder.requests()
    assert table["outcome"] == ["length", "rejected", "length"]
    assert table["request"].tolist() == [0, -1, 1]
    assert table["row"].tolist() == [0, 1, 2]
    assert "max_model_len = 30" in table["reason"][1]
    assert table["reason"][::2] == ["", ""]
    assert table["finish_ns"][1] == -1
    assert table["queued_ns"][1] == 10


@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_end_a_request_wherever_it_is(depth: int) -> None:
    """P9: running, waiting, unknown or already gone: an abort ends what is there, and is told once."""
    ran = run(
        config(max_num_seqs=1, steps_in_flight=depth),
        [
            (0, Add(spec(max_tokens=9), 0)),
            (0, Add(spec(max_tokens=9), 1)),
            (0, Add(spec(max_tokens=2), 2)),
            (12, Abort(1)),  # waiting
            (25, Abort(0)),  # running
            (26, Abort(0)),  # gone
            (26, Abort(77)),  # never there
        ],
    )
    assert [(finish.request, finish.reason) for finish in ran.aborted] == [(1, "abort"), (0, "abort")]
    table = ran.recorder.requests()
    assert table["outcome"] == ["aborted", "aborted", "length"]
    assert table["finish_ns"].tolist()[:2] == [30, 20]
    assert table["output_tokens"].tolist() == [3, 0, 2]
    assert ran.scheduler.manager.pool.num_free == 20


def test_plans_are_completed_in_order() -> None:
    """Completing a plan that is not the oldest, or one twice, is an error that names it."""
    scheduler = Scheduler(config(steps_in_flight=2))
    scheduler.add(spec(), 0)
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    with pytest.raises(InvariantError, match="plan 2 is completed out of order"):
        scheduler.complete(second, StepOutcome(1))
    scheduler.complete(first, StepOutcome(1))
    with pytest.raises(InvariantError, match="plan 1 is completed out of order"):
        scheduler.complete(first, StepOutcome(1))


def test_a_plan_without_rows_is_not_in_flight() -> None:
    """When nothing can run the plan is empty, has no number, and need not be completed."""
    scheduler = Scheduler(config())
    plan = scheduler.schedule(3)
    assert (plan.num_rows, plan.seq, plan.now, scheduler.num_in_flight) == (0, 0, 3, 0)


class Spy(Scheduler):
    """Remembers every plan and what came of it, with the table of each row at that time."""

    def __init__(self, options: SchedulerConfig) -> None:
        super().__init__(options)
        self.plans: list[tuple[StepPlan, list[PlanItem], dict[int, list[int]]]] = []
        self.ended: list[tuple[StepPlan, StepOutcome, StepEvents]] = []
        self.lost: list[int] = []
        self.gone: list[Finish] = []
        self.specs: list[RequestSpec] = []

    def add(self, spec: RequestSpec, now: int) -> int:
        id = super().add(spec, now)
        self.specs.append(spec)
        return id

    def schedule(self, now: int) -> StepPlan:
        plan = super().schedule(now)
        self.lost.extend(plan.preempted)
        if plan.runs:
            rows = self.scheduled_order(plan)
            self.plans.append((plan, rows, {row.request: list(self.table(row.request)) for row in rows}))
        return plan

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> StepEvents:
        events = super().complete(plan, outcome)
        self.ended.append((plan, outcome, events))
        return events

    def abort(self, id: int) -> list[Finish]:
        finishes = super().abort(id)
        self.gone.extend(finishes)
        return finishes


def spied(case: Case, log: bool = False) -> tuple[Spy, Recorder, DecisionLog | None]:
    ran = simulate(case, False, Spy, log_decisions=log)
    assert isinstance(ran.scheduler, Spy)
    return ran.scheduler, ran.recorder, ran.log


@settings(max_examples=100)
@given(fast_cases())
def test_the_tables_say_what_happened(case: Case) -> None:
    """Each request's times, tokens, hits, preemptions and outcome are those of its plans and events; steps too."""
    spy, recorder, _ = spied(case)
    requests, steps = recorder.requests(), recorder.steps()
    assert list(requests) == list(REQUEST_COLUMNS)
    assert set(STEP_COLUMNS) < set(steps)
    first: dict[int, int] = {}
    finish: dict[int, tuple[str, int]] = {}
    outputs: Counter[int] = Counter()
    for _, outcome, events in spy.ended:
        assert not first.keys() & set(events.first_tokens)
        first.update(dict.fromkeys(events.first_tokens, outcome.end))
        finish.update((end.request, (end.reason, outcome.end)) for end in events.finished)
        outputs.update({end.request: end.num_output_tokens for end in events.finished})
    outputs.update({gone.request: gone.num_output_tokens for gone in spy.gone})
    admitted: dict[int, tuple[int, int]] = {}
    for plan, rows, _ in spy.plans:
        for row in rows:
            if row.request in plan.admitted:
                admitted.setdefault(row.request, (plan.now, row.start))
    preempted = Counter(spy.lost)
    aborted = {gone.request for gone in spy.gone}
    assert len(requests["request"]) == len(case.jobs)
    for i, id in enumerate(requests["request"].tolist()):
        job = case.jobs[requests["row"][i]]
        assert requests["max_tokens"][i] == job.cap
        assert requests["first_token_ns"][i] == first.get(id, -1)
        assert (requests["admitted_ns"][i], requests["cached_tokens"][i]) == admitted.get(id, (-1, 0))
        assert requests["num_preemptions"][i] == preempted[id]
        assert requests["output_tokens"][i] == outputs[id]
        assert requests["arrival_ns"][i] <= requests["queued_ns"][i]
        if id in aborted:
            assert requests["outcome"][i] == "aborted"
        else:
            assert (requests["outcome"][i], requests["finish_ns"][i]) == finish[id]
            assert requests["output_tokens"][i] == min(
                job.out, job.cap, case.config.max_model_len - requests["prompt_tokens"][i]
            )
            assert requests["outcome"][i] == ("stop" if job.out < job.cap and outputs[id] == job.out else "length")
    assert steps["step"].tolist() == [plan.seq for plan, _, _ in spy.ended]
    assert steps["end_ns"].tolist() == [outcome.end for _, outcome, _ in spy.ended]
    assert steps["finished"].tolist() == [len(events.finished) for _, _, events in spy.ended]
    for i, (plan, rows, _) in enumerate(spy.plans):
        single = {item.request for item in plan.prefills}
        assert steps["start_ns"][i] == plan.now
        assert steps["num_decodes"][i] == len(rows) - len(single)
        assert steps["num_prefills"][i] == len(single)
        assert steps["decode_context_tokens"][i] == sum(row.start for row in rows if row.request not in single)
        assert steps["prefill_tokens"][i] == sum(item.num_tokens for item in plan.prefills)
        assert steps["prefill_context_work"][i] == sum(
            at + 1 for item in plan.prefills for at in range(item.start, item.start + item.num_tokens)
        )
        assert steps["admitted"][i] == len(plan.admitted)
    if not aborted:
        assert steps["preempted"].sum() == len(spy.lost)


@settings(max_examples=100)
@given(fast_cases())
def test_the_log_has_every_decision_and_every_input(case: Case) -> None:
    """Turns name what came before each plan; steps name rows, blocks taken, hits, victims, finishes and usage."""
    spy, _, log = spied(case, log=True)
    assert log is not None
    assert log.ends == [outcome.end for _, outcome, _ in spy.ended]
    assert [step["step"] for step in log.steps] == [plan.seq for plan, _, _ in spy.plans]
    assert [seq for _, seq, _, _ in log.turns if seq] == [plan.seq for plan, _, _ in spy.plans]
    assert [now for now, *_ in log.turns] == sorted(now for now, *_ in log.turns)
    came = [id for _, _, added, _ in log.turns for id in added]
    assert came == list(range(len(came)))
    assert [id for *_, gone in log.turns for id in gone] == [finish.request for finish in spy.gone]
    finished = {plan.seq: [finish.request for finish in events.finished] for plan, _, events in spy.ended}
    tables: dict[int, list[int]] = {}
    """Each request's blocks when it was last seen."""
    for step, (plan, rows, now) in zip(log.steps, spy.plans, strict=True):
        assert step["rows"] == [row.request for row in rows]
        assert step["starts"] == [row.start for row in rows]
        assert step["tokens"] == [row.num_tokens for row in rows]
        assert step["preempted"] == list(plan.preempted)
        assert step["hits"] == [row.start for row in rows if row.request in plan.admitted]
        assert step["finished"] == finished[plan.seq]
        assert sum(step["usage"][:-1]) == case.config.num_blocks * case.config.block_size
        new: list[int] = []
        for row in rows:
            if row.request in plan.admitted:
                tables[row.request] = now[row.request][: row.start // case.config.block_size]
            known = tables.get(row.request, [])
            new.extend(now[row.request][len(known) :])
        tables = {**tables, **now}
        assert set(new) <= set(step["taken"])
        assert plan.preempted or case.config.num_lookahead_tokens or sorted(new) == sorted(step["taken"])


@settings(max_examples=60)
@given(fast_cases())
def test_the_log_repeats_the_run(case: Case) -> None:
    """A fresh scheduler that is given the log's turns, ends and finishes makes the same decisions, step by step."""
    spy, _, log = spied(case, log=True)
    assert log is not None
    again = Scheduler(case.config)
    repeated = DecisionLog(again)
    flight: list[StepPlan] = []
    outcomes = iter(outcome for _, outcome, _ in spy.ended)
    for now, seq, added, gone in log.turns:
        while flight and (len(flight) >= case.config.steps_in_flight):
            events_of(again, repeated, flight.pop(0), next(outcomes))
        for id in added:
            assert again.add(spy.specs[id], now) == id
            repeated.added(id)
        for id in gone:
            again.abort(id)
            repeated.aborted(id)
        plan = again.schedule(now)
        repeated.planned(plan)
        assert plan.seq == seq
        if plan.runs:
            flight.append(plan)
        elif flight:
            events_of(again, repeated, flight.pop(0), next(outcomes))
    for plan in flight:
        events_of(again, repeated, plan, next(outcomes))
    assert repeated.steps == log.steps
    assert repeated.turns == log.turns
    assert repeated.ends == log.ends
    assert again.digest() == spy.digest()


def events_of(scheduler: Scheduler, log: DecisionLog, plan: StepPlan, outcome: StepOutcome) -> None:
    log.completed(plan, outcome, scheduler.complete(plan, outcome))
