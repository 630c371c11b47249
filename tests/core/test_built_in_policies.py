"""The built-in policies: each decides as its name says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from core_kit import Case, Job, simulate
from hypothesis import given, settings
from shadow import play
from strategies import cases
from test_fast_forward import same_both_ways

from engine.core import (
    Batch,
    Batching,
    ConfigError,
    DynamicOrder,
    InvalidRequest,
    Order,
    PolicyError,
    RequestSpec,
    RequestView,
    Scheduler,
    SchedulerConfig,
    StepOutcome,
    StepPlan,
    StepView,
    TokenIdentity,
    Victim,
)
from engine.core.orders import LongestPrefix
from engine.core.victims import LeastWorkLost, LowestPriority, MostMemory


def config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 100, "max_model_len": 60, "block_size": 2, "max_num_seqs": 8, **changes})


def ends(scheduler: Scheduler) -> list[int]:
    """The rest of the requests, in the order in which they end."""
    found: list[int] = []
    for turn in range(500):
        plan = scheduler.schedule(turn)
        if plan.num_rows:
            tokens = {row.request: 0 for row in scheduler.scheduled_order(plan) if row.samples}
            found.extend(finish.request for finish in scheduler.complete(plan, StepOutcome(turn + 1, tokens)).finished)
    assert not scheduler.has_unfinished
    return found


def served(options: SchedulerConfig, specs: Sequence[RequestSpec]) -> list[int]:
    """Requests in the order in which they end, one at a time."""
    scheduler = Scheduler(replace(options, max_num_seqs=1))
    for spec in specs:
        scheduler.add(spec, 0)
    return ends(scheduler)


SPECS = (
    RequestSpec(0, 2, 9, deadline=90, priority=2, predicted_tokens=1, oracle_tokens=9),
    RequestSpec(1, 2, 3, deadline=50, priority=1, oracle_tokens=2),
    RequestSpec(2, 2, 5, priority=0, predicted_tokens=30, oracle_tokens=1),
)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", [0, 1, 2]),
        ("priority", [2, 1, 0]),
        ("sjf", [1, 2, 0]),
        ("sjf-predicted", [0, 1, 2]),
        ("sjf-oracle", [2, 1, 0]),
        ("edf", [1, 0, 2]),
        ("aging", [2, 1, 0]),
    ],
)
def test_an_order_serves_by_its_key(policy: str, expected: list[int]) -> None:
    """Each order serves first whom its table says: shortest, most urgent, earliest."""
    assert served(config(scheduling_policy=policy), SPECS) == expected


def test_a_prediction_beyond_max_tokens_counts_as_max_tokens() -> None:
    """Nobody generates more than max_tokens, whatever was predicted."""
    specs = [RequestSpec(0, 2, 6, predicted_tokens=50), RequestSpec(1, 2, 7, predicted_tokens=7)]
    assert served(config(scheduling_policy="sjf-predicted"), specs) == [0, 1]


def test_the_oracle_refuses_a_request_whose_length_is_not_known() -> None:
    """sjf-oracle says what it needs, and the request takes no id."""
    scheduler = Scheduler(config(scheduling_policy="sjf-oracle"))
    with pytest.raises(InvalidRequest, match=r"sjf-oracle.*true output length.*sjf-predicted"):
        scheduler.add(RequestSpec(0, 2, 5), 0)
    assert scheduler.add(RequestSpec(0, 2, 5, oracle_tokens=3), 0) == 0


def test_aging_lets_nobody_wait_for_ever() -> None:
    """A request of low priority is overtaken by those of the second after it for each level, and by no later ones."""
    low = RequestSpec(0, 2, 2, priority=3)
    soon, late = RequestSpec(2_900_000_000, 2, 2), RequestSpec(3_100_000_000, 2, 2)
    assert served(config(scheduling_policy="aging"), [low, soon, late]) == [1, 0, 2]


def test_fair_share_alternates_between_tenants() -> None:
    """A tenant that sends many requests at once does not keep the one that sends few waiting behind all of them."""
    many = [RequestSpec(0, 4, 4, tenant=1) for _ in range(4)]
    few = [RequestSpec(1, 4, 4, tenant=2) for _ in range(2)]
    assert served(config(scheduling_policy="fair"), [*many, *few]) == [0, 4, 1, 5, 2, 3]


def test_fair_share_counts_tokens() -> None:
    """Two requests of one tenant that cost as much as one of another are served beside it."""
    specs = [*(RequestSpec(0, 8, 8, tenant=1) for _ in range(2)), *(RequestSpec(0, 4, 4, tenant=2) for _ in range(4))]
    assert served(config(scheduling_policy="fair"), specs) == [0, 2, 3, 1, 4, 5]


def test_an_idle_tenant_saves_up_nothing() -> None:
    """A tenant that comes late starts where the others are, and does not get all turns until it has caught up."""
    scheduler = Scheduler(config(scheduling_policy="fair", max_num_seqs=1))
    for _ in range(4):
        scheduler.add(RequestSpec(0, 4, 4, tenant=1), 0)
    done: list[int] = []
    turn = 0
    while len(done) < 3:
        plan = scheduler.schedule(turn)
        turn += 1
        done.extend(finish.request for finish in scheduler.complete(plan, StepOutcome(turn)).finished)
    for tenant in (1, 2, 2):
        scheduler.add(RequestSpec(turn, 4, 4, tenant=tenant), turn)
    assert ends(scheduler) == [5, 3, 6, 4]


def test_longest_prefix_first_takes_what_is_cached() -> None:
    """lpm starts the waiting request with most cached tokens, and the first that came among equals."""
    scheduler = Scheduler(config(scheduling_policy="lpm", max_num_seqs=1))
    prompts = [(1, 2, 3, 4, 5), (9, 9, 9, 9, 9), (1, 2, 7, 7, 7), (1, 2, 3, 4, 8)]
    for prompt in prompts:
        scheduler.add(RequestSpec(0, len(prompt), 2, TokenIdentity(prompt, 2)), 0)
    assert ends(scheduler) == [0, 3, 2, 1]


def test_a_dynamic_order_is_shown_the_first_of_the_queue() -> None:
    """It sees `window` waiting requests, in order, with the tokens that the cache would serve of each, and the time."""
    shown: list[tuple[list[int], list[int], int]] = []

    class Spy(DynamicOrder):
        window = 2

        def next(self, waiting: Sequence[RequestView], cached_tokens: Sequence[int], now: int) -> int:
            shown.append(([view.id for view in waiting], list(cached_tokens), now))
            return waiting[-1].id

    scheduler = Scheduler(config(policies=(Spy(),), max_num_batched_tokens=8))
    for _ in range(4):
        scheduler.add(RequestSpec(0, 5, 2, TokenIdentity((1, 2, 3, 4, 5), 2)), 0)
    assert scheduler.schedule(7).admitted == (1, 2, 3, 0)
    assert shown == [([0, 1], [0, 0], 7), ([0, 2], [4, 4], 7), ([0, 3], [4, 4], 7), ([0], [4], 7)]


class AskedAnew(LongestPrefix):
    """The same, without a promise: it is asked whenever time has passed."""

    def stable_until(self, now: int) -> int:
        return now


@settings(max_examples=150)
@given(cases())
def test_an_answer_that_was_promised_is_what_would_be_answered(case: Case) -> None:
    """lpm is asked again only where a request, or the cache, has changed; asking at every step decides the same."""
    case = replace(case, config=replace(case.config, scheduling_policy="lpm"))
    anew = replace(case, config=replace(case.config, policies=(AskedAnew(),)))
    assert play(case) == play(anew)


def test_a_promised_answer_is_kept_until_something_changes() -> None:
    """A queue that stays blocked costs one question, however many steps it lasts."""
    asked: list[int] = []

    class Spy(LongestPrefix):
        def next(self, waiting: Sequence[RequestView], cached_tokens: Sequence[int], now: int) -> int:
            asked.append(now)
            return super().next(waiting, cached_tokens, now)

    scheduler = Scheduler(config(policies=(Spy(),), num_blocks=3))
    scheduler.add(RequestSpec(0, 3, 3), 0)
    scheduler.add(RequestSpec(0, 3, 3), 0)
    for now in range(3):
        plan = scheduler.schedule(now)
        scheduler.complete(plan, StepOutcome(now, {row.request: 1 for row in (*plan.prefills, *plan.decodes.rows())}))
    assert asked == [0, 0]


def test_a_next_that_is_not_waiting_is_refused() -> None:
    """A dynamic order that names somebody whom it was not shown is told so."""

    class Wrong(DynamicOrder):
        def next(self, waiting: Sequence[RequestView], cached_tokens: Sequence[int], now: int) -> int:
            return 99

    scheduler = Scheduler(config(policies=(Wrong(),)))
    scheduler.add(RequestSpec(0, 5, 2), 0)
    with pytest.raises(PolicyError, match="policy Wrong chose 99 as next"):
        scheduler.schedule(0)


def view(id: int, priority: int = 0, computed: int = 0, blocks: int = 0) -> RequestView:
    return RequestView(id, 0, 4, 4, priority, 0, 0, 0, computed, blocks, 0)


def test_victims_are_chosen_by_name() -> None:
    """lowest-priority, most-memory and least-work-lost choose whom they name, and the last in the order of equals."""
    views = [view(0, 1, 9, 3), view(1, 2, 4, 2), view(2, 2, 4, 3), view(3, 0, 5, 1)]
    assert LowestPriority().choose(views) == 2
    assert MostMemory().choose(views) == 2
    assert LeastWorkLost().choose(views) == 2
    assert (LowestPriority().choose(views[:2]), MostMemory().choose(views[:2]), LeastWorkLost().choose(views[:2])) == (
        (1, 0, 1)
    )


def test_the_first_in_the_order_is_no_victim() -> None:
    """P7: whatever the victim policy, the first that runs keeps its blocks while others have some."""
    seen: list[list[int]] = []

    class Spy(Victim):
        def choose(self, candidates: Sequence[RequestView]) -> int:
            seen.append([candidate.id for candidate in candidates])
            return candidates[0].id

    jobs = tuple(Job(0, (0,) * 3, 9, 9, private=True) for _ in range(3))
    played = play(Case(config(num_blocks=7, max_model_len=20, policies=(Spy(),)), jobs))
    assert played.preemptions == len(seen) > 0
    assert all(0 not in ids for ids in seen)


def check_promise(case: Case) -> None:
    """Assert that the program preempts nobody under admission_reserve `max_tokens`."""
    options = replace(case.config, admission_reserve="max_tokens", host_tier=False)
    jobs = tuple(replace(job, n=1, beam=False) for job in case.jobs)
    assert play(replace(case, config=options, jobs=jobs)).preemptions == 0


@settings(max_examples=60)
@given(cases())
def test_promised_blocks_are_there(case: Case) -> None:
    """admission_reserve `max_tokens`: nobody is ever preempted, whatever comes and however short memory is."""
    check_promise(case)


def test_a_promise_is_for_one_sequence() -> None:
    """admission_reserve `max_tokens` refuses a request with several sequences."""
    scheduler = Scheduler(config(admission_reserve="max_tokens"))
    with pytest.raises(InvalidRequest, match="n is 2, but admission_reserve 'max_tokens'"):
        scheduler.add(RequestSpec(0, 2, 5, n=2), 0)


def shape(scheduler: Scheduler, plan: StepPlan) -> list[tuple[int, int]]:
    """(request, tokens) of each row, in the order of their places."""
    return [(row.request, row.num_tokens) for row in scheduler.scheduled_order(plan)]


def steps(scheduler: Scheduler, arrivals: dict[int, RequestSpec], num: int) -> list[list[tuple[int, int]]]:
    found = []
    for turn in range(num):
        if turn in arrivals:
            scheduler.add(arrivals[turn], turn)
        plan = scheduler.schedule(turn)
        found.append(shape(scheduler, plan))
        if plan.num_rows:
            scheduler.complete(plan, StepOutcome(turn + 1))
        scheduler.check()
    return found


TWO = {0: RequestSpec(0, 2, 9, priority=5), 2: RequestSpec(2, 6, 3, priority=0)}
"""One that decodes, and a prompt that comes later and is first by priority."""


STEPS: list[tuple[str, list[list[tuple[int, int]]]]] = [
    ("mixed", [[(0, 2)], [(0, 1)], [(0, 1), (1, 3)], [(1, 3), (0, 1)], [(1, 1), (0, 1)]]),
    ("decode-first", [[(0, 2)], [(0, 1)], [(0, 1), (1, 3)], [(0, 1), (1, 3)], [(1, 1), (0, 1)]]),
    ("prefill-first", [[(0, 2)], [(0, 1)], [(1, 4)], [(1, 2)], [(1, 1), (0, 1)]]),
    ("static", [[(0, 2)], [(0, 1)], [(0, 1)], [(0, 1)], [(0, 1)]]),
]


@pytest.mark.parametrize(("batching", "expected"), STEPS)
def test_a_step_holds_what_the_batching_says(batching: str, expected: list[list[tuple[int, int]]]) -> None:
    """A prompt that comes while another request decodes: beside it, behind it, instead of it, or after it has ended."""
    options = config(batching=batching, scheduling_policy="priority", max_num_seqs=4, max_num_batched_tokens=4)
    assert steps(Scheduler(options), TWO, 5) == expected


def test_prefill_first_takes_whole_prompts() -> None:
    """A prompt that does not fit into what is left of a step waits for the next; one longer than a step is cut."""
    options = config(batching="prefill-first", max_num_seqs=4, max_num_batched_tokens=6)
    scheduler = Scheduler(options)
    for prompt in (4, 3, 8):
        scheduler.add(RequestSpec(0, prompt, 2), 0)
    assert steps(scheduler, {}, 5) == [[(0, 4)], [(1, 3)], [(2, 6)], [(2, 2)], [(0, 1), (1, 1), (2, 1)]]


def test_a_run_ends_where_the_cache_changes_who_is_next() -> None:
    """lpm: a run of steps takes blocks from the cache, and with them the place of the request that was next."""
    jobs = (
        Job(0, (0, 1, 0), 1, 1),
        Job(2, (1, 1, 0, 0), 1, 1),
        Job(4, (0, 0), 9, 9, private=True),
        Job(6, (1,), 1, 1, private=True),
        Job(6, (0, 1, 0, 1, 1, 1, 1, 1), 1, 1),
    )
    case = Case(config(num_blocks=10, block_size=1, scheduling_policy="lpm"), jobs)
    requests = same_both_ways(case).recorder.requests()
    assert requests["admitted_ns"][3] == 8
    assert requests["admitted_ns"][4] >= requests["finish_ns"][2]


def test_a_pause_for_prefills_loses_no_token() -> None:
    """prefill-first: who pauses goes on where it was, and its gap is recorded."""
    jobs = (Job(0, (0, 1), 9, 9), *(Job(2 + i, (1, 0, i % 2), 2, 2) for i in range(3)))
    found = simulate(Case(config(batching="prefill-first"), jobs), False).recorder
    requests = found.requests()
    assert requests["output_tokens"].tolist() == [9, 2, 2, 2]
    assert max(found.gaps()) >= 3


def test_static_batches_start_when_all_have_ended() -> None:
    """Under `static` the second batch starts only after the longest of the first."""
    options = config(batching="static", max_num_seqs=2)
    jobs = tuple(Job(0, (0,), out, out) for out in (2, 7, 2, 2))
    requests = simulate(Case(options, jobs), False).recorder.requests()
    assert requests["admitted_ns"].tolist() == [0, 0, 7, 7]


class Nothing(Batching):
    """Wants nothing to happen."""

    def step(self, state: StepView) -> Batch:
        return Batch(admit=False, decodes=False, prefills=False)


def test_no_batching_can_stall() -> None:
    """P7: a batching that wants empty steps gets the usual ones instead, and admits nobody while others run."""
    jobs = tuple(Job(0, (0, 1, 0), 4, 4) for _ in range(3))
    played = play(Case(config(policies=(Nothing(),)), jobs))
    assert set(played.finished.values()) == {"length"}


def test_an_answer_that_is_no_batch_is_named() -> None:
    """A batching whose answer is of another type is told so."""

    class Wrong(Batching):
        def step(self, state: StepView) -> Any:
            return True

    scheduler = Scheduler(config(policies=(Wrong(),)))
    scheduler.add(RequestSpec(0, 5, 2), 0)
    with pytest.raises(PolicyError, match=r"policy Wrong: step\(\) must give a Batch, and gave True"):
        scheduler.schedule(0)


def test_batchings_that_cannot_be_are_refused() -> None:
    """A beam is not torn apart, and a host tier's loads do not meet steps that hold only some kinds of rows."""
    scheduler = Scheduler(config(batching="prefill-first"))
    with pytest.raises(InvalidRequest, match="a beam needs batching 'mixed'"):
        scheduler.add(RequestSpec(0, 2, 5, n=2, beam=True), 0)
    for options in ({"batching": "static"}, {"policies": (Nothing(),)}):
        with pytest.raises(ConfigError, match="host_tier needs batching 'mixed'"):
            config(num_host_blocks=4, host_tier=True, **options)


class Counting(Order):
    """Remembers how many it has seen, and serves the last first."""

    def __init__(self) -> None:
        self.seen = 0

    def key(self, request: RequestView) -> tuple[int, ...]:
        self.seen += 1
        return (-self.seen,)


def test_every_scheduler_has_policies_of_its_own() -> None:
    """What a policy remembers does not pass from one run to the next, nor back to whoever gave it."""
    policy = Counting()
    keys = []
    for _ in range(2):
        scheduler = Scheduler(config(policies=(policy,)))
        id = scheduler.add(RequestSpec(0, 2, 2), 0)
        keys.append(scheduler._requests[id].key)
    assert keys[0] == keys[1]
    assert policy.seen == 0


def test_a_policy_that_cannot_be_copied_is_named() -> None:
    """A policy that holds something that cannot be copied is an error of its own."""

    class Locked(Counting):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot copy")

    with pytest.raises(PolicyError, match="policy Locked failed: TypeError: cannot copy"):
        Scheduler(config(policies=(Locked(),)))
