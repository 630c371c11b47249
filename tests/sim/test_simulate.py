"""The simulator as a whole: times by hand, fast-forward, conservation, closed loops, sessions, stops, wake-ups."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from engine.core.drive import Abort, Add
from engine.core.presets import SchedulerConfig
from engine.core.records import Recorder
from engine.core.scheduler import Scheduler
from engine.core.types import Finish, RequestSpec
from sim.calibration import Hull
from sim.errors import SimError
from sim.executor import SimExecutor
from sim.replica import Replica
from sim.simulate import SimResult, share_outside_hull, simulate
from sim.steptime import StepTime
from sim.sweep import Limits, pick_trace_like
from traces import Trace, make_trace

CONSTANT = StepTime(step=100.0)
MODEL = StepTime(
    step=9e6, token=4e4, token_above=1e5, ridge=8.0, context=900.0, context_mixed=300.0, work=60.0, noise=0.02, seed=3
)


def config(**changes) -> SchedulerConfig:
    values = {"num_blocks": 64, "max_model_len": 200, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    return SchedulerConfig(**(values | changes))


@st.composite
def workloads(draw: st.DrawFn) -> Trace:
    """Small traces: open or closed loop, with shared prefixes, sessions, and generated text that later turns repeat."""
    count = draw(st.integers(1, 14))
    arrivals = sorted(draw(st.lists(st.integers(0, 3 * 10**8), min_size=count, max_size=count)))
    output = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    after, think = [-1] * count, [0] * count
    offsets, ids, tokens = [0], [], []
    output_ids = [1000 + i for i in range(count)]
    for i in range(count):
        parent = draw(st.integers(-1, i - 1)) if draw(st.booleans()) else -1
        if parent >= 0 and parent not in after:
            after[i], think[i] = parent, draw(st.integers(0, 10**8))
            lo, hi = offsets[parent], offsets[parent + 1]
            ids += [*ids[lo:hi], output_ids[parent], 2000 + i]
            tokens += [*tokens[lo:hi], output[parent], draw(st.integers(1, 9))]
        else:
            group = draw(st.integers(1, 3))
            ids += [group, 3000 + i]
            tokens += [4 * group + 1, draw(st.integers(1, 30))]
        offsets.append(len(ids))
    lengths = [sum(tokens[offsets[i] : offsets[i + 1]]) for i in range(count)]
    return make_trace(
        arrivals,
        lengths,
        output,
        spans=(offsets, ids, tokens),
        output_ids=output_ids,
        after=after,
        think_ns=think,
        concurrency=draw(st.sampled_from([None, None, 1, 3])),
    )


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    return config(
        num_blocks=draw(st.sampled_from([18, 24, 40, 200])),
        max_num_seqs=draw(st.sampled_from([1, 3, 8])),
        max_num_batched_tokens=draw(st.sampled_from([8, 32, 256])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        steps_in_flight=draw(st.sampled_from([1, 2])),
        enable_prefix_caching=draw(st.booleans()),
        same_step=draw(st.sampled_from(["share", "off", "defer"])),
        free_order=draw(st.sampled_from(["blank-first", "single-queue"])),
    )


def expanded(result: SimResult) -> dict[str, list[int]]:
    """The table of steps with runs taken apart."""
    steps = result.steps()
    count = np.asarray(steps["num_steps"])
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    decodes = np.repeat(steps["num_decodes"], count)
    columns = {name: np.repeat(steps[name], count) for name in ("num_prefills", "prefill_tokens", "num_waiting")}
    columns["seq"] = np.repeat(steps["step"], count) + within
    columns["num_decodes"] = decodes
    columns["context"] = np.repeat(steps["decode_context_tokens"], count) + within * decodes
    columns["ends"] = result.recorder.step_ends()
    return {name: values.tolist() for name, values in columns.items()}


def requests(result: SimResult) -> dict[str, list[object]]:
    return {name: list(values) for name, values in result.requests().items()}


@given(workloads(), configs(), st.sampled_from([None, 25, 60]))
@settings(max_examples=250, deadline=None)
def test_fast_forward_changes_nothing(trace: Trace, cfg: SchedulerConfig, max_tokens: int | None) -> None:
    """With sessions, closed loops and stops that only the simulator knows, runs give what single steps give: every
    token time, batch, preemption, the end state and the clock."""
    fast = simulate(trace, cfg, MODEL, max_tokens=max_tokens, check=True)
    slow = simulate(trace, cfg, MODEL, max_tokens=max_tokens, fast_forward=False)
    assert requests(fast) == requests(slow)
    assert expanded(fast) == expanded(slow)
    assert fast.gaps().tolist() == slow.gaps().tolist()
    assert fast.scheduler.digest() == slow.scheduler.digest()
    assert fast.end_ns == slow.end_ns


@given(workloads(), configs(), st.sampled_from([None, 30]))
@settings(max_examples=150, deadline=None)
def test_requests_are_conserved(trace: Trace, cfg: SchedulerConfig, max_tokens: int | None) -> None:
    """Each row of the trace comes out exactly once: served with its number of tokens, or rejected with a reason. Its
    times are in order, and every step's slots sum to the pool."""
    result = simulate(trace, cfg, MODEL, max_tokens=max_tokens)
    table = result.requests()
    assert sorted(table["row"]) == list(range(len(trace)))
    for i, row in enumerate(table["row"]):
        if table["outcome"][i] == "rejected":
            assert table["reason"][i]
            assert table["output_tokens"][i] == 0
            continue
        allowed = max_tokens or int(trace.output_tokens[row])
        room = cfg.max_model_len - int(trace.prompt_tokens[row])
        assert table["output_tokens"][i] == min(int(trace.output_tokens[row]), allowed, room)
        stops_itself = max_tokens is not None and trace.output_tokens[row] < min(allowed, room)
        assert table["outcome"][i] == ("stop" if stops_itself else "length")
        times = [table[name][i] for name in ("arrival_ns", "queued_ns", "admitted_ns", "first_token_ns", "finish_ns")]
        assert times == sorted(times)
        assert times[0] >= 0
    steps = result.steps()
    usage = sum(steps[name] for name in ("held", "tail", "reserved_may", "reserved_cannot", "external", "transfer"))
    total = usage + steps["cached"] + steps["free"]
    assert set(total.tolist()) <= {cfg.num_blocks * cfg.block_size}
    assert not result.scheduler.has_unfinished


@given(workloads(), configs())
@settings(max_examples=30, deadline=None)
def test_the_same_input_gives_the_same_tables(trace: Trace, cfg: SchedulerConfig) -> None:
    """Two simulations of one input are equal in every cell."""
    first, second = simulate(trace, cfg, MODEL), simulate(trace, cfg, MODEL)
    assert requests(first) == requests(second)
    assert expanded(first) == expanded(second)


def test_times_of_one_request_by_hand() -> None:
    """Steps of 100 ns: a prompt of 70 tokens in chunks of 32 takes three steps, then one step a token."""
    result = simulate(make_trace([0], [70], [3]), config(), CONSTANT)
    table = result.requests()
    assert table["first_token_ns"].tolist() == [300]
    assert table["finish_ns"].tolist() == [500]
    assert result.end_ns == 500


def test_an_arrival_waits_for_a_step_boundary() -> None:
    """With one step in flight, a request that comes during a step is noticed at its end and runs in the next step."""
    table = simulate(make_trace([0, 250], [10, 10], [50, 2]), config(), CONSTANT).requests()
    assert table["queued_ns"].tolist() == [0, 300]
    assert table["first_token_ns"].tolist() == [100, 400]
    at_boundary = simulate(make_trace([0, 300], [10, 10], [50, 2]), config(), CONSTANT).requests()
    assert at_boundary["first_token_ns"].tolist() == [100, 400]


def test_with_two_steps_in_flight_an_arrival_waits_a_step_longer() -> None:
    """A request that comes during step k waits for the rest of k and all of k + 1, and runs in k + 2."""
    table = simulate(make_trace([0, 250], [10, 10], [50, 2]), config(steps_in_flight=2), CONSTANT).requests()
    assert table["queued_ns"].tolist() == [0, 300]
    assert table["first_token_ns"].tolist() == [100, 500]


def test_cpu_time_hides_behind_the_step_only_with_two_in_flight() -> None:
    """The step-time model's CPU part adds to synchronous steps and disappears in asynchronous ones."""
    model = StepTime(step=100.0, cpu_step=40.0)
    trace = make_trace([0], [10], [5])
    assert simulate(trace, config(), model).end_ns == 5 * 140
    assert simulate(trace, config(steps_in_flight=2), model).end_ns == 5 * 100


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    """Two clients, five equal requests: each next one starts when one before it ended, whatever the arrivals say."""
    trace = make_trace([0, 10**12, 10**12, 10**12, 10**12], [4] * 5, [3] * 5, concurrency=2)
    table = simulate(trace, config(), CONSTANT).requests()
    assert table["arrival_ns"].tolist() == [0, 0, 300, 300, 600]
    assert table["finish_ns"].tolist() == [300, 300, 600, 600, 900]


def test_the_next_turn_of_a_session_comes_after_the_pause_and_hits_the_cache() -> None:
    """The second turn arrives `think` after the first ended, and finds its whole history, the reply included."""
    trace = make_trace(
        [0, 0],
        [8, 20],
        [8, 2],
        spans=([0, 1, 4], [1, 1, 50, 2], [8, 8, 8, 4]),
        output_ids=[50, 60],
        after=[-1, 0],
        think_ns=[0, 1000],
    )
    table = simulate(trace, config(), CONSTANT).requests()
    assert table["arrival_ns"].tolist() == [0, 1800]
    # 8 prompt tokens and 7 of 8 replies are computed: 15 tokens, 3 full blocks of 4.
    assert table["cached_tokens"].tolist() == [0, 12]


def test_a_rejected_turn_releases_the_next() -> None:
    """A turn that can never fit is rejected with a reason, and the session goes on."""
    trace = make_trace([0, 0, 0], [10, 500, 10], [2, 2, 2], after=[-1, 0, 1], think_ns=[0, 50, 50])
    table = simulate(trace, config(), CONSTANT).requests()
    assert table["outcome"] == ["length", "rejected", "length"]
    assert "max_model_len" in table["reason"][1]
    assert table["arrival_ns"].tolist() == [0, 250, 300]


def test_only_the_simulator_knows_when_a_request_stops() -> None:
    """With max_tokens above the true length, a request stops at the true one, and admission is as if it did not."""
    trace = make_trace([0, 0], [10, 10], [7, 1])
    table = simulate(trace, config(), CONSTANT, max_tokens=100).requests()
    assert table["output_tokens"].tolist() == [7, 1]
    assert table["outcome"] == ["stop", "stop"]
    assert table["max_tokens"].tolist() == [100, 100]
    too_long = simulate(trace, config(num_blocks=20), CONSTANT, max_tokens=100).requests()
    assert too_long["outcome"] == ["rejected", "rejected"]
    with pytest.raises(SimError, match="max_tokens"):
        simulate(trace, config(), CONSTANT, max_tokens=0)


class _Surprises:
    """An inbox whose arrivals nobody knows ahead."""

    def __init__(self) -> None:
        self.pending: list[Add | Abort] = []
        self.ids: dict[int, int] = {}
        self.open = True

    def drain(self, now: int) -> list[Add | Abort]:
        taken, self.pending = self.pending, []
        return taken

    def accepted(self, row: int, request: int) -> None:
        self.ids[row] = request

    def rejected(self, row: int, reason: str, now: int) -> None:
        raise AssertionError(reason)

    def next_ns(self) -> int | None:
        return None

    def is_open(self) -> bool:
        return self.open


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_wake_up_cuts_a_run_and_ends_idleness(depth: int, fast_forward: bool) -> None:
    """A request that another process brings is noticed at the next step boundary, also in the middle of a run, and at
    once when the replica is idle; an abort ends a request at the next boundary too."""
    env = simpy.Environment(initial_time=0)
    cfg = config(steps_in_flight=depth)
    scheduler = Scheduler(cfg)
    recorder = Recorder(scheduler)
    inbox = _Surprises()
    ended: list[tuple[int, str, int]] = []
    replica = Replica(
        env,
        scheduler,
        SimExecutor(CONSTANT),
        inbox,
        recorder,
        finished=lambda finish, now: ended.append((finish.request, finish.reason, now)),
        fast_forward=fast_forward,
    )

    def world():
        yield env.timeout(1000)
        inbox.pending.append(Add(RequestSpec(1000, 10, 100), 0))
        replica.wake()
        yield env.timeout(1250)
        inbox.pending.append(Add(RequestSpec(2250, 10, 2), 1))
        replica.wake()
        yield env.timeout(2010)
        inbox.pending.append(Abort(inbox.ids[0]))
        inbox.open = False
        replica.wake()

    env.process(world())
    env.run()
    assert not replica.process.is_alive
    table = recorder.requests()
    assert table["queued_ns"].tolist() == [1000, 2300]
    assert table["first_token_ns"].tolist() == [1100, 2400 if depth == 1 else 2500]
    assert ended[-1] == (0, "abort", 4300)


def test_the_simulated_clock_reads_no_wall_time(monkeypatch) -> None:
    """A simulation runs with every real clock out of order, and no module of the simulator imports one."""

    def broken(*_):
        raise AssertionError("the simulator read a real clock")

    for name in ("time", "monotonic", "perf_counter", "process_time", "time_ns", "monotonic_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, name, broken)
    result = simulate(make_trace([0, 500], [10, 20], [30, 5]), config(), MODEL)
    monkeypatch.undo()
    assert result.end_ns > 0
    for path in Path(sim.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"time", "datetime", "random"} & {name.split(".")[0] for name in names}, path


def test_time_outside_the_hull_is_counted_from_the_tables() -> None:
    """All steps outside, none, or just those of a context longer than measured."""
    result = simulate(make_trace([0], [10], [40]), config(), CONSTANT)
    wide = Hull((0, 10_000), (0, 10_000), (0, 100), (0, 10_000))
    assert share_outside_hull(result, wide) == 0.0
    assert share_outside_hull(result, Hull((100, 200), (0, 10_000), (0, 100), (0, 10_000))) == 1.0
    # Tokens 31 to 50 of 50 are beyond a longest context of 30: half of the steps.
    assert share_outside_hull(result, Hull((0, 10_000), (0, 10_000), (0, 100), (0, 30))) == pytest.approx(0.5, abs=0.05)
    # One decode row: K at the start of the decode steps runs from 10 to 48.
    assert share_outside_hull(result, Hull((0, 10_000), (0, 28), (0, 100), (0, 10_000))) == pytest.approx(0.5)


def test_observed_steps_make_trace_like_batches() -> None:
    """The rows of simulated steps can be collected, and are what the sweep picks its trace-like batches from."""
    seen: list[list[tuple[int, int]]] = []

    def observe(plan) -> None:
        rows = [(item.num_tokens, item.start) for item in plan.prefills]
        seen.append(rows + [(1, item.start) for item in plan.decodes.rows()])

    trace = make_trace(np.arange(20) * 10**7, [30] * 20, [20] * 20)
    result = simulate(trace, config(), MODEL, fast_forward=False, observe=observe)
    assert len(seen) == int(result.steps()["num_steps"].sum())
    picked = pick_trace_like(seen, Limits(8, 32, 200, 256, 4), decode=10, mixed=10)
    assert len(picked) == 20


def test_stops_survive_preemption() -> None:
    """A request that is preempted, computed again and decodes on still stops where it should."""
    trace = make_trace([0] * 6, [20] * 6, [30, 28, 26, 24, 22, 20])
    cfg = config(num_blocks=31, block_size=4, max_model_len=100)
    for depth in (1, 2):
        result = simulate(trace, config(num_blocks=31, max_model_len=100, steps_in_flight=depth), MODEL, max_tokens=60)
        table = result.requests()
        assert table["num_preemptions"].sum() > 0
        assert table["output_tokens"].tolist() == trace.output_tokens[table["row"]].tolist()
        assert set(table["outcome"]) == {"stop"}
    assert cfg.num_blocks == 31


def test_collecting_nothing_is_an_error() -> None:
    """The executor refuses to collect what was not submitted."""
    with pytest.raises(SimError, match="in flight"):
        SimExecutor(CONSTANT).collect()
    executor = SimExecutor(CONSTANT)
    executor.stops[5] = 3
    executor.forget(5)
    assert not executor.stops
    assert Finish(5, "stop").num_output_tokens == 0
