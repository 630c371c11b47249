"""Out of memory in simulation: which step does not fit, what that ends, and what the check leaves alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.core.presets import SchedulerConfig
from engine.core.types import PlanItem
from sim.errors import SimError
from sim.hardware import device
from sim.memory import MemoryRequest, plan
from sim.models import preset
from sim.oom import MemoryGuard, Transients, asks_for_logprobs
from sim.simulate import SimResult, simulate
from sim.steptime import roofline
from sim.transients import cublas_bytes, eager_attention_bytes, layer_bytes
from traces import Trace, make_trace

GIB = 1 << 30
MISTRAL = preset("mistral-7b")
REQUEST = MemoryRequest(MISTRAL, device("a100-80g"), "0.19.1", max_model_len=32768)


def spike(longest: int = 28000, num: int = 40) -> Trace:
    """Prompts of 2,000 tokens, two a second, and one long one among them."""
    prompts = np.full(num, 2000)
    prompts[num // 2] = longest
    return make_trace(np.arange(num) * 500_000_000, prompts, np.full(num, 40))


def served(guard: MemoryGuard, trace: Trace | None = None, tokens: int = 2048, **more: object) -> SimResult:
    made = guard.transients.plan
    options = SchedulerConfig(
        num_blocks=made.usable_blocks,
        max_model_len=made.max_model_len,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=False,
    )
    return simulate(trace or spike(), options, roofline(MISTRAL, device("a100-80g")), guard=guard, **more)  # type: ignore[arg-type]


def test_room_and_pool_and_what_stays_fill_the_device() -> None:
    """What a step may take is what the device has beside every term that stays and the pool."""
    made = plan(REQUEST)
    guard = MemoryGuard(Transients(made))
    stays = sum(term.bytes for term in made.terms if term.name != "activations")
    assert guard.room + stays + made.num_blocks * made.block_bytes == device("a100-80g").memory_bytes
    profiled = next(term.bytes for term in made.terms if term.name == "activations")
    assert guard.room - made.headroom - profiled == made.available - made.num_blocks * made.block_bytes
    assert MemoryGuard(Transients(made), pool_blocks=made.num_blocks - 100).room - guard.room == 100 * made.block_bytes


def test_a_step_needs_what_its_rows_need() -> None:
    """Layers grow with tokens, a score matrix with tokens times context, samplers with rows; the largest one counts."""
    made = plan(REQUEST)
    chunk = PlanItem(1, 0, 26000, 2000, False)
    flash, eager = Transients(made), Transients(made, "eager")
    workspace = cublas_bytes(device("a100-80g"))
    assert flash.need([chunk], 0, 0) == (layer_bytes(MISTRAL, 2000) + workspace, "layers")
    matrix = eager_attention_bytes(MISTRAL, 2000, 28000)
    assert matrix == 2 * 4 * 32 * 2000 * 28000
    assert eager.need([chunk], 0, 0) == (layer_bytes(MISTRAL, 2000) + matrix + workspace, "attention")
    assert flash.need([], 256, 500_000)[1] == "sampler"
    logits = Transients(made, prompt_logprobs=1.0).need([chunk], 0, 0)
    assert logits[1] == "prompt_logprobs"
    assert logits[0] > 2000 * 32000 * 6


def test_a_long_prompt_kills_an_engine_that_builds_score_matrices() -> None:
    """One prompt of 28,000 tokens ends it, with its own batch; a fused attention serves everything."""
    flash = MemoryGuard(Transients(plan(REQUEST)))
    found = served(flash)
    assert not flash.events
    assert found.complete
    eager = MemoryGuard(Transients(plan(REQUEST), "eager"))
    found = served(eager)
    assert eager.crashed
    assert not found.complete
    event = eager.events[0]
    assert event.what == "attention"
    assert event.need_bytes > event.room_bytes
    assert event.prefills[0][0] == found.requests()["row"].tolist().index(20)
    outcomes = found.requests()["outcome"]
    assert "unfinished" in outcomes
    assert outcomes[20] == "unfinished"
    assert found.end_ns < 20 * 10**9
    assert len(found.recorder.step_ends()) < event.step + 2


def test_reporting_goes_on_and_changes_nothing() -> None:
    """With `report` every request is served as without a check, and each step that did not fit is counted."""
    guard = MemoryGuard(Transients(plan(REQUEST), "eager"), "report")
    found, free = served(guard), served(MemoryGuard(Transients(plan(REQUEST))))
    assert len(guard.events) > 1
    assert found.requests()["finish_ns"].tolist() == free.requests()["finish_ns"].tolist()


def test_fast_forward_hides_no_event() -> None:
    """The same events with and without fast-forward: what can change within a run is looked at step by step."""
    events = []
    for fast in (True, False):
        guard = MemoryGuard(Transients(plan(replace(REQUEST, utilization=0.995))), "report", growth_per_hour=40 * GIB)
        served(guard, spike(2000), fast_forward=fast)
        assert guard.events
        events.append([(event.time_ns, event.step, event.need_bytes) for event in guard.events])
    assert events[0] == events[1]


def test_memory_that_is_lost_ends_the_engine_late() -> None:
    """Without growth nothing happens; with it, the engine dies when the room is gone, whatever the load."""
    made = plan(REQUEST)
    calm = MemoryGuard(Transients(made))
    served(calm)
    assert not calm.events
    hourly = calm.room * 3600 // 10
    growing = MemoryGuard(Transients(made), growth_per_hour=hourly)
    served(growing)
    assert growing.crashed
    assert 8e9 < growing.events[0].time_ns <= 10e9


def test_what_was_profiled_is_set_aside() -> None:
    """An engine that profiles its score matrix has a smaller pool, and the same prompt does not kill it."""
    blind = Transients(plan(REQUEST), "eager")
    knowing = plan(replace(REQUEST, extra_peak=blind.unprofiled()))
    assert knowing.num_blocks < blind.plan.num_blocks
    guard = MemoryGuard(Transients(knowing, "eager"))
    served(guard)
    assert not guard.events


def test_a_share_of_requests_asks_for_logprobs() -> None:
    """The share is met, by the request's number alone."""
    asked = [asks_for_logprobs(request, 0.25) for request in range(10000)]
    assert sum(asked) == pytest.approx(2500, rel=0.05)
    assert not any(asks_for_logprobs(request, 0.0) for request in range(100))
    assert all(asks_for_logprobs(request, 1.0) for request in range(100))


def test_what_cannot_be_is_named() -> None:
    """An unknown backend, mode or share is one sentence."""
    made = plan(REQUEST)
    with pytest.raises(SimError, match="Unknown attention backend 'paged'"):
        Transients(made, "paged")
    with pytest.raises(SimError, match="prompt_logprobs"):
        Transients(made, prompt_logprobs=2.0)
    with pytest.raises(SimError, match="--oom must be one of"):
        MemoryGuard(Transients(made), "ignore")
