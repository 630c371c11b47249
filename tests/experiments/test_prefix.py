"""The experiment on prefix caching, and the offline replay beneath it."""

from __future__ import annotations

import pytest

import traces
from experiments.experiment import shared_folder
from experiments.offline import replay
from experiments.prefix import MOONCAKE, documents, documents_of
from experiments.prefixplot import same_curves


@pytest.mark.parametrize(
    ("tokens", "percent"), [(1_000_000, 5.714), (2_000_000, 9.147), (4_000_000, 18.92), (8_000_000, 27.71)]
)
def test_the_core_hits_of_a_real_trace_what_an_lru_of_whole_ids_hits(tokens: int, percent: float) -> None:
    """Mooncake's conversations in blocks of 512: within 0.1 points of the statistics over ids of whole blocks."""
    path = shared_folder(None) / "data" / MOONCAKE
    if not path.is_file():
        pytest.skip(f"no {MOONCAKE} in the shared data (name the folder in KVTWIN_SHARED)")
    assert 100 * replay(traces.load(path), tokens, 512).share == pytest.approx(percent, abs=0.1)


@pytest.mark.parametrize(("size", "hit"), [(16, 240), (528, 0), (2096, 0)])
def test_a_common_prefix_hits_whole_blocks_only(size: int, hit: int) -> None:
    """floor(n / B) B tokens: 240 common tokens are nothing to a block of 528."""
    assert replay(documents_of(240), max(64, 1024 // size * 16) * size, size).hit_tokens == hit


def test_a_cycle_of_documents_larger_than_the_cache_is_the_worst_case_of_lru() -> None:
    """LRU loses most of each document just before it is asked for again; who knows the future keeps whole ones."""
    trace = documents(5)
    four = 4 * 8192 + 1024
    assert replay(trace, four, 16).hit_tokens < 8192
    future = replay(trace, four, 16, eviction_policy="belady")
    assert future.hit_tokens > 2 * 8192
    assert replay(trace, 6 * 8192, 16).hit_tokens == 10 * 8192


def test_no_policy_beats_the_one_that_knows_the_future() -> None:
    """On a cycle, Belady's hits are an upper bound for all others, whichever the index."""
    trace = documents(6)
    room = 4 * 8192 + 1024
    best = replay(trace, room, 16, eviction_policy="belady").hit_tokens
    for policy in ("lru", "fifo", "lfu", "2q", "cost-aware", "priority"):
        hits = {replay(trace, room, 16, eviction_policy=policy, prefix_index=i).hit_tokens for i in ("hash", "radix")}
        assert len(hits) == 1
        assert hits.pop() <= best


def test_policies_with_equal_curves_share_a_line() -> None:
    """Curves that are equal to 0.1 % are drawn once, under all of their names."""
    curves = [
        {"workload": "w", "policy": policy, "index": index, "capacity_tokens": size, "hit_share": share + size / 1000}
        for policy, index, share in (("lru", "hash", 0.1), ("fifo", "hash", 0.10001), ("lfu", "hash", 0.2))
        for size in (1, 2)
    ]
    assert same_curves(curves, "w") == {(10.1, 10.2): ["lru", "fifo"], (20.1, 20.2): ["lfu"]}
