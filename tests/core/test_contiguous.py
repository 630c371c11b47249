"""Contiguous reservations: programs, fast-forward, refusals, and where every slot is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from core_kit import Case, simulate
from hypothesis import given, settings
from shadow import play
from strategies import contiguous_cases
from test_fast_forward import same_both_ways

from engine.core import ConfigError, InvalidRequest, NoFreeBlocks, RequestSpec, Scheduler, SchedulerConfig, StepOutcome
from engine.core.contiguous import ContiguousManager
from engine.core.extents import ExtentPool, Run
from engine.core.request import RUNNING, Request

ALLOCATORS = ("contiguous-max", "contiguous-pow2", "contiguous-oracle")
PLACEMENTS = ("first-fit", "best-fit", "buddy")


def test_programs_under_every_allocator() -> None:
    """P1, P3, P4, P7: whatever the options and aborts, reads match, all requests end, and nobody is preempted."""
    seen: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(contiguous_cases())
    def check(case: Case) -> None:
        played = play(case)
        assert played.preemptions == 0
        assert played.hits == 0
        seen[case.config.allocator] += 1
        seen[case.config.placement] += 1

    check()
    for name in (*ALLOCATORS, *PLACEMENTS):
        assert seen[name] >= 40, seen


def test_fast_forward_equals_step_by_step() -> None:
    """P16: with and without fast-forward all is equal, every slot at every step; most programs have a run."""
    seen: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(contiguous_cases(fast=True))
    def check(case: Case) -> None:
        fast = same_both_ways(case)
        seen["programs"] += 1
        seen["with a run"] += any(run >= 3 for run in fast.runs)
        steps = fast.recorder.steps()
        seen["external"] += any(steps["external"])
        seen["reserved_cannot in a run"] += any(len(set(cells)) > 1 for cells in steps["step_reserved_cannot"])

    check()
    assert seen["with a run"] * 2 >= seen["programs"], seen
    assert seen["external"] >= 20, seen
    assert seen["reserved_cannot in a run"] >= 20, seen


_take_run = ExtentPool.take_run


def served(config: SchedulerConfig, spec: RequestSpec) -> tuple[Scheduler, int]:
    """A scheduler that has admitted one request."""
    scheduler = Scheduler(config)
    id = scheduler.add(spec, 0)
    scheduler.schedule(0)
    return scheduler, id


@pytest.mark.parametrize(
    ("allocator", "blocks", "may", "cannot"),
    [
        # the prompt's three blocks have 24 slots; prompt + max_tokens is 48, but 37 where the oracle sets the limit
        ("contiguous-max", 16, 48 - 24, 128 - 48),
        ("contiguous-pow2", 7, 48 - 24, 56 - 48),
        ("contiguous-oracle", 5, 37 - 24, 40 - 37),
    ],
)
def test_what_is_reserved(allocator: str, blocks: int, may: int, cannot: int) -> None:
    """A prompt of 20 with 17 outputs to come, of at most 28, in blocks of 8, takes what its allocator is named for."""
    config = SchedulerConfig(num_blocks=40, block_size=8, max_model_len=128, allocator=allocator)
    scheduler, id = served(config, RequestSpec(0, 20, 28, oracle_tokens=17))
    assert list(scheduler.table(id)) == [0, 1, 2]
    usage = scheduler.usage()
    assert usage[:5] == (20, 4, may, cannot, 0)
    assert usage.free == (40 - blocks) * 8
    scheduler.check()


@pytest.mark.parametrize(
    ("outputs", "reserved"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (25, 32), (32, 32), (33, 63)]
)
def test_the_next_power_of_two(outputs: int, reserved: int) -> None:
    """contiguous-pow2 reserves the next power of two of the output, less where the model's length ends before."""
    config = SchedulerConfig(num_blocks=70, block_size=1, max_model_len=64, allocator="contiguous-pow2")
    scheduler, _ = served(config, RequestSpec(0, 1, 60, oracle_tokens=outputs))
    assert 70 - scheduler.usage().free == 1 + reserved
    scheduler, _ = served(config, RequestSpec(0, 1, outputs))
    assert 70 - scheduler.usage().free == 1 + reserved


def test_what_a_buddy_rounds_up_can_hold_no_token() -> None:
    """A run of 5 blocks takes 8 under buddy, and the 3 count as reserved for what cannot come."""
    config = SchedulerConfig(
        num_blocks=21, block_size=8, max_model_len=128, allocator="contiguous-oracle", placement="buddy"
    )
    scheduler, _ = served(config, RequestSpec(0, 20, 28, oracle_tokens=17))
    usage = scheduler.usage()
    assert (usage.reserved_may, usage.reserved_cannot, usage.free) == (13, 3 + 3 * 8, 13 * 8)


def test_free_slots_that_fit_nobody_are_external() -> None:
    """Two holes of 3 blocks have no room for a run of 4: they are external while it waits, and free afterwards."""
    config = SchedulerConfig(num_blocks=9, block_size=1, max_model_len=9, allocator="contiguous-oracle", max_num_seqs=9)
    scheduler = Scheduler(config)
    ids = [scheduler.add(RequestSpec(0, 2, 1, oracle_tokens=1), 0) for _ in range(3)]
    plan = scheduler.schedule(0)
    assert len(plan.admitted) == 3
    scheduler.abort(ids[0])
    scheduler.abort(ids[2])
    waiting = scheduler.add(RequestSpec(0, 3, 1, oracle_tokens=1), 0)
    assert scheduler.usage().external == 6
    assert scheduler.usage().free == 0
    assert scheduler.schedule(1).admitted == ()
    scheduler.check()
    scheduler.abort(waiting)
    assert (scheduler.usage().external, scheduler.usage().free) == (0, 6)


def test_an_oracle_that_promised_too_little_ends_its_request() -> None:
    """A request never grows beyond its run: at the promised length it ends with reason length."""
    config = SchedulerConfig(num_blocks=8, block_size=2, max_model_len=16, allocator="contiguous-oracle")
    scheduler = Scheduler(config)
    scheduler.add(RequestSpec(0, 3, 10, oracle_tokens=2), 0)
    finished = ()
    for now in range(2):
        plan = scheduler.schedule(now)
        finished = scheduler.complete(plan, StepOutcome(now + 1)).finished
        scheduler.check()
    assert [(finish.reason, finish.num_output_tokens) for finish in finished] == [("length", 2)]
    assert not scheduler.has_unfinished


@pytest.mark.parametrize(
    ("options", "spec", "says"),
    [
        ({"allocator": "contiguous-oracle"}, RequestSpec(0, 4, 8), "oracle_tokens"),
        ({"allocator": "contiguous-max"}, RequestSpec(0, 4, 8, n=2), "n is 2"),
        ({"allocator": "contiguous-max", "max_model_len": 200}, RequestSpec(0, 4, 8), "25 blocks of 8 in a row"),
        (
            {"allocator": "contiguous-oracle", "placement": "buddy"},
            RequestSpec(0, 60, 20, oracle_tokens=10),
            "8 in a row",
        ),
    ],
)
def test_what_can_never_be_placed_is_refused(options: dict[str, object], spec: RequestSpec, says: str) -> None:
    """P7: what the reservation makes impossible is refused at once, with the reason; a pool of 12 has 8 buddies."""
    config = replace(SchedulerConfig(num_blocks=12, block_size=8, max_model_len=96), **options)
    with pytest.raises(InvalidRequest, match=says):
        Scheduler(config).add(spec, 0)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_exact_minimum_is_accepted_and_ends(allocator: str) -> None:
    """P7: in a pool that is exactly one run, requests are served one after the other; a block less refuses them."""
    config = SchedulerConfig(num_blocks=3, block_size=4, max_model_len=12, allocator=allocator)
    scheduler = Scheduler(config)
    for _ in range(3):
        scheduler.add(RequestSpec(0, 4, 8, oracle_tokens=8), 0)
    steps = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule(steps)
        scheduler.check()
        assert scheduler.num_running == 1
        scheduler.complete(plan, StepOutcome(steps + 1))
        steps += 1
    assert steps == 3 * 8
    with pytest.raises(InvalidRequest):
        Scheduler(replace(config, num_blocks=2)).add(RequestSpec(0, 4, 8, oracle_tokens=8), 0)


def test_a_watermark_counts_blocks_that_are_left() -> None:
    """R6: an admission leaves the watermark free, what a buddy rounds up counted."""
    config = SchedulerConfig(
        num_blocks=16, block_size=1, max_model_len=16, watermark=0.125, allocator="contiguous-oracle", placement="buddy"
    )
    scheduler = Scheduler(config)
    for _ in range(3):
        scheduler.add(RequestSpec(0, 4, 1, oracle_tokens=1), 0)  # 5 blocks, so 8
    assert len(scheduler.schedule(0).admitted) == 1


def test_a_host_tier_needs_pages() -> None:
    """An option that has no meaning without a prefix cache is refused."""
    with pytest.raises(ConfigError, match="paged"):
        SchedulerConfig(num_blocks=8, max_model_len=64, allocator="contiguous-max", host_tier=True, num_host_blocks=4)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_nth_allocation_that_fails_changes_nothing(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: for each N, when the Nth run cannot be had, `allocate` leaves the manager as it was."""
    for failing in range(5):
        manager = ContiguousManager(40, 2, "contiguous-pow2", placement, 64, 0)
        requests = [Request(i, RequestSpec(0, 3, 4), 4, 0, (0, i)) for i in range(5)]
        calls = []

        def failing_take(self: ExtentPool, num: int, at: int = failing, calls: list[int] = calls) -> Run:
            calls.append(num)
            if len(calls) == at + 1:
                raise NoFreeBlocks("injected")
            return _take_run(self, num)

        with monkeypatch.context() as patch:
            patch.setattr(ExtentPool, "take_run", failing_take)
            for i, request in enumerate(requests):
                running = [r for r in requests if r.state == RUNNING]
                before = manager.digest(running)
                if i == failing:
                    with pytest.raises(NoFreeBlocks):
                        manager.allocate(request, (), 3)
                    assert manager.digest(running) == before
                    assert request.table == []
                else:
                    manager.allocate(request, (), 3)
                    request.state = RUNNING
                manager.check(requests)
        for request in requests:
            if request.state == RUNNING:
                manager.free(request, 3, ended=True)
        assert manager.pool.num_free == 40
        assert manager.num_table_blocks == manager.reserved_cannot == 0


def test_appending_many_is_appending_one_often() -> None:
    """P5: a table that grows by n tokens at once is the one that grew by one token n times; beyond the run it fails."""
    for more in range(1, 5):
        managers = []
        for steps in ([more], [1] * more):
            manager = ContiguousManager(20, 2, "contiguous-pow2", "first-fit", 64, 0)
            request = Request(0, RequestSpec(0, 3, 4), 4, 0, (0, 0))
            manager.allocate(request, (), 3)
            have = 3
            for num in steps:
                have += num
                manager.append_slots(request, have)
            managers.append((manager.digest([request]), manager.reserved_cannot, manager.num_table_blocks))
            before = manager.digest([request])
            with pytest.raises(NoFreeBlocks):
                manager.append_slots(request, 9)
            with pytest.raises(NoFreeBlocks):
                manager.append_block_each([request] * 3)
            assert manager.digest([request]) == before
        assert managers[0] == managers[1]


def test_simulated_outputs_do_not_depend_on_the_allocator() -> None:
    """P16: the same requests end with the same tokens whatever reserves their memory."""

    @settings(max_examples=100)
    @given(contiguous_cases())
    def check(case: Case) -> None:
        if any(job.abort_at is not None for job in case.jobs):
            return
        paged = replace(case, config=replace(case.config, allocator="paged", num_blocks=400))
        one, two = play(case), play(paged)
        for i, job in enumerate(case.jobs):
            assert one.outputs[i][: job.out] == two.outputs[i][: job.out]
        assert len(simulate(case, True).recorder.requests()["outcome"]) == len(case.jobs)

    check()
