"""A shared link: alone, in company, in many copies, and against a walk in small steps."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import SimError
from sim.transfers import Link


def ends(link_options: dict[str, float], transfers: list[tuple[int, int, int]]) -> list[int]:
    """When each of (start in ns, bytes, copies) ends."""
    env = simpy.Environment()
    link = Link(env, **link_options)  # type: ignore[arg-type]
    found = [0] * len(transfers)

    def one(index: int, start: int, num_bytes: int, copies: int):  # type: ignore[no-untyped-def]
        yield env.timeout(start)
        yield link.transfer(num_bytes, copies)
        found[index] = int(env.now)

    for index, transfer in enumerate(transfers):
        env.process(one(index, *transfer))
    env.run()
    assert link.num_open == 0
    assert link.bytes_moved == sum(num_bytes for _, num_bytes, _ in transfers)
    return found


def test_alone_it_takes_latency_and_bytes_over_bandwidth() -> None:
    """1 MB over 10 GB/s behind 5 us: 105 us."""
    assert ends({"bandwidth": 10e9, "latency_ns": 5_000}, [(0, 1_000_000, 1)]) == [105_000]


def test_two_share() -> None:
    """Two at once take twice as long each; one that comes half-way shares the rest."""
    link = {"bandwidth": 1e9}
    assert ends(link, [(0, 1_000, 1), (0, 1_000, 1)]) == [2_000, 2_000]
    assert ends(link, [(0, 1_000, 1), (500, 1_000, 1)]) == [1_500, 2_000]
    assert ends(link, [(0, 3_000, 1), (0, 1_000, 1)]) == [4_000, 2_000]


@pytest.mark.parametrize("per_copy_ns", [1_000, 10_000])
def test_a_thousand_copies_cost_a_thousand_times_a_copy(per_copy_ns: int) -> None:
    """A swap of a thousand blocks of 2 MiB: the ratio to one gathered copy is what the cost of a copy implies."""
    block, rate, latency = 2 << 20, 25e9, 10_000
    link = {"bandwidth": rate, "latency_ns": latency, "per_copy_ns": per_copy_ns}
    many, one = ends(link, [(0, 1000 * block, 1000)])[0], ends(link, [(0, 1000 * block, 1)])[0]
    moved = 1000 * block / rate * 1e9
    assert many / one == pytest.approx(
        (latency + 1000 * per_copy_ns + moved) / (latency + per_copy_ns + moved), rel=1e-6
    )


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.just(1)), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_sharing_is_a_walk_in_small_steps(transfers: list[tuple[int, int, int]], rate: int) -> None:
    """In steps of a hundredth of a ns, each gives every open transfer its part: the same ends to the ns."""
    left = {index: float(num_bytes) for index, (_, num_bytes, _) in enumerate(transfers)}
    walked: dict[int, float] = {}
    tick = 0
    small = 100
    while left:
        now = tick / small
        open_now = [index for index in left if transfers[index][0] <= now]
        for index in open_now:
            left[index] -= rate / small / len(open_now)
            if left[index] <= 1e-9:
                walked[index] = now + 1 / small
        left = {index: rest for index, rest in left.items() if index not in walked}
        tick += 1
    for index, end in enumerate(ends({"bandwidth": rate * 1e9}, transfers)):
        assert end == pytest.approx(walked[index], abs=len(transfers) + 0.2)  # each end is a whole ns


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 3)), min_size=1, max_size=20))
def test_no_byte_is_lost_and_no_link_faster_than_it_is(transfers: list[tuple[int, int, int]]) -> None:
    """All end, none before it would alone, and all together not before the link could have moved all."""
    options = {"bandwidth": 2e9, "latency_ns": 300, "per_copy_ns": 40}
    found = ends(options, transfers)
    for end, (start, num_bytes, copies) in zip(found, transfers, strict=True):
        assert end >= start + 300 + 40 * copies + num_bytes / 2
    assert max(found) >= min(start for start, _, _ in transfers) + sum(num_bytes for _, num_bytes, _ in transfers) / 2


def test_what_cannot_be_moved_is_said() -> None:
    """A link without bandwidth, fewer than no bytes, no copy."""
    env = simpy.Environment()
    with pytest.raises(SimError, match="bandwidth above 0"):
        Link(env, 0)
    with pytest.raises(SimError, match="0 ns or more"):
        Link(env, 1, latency_ns=-1)
    for num_bytes, copies in ((-1, 1), (1, 0)):
        with pytest.raises(SimError, match="1 or more copies"):
            Link(env, 1).transfer(num_bytes, copies)
