"""How long block moves take on this machine: bytes x count x direction, timed through the pools that serve.

On a GPU the host's memory is page-locked (`pinned`) or not (`pageable`); a CPU has no link, its copies are `plain`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernels.cache import HostKVCache, PagedKVCache

__all__ = ["COUNTS", "DIRECTIONS", "measure_copies"]

COUNTS = (1, 2, 4, 8, 16, 32)
"""Blocks in a batch."""
DIRECTIONS = ("store", "load", "local")
"""Device to host, host to device, within the device."""
_SIZES = (0.25, 1.0, 4.0)
"""Bytes of a block over those of the engine's: what a copy costs and what a byte costs are told apart by these."""
_LIMIT_BYTES = 64 << 20
"""The longest batch that is timed."""
_REPEATS = 9


def measure_copies(cache: PagedKVCache, seed: int = 0, repeats: int = _REPEATS) -> list[dict[str, Any]]:
    """One entry for each direction, kind of host memory, size of a block and number of blocks.

    Blocks are scattered over scratch pools like `cache`, which is not touched. `ns_median`, `ns_p25` and `ns_p75` are
    of the whole batch, until its last byte has arrived; the first of `repeats` + 1 rounds is not counted. Rounds go
    through all batches, so that another program which has the machine for a moment does not spoil all samples of one.
    """
    memories = ("pinned", "pageable") if cache.keys.is_cuda else ("plain",)
    rng = np.random.default_rng(seed)
    entries: list[dict[str, Any]] = []
    for size in sorted({max(1, round(cache.block_size * factor)) for factor in _SIZES}):
        block_bytes = cache.block_bytes * size // cache.block_size
        counts = [count for count in COUNTS if count == 1 or count * block_bytes <= _LIMIT_BYTES]
        num_blocks = 2 * max(counts)
        scratch = PagedKVCache(
            cache.num_layers,
            num_blocks,
            size,
            cache.num_kv_heads,
            cache.head_dim,
            cache.dtype,
            cache.keys.device,
        )
        for memory in memories:
            host = HostKVCache(scratch, num_blocks, pinned=memory == "pinned")
            batches = [
                (direction, count)
                for direction in (DIRECTIONS if memory == memories[0] else DIRECTIONS[:2])
                for count in counts
            ]
            samples: list[list[int]] = [[] for _ in batches]
            for _ in range(repeats + 1):
                for times, (direction, count) in zip(samples, batches, strict=True):
                    order = rng.permutation(num_blocks)
                    times.append(
                        _time(scratch, host, direction, order[:count].tolist(), order[count:][:count].tolist())
                    )
            for times, (direction, count) in zip(samples, batches, strict=True):
                low, middle, high = statistics.quantiles(times[1:], n=4, method="inclusive")
                entries.append(
                    {
                        "direction": direction,
                        "memory": memory,
                        "blocks": count,
                        "bytes": count * block_bytes,
                        "ns_median": round(middle),
                        "ns_p25": round(low),
                        "ns_p75": round(high),
                    }
                )
    return entries


def _time(
    cache: PagedKVCache, host: HostKVCache, direction: str, sources: Sequence[int], destinations: Sequence[int]
) -> int:
    began = time.perf_counter_ns()
    if direction == "store":
        host.store(sources, destinations)
    elif direction == "load":
        host.load(sources, destinations)
    else:
        where = cache.keys.device
        cache.copy_blocks(torch.tensor(sources, device=where), torch.tensor(destinations, device=where))
        if where.type == "cuda":
            torch.cuda.current_stream().synchronize()
    return time.perf_counter_ns() - began
