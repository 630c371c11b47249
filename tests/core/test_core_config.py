"""Options and requests that cannot work are refused with a reason; what only just fits is served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_kit import Case, Job
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow import play

from engine.core import (
    ConfigError,
    InvalidRequest,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    StepOutcome,
    TokenIdentity,
    preset,
)
from engine.core.presets import PRESETS, usable_blocks

BASE: dict[str, Any] = {"num_blocks": 10, "max_model_len": 100, "block_size": 2}


def config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{**BASE, **changes})


OUT_OF_RANGE: list[tuple[str, object, str]] = [
    *((name, value, "at least 1") for name in ("num_blocks", "max_model_len", "block_size") for value in (0, -1)),
    ("max_num_seqs", 0, "at least 1"),
    ("max_num_batched_tokens", 0, "at least 1"),
    ("long_prefill_token_threshold", -1, "0 or more"),
    ("num_lookahead_tokens", -1, "0 or more"),
    ("num_host_blocks", -1, "0 or more"),
    ("transfer_lease_ns", 0, "at least 1"),
    ("watermark", -0.1, "at least 0 and below 1"),
    ("watermark", 1.0, "at least 0 and below 1"),
    ("watermark", float("nan"), "at least 0 and below 1"),
    ("steps_in_flight", 0, "1 or 2"),
    ("steps_in_flight", 3, "1 or 2"),
    ("same_step", "sometimes", "share, off, defer"),
    ("free_order", "lru", "single-queue, blank-first"),
    ("prefix_index", "trie", "hash, radix"),
    ("allocator", "contiguous", "paged, contiguous-max, contiguous-pow2, contiguous-oracle"),
    ("placement", "worst-fit", "first-fit, best-fit, buddy"),
    ("eviction_policy", "random", "lru, fifo, lfu, 2q"),
    ("preemption_mode", "kill", "recompute, swap, swap-groups, auto, reject"),
    ("scheduling_policy", "lifo", "fcfs, priority, sjf, sjf-predicted, sjf-oracle, edf, fair, lpm, aging"),
    ("victim_policy", "me", "last-in, lowest-priority, most-memory, least-work-lost"),
    ("batching", "none", "mixed, decode-first, prefill-first, static"),
    ("admission_reserve", "all", "prompt, max_tokens"),
]


@pytest.mark.parametrize(("option", "value", "fix"), OUT_OF_RANGE)
def test_an_option_out_of_range_is_named(option: str, value: object, fix: str) -> None:
    """Each option outside of its range raises one sentence that names it, its value and what it may be."""
    with pytest.raises(ConfigError) as error:
        config(**{option: value})
    message = str(error.value)
    assert option in message
    assert (repr(value) if isinstance(value, str) else str(value)) in message
    assert fix in message
    assert "\n" not in message


def test_every_option_has_a_range_or_is_a_switch() -> None:
    """No option is forgotten: all but switches and policies are refused at some value."""
    tried = {option for option, _, _ in OUT_OF_RANGE}
    switches = {"enable_prefix_caching", "scheduler_reserve_full_isl", "host_tier", "cost_model", "policies"}
    switches |= {"long_prefill_threshold_alone", "null_block", "prefix_stats"}
    assert tried | switches == set(SchedulerConfig.__dataclass_fields__)


def test_fewer_tokens_than_sequences_are_refused() -> None:
    """A step that cannot give every running request a token is a contradiction of two options, and both are named."""
    config(max_num_seqs=8, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        config(max_num_seqs=8, max_num_batched_tokens=7)


def test_presets_are_whole_and_differ() -> None:
    """Each preset makes a configuration; the names of one version agree, those of two do not; copies are safe."""
    for name in PRESETS:
        assert isinstance(SchedulerConfig(num_blocks=9, max_model_len=64, **preset(name)), SchedulerConfig)  # type: ignore[arg-type]
    assert preset("vllm-v1") == preset("vllm-0.33")
    assert preset("vllm-0.19")["free_order"] == "single-queue"
    assert preset("vllm-0.33")["free_order"] == "blank-first"
    preset("vllm-v1")["block_size"] = 99
    assert preset("vllm-v1")["block_size"] == 16
    with pytest.raises(ConfigError, match="there is no preset 'vllm-9'; choose one of vllm"):
        preset("vllm-9")


def spec(prompt: int, max_tokens: int, shared: bool = False) -> RequestSpec:
    identity = TokenIdentity(list(range(prompt)), BASE["block_size"]) if shared else None
    return RequestSpec(0, prompt, max_tokens, identity)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        (0, 5, "the prompt has 0 tokens; it needs at least 1"),
        (5, 0, "max_tokens is 0; it must be at least 1"),
        (100, 1, "leaves no room for an output within max_model_len = 100"),
        (500, 1, "leaves no room for an output within max_model_len = 100"),
        (20, 2, "need 11 blocks of 2, and the pool has 10; it can never fit"),
        (1, 99, "need 50 blocks of 2, and the pool has 10; it can never fit"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(prompt: int, max_tokens: int, reason: str) -> None:
    """Rule 7: it is refused at `add`, with the reason, takes no id, and leaves no trace."""
    scheduler = Scheduler(config())
    before = scheduler.digest()
    with pytest.raises(InvalidRequest) as error:
        scheduler.add(spec(prompt, max_tokens), 0)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert scheduler.digest() == before
    assert not scheduler.has_unfinished
    assert scheduler.add(spec(4, 4), 0) == 0


def serve(scheduler: Scheduler, turns: int = 200) -> dict[int, tuple[str, int]]:
    """Run all that is there to its end: request -> (why it ended, outputs)."""
    ended: dict[int, tuple[str, int]] = {}
    for turn in range(turns):
        plan = scheduler.schedule(turn)
        if plan.runs:
            sampled = [item.request for item in plan.prefills if item.samples]
            sampled += [item.request for item in plan.decodes.rows()]
            events = scheduler.complete(plan, StepOutcome(turn + 1, dict.fromkeys(sampled, 1)))
            ended.update((finish.request, (finish.reason, finish.num_output_tokens)) for finish in events.finished)
        scheduler.check()
        if not scheduler.has_unfinished:
            break
    return ended


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 24), st.integers(0, 3), st.integers(1, 2), st.booleans())
def test_the_exact_minimum_is_accepted_and_ends(
    num_blocks: int, size: int, max_tokens: int, lookahead: int, budget: int, reserve: bool
) -> None:
    """Rule 7, P7: a request that needs every block of the pool is served to its end; one more token is refused."""
    # The last output is never an input, so it needs no slot.
    prompt = num_blocks * size - lookahead - max_tokens + 1
    if prompt < 1:
        return
    options = config(
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=1000,
        num_lookahead_tokens=lookahead,
        scheduler_reserve_full_isl=reserve,
        max_num_seqs=1,
        max_num_batched_tokens=budget,
        watermark=0.5,
    )
    scheduler = Scheduler(options)
    with pytest.raises(InvalidRequest, match="it can never fit"):
        scheduler.add(spec(prompt + 1, max_tokens), 0)
    with pytest.raises(InvalidRequest, match="it can never fit"):
        scheduler.add(spec(prompt, max_tokens + 1), 0)
    scheduler.add(spec(prompt, max_tokens), 0)
    assert serve(scheduler) == {0: ("length", max_tokens)}
    assert scheduler.manager.pool.num_free == num_blocks


def test_a_refused_request_does_not_hold_up_others() -> None:
    """Rule 7: requests before and behind one that can never fit are served as if it had not come."""
    scheduler = Scheduler(config())
    scheduler.add(spec(4, 4), 0)
    with pytest.raises(InvalidRequest):
        scheduler.add(spec(50, 4), 0)
    scheduler.add(spec(18, 3), 0)
    assert serve(scheduler) == {0: ("length", 4), 1: ("length", 3)}


def test_the_model_length_ends_a_request() -> None:
    """max_tokens beyond max_model_len is cut to what the model's length leaves, and the request ends there."""
    scheduler = Scheduler(config(max_model_len=12))
    scheduler.add(spec(9, 50), 0)
    scheduler.add(spec(11, 50), 0)
    assert serve(scheduler) == {0: ("length", 3), 1: ("length", 1)}
    with pytest.raises(InvalidRequest, match="max_model_len = 12"):
        scheduler.add(spec(12, 1), 0)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_ends_a_request(max_tokens: int) -> None:
    """A request that meets no stop gets exactly max_tokens outputs."""
    scheduler = Scheduler(config())
    scheduler.add(spec(3, max_tokens), 0)
    assert serve(scheduler) == {0: ("length", max_tokens)}


def test_the_watermark_counts_only_while_something_runs() -> None:
    """Rule 6: an idle pool is given whole to its first request; a second has to leave the watermark free."""
    scheduler = Scheduler(config(watermark=0.5, max_num_seqs=4))
    scheduler.add(spec(20, 1), 0)  # all 10 blocks
    plan = scheduler.schedule(0)
    assert plan.admitted == (0,)
    scheduler.complete(plan, StepOutcome(1))
    for prompt in (4, 8, 4):  # 2, 4 and 2 blocks
        scheduler.add(spec(prompt, 3), 1)
    plan = scheduler.schedule(1)
    assert plan.admitted == (1,), "request 2 would leave 4 blocks free, and the watermark is 5"
    scheduler = Scheduler(config(watermark=0.5, max_num_seqs=4))
    scheduler.add(spec(4, 3), 0)
    scheduler.add(spec(6, 3), 0)
    assert scheduler.schedule(0).admitted == (0, 1), "request 1 leaves exactly 5 blocks free"


@pytest.mark.parametrize(("reserve", "admitted"), [(True, (0,)), (False, (0, 1))])
def test_admission_looks_at_the_whole_prompt(reserve: bool, admitted: tuple[int, ...]) -> None:
    """Rule 6: a prompt of which only the first chunk fits waits, unless that is switched off."""
    options = config(scheduler_reserve_full_isl=reserve, max_num_seqs=4, max_num_batched_tokens=14)
    scheduler = Scheduler(options)
    scheduler.add(spec(10, 2), 0)  # 5 of 10 blocks
    scheduler.add(spec(12, 2), 0)  # 6 blocks, but 2 for a first chunk of 4 tokens
    assert scheduler.schedule(0).admitted == admitted


def test_a_chunk_is_no_longer_than_the_threshold() -> None:
    """long_prefill_token_threshold bounds what one prompt may take of a step, in its first chunk and later ones."""
    scheduler = Scheduler(config(long_prefill_token_threshold=3, max_num_seqs=4))
    scheduler.add(spec(7, 2), 0)
    sizes = []
    for turn in range(3):
        plan = scheduler.schedule(turn)
        sizes.append([(item.start, item.num_tokens, item.samples) for item in plan.prefills])
        scheduler.complete(plan, StepOutcome(turn + 1))
    assert sizes == [[(0, 3, False)], [(3, 3, False)], [(6, 1, True)]]


def test_the_threshold_may_spare_a_request_that_is_alone() -> None:
    """Without long_prefill_threshold_alone the bound holds only while there is another request, running or waiting."""
    limits = {"long_prefill_token_threshold": 2, "max_num_seqs": 4, "max_num_batched_tokens": 5}
    scheduler = Scheduler(config(long_prefill_threshold_alone=False, **limits))
    scheduler.add(spec(15, 1), 0)
    sizes = []
    for turn in range(5):
        if turn == 1:
            scheduler.add(spec(3, 1), turn)  # ends in turn 2
        plan = scheduler.schedule(turn)
        sizes.append([(item.request, item.num_tokens) for item in plan.prefills])
        scheduler.complete(plan, StepOutcome(turn + 1))
    assert sizes == [[(0, 5)], [(0, 2), (1, 2)], [(0, 2), (1, 1)], [(0, 5)], [(0, 1)]]


def test_max_num_seqs_bounds_the_running() -> None:
    """No more requests run than max_num_seqs, and the next starts in the step after one ended."""
    jobs = tuple(Job(0, (0, 1), out, out, private=True) for out in (2, 4, 2))
    played = play(Case(config(max_num_seqs=2), jobs))
    assert played.turns == 4  # the third runs in turns 2 and 3, in the place of the first
    assert play(Case(replace(config(), max_num_seqs=1), jobs)).turns == 8


def test_a_vllm_preset_keeps_the_null_block() -> None:
    """Of the 2,588 blocks that vLLM reports, requests can have 2,587; other engines' presets and ours give all."""
    assert usable_blocks(2588, "vllm-0.19") == usable_blocks(2588, "vllm-v1") == 2587
    assert usable_blocks(2588, None) == usable_blocks(2588, "other") == usable_blocks(2588, "vllm-v0") == 2588


def test_the_null_block_counts_in_the_watermark() -> None:
    """vLLM takes the watermark's share of all blocks, the one that it keeps among them."""
    assert config(num_blocks=99, watermark=0.1).watermark_blocks == 9
    assert config(num_blocks=99, watermark=0.1, null_block=True).watermark_blocks == 10
