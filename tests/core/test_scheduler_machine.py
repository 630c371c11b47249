"""The scheduler call by call, in any order that its callers may choose, against a count of what each call must do."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from core_kit import Case, Job, full_prompt, request_of
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from shadow import ShadowExecutor, check_order, check_plan, expected_key, expected_output
from strategies import jobs_after, machine_options

from engine.core import Finish, Scheduler, SchedulerConfig, StepOutcome, StepPlan, TokenIdentity, Transfer, TransferEnd
from engine.core.types import BlockId

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


class HandExecutor(ShadowExecutor):
    """Its transfers run until they are ended by hand; the next outcome that is collected tells of them."""

    def __init__(self, scheduler: Scheduler, jobs: list[Job]) -> None:
        super().__init__(scheduler, Case(scheduler.config, ()))
        self.jobs = jobs
        self.ends: list[TransferEnd] = []

    def _begin(self, transfer: Transfer) -> None:
        super()._begin(transfer)
        _, _, contents = self.open[transfer.id]
        self.open[transfer.id] = (transfer, 1, contents)

    def _ended(self) -> tuple[TransferEnd, ...]:
        return ()

    def end(self, id: int, ok: bool) -> None:
        self._end(id, ok)
        self.ends.append(TransferEnd(id, ok))

    def collect(self) -> StepOutcome:
        outcome = super().collect()._replace(transfers=tuple(self.ends))
        self.ends = []
        return outcome


@dataclass
class Sequence:
    """What must be true of one sequence, by what the calls have answered so far."""

    job: int
    place: int
    """Which of the job's sequences it is."""
    root: int
    state: str = WAITING
    outputs: int = 0
    computed: int = 0
    """Tokens in its blocks once all plans have run, as far as plans had rows for it."""
    preemptions: int = 0
    reason: str = ""


@dataclass
class Model:
    """All sequences that ever were, by id."""

    all: dict[int, Sequence] = field(default_factory=dict)

    def live(self, *states: str) -> list[int]:
        return [id for id, sequence in self.all.items() if sequence.state in (states or (WAITING, RUNNING))]

    def of(self, root: int) -> list[int]:
        return [id for id in self.live() if self.all[id].root == root]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go between any two calls, plans are completed when it pleases, and transfers end or do not."""

    of = ""
    seen: ClassVar[Counter[str]] = Counter()
    """What happened in all runs of the machine together."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        config, self.roots = data.draw(machine_options(self.of))
        self.start(config)

    def start(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.jobs: list[Job] = []
        self.executor = HandExecutor(self.scheduler, self.jobs)
        self.model = Model()
        self.order: dict[int, tuple[int, ...]] = {}
        self.flight: deque[StepPlan] = deque()
        self.now = 0
        self.sound = True
        """No call has failed."""

    # ---- requests

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        job = data.draw(jobs_after(self.config, self.jobs, self.roots, self.now, self.of))
        if job is not None and len(self.jobs) < 40:
            self.put(job)

    def put(self, job: Job) -> None:
        number = len(self.jobs)
        self.jobs.append(job)
        prompt = full_prompt(tuple(self.jobs), number)
        identity = None if job.private else TokenIdentity(prompt, self.config.block_size, job.salt)
        spec = request_of(job, self.now, len(prompt), identity)
        self.sound = False
        root = self.scheduler.add(spec, self.now)
        self.sound = True
        content = 10_000 + number if job.private else int.from_bytes(job.salt + b"\0", "little")
        self.executor.register(root, number, prompt, content)
        place = expected_key(self.config, spec, self.scheduler, root)
        for q in range(job.n):
            self.order[root + q] = (*place, self.now, root + q)
        self.model.all[root] = Sequence(number, 0, root)

    @precondition(lambda self: bool(self.model.all) and bool(self.model.live()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """P9: whatever is in flight, the request goes with all its sequences, or the one sequence alone."""
        live = self.model.live()
        self.leave(data.draw(st.sampled_from(sorted({*live, *(self.model.all[id].root for id in live)}))))

    def leave(self, id: int) -> None:
        sequence = self.model.all[id]
        whole = id == sequence.root or self.jobs[sequence.job].beam
        expected = self.model.of(sequence.root) if whole else [id]
        self.sound = False
        finished = self.scheduler.abort(id)
        assert [finish.request for finish in finished] == expected
        self.ended(finished, {"abort"})
        assert self.scheduler.abort(id) == [], "a request is aborted twice"
        self.seen["aborts in flight"] += bool(self.flight)

    def ended(self, finishes: Iterable[Finish], reasons: set[str]) -> None:
        """Each ends once, and is told how many tokens it has got and how often it was preempted."""
        for finish in finishes:
            sequence = self.model.all[finish.request]
            assert sequence.state != FINISHED, "a sequence ends twice"
            assert finish.reason in reasons
            assert finish.num_output_tokens == sequence.outputs
            assert finish.num_preemptions == sequence.preemptions
            sequence.state, sequence.reason = FINISHED, finish.reason
            self.seen[finish.reason] += 1
        self.sound = True

    # ---- steps

    @rule(passed=st.sampled_from([0, 0, 1, 1, 1, 4, 40]))
    def time_passes(self, passed: int) -> None:
        self.now += passed

    @precondition(lambda self: len(self.flight) < self.config.steps_in_flight)
    @rule()
    def schedule(self) -> None:
        self.plan()

    def plan(self) -> StepPlan:
        scheduler, model = self.scheduler, self.model
        self.sound = False
        plan = scheduler.schedule(self.now)
        for id in plan.preempted:
            sequence = model.all[id]
            assert sequence.state == RUNNING, "somebody is preempted who did not run"
            sequence.state, sequence.computed = WAITING, 0
            sequence.preemptions += 1
            self.seen["preemptions"] += 1
        self.ended(plan.rejected, {"no-memory"})
        self.sound = False
        for id in (*plan.admitted, *(id for id, _ in plan.loading)):
            assert model.all[id].state == WAITING, "somebody is admitted who did not wait"
            model.all[id].state = RUNNING
        if plan.runs:
            check_plan(plan, scheduler)
            check_order(plan, scheduler, self.order)
            for row in scheduler.scheduled_order(plan):
                sequence = model.all[row.request]
                assert sequence.state == RUNNING, "a row of somebody who does not run"
                assert row.epoch == sequence.preemptions
                sequence.computed = row.start + row.num_tokens
            self.executor.submit(plan, scheduler, self.now)
            self.flight.append(plan)
            for what in ("copies", *MOVES):
                self.seen[what] += len(getattr(plan, what, ()))
        else:
            assert not plan.num_rows
            idle = not (plan.preempted or plan.rejected or self.flight)
            assert not (idle and model.live()), "requests wait, nothing runs, and nothing will come"
        self.sound = True
        return plan

    @precondition(lambda self: bool(self.flight))
    @rule(data=st.data(), stop=st.booleans())
    def complete(self, data: st.DataObject, stop: bool) -> None:
        sampled = sorted(self.executor.outcomes[0].tokens or ())
        stops = data.draw(st.sets(st.sampled_from(sampled), min_size=1)) if stop and sampled else set()
        self.finish_step(stops)

    def finish_step(self, stops: set[int]) -> None:
        """The oldest step is over, and those of `stops` have met one; of a beam all meet it together."""
        scheduler, model = self.scheduler, self.model
        plan = self.flight.popleft()
        outcome = self.executor.collect()
        assert outcome.tokens is not None
        beams = {self.root_of(id) for id in stops if self.jobs[self.executor.job_of[id][0]].beam}
        stops = stops | {id for id in outcome.tokens if self.root_of(id) in beams}
        outcome = outcome._replace(end=self.now, finished=tuple(Finish(id, "stop") for id in sorted(stops)))
        forked: list[tuple[int, int]] = []
        for id in sorted(outcome.tokens):
            root = self.root_of(id)
            of = model.all[root]
            if id not in model.all and of.state != FINISHED:
                model.all[id] = Sequence(of.job, id - root, root, of.state, computed=of.computed)
                forked.append((root, id))
        first: list[int] = []
        done: dict[int, str] = {}
        for id in outcome.tokens:
            sequence = model.all.get(id)
            if sequence is None or sequence.state == FINISHED:
                continue
            sequence.outputs += 1
            if sequence.outputs == 1:
                first.append(id)
            job = self.jobs[sequence.job]
            cap = min(job.cap, self.config.max_model_len - self.executor.prompt_len[id])
            assert sequence.outputs <= cap, "more tokens than it may have"
            if id in stops:
                done[id] = "stop"
            elif sequence.outputs == cap:
                done[id] = "length"
        self.sound = False
        events = scheduler.complete(plan, outcome)
        assert sorted(events.first_tokens) == sorted(first)
        assert sorted(events.forked) == forked
        assert {finish.request: finish.reason for finish in events.finished} == done
        self.ended(events.finished, {"stop", "length"})
        self.seen["forks"] += len(events.forked)
        if not self.flight:
            self.executor.confirm()

    def root_of(self, id: int) -> int:
        return id - self.executor.job_of[id][1]

    @rule(steps=st.integers(1, 5), moves=st.booleans())
    def run(self, steps: int, moves: bool) -> None:
        """Some steps without a stop; if `moves`, transfers that run end with each."""
        for _ in range(steps):
            self.now += 1
            self.a_step()
            for id in sorted(self.executor.open) if moves else ():
                self.executor.end(id, True)

    def a_step(self) -> None:
        plan = self.plan() if len(self.flight) < self.config.steps_in_flight else self.flight[-1]
        while self.flight and (len(self.flight) >= self.config.steps_in_flight or not plan.runs):
            self.finish_step(set())

    # ---- transfers

    @precondition(lambda self: bool(self.executor.open))
    @rule(data=st.data(), ok=st.sampled_from([True, True, False]))
    def a_transfer_ends(self, data: st.DataObject, ok: bool) -> None:
        self.executor.end(data.draw(st.sampled_from(sorted(self.executor.open))), ok)
        self.seen["failed"] += not ok

    # ---- what is true after every call

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler, model = self.scheduler, self.model
        self.sound = False
        before = scheduler.digest()
        scheduler.check()
        usage = scheduler.usage()
        assert sum(usage) - usage.shared == self.config.num_blocks * self.config.block_size
        assert min(usage) >= 0
        assert scheduler.num_waiting == len(model.live(WAITING))
        assert scheduler.num_running == len(model.live(RUNNING)) <= self.config.max_num_seqs
        assert scheduler.has_unfinished == bool(model.live())
        assert scheduler.num_in_flight == len(self.flight)
        for id in model.live():
            sequence, slots = model.all[id], len(scheduler.table(id)) * self.config.block_size
            assert scheduler.num_output_tokens(id) == sequence.outputs
            assert slots >= sequence.computed if sequence.state == RUNNING else slots == 0
        self.whoever_shares_a_block_means_the_same()
        assert scheduler.digest() == before, "a look changes something"
        self.sound = True

    def whoever_shares_a_block_means_the_same(self) -> None:
        size = self.config.block_size
        owners: dict[BlockId, list[tuple[int, int]]] = {}
        for id in self.model.live(RUNNING):
            for i, block in enumerate(self.scheduler.table(id)):
                owners.setdefault(block, []).append((id, i))
        for block, found in owners.items():
            first, place = found[0]
            for other, i in found[1:]:
                assert i == place, f"block {block} is in two places of two tables"
                self.seen["shared"] += 1
                have = min(self.model.all[first].computed, self.model.all[other].computed) - i * size
                for position in range(i * size, i * size + min(have, size)):
                    both = min(len(self.executor.tokens[first]), len(self.executor.tokens[other]))
                    if position < both:
                        names = [self.executor.name(id, position + 1) for id in (first, other)]
                        assert names[0] == names[1], f"{first} and {other} share block {block}, and mean other content"

    # ---- the end

    def teardown(self) -> None:
        """P7: left alone, every request ends; then no block has an owner, and every token was the right one."""
        if not getattr(self, "sound", False):
            return
        lease = self.config.transfer_lease_ns if self.config.host_tier else 0
        tokens = sum(len(full_prompt(tuple(self.jobs), i)) + job.cap for i, job in enumerate(self.jobs))
        bound = 50 + (40 + lease) * 4 * (tokens + 1)
        transfers = self.scheduler.transfers
        for turn in range(bound):
            if not (self.model.live() or self.flight or (transfers is not None and transfers.open)):
                break
            self.now += 1
            self.a_step()
            for id in sorted(self.executor.open):
                if (id + turn) % 4 == 0 and id % 7:
                    self.executor.end(id, id % 5 != 4)
            self.holds()
        else:
            raise AssertionError("no end in sight")
        assert not self.scheduler.has_unfinished
        usage = self.scheduler.usage()
        assert usage.cached + usage.free == self.config.num_blocks * self.config.block_size, "blocks are lost"
        if self.scheduler.host is not None:
            assert self.scheduler.host.pool.num_free == self.config.num_host_blocks, "host blocks are lost"
        for id, sequence in self.model.all.items():
            job = self.jobs[sequence.job]
            if job.beam and sequence.reason in ("abort", "no-memory"):
                continue  # the step in flight may have given its tokens to others
            got = self.executor.tokens[id][self.executor.prompt_len[id] :][: sequence.outputs]
            assert got == expected_output(sequence.job, job.n, job.beam, sequence.place, sequence.outputs)
        self.seen["runs"] += 1


MUST_HAPPEN = ("abort", "aborts in flight", "stop", "length", "preemptions", "forks", "copies", "shared")
MOVES = ("swap_out", "swap_in", "transfers", "loading", "failed", "revoked")


def run_scheduler_machine(of: str, **options: Any) -> Counter[str]:
    """Run the machine on programs of a kind (see `strategies.cases`); returns what happened."""
    seen: Counter[str] = Counter()
    machine = type("Machine", (SchedulerMachine,), {"of": of, "seen": seen})
    run_state_machine_as_test(machine, settings=settings(settings(), **options))
    return seen


@pytest.mark.parametrize("of", ["", "forks", "swaps", "tiers"])
def test_every_call_does_what_it_must(of: str) -> None:
    """Any order of calls: all is counted right, content is right, limits hold, and left alone every request ends."""
    seen = run_scheduler_machine(of, max_examples=20, stateful_step_count=40)
    assert seen["runs"] >= 20
    assert all(seen[what] for what in ("abort", "length", "preemptions", "forks")), seen


@pytest.mark.slow
@pytest.mark.parametrize("of", ["", "forks", "swaps", "tiers"])
def test_many_orders_of_calls(of: str) -> None:
    """The same with many more programs, in which everything happens that can."""
    seen = run_scheduler_machine(
        of,
        max_examples=1000,
        stateful_step_count=50,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    assert seen["runs"] >= 1000
    for what in MUST_HAPPEN + (MOVES if of == "tiers" else MOVES[:2]):
        assert seen[what] >= 20, (what, seen)
