"""Pages copied on the device, to the host and back, against slow references."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kernels.cache import (  # noqa: E402
    HostKVCache,
    PagedKVCache,
    copy_reference,
    load_reference,
    store_reference,
)

DEVICE_BLOCKS, HOST_BLOCKS = 9, 7


def caches(seed: int, block_size: int) -> tuple[PagedKVCache, HostKVCache]:
    """A device and a host pool with random content everywhere, the padding page too."""
    cache = PagedKVCache(2, DEVICE_BLOCKS, block_size, 3, 4, torch.float32)
    host = HostKVCache(cache, HOST_BLOCKS)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (cache.keys, cache.values, host.pages):
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return cache, host


def assert_equal(one: tuple[PagedKVCache, HostKVCache], other: tuple[PagedKVCache, HostKVCache]) -> None:
    assert torch.equal(one[0].keys, other[0].keys)
    assert torch.equal(one[0].values, other[0].values)
    assert torch.equal(one[1].pages, other[1].pages)


@st.composite
def pairs(draw, sources: int, destinations: int, apart: bool):
    """Some sources, perhaps repeated, and as many destinations, none twice (and, if `apart`, none a source)."""
    ends = draw(st.lists(st.integers(0, destinations - 1), min_size=1, max_size=destinations - 1, unique=True))
    allowed = [i for i in range(sources) if not (apart and i in ends)]
    return draw(st.lists(st.sampled_from(allowed), min_size=len(ends), max_size=len(ends))), ends


@given(pairs(DEVICE_BLOCKS, DEVICE_BLOCKS, True), st.integers(0, 99), st.sampled_from([1, 2, 5]))
def test_copies_on_the_device_equal_the_reference(moves, seed, block_size):
    """A batch of copies moves exactly the named pages, in all layers, and touches nothing else."""
    fast, slow = caches(seed, block_size), caches(seed, block_size)
    fast[0].copy_blocks(torch.tensor(moves[0]), torch.tensor(moves[1]))
    copy_reference(slow[0], *moves)
    assert_equal(fast, slow)


@given(pairs(DEVICE_BLOCKS, HOST_BLOCKS, False), st.integers(0, 99), st.sampled_from([1, 2, 5]))
def test_stores_equal_the_reference(moves, seed, block_size):
    """Scattered device pages arrive at the named host pages, and nothing else changes."""
    fast, slow = caches(seed, block_size), caches(seed, block_size)
    fast[1].store(*moves)
    store_reference(*slow, *moves)
    assert_equal(fast, slow)


@given(pairs(HOST_BLOCKS, DEVICE_BLOCKS, False), st.integers(0, 99), st.sampled_from([1, 2, 5]))
def test_loads_equal_the_reference(moves, seed, block_size):
    """Host pages arrive at the named device pages, and nothing else changes."""
    fast, slow = caches(seed, block_size), caches(seed, block_size)
    fast[1].load(*moves)
    load_reference(*slow, *moves)
    assert_equal(fast, slow)


@given(st.permutations(range(DEVICE_BLOCKS)), st.permutations(range(HOST_BLOCKS)), st.integers(1, HOST_BLOCKS))
def test_a_round_trip_over_the_host_is_the_identity(device, host, count):
    """What is stored, overwritten on the device and loaded to other pages is what it was, bit by bit."""
    cache, pool = caches(3, 2)
    sources, through = list(device[:count]), list(host[:count])
    kept = cache.gather_blocks(torch.tensor(sources))
    pool.store(sources, through)
    cache.keys.zero_()
    cache.values.zero_()
    landed = list(device[-count:])
    pool.load(through, landed)
    assert torch.equal(cache.gather_blocks(torch.tensor(landed)), kept)
