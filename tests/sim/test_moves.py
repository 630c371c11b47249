"""Block moves in the simulator: their cost, links that transfers share, and who continues whom in a beam."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.presets import SchedulerConfig
from engine.core.types import BlockCopy, BlockId, PlanItem, StepPlan, Transfer
from sim.calibration import fit_moves
from sim.errors import CalibrationError, SimError
from sim.executor import SimExecutor, beam_parents
from sim.hardware import device
from sim.moves import CopyTime, MoveTime, cost_model, moves_of_device
from sim.simulate import SimResult, simulate
from sim.steptime import StepTime
from traces import Trace, make_trace

MOVES = MoveTime(8, CopyTime(100.0, 10.0, 1.0), CopyTime(200.0, 20.0, 2.0), CopyTime(1.0, 2.0, 3.0), label="test")
"""A block is stored in 118 ns, loaded in 236 and copied in 27."""
STEP = StepTime(step=1000.0)


class Rows:
    num = 0
    context_tokens = 0

    def rows(self) -> list[PlanItem]:
        return []


def plan(seq: int, rows: int = 0, **parts) -> StepPlan:
    items = tuple(PlanItem(i, 0, 0, 1, False) for i in range(rows))
    made = StepPlan(seq, 0, items, Rows(), (), (), (), False)
    for name, value in parts.items():
        setattr(made, name, value)
    return made


def copies(count: int) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(BlockId(i), BlockId(i + 50)) for i in range(count))


def run(executor: SimExecutor, made: StepPlan, now: int = 0):
    executor.submit(made, None, now)
    return executor.collect()


def test_a_step_takes_as_long_as_its_moves_and_its_rows():
    """Swap-outs, swap-ins and copies are added up, each with a batch's latency, its copies and its bytes."""
    executor = SimExecutor(STEP, moves=MOVES)
    outcome = run(executor, plan(1, 3, swap_out=copies(2), swap_in=copies(1), copies=copies(4)))
    assert outcome.end == (100 + 20 + 16) + (200 + 20 + 16) + (1 + 8 + 96) + 1000
    assert run(executor, plan(2, 3)).end - outcome.end == 1000


def test_transfers_take_their_direction_of_the_link_one_after_another():
    """Stores queue behind stores, loads behind loads, both beside steps; each is told of once, in order of its end."""
    executor = SimExecutor(STEP, moves=MOVES)
    first = (Transfer(1, False, copies(50)), Transfer(2, False, copies(1)), Transfer(3, True, copies(1)))
    outcome = run(executor, plan(1, 1, transfers=first))
    # Stores end at 100 + 500 + 400 = 1000 and 1118, the load at 236.
    assert (outcome.end, [end.id for end in outcome.transfers]) == (1000, [3, 1])
    assert all(end.ok for end in outcome.transfers)
    outcome = run(executor, plan(2, 1))
    assert (outcome.end, [end.id for end in outcome.transfers]) == (2000, [2])


def test_a_swap_waits_for_the_transfers_before_it():
    """What a step moves itself begins when its direction of the link is free."""
    executor = SimExecutor(STEP, moves=MOVES)
    run(executor, plan(1, 1, transfers=(Transfer(1, False, copies(150)),)))  # until 100 + 1500 + 1200
    assert run(executor, plan(2, 1, swap_out=copies(1))).end == 2800 + 118 + 1000
    executor = SimExecutor(STEP, moves=MOVES)
    run(executor, plan(1, 1, transfers=(Transfer(1, False, copies(150)),)))
    assert run(executor, plan(2, 1, swap_in=copies(1))).end == 1000 + 236 + 1000


def test_a_plan_without_rows_ends_with_the_next_transfer():
    """Where there is nothing to compute and nothing to move, the step lasts until a transfer ends."""
    executor = SimExecutor(STEP, moves=MOVES)
    outcome = run(executor, plan(1, 0, transfers=(Transfer(1, True, copies(1)), Transfer(2, False, copies(9)))))
    assert (outcome.end, [end.id for end in outcome.transfers]) == (236, [1])
    outcome = run(executor, plan(2, 0))
    assert (outcome.end, [end.id for end in outcome.transfers]) == (262, [2])


def test_a_revoked_transfer_is_never_told_of():
    """A transfer whose lease is over ends silently."""
    executor = SimExecutor(STEP, moves=MOVES)
    run(executor, plan(1, 1, transfers=(Transfer(1, False, copies(150)),)))
    for seq in (2, 3, 4):
        assert run(executor, plan(seq, 1, revoked=(1,) if seq == 2 else ())).transfers == ()


def test_where_there_is_no_link_transfers_are_part_of_their_step():
    """On a CPU the step that begins a transfer is longer by it and tells of its end."""
    cpu = MoveTime(8, MOVES.store, MOVES.load, MOVES.local, beside=False)
    outcome = run(SimExecutor(STEP, moves=cpu), plan(1, 1, transfers=(Transfer(7, True, copies(1)),)))
    assert (outcome.end, [end.id for end in outcome.transfers]) == (1236, [7])


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(1, 8), st.floats(0.0, 1.0))
def test_the_parents_of_a_beam_are_drawn_by_counter(seed, group, width, churn):
    """Equal arguments, equal parents, all within the beam; with no churn each sequence continues itself."""
    drawn = [beam_parents(seed, group, step, width, churn) for step in range(20)]
    assert drawn == [beam_parents(seed, group, step, width, churn) for step in range(20)]
    assert all(0 <= parent < width for parents in drawn for parent in parents)
    assert beam_parents(seed, group, 3, width, 0.0) == list(range(width))


def test_churn_is_the_share_of_sequences_that_are_drawn_anew():
    """Of sequences that are drawn anew, one in `width` falls on itself."""
    moved = [p != i for step in range(4000) for i, p in enumerate(beam_parents(1, 5, step, 4, 0.4))]
    assert np.mean(moved) == pytest.approx(0.4 * 3 / 4, abs=0.01)


def test_a_device_without_a_link_is_refused():
    """Moves over a link that is not there are an error; over one that is, its bandwidth is what long copies reach."""
    a100 = moves_of_device(device("a100-80g"), 1 << 20)
    assert a100.store.bandwidth == pytest.approx(31.5e9 * 0.8)
    assert "assumed, not measured" in a100.label
    pieces = moves_of_device(device("a100-80g"), 1 << 20, pieces=64)
    assert pieces.store_ns(16) - a100.store_ns(16) == 64 * 16 * 10_000
    from dataclasses import replace

    with pytest.raises(SimError, match="no link to its host"):
        moves_of_device(replace(device("a100-80g"), pcie_bandwidth=0.0), 1 << 20)


def measured(store: CopyTime, load: CopyTime, local: CopyTime, memory: str = "plain") -> list[dict]:
    return [
        {
            "direction": name,
            "memory": memory,
            "blocks": count,
            "bytes": count * size,
            "ns_median": time.ns(count, count * size),
        }
        for name, time in (("store", store), ("load", load), ("local", local))
        for size in (1 << 14, 1 << 16, 1 << 18)
        for count in (1, 2, 4, 8, 16, 32)
    ]


def test_the_fit_finds_latency_copies_and_bandwidth_of_each_direction():
    """Coefficients that made the measurements are found again, the costs of a choice follow from them."""
    truth = CopyTime(20_000.0, 3_000.0, 0.05), CopyTime(30_000.0, 1_000.0, 0.1), CopyTime(5_000.0, 500.0, 0.01)
    slow = [CopyTime(10 * one.latency, 10 * one.copy, 10 * one.byte) for one in truth]
    entries = measured(*truth, memory="pinned") + measured(*slow, memory="pageable")[:36]
    about = {"copies": entries, "block_bytes": 1 << 16, "device": "cuda"}
    found = fit_moves(about)
    assert found is not None
    assert found.beside
    for one, other in zip((found.store, found.load, found.local), truth, strict=True):
        assert (one.latency, one.copy, one.byte) == pytest.approx((other.latency, other.copy, other.byte), rel=0.02)
    cost = cost_model(StepTime(step=7.0, token=100.0, token_above=50.0, work=2.0), found)
    assert cost.recompute_ns(10) == 10 * 150 + 2 * 55
    assert cost.swap_ns(3) == pytest.approx(found.store_ns(3) + found.load_ns(3), abs=2)
    assert MoveTime.from_dict(found.to_dict()) == found
    assert fit_moves({}) is None
    with pytest.raises(CalibrationError, match="block moves of the profile are damaged"):
        fit_moves(about | {"copies": entries[:2]})


def workload(count: int = 30) -> Trace:
    rng = np.random.default_rng(2)
    return make_trace(
        arrival_ns=np.sort(rng.integers(0, 10**6, count)),
        prompt_tokens=rng.integers(5, 60, count),
        output_tokens=rng.integers(1, 40, count),
    )


def served(fast_forward: bool = True, max_tokens: int | None = None, **more) -> SimResult:
    options = {
        "num_blocks": 60,
        "max_model_len": 200,
        "block_size": 4,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
    }
    sequences = {name: more.pop(name) for name in ("n", "beam", "forks", "seed", "beam_churn") if name in more}
    config = SchedulerConfig(**(options | more))
    model = StepTime(step=1000.0, token=10.0, context=1.0)
    return simulate(
        workload(),
        config,
        model,
        moves=MOVES,
        fast_forward=fast_forward,
        max_tokens=max_tokens,
        check=True,
        **sequences,
    )


@settings(max_examples=25)
@given(
    n=st.sampled_from([1, 2, 3]),
    forks=st.booleans(),
    steps=st.sampled_from([1, 2]),
    host=st.sampled_from([{}, {"preemption_mode": "swap"}, {"host_tier": True}]),
    stops=st.booleans(),
)
def test_fast_forward_changes_nothing_with_moves_and_forks(n, forks, steps, host, stops):
    """With swaps, transfers and forks, runs of steps done at once give the times of step by step."""
    options = {"n": n, "forks": forks, "steps_in_flight": steps, "max_tokens": 45 if stops else None}
    options |= {"num_host_blocks": 40 if host else 0, **host}
    fast, slow = (served(fast_forward=fast, **options) for fast in (True, False))
    assert fast.end_ns == slow.end_ns
    for name, values in fast.requests().items():
        assert list(values) == list(slow.requests()[name]), name
    outputs = fast.requests()["output_tokens"]
    assert sorted(outputs) == sorted(np.repeat(workload().output_tokens, n).tolist())


@pytest.mark.parametrize("stops", [None, 45])
def test_beams_end_together_and_move_more_with_more_churn(stops):
    """All sequences of a beam end with the trace's number of tokens, and reordering costs copies."""
    trace = workload()
    results = {
        churn: served(n=3, beam=True, beam_churn=churn, num_blocks=140, max_tokens=stops) for churn in (0.0, 0.8)
    }
    for found in results.values():
        requests = found.requests()
        assert sorted(requests["output_tokens"]) == sorted(np.repeat(trace.output_tokens, 3).tolist())
    moved = {churn: int(found.steps()["copied_blocks"].sum()) for churn, found in results.items()}
    assert moved[0.8] > 2 * moved[0.0] > 0
