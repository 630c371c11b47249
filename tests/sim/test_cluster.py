"""Replicas behind a gateway: nothing is lost or counted twice, whatever dies when; and it is what one replica is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.presets import SchedulerConfig
from sim.attempts import FAILED, SHED
from sim.cluster import ClusterResult, sessions_of, simulate_cluster
from sim.errors import SimError
from sim.faults import NEVER, Faults, load_ns
from sim.gateway import GatewayOptions
from sim.handover import KvLink
from sim.moves import FREE_MOVES
from sim.node import NodeSpec
from sim.routers import (
    ROUTERS,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    ReplicaView,
    RoundRobin,
    RoutedRequest,
    Router,
    Session,
    load_router,
)
from sim.simulate import simulate
from sim.steptime import StepTime
from traces import Trace, make_trace

TOKEN = StepTime(step=10.0, token=1.0)
SMALL = SchedulerConfig(
    num_blocks=12, block_size=4, max_model_len=48, max_num_seqs=4, max_num_batched_tokens=8, enable_prefix_caching=True
)


def small_trace(n: int = 8, gap: int = 15) -> Trace:
    """Requests that come faster than one replica serves them, half of them with a common prefix."""
    rows = np.arange(n)
    prompts = 5 + rows % 7
    ids = [spans for row in rows.tolist() for spans in ([0, 100 + row] if row % 2 else [200 + row])]
    tokens = [
        t
        for row, prompt in zip(rows.tolist(), prompts.tolist(), strict=True)
        for t in ([4, prompt - 4] if row % 2 else [prompt])
    ]
    offsets = np.concatenate([[0], np.cumsum(np.where(rows % 2, 2, 1))])
    return make_trace(rows * gap, prompts, 3 + rows % 5, spans=(offsets, ids, tokens))


def conserved(result: ClusterResult) -> None:
    """Every request has ended once, every attempt belongs to one, and no block is held by anybody."""
    trace = result.trace
    requests, attempts = result.requests(), result.attempts()
    n = len(trace)
    assert requests["row"].tolist() == list(range(n))
    assert sorted(result.gateway.outcome) == list(range(n))
    by_row: dict[int, list[int]] = {}
    for ticket, row in enumerate(attempts["row"].tolist()):
        by_row.setdefault(row, []).append(ticket)
    ends, outcome = attempts["end_ns"], attempts["outcome"]
    assert [
        name for name, leg in zip(outcome, attempts["leg"].tolist(), strict=True) if leg != 1 and name == "handed-over"
    ] == []
    for row, legs in by_row.items():
        # Of a prompt that was handed over, what follows is the other leg of the same attempt.
        for before, after in pairwise(legs):
            if outcome[before] == "handed-over":
                assert attempts["leg"][after] == 2
                assert attempts["attempt"][after] == attempts["attempt"][before]
                assert attempts["sent_ns"][after] == ends[before]
        tickets = [t for t in legs if outcome[t] != "handed-over"]
        assert [int(attempts["attempt"][t]) for t in tickets] == list(range(1, len(tickets) + 1))
        assert int(requests["retries"][row]) == len(tickets) - 1
        for before, after in pairwise(tickets):
            assert outcome[before] in (*SHED, *FAILED, "timeout")
            assert ends[before] <= attempts["sent_ns"][after]
    assert (ends >= attempts["sent_ns"]).all()
    assert "unfinished" not in outcome
    ended = Counter(requests["outcome"])
    assert sum(ended.values()) == n
    assert set(ended) <= {"length", "stop", "rejected", "no-memory", "shed", "timeout", "failed"}
    served = np.isin(np.array(requests["outcome"], dtype=object).astype(str), ("length", "stop"))
    assert (requests["output_tokens"] == np.where(served, trace.output_tokens, 0)).all()
    # The cores' own records: whoever was answered was served by exactly one of them.
    told = Counter(int(attempts["row"][t]) for t in range(len(outcome)) if outcome[t] in ("length", "stop"))
    assert set(told) == set(np.flatnonzero(served).tolist())
    assert set(told.values()) <= {1}
    kept = 0
    for record in result.lives:
        scheduler = record.life.scheduler
        scheduler.check()
        assert not scheduler.has_unfinished
        usage = scheduler.usage()
        assert usage.held == usage.tail == usage.reserved_may == usage.reserved_cannot == 0
        assert usage.cached + usage.free == scheduler.config.num_blocks * scheduler.config.block_size
        table = record.life.recorder.requests()
        assert "unfinished" not in table["outcome"]
        kept += len(table["row"])
    assert kept == int((attempts["life"] >= 0).sum())
    assert all(view.outstanding == view.outstanding_tokens == 0 for view in result.gateway.views)
    assert not result.gateway.num_waiting


def moments(result: ClusterResult) -> list[int]:
    """When anything happened: requests came, went, were sent on or answered, and steps ended."""
    attempts = result.attempts()
    found = {int(at) for name in ("sent_ns", "routed_ns", "end_ns") for at in attempts[name]}
    for record in result.lives:
        found.update(record.life.recorder.step_ends().tolist())
    return sorted(found - {-1})


def same(one: ClusterResult, other: ClusterResult) -> None:
    """Two results with equal tables, step ends included."""
    for left, right in ((one.requests(), other.requests()), (one.attempts(), other.attempts())):
        assert left.keys() == right.keys()
        for name in left:
            assert list(left[name]) == list(right[name]), name
    ends = [[r.life.recorder.step_ends().tolist() for r in result.lives] for result in (one, other)]
    assert ends[0] == ends[1]
    assert one.end_ns == other.end_ns


def test_one_replica_behind_a_gateway_without_limits_is_a_simulation() -> None:
    """The same requests, steps and times as `simulate`, with two steps in flight, too."""
    for flight in (1, 2):
        config = SchedulerConfig(num_blocks=12, block_size=4, max_model_len=48, steps_in_flight=flight)
        alone = simulate(small_trace(), config, TOKEN)
        cluster = simulate_cluster(small_trace(), [NodeSpec(config, TOKEN)])
        requests, steps = alone.requests(), alone.recorder.step_ends()
        together = cluster.requests()
        for name in requests:
            assert list(requests[name]) == list(together[name]), name
        assert cluster.lives[0].life.recorder.step_ends().tolist() == steps.tolist()
        conserved(cluster)


@pytest.mark.parametrize("flight", [1, 2])
def test_a_crash_at_any_moment_loses_and_repeats_nothing(flight: int) -> None:
    """A replica dies just before, at and just after every event of a run, and comes back: all is conserved."""
    config = SchedulerConfig(
        num_blocks=12, block_size=4, max_model_len=48, max_num_seqs=8, max_num_batched_tokens=16, steps_in_flight=flight
    )
    nodes = [NodeSpec(config, TOKEN, restart_ns=60)] * 2
    options = GatewayOptions(retries=3, backoff_ns=20, max_queue=3, max_outstanding=3)
    whole = simulate_cluster(small_trace(), nodes, LeastLoaded(), options)
    conserved(whole)
    crashed = 0
    for at in sorted({max(0, moment + d) for moment in moments(whole) for d in (-1, 0, 1)}):
        result = simulate_cluster(small_trace(), nodes, LeastLoaded(), options, Faults(((at % 2, at),)), check=True)
        conserved(result)
        crashed += len(result.lives) - 2
    assert crashed > 50


def test_a_timeout_at_any_moment_loses_and_repeats_nothing() -> None:
    """Clients lose patience at every moment at which something happens to the first request: all is conserved."""
    nodes = [NodeSpec(SMALL, TOKEN)]
    kinds: Counter[str] = Counter()
    for patience in range(1, 400, 7):
        options = GatewayOptions(timeout_ns=patience, retries=1, backoff_ns=10, max_outstanding=2)
        result = simulate_cluster(small_trace(6), nodes, RoundRobin(), options, check=True)
        conserved(result)
        kinds.update(result.attempts()["outcome"])
    assert kinds["timeout"] > 20
    assert kinds["length"] > 20


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """A small cluster where everything collides: replicas that differ, short queues, impatient clients, crashes."""
    nodes = []
    for _ in range(draw(st.integers(1, 3))):
        config = SchedulerConfig(
            num_blocks=draw(st.sampled_from([4, 6, 12])),
            block_size=draw(st.sampled_from([2, 4])),
            max_model_len=draw(st.sampled_from([16, 48])),
            max_num_seqs=draw(st.integers(1, 4)),
            max_num_batched_tokens=draw(st.integers(4, 16)),
            enable_prefix_caching=draw(st.booleans()),
            steps_in_flight=draw(st.sampled_from([1, 2])),
        )
        restart = draw(st.sampled_from([NEVER, 0, 1, 40, 200]))
        nodes.append(NodeSpec(config, StepTime(step=draw(st.integers(1, 12)), token=1.0), restart_ns=restart))
    if len(nodes) > 1 and draw(st.booleans()):
        link = draw(st.sampled_from([KvLink(), KvLink(1e9, 3), KvLink(2e7, 0)]))
        moves = replace(FREE_MOVES, block_bytes=draw(st.sampled_from([0, 8])))
        nodes = [
            replace(node, role="decode" if at else "prefill", link=link, moves=moves) for at, node in enumerate(nodes)
        ]
    options = GatewayOptions(
        rate_per_s=draw(st.sampled_from([0.0, 5e7, 2e8])),
        burst=draw(st.integers(1, 3)),
        max_queue=draw(st.sampled_from([None, 0, 1, 3])),
        max_outstanding=draw(st.sampled_from([None, 1, 2])),
        timeout_ns=draw(st.sampled_from([0, 0, 20, 75, 150])),
        retries=draw(st.integers(0, 3)),
        backoff_ns=draw(st.sampled_from([0, 1, 30])),
        seed=draw(st.integers(0, 3)),
    )
    crashes = draw(st.lists(st.tuples(st.integers(0, len(nodes) - 1), st.integers(0, 300)), max_size=4))
    faults = Faults(
        tuple(crashes),
        mtbf_ns=draw(st.sampled_from([0, 0, 60, 300])),
        health_interval_ns=draw(st.sampled_from([0, 0, 50])),
        seed=draw(st.integers(0, 3)),
    )
    n = draw(st.integers(1, 10))
    turns = draw(st.booleans())
    trace = small_trace(n, draw(st.sampled_from([0, 5, 15, 40])))
    if turns:
        after = [row - 2 if row >= 2 else -1 for row in range(n)]
        trace = make_trace(trace.arrival_ns, trace.prompt_tokens, trace.output_tokens, after=after)
    return {
        "trace": trace,
        "replicas": nodes,
        "router": draw(st.sampled_from(sorted(ROUTERS))),
        "options": options,
        "faults": faults,
    }


def _run(case: dict[str, Any], **more: Any) -> ClusterResult:
    return simulate_cluster(
        case["trace"], case["replicas"], load_router(case["router"]), case["options"], case["faults"], **more
    )


@given(clusters())
@settings(max_examples=150)
def test_requests_are_conserved_under_crash_timeout_and_retry(case: dict[str, Any]) -> None:
    """Each request ends exactly once, a retried one counts once, and all blocks are free in the end; fast-forward
    changes nothing of it."""
    result = _run(case, check=True)
    conserved(result)
    same(result, _run(case, fast_forward=False))


@pytest.mark.slow
@given(clusters())
@settings(max_examples=4000)
def test_requests_are_conserved_in_many_more_clusters(case: dict[str, Any]) -> None:
    """The same on many more."""
    result = _run(case, check=True)
    conserved(result)
    same(result, _run(case, fast_forward=False))


def test_a_prompt_is_computed_here_and_its_output_there() -> None:
    """The first token comes after the prompt's step, the transfer of its blocks, and the step of its last token."""
    step = StepTime(step=1000.0, token=100.0, context=1.0)
    moves = replace(FREE_MOVES, block_bytes=64)
    config = SchedulerConfig(num_blocks=40, block_size=4, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    node = NodeSpec(config, step, moves, link=KvLink(1e8, 30))
    nodes = [replace(node, role="prefill"), replace(node, role="decode")]
    trace = make_trace([0, 20_000], [18, 18], [3, 1])
    result = simulate_cluster(trace, nodes, check=True)
    conserved(result)
    requests, attempts = result.requests(), result.attempts()
    prompt, transfer = 1000 + 18 * 100, 5 * 64 * 10 + 30  # five blocks of 64 bytes at 100 bytes a us
    first = prompt + 1 + transfer + (1000 + 100 + 17)
    assert requests["first_token_ns"].tolist() == [first, 20_000 + first]
    assert requests["finish_ns"][0] == first + (1000 + 100 + 18) + (1000 + 100 + 19)
    assert attempts["outcome"] == ["handed-over", "length"] * 2
    assert attempts["replica"].tolist() == [0, 1, 0, 1]


def test_two_prompts_share_a_link_one_after_another() -> None:
    """Of two that are handed over at once to one replica, the second comes a transfer later."""
    node = NodeSpec(SMALL, TOKEN, replace(FREE_MOVES, block_bytes=1000), role="decode", link=KvLink(1e9, 0))
    trace = make_trace([0, 0], [4, 4], [1, 1])
    result = simulate_cluster(trace, [replace(node, role="prefill"), node], check=True)
    conserved(result)
    queued = result.attempts()["queued_ns"][result.attempts()["leg"] == 2].tolist()
    assert queued[1] - queued[0] == 1000


def test_a_preempted_request_computes_its_prompt_again_where_it_decodes() -> None:
    """What was received is gone with its blocks: with too few of them decoding takes longer than without preemption."""
    config = SchedulerConfig(
        num_blocks=9, block_size=4, max_model_len=36, max_num_seqs=4, max_num_batched_tokens=36,
        enable_prefix_caching=False,
    )  # fmt: skip
    roomy = replace(config, num_blocks=40)
    step = StepTime(step=10.0, token=100.0)
    trace = make_trace([0, 0], [12, 12], [16, 16])
    took = {}
    for name, decode in (("tight", config), ("roomy", roomy)):
        nodes = [NodeSpec(roomy, step, role="prefill"), NodeSpec(decode, step, role="decode")]
        result = simulate_cluster(trace, nodes, check=True)
        conserved(result)
        took[name] = result.end_ns, int(result.requests()["num_preemptions"].sum())
    assert took["tight"][1] > 0 == took["roomy"][1]
    assert took["tight"][0] > took["roomy"][0] + 1200  # 12 tokens or more, at 100 each


def test_a_prompt_that_has_not_come_dies_with_either_replica() -> None:
    """A crash of the one that has it or of the one that is to have it ends the attempt; a retry serves the request."""
    node = NodeSpec(SMALL, TOKEN, replace(FREE_MOVES, block_bytes=1000), restart_ns=10, link=KvLink(1e7, 0))
    nodes = [replace(node, role="prefill"), replace(node, role="decode")]
    trace = make_trace([0], [4], [3])
    for dead in (0, 1):
        result = simulate_cluster(
            trace, nodes, None, GatewayOptions(retries=1, backoff_ns=100), Faults(((dead, 5000),)), check=True
        )
        conserved(result)
        assert result.attempts()["outcome"] == ["handed-over", "crashed", "handed-over", "length"]


def test_roles_that_cannot_serve_are_named() -> None:
    """Prompts alone, outputs alone, or some that do both beside some that do not."""
    node = NodeSpec(SMALL, TOKEN)
    with pytest.raises(SimError, match="must have the role decode"):
        simulate_cluster(small_trace(), [replace(node, role="prefill")])
    with pytest.raises(SimError, match="give each a role or none"):
        simulate_cluster(small_trace(), [replace(node, role="prefill"), node])
    with pytest.raises(SimError, match="role must be both, prefill or decode"):
        replace(node, role="router")


def test_a_bucket_lets_in_its_rate_and_its_burst() -> None:
    """Of 20 requests at once a burst of 5 gets in; of 20 that come at twice the rate, half, and the burst."""
    nodes = [NodeSpec(SMALL, TOKEN)]
    options = GatewayOptions(rate_per_s=1e7, burst=5)  # one each 100 ns
    at_once = simulate_cluster(small_trace(20, 0), nodes, None, options)
    assert Counter(at_once.requests()["outcome"]) == {"length": 5, "shed": 15}
    assert set(at_once.requests()["status"].tolist()) == {200, 429}
    steady = simulate_cluster(small_trace(40, 50), nodes, None, options)
    assert Counter(steady.requests()["outcome"])["length"] in (24, 25)


def test_a_full_queue_sheds() -> None:
    """One request runs, two wait, the others are refused with 503."""
    options = GatewayOptions(max_queue=2, max_outstanding=1)
    result = simulate_cluster(small_trace(6, 0), [NodeSpec(SMALL, TOKEN)], None, options)
    assert result.requests()["outcome"] == ["length"] * 3 + ["shed"] * 3
    assert result.attempts()["outcome"][3:] == ["queue-full"] * 3


def test_what_a_crash_loses_is_served_by_the_others() -> None:
    """With a retry nothing is lost; without, exactly those that ran there are."""
    nodes = [NodeSpec(SMALL, TOKEN)] * 2
    faults = Faults(((0, 30),))
    without = simulate_cluster(small_trace(), nodes, None, None, faults)
    at_crash = [
        row
        for row, sent, end, replica in zip(
            *(without.attempts()[k] for k in ("row", "sent_ns", "end_ns", "replica")), strict=True
        )
        if replica == 0 and sent <= 30 <= end
    ]
    assert [row for row, name in enumerate(without.requests()["outcome"]) if name == "failed"] == at_crash
    assert at_crash
    again = simulate_cluster(small_trace(), nodes, None, GatewayOptions(retries=1, backoff_ns=0), faults)
    assert set(again.requests()["outcome"]) == {"length"}
    assert int(again.requests()["retries"].sum()) == len(at_crash)


def test_a_replica_forgets_what_its_client_gave_up() -> None:
    """A request that times out while it runs ends at the next step; one that it has not seen yet never runs."""
    node = NodeSpec(SchedulerConfig(num_blocks=100, block_size=4, max_model_len=400), StepTime(step=100.0))
    trace = make_trace([0, 150], [4, 4], [300, 300])
    result = simulate_cluster(trace, [node], None, GatewayOptions(timeout_ns=1040), check=True)
    conserved(result)
    table = result.lives[0].life.recorder.requests()
    assert table["outcome"] == ["aborted", "aborted"]
    assert table["finish_ns"].tolist() == [1100, 1200]
    unseen = simulate_cluster(make_trace([0, 50], [4, 4], [300, 300]), [node], None, GatewayOptions(timeout_ns=40))
    conserved(unseen)
    assert unseen.attempts()["outcome"] == ["timeout", "timeout"]
    assert unseen.attempts()["life"].tolist() == [0, -1]


def test_those_in_the_queue_are_refused_when_the_last_replica_goes() -> None:
    """They do not wait for ever."""
    node = NodeSpec(SMALL, TOKEN)
    result = simulate_cluster(small_trace(5, 0), [node], None, GatewayOptions(max_outstanding=2), Faults(((0, 20),)))
    conserved(result)
    assert result.attempts()["outcome"] == ["crashed"] * 2 + ["no-replica"] * 3


def test_what_follows_an_answer_does_not_depend_on_whose_step_ends_first() -> None:
    """Steps of two replicas end together, and the turn after one goes to the other: the same step by step or not."""
    node = NodeSpec(SMALL, StepTime(step=10.0))
    trace = make_trace([0, 0, 0], [4, 4, 4], [40, 5, 3], after=[-1, -1, 1])
    fast = simulate_cluster(trace, [node] * 2, RoundRobin())
    assert fast.requests()["replica"].tolist() == [0, 1, 0]
    same(fast, simulate_cluster(trace, [node] * 2, RoundRobin(), fast_forward=False))


def test_what_comes_at_the_end_of_a_step_is_noticed_at_it() -> None:
    """A request that times out when a step ends, and is tried again at once: the same step by step or not."""
    config = SchedulerConfig(
        num_blocks=4, block_size=4, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=4,
        enable_prefix_caching=False,
    )  # fmt: skip
    trace = make_trace([0, 0, 0], [5, 6, 7], [3, 4, 5], after=[-1, -1, 0])
    options = GatewayOptions(timeout_ns=20, retries=1, backoff_ns=0)
    node = NodeSpec(config, StepTime(step=1.0, token=1.0))
    fast = simulate_cluster(trace, [node], None, options)
    assert fast.attempts()["queued_ns"].tolist() == [0, 0, 16, 21, 32]
    same(fast, simulate_cluster(trace, [node], None, options, fast_forward=False))


class OnceAt500(Faults):
    """The first life would end by itself after 500 ns."""

    def lives_ns(self, replica: int, life: int) -> int:
        return NEVER if life else 500


def test_a_life_ends_once() -> None:
    """One that was ended before its time takes its time with it: the next life goes on."""
    node = NodeSpec(SMALL, TOKEN, restart_ns=10)
    result = simulate_cluster(small_trace(60), [node], None, GatewayOptions(retries=1), OnceAt500(((0, 100),)))
    assert [record.ended_ns for record in result.lives] == [100, NEVER]
    assert result.end_ns > 600


def test_a_crash_is_noticed_at_the_next_health_check() -> None:
    """Until then requests go to the dead replica and are refused."""
    nodes = [NodeSpec(SMALL, TOKEN)] * 2
    result = simulate_cluster(small_trace(8), nodes, None, None, Faults(((0, 20),), health_interval_ns=50))
    refused = [
        int(at)
        for at, name in zip(result.attempts()["sent_ns"], result.attempts()["outcome"], strict=True)
        if name == "refused"
    ]
    assert refused == [30]
    faults = Faults(health_interval_ns=50)
    assert [faults.noticed_at(now) for now in (100, 101, 149, 150)] == [100, 150, 150, 150]


def test_without_any_replica_left_requests_are_refused() -> None:
    """Nobody waits for a replica that will not be back."""
    result = simulate_cluster(small_trace(6), [NodeSpec(SMALL, TOKEN)], None, None, Faults(((0, 20),)))
    assert result.attempts()["outcome"] == [
        "crashed",
        "crashed",
        "no-replica",
        "no-replica",
        "no-replica",
        "no-replica",
    ]


def test_a_restarted_replica_has_an_empty_cache() -> None:
    """The same prompt hits before the crash and not after it."""
    ids, tokens = [7, 7, 7], [16, 16, 16]
    trace = make_trace([0, 500, 2000], [16] * 3, [4] * 3, spans=([0, 1, 2, 3], ids, tokens))
    node = NodeSpec(SMALL, TOKEN, restart_ns=100)
    result = simulate_cluster(trace, [node], None, None, Faults(((0, 1000),)))
    assert result.requests()["cached_tokens"].tolist() == [0, 12, 0]
    assert [record.number for record in result.lives] == [0, 1]
    assert result.lives[0].ended_ns == 1000
    assert result.lives[1].started_ns == 1100


def test_replicas_that_crash_at_random_do_so_at_the_rate_asked_for() -> None:
    """The mean life is the one asked for, and restarts are spread over their range."""
    faults = Faults(mtbf_ns=1000, restart_ns=(100, 300), seed=1)
    lives = [faults.lives_ns(0, life) for life in range(4000)]
    downs = [faults.down_ns(0, life, NEVER) for life in range(4000)]
    assert np.mean(lives) == pytest.approx(1000, rel=0.05)
    assert np.mean(downs) == pytest.approx(200, rel=0.02)
    assert (min(downs), max(downs)) == (100, 300)
    assert load_ns(16 * 10**9, 1e9, 60) == 76 * 10**9


# ---- routers ----


def views(*outstanding: int) -> list[ReplicaView]:
    """Replicas with so many requests."""
    found = [ReplicaView(index, 1000, None) for index in range(len(outstanding))]
    for view, count in zip(found, outstanding, strict=True):
        view.outstanding = count
    return found


def request(row: int = 0, session: int = 0, trace: Trace | None = None) -> RoutedRequest:
    return RoutedRequest(trace or small_trace(), row, 1, session)


def test_routers_choose_as_they_say() -> None:
    """Round robin goes round, also past those that are left out; least loaded takes the least for its speed."""
    turn = RoundRobin()
    three = views(5, 0, 3)
    assert [turn.choose(request(), three, 0) for _ in range(4)] == [0, 1, 2, 0]
    assert turn.choose(request(), [three[0], three[2]], 0) == 2
    assert LeastLoaded().choose(request(), three, 0) == 1
    fast = ReplicaView(3, 1000, None, weight=10.0)
    fast.outstanding = 9
    assert LeastLoaded().choose(request(), [three[0], three[2], fast], 0) == 3


def test_the_power_of_two_takes_the_less_loaded_of_two() -> None:
    """The fullest of three is never chosen, and both others are."""
    router = PowerOfTwo()
    router.start(views(9, 0, 1), 5)
    trace = small_trace(60)
    chosen = Counter(router.choose(request(row, trace=trace), views(9, 0, 1), 0) for row in range(60))
    assert set(chosen) == {1, 2}
    assert chosen[1] > chosen[2]


def test_a_conversation_stays_where_it_is_while_its_replica_lives() -> None:
    """When a replica goes, only its own conversations move."""
    router = Session()
    router.start(views(0, 0, 0), 1)
    before = [router.choose(request(session=s), views(0, 0, 0), 0) for s in range(200)]
    after = [router.choose(request(session=s), views(0, 0, 0)[:2], 0) for s in range(200)]
    assert all(a == b for a, b in zip(after, before, strict=True) if b < 2)
    assert min(Counter(before).values()) > 40
    trace = make_trace([0, 0, 9, 9, 9], [4] * 5, [1] * 5, after=[-1, -1, 0, 1, 2])
    assert sessions_of(trace) == [0, 1, 0, 1, 0]


def test_the_prefix_router_goes_where_the_prompt_was() -> None:
    """To the longest match; elsewhere where load is uneven; and it forgets a replica that died."""
    trace = make_trace(
        [0] * 4, [100] * 4, [1] * 4, spans=([0, 2, 4, 5, 7], [1, 2, 1, 3, 9, 1, 2], [60, 40] * 2 + [100, 60, 40])
    )
    router = PrefixAffinity(balance_abs=8, balance_rel=1.5)
    router.start(views(0, 0), 0)
    router.sent(request(0, trace=trace), 1, 0)
    assert router.matched(request(1, trace=trace), 1) == 60
    assert router.choose(request(1, trace=trace), views(0, 3), 0) == 1
    assert router.choose(request(2, trace=trace), views(2, 1), 0) == 1
    assert router.choose(request(3, trace=trace), views(0, 9), 0) == 0
    router.lost(1)
    assert router.matched(request(3, trace=trace), 1) == 0


def test_the_prefix_router_remembers_as_much_as_a_replica_holds() -> None:
    """Of what a replica was sent the oldest is forgotten first, and of a prompt its end."""
    rows = 20
    trace = make_trace([0] * rows, [100] * rows, [1] * rows, spans=(np.arange(rows + 1), np.arange(rows), [100] * rows))
    router = PrefixAffinity()
    router.start(views(0), 0)  # which holds 1,000 tokens
    for row in range(rows):
        router.sent(request(row, trace=trace), 0, 0)
    known = [router.matched(request(row, trace=trace), 0) for row in range(rows)]
    assert known == [0] * 10 + [100] * 10


class Nowhere(Router):
    """Names a replica that does not exist."""

    def choose(self, request: RoutedRequest, replicas: Any, now: int) -> int:
        return 7


class Failing(Router):
    """Raises."""

    def choose(self, request: RoutedRequest, replicas: Any, now: int) -> int:
        return [][1]


def test_a_router_that_names_no_replica_is_told_in_one_sentence() -> None:
    """So are one that raises, and a cluster, a fault or a limit that cannot be."""
    nodes = [NodeSpec(SMALL, TOKEN)] * 2
    with pytest.raises(SimError, match=r"Nowhere chose 7 for request 0, .* none of the replicas .* \(0, 1\)\."):
        simulate_cluster(small_trace(), nodes, Nowhere())
    with pytest.raises(SimError, match="Router Failing fails on request 0: IndexError"):
        simulate_cluster(small_trace(), nodes, Failing())
    with pytest.raises(SimError, match="one replica or more"):
        simulate_cluster(small_trace(), [])
    with pytest.raises(SimError, match="names replica 2; there are 0 to 1"):
        simulate_cluster(small_trace(), nodes, None, None, Faults(((2, 5),)))
    with pytest.raises(SimError, match="max_outstanding must be 1 or more"):
        GatewayOptions(max_outstanding=0)


def test_a_router_of_ones_own_is_loaded_from_a_file(tmp_path: Path) -> None:
    """By path and class; what cannot be loaded is named, and how to name a built-in one."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from sim.routers import Router\n\n\nclass Last(Router):\n    def choose(self, request, replicas, now):\n"
        "        return replicas[-1].index\n\n\nclass Lazy(Router):\n    pass\n"
    )
    result = simulate_cluster(small_trace(), [NodeSpec(SMALL, TOKEN)] * 3, load_router(f"{path}:Last"))
    assert set(result.requests()["replica"].tolist()) == {2}
    with pytest.raises(SimError, match=r"must be a subclass of sim\.routers\.Router that defines choose"):
        load_router(f"{path}:Lazy")
    with pytest.raises(SimError, match="has no class Nobody"):
        load_router(f"{path}:Nobody")
    with pytest.raises(SimError, match="no file"):
        load_router("nowhere.py:Last")
    with pytest.raises(SimError, match="did you mean least-loaded"):
        load_router("least-load")
