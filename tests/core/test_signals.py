"""What the steps table says of limits: why the waiting wait, and what is lost and computed again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from core_kit import Case, Job, simulate
from hypothesis import event, given, settings
from strategies import fast_cases

from engine.core import Admission, RequestView, Scheduler, SchedulerConfig, StepPlan
from engine.core.signals import SIGNAL_COLUMNS


class Twice(Scheduler):
    """Counts lost and repeated tokens from the rows of plans alone."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.most: Counter[int] = Counter()
        """The most tokens that each request has had in its blocks."""
        self.held: dict[int, int] = {}
        self.lost = 0
        self.found: list[tuple[int, int, int]] = []
        """(lost before it and since the last one, computed again, new tokens) of each plan that runs."""

    def schedule(self, now: int) -> StepPlan:
        plan = super().schedule(now)
        for request in plan.preempted:
            self.lost += self.held.pop(request)
        if plan.runs:
            again = new = 0
            for row in self.scheduled_order(plan):
                end = row.start + row.num_tokens
                again += max(0, min(end, self.most[row.request]) - row.start)
                new += max(0, end - max(row.start, self.most[row.request]))
                self.held[row.request] = end
                self.most[row.request] = max(self.most[row.request], end)
            self.found.append((self.lost, again, new))
            self.lost = 0
        return plan


@settings(max_examples=60)
@given(fast_cases())
def test_lost_and_repeated_tokens_are_those_of_the_plans(case: Case) -> None:
    """Preempted and recomputed tokens, and steps without progress, follow from the rows of the plans."""
    ran = simulate(case, False, Twice)
    assert isinstance(ran.scheduler, Twice)
    steps = ran.recorder.steps()
    columns = zip(steps["preempted_tokens"], steps["recomputed_tokens"], steps["zero_progress"], strict=True)
    assert [tuple(map(int, row)) for row in columns] == [
        (lost, again, int(not new)) for lost, again, new in ran.scheduler.found
    ]
    event(f"recomputed: {bool(steps['recomputed_tokens'].any())}")


@settings(max_examples=60)
@given(fast_cases())
def test_all_that_wait_are_counted_under_one_reason(case: Case) -> None:
    """In each step the four counts of the waiting sum to their number, and at most one of them is not 0."""
    steps = simulate(case, True).recorder.steps()
    counts = [steps[name] for name in SIGNAL_COLUMNS[:4]]
    assert (sum(counts) == steps["num_waiting"]).all()
    assert (sum((count > 0).astype(int) for count in counts) <= 1).all()


class Nobody(Admission):
    def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
        return False


def prompts(*lengths: int, out: int = 6) -> tuple[Job, ...]:
    return tuple(Job(0, (i % 2,) * length, out, out, private=True) for i, length in enumerate(lengths))


REASONS: dict[str, tuple[dict[str, Any], tuple[Job, ...]]] = {
    "waiting_for_tokens": ({"max_num_batched_tokens": 8}, prompts(8, 8, 8)),
    "waiting_for_sequences": ({"max_num_seqs": 1}, prompts(2, 2)),
    "waiting_for_kv": ({"num_blocks": 9}, prompts(10, 10)),
    "a watermark": ({"num_blocks": 12, "watermark": 0.5}, prompts(10, 10)),
    "a reservation": ({"num_blocks": 12, "admission_reserve": "max_tokens"}, prompts(10, 10, out=4)),
    "a contiguous pool": ({"num_blocks": 12, "allocator": "contiguous-max", "max_model_len": 24}, prompts(2, 2)),
    "waiting_for_policy": ({"policies": (Nobody(),)}, prompts(2, 2)),
    "a static batch": ({"batching": "static"}, (*prompts(2), Job(3, (1,), 1, 1))),
    "decodes before prompts that do not fit": ({"num_blocks": 9, "batching": "prefill-first"}, prompts(10, 10)),
    "a preemption": ({"num_blocks": 8, "scheduler_reserve_full_isl": False}, prompts(7, 7)),
}
OF = {
    "a watermark": "waiting_for_kv",
    "a reservation": "waiting_for_kv",
    "a contiguous pool": "waiting_for_kv",
    "a static batch": "waiting_for_policy",
    "decodes before prompts that do not fit": "waiting_for_kv",
    "a preemption": "waiting_for_kv",
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("fast", [False, True])
def test_the_reason_is_what_stopped_the_first_of_the_waiting(reason: str, fast: bool) -> None:
    """A queue behind one limit is counted under that limit, in each step in which somebody waits."""
    options, jobs = REASONS[reason]
    given: dict[str, Any] = {"num_blocks": 60, "block_size": 2, "max_model_len": 40, "max_num_seqs": 8}
    given |= {"max_num_batched_tokens": 60, "enable_prefix_caching": False} | options
    steps = simulate(Case(SchedulerConfig(**given), jobs), fast).recorder.steps()
    assert steps["num_waiting"].any()
    assert (steps[OF.get(reason, reason)] == steps["num_waiting"]).all()


def test_a_policy_gives_way_to_memory_within_a_run() -> None:
    """Those who wait for a policy wait for memory once the blocks that the first of them needs are taken."""
    config = SchedulerConfig(
        num_blocks=12, block_size=2, max_model_len=24, max_num_seqs=4, enable_prefix_caching=False, policies=(Steady(),)
    )
    case = Case(config, (Job(0, (0,), 20, 20, private=True), Job(2, (1,) * 12, 1, 1, private=True)))
    tables = [simulate(case, fast).recorder.steps() for fast in (False, True)]
    for name in ("waiting_for_policy", "waiting_for_kv"):
        slow, fast = (int((table[name] * table["num_steps"]).sum()) for table in tables)
        assert slow == fast > 0, name
    assert len(tables[1]["step"]) < len(tables[0]["step"])


class Steady(Nobody):
    def stable_until(self, now: int) -> int:
        return 1 << 62
