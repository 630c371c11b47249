"""What releases of vLLM do at start: their defaults, and how they find out what is left for KV.

Read from the sources of 0.19.1 and 0.33.0; for earlier releases from their logs and pull requests, which each entry
names. A version is described by the newest entry that is not newer than it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sim.errors import SimError
from sim.hardware import Device

__all__ = ["RELEASES", "Release", "release"]

_GIB = 1 << 30
CONTEXT_BYTES = int(0.415 * _GIB)
"""CUDA context and kernels of a process before it allocates anything: the mean of 0.44 GiB (RTX A6000, vLLM 0.6.4,
vllm#10360: non_torch_memory) and about 400 MB (RTX 3090, Sandermage/genesis-vllm-patches#24)."""
GROWTH_V0_BYTES = int(0.10 * _GIB)
"""What a profiling run adds outside of PyTorch, in releases that count only that: between 0.04 GiB (Qwen2.5-1.5B,
vLLM 0.7, vllm#12529) and 0.16 (H100, vllm#12126)."""
GROWTH_V1_BYTES = int(0.24 * _GIB)
"""The same with torch.compile and Triton kernels: Qwen3-8B on a card of 23.5 GiB, vLLM 0.21, LMCache#3430: 0.8 GiB
beside weights and graphs, of which the sampler takes 0.57."""
GRAPH_PROFILING_BYTES = int(0.15 * _GIB)
"""What is left behind by capturing graphs within the profiling run (0.17 to 0.20): gpt-oss-20b on an A100-80G, vLLM
0.19.0, utilization 0.65: 13.72 GiB of weights and 36.56 available leave 1.30 GiB, of which the sampler takes 0.77, the
workspace of the experts 0.13 and `GROWTH_V1_BYTES` 0.24 (myoceane.fr, 2026-04-18). With the 79.25 GiB that newer
drivers report it would be 0.09."""
FRAGMENTATION_BYTES = int(0.35 * _GIB)
"""Reserved by PyTorch's allocator beyond the peak that was allocated: vllm#2031 began to count all that the device
lacks, and Llama-2-7B on an A100 went from 7,449 blocks of 8 MiB to 7,351; the context is `CONTEXT_BYTES` of that."""
NCCL_BYTES = int(0.25 * _GIB)
"""Buffers of a communicator on each device: non_torch_memory of two and more devices (0.25, 0.30 and 0.33 GiB in
vllm#13061, #15815 and #14452) less what one device has (0.04, vllm#12529)."""
GRAPH_BYTES = 4 << 20
"""Of one captured graph: 0.26 GiB for 86 (LMCache#3326) to 0.52 GiB for 86 (LMCache#3430), and 0.11 for 30
(aivrar/vllm-windows-build#4)."""


@dataclass(frozen=True, slots=True)
class Release:
    """The rules of one release and those after it."""

    since: tuple[int, int, int]
    engine: str
    """`V0` or `V1`."""
    utilization: float = 0.90
    swap_gib: float = 0.0
    """Host memory that swapping takes by default; V1 does not swap."""
    sampler: str = "sort"
    """What the profiling run samples with: torch's `sort`, a `triton` kernel, or `flashinfer`."""
    counts_context: bool = False
    """Whether memory outside of PyTorch counts as a whole, or only what was added after the engine's first look."""
    counts_reserved: bool = False
    """Whether what the allocator has reserved counts, or what was allocated at the peak."""
    growth_bytes: int = 0
    graph_profiling_bytes: int = 0
    counts_graphs: bool = False
    expert_workspace: bool = False
    """Whether the buffers of the experts are kept, so that they are there while the sampler runs."""
    chunked_above: int = 0
    """V0: the max_model_len above which chunked prefill is on by default; 0: never."""
    chunked_tokens: int = 512
    """V0: max_num_batched_tokens with chunked prefill."""
    null_block: bool = False
    source: str = ""

    @property
    def name(self) -> str:
        return ".".join(str(part) for part in self.since)

    def batch_defaults(self, device: Device) -> tuple[int, int]:
        """(max_num_batched_tokens, max_num_seqs) of V1's server on this device: EngineArgs.get_batch_defaults."""
        if self.since >= (0, 33, 0) and device.memory_bytes >= 160 * _GIB:
            return 16384, 1024
        if device.memory_bytes >= 70 * _GIB and "a100" not in device.name:
            return 8192, 1024
        return 2048, 256


_V0 = Release((0, 2, 5), "V0", swap_gib=4, counts_context=True, counts_reserved=True, source="vllm#2031")
_CUT = replace(_V0, since=(0, 5, 4), chunked_above=32768, source="vllm#6666")
_PEAK = replace(_CUT, since=(0, 6, 4), counts_reserved=False, source="vllm#9352")
_V1 = Release((0, 8, 0), "V1", null_block=True, growth_bytes=GROWTH_V1_BYTES, source="V1 by default")
_TRITON = replace(
    _V1,
    since=(0, 17, 0),
    sampler="triton",
    expert_workspace=True,
    graph_profiling_bytes=GRAPH_PROFILING_BYTES,
    source="gpu_worker.determine_available_memory and topk_topp_sampler of 0.19.1",
)
_GRAPHS = replace(_TRITON, since=(0, 21, 0), graph_profiling_bytes=0, counts_graphs=True, source="vllm#30515")
_HIGHER = replace(_GRAPHS, since=(0, 22, 0), utilization=0.92, source="CacheConfig")
RELEASES: tuple[Release, ...] = (
    _V0,
    _CUT,
    _PEAK,
    replace(_PEAK, since=(0, 6, 5), chunked_tokens=2048, source="vllm#10511"),
    replace(
        _PEAK,
        since=(0, 7, 0),
        chunked_tokens=2048,
        counts_context=False,
        growth_bytes=GROWTH_V0_BYTES,
        source="vllm#12126",
    ),
    _V1,
    _TRITON,
    _GRAPHS,
    _HIGHER,
    replace(
        _HIGHER,
        since=(0, 33, 0),
        sampler="flashinfer",
        source="gpu_worker, worker/gpu/model_runner and worker/gpu/sample of 0.33.0",
    ),
)
"""From the oldest to the newest."""


def release(version: str) -> Release:
    """The rules of a version such as 0.19 or 0.6.4.post1. Raises SimError where it is none or too old."""
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[.\-+]?[a-z].*)?", version.strip())
    if match is None:
        raise SimError(f"'{version}' is no version of vLLM; give one such as 0.19.1 for --vllm-version.")
    parts = tuple(int(part or 0) for part in match.groups())
    known = [entry for entry in RELEASES if entry.since <= parts]
    if not known:
        raise SimError(
            f"vLLM {version} is older than {RELEASES[0].name}, the oldest that is described; give a newer one."
        )
    return known[-1]
