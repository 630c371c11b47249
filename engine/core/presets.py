"""The scheduler's options, and the engines whose behaviour they can take on."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.batching import BATCHINGS
from engine.core.cost import CostModel
from engine.core.errors import ConfigError
from engine.core.eviction import EVICTIONS
from engine.core.extents import PLACEMENTS
from engine.core.orders import ORDERS
from engine.core.policies import Batching, Policy
from engine.core.pool import FREE_ORDERS
from engine.core.victims import VICTIMS

__all__ = [
    "ADMISSION_RESERVES",
    "PREEMPTION_MODES",
    "PRESETS",
    "SAME_STEP",
    "SchedulerConfig",
    "host_blocks",
    "preset",
    "usable_blocks",
]

SAME_STEP = ("share", "off", "defer")
PREFIX_INDICES = ("hash", "radix")
ALLOCATORS = ("paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle")
PREEMPTION_MODES = ("recompute", "swap", "swap-groups", "auto", "reject")
ADMISSION_RESERVES = ("prompt", "max_tokens")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler decides by. Option names are vLLM's where vLLM has the option.

    Raises:
        ConfigError: a value is out of range.
    """

    num_blocks: int
    """Usable KV blocks of the device."""
    max_model_len: int
    """Most tokens of a request, prompt and output together."""
    block_size: int = 16
    """Tokens a block."""
    max_num_seqs: int = 256
    """Most running requests."""
    max_num_batched_tokens: int = 2048
    """Most new tokens in a step, prefill and decode together."""
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    """Share of the blocks that an admission leaves free, as long as something is running."""
    null_block: bool = False
    """Whether there is one more block, which no request gets, but which counts in that share (vLLM's null block)."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in a step; 0: no such limit."""
    long_prefill_threshold_alone: bool = True
    """Whether that limit also holds while there is no other request, running or waiting. In vLLM 0.33 it does not."""
    num_lookahead_tokens: int = 0
    """Slots that a request is given beyond the tokens of the step (speculative decoding)."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if its whole prompt fits, not merely its first chunk."""
    same_step: str = "share"
    """A prefix that a step in flight writes: `share` it at once, `off` (compute it again), or `defer` until written."""
    free_order: str = "blank-first"
    """Which free blocks are used first: see engine.core.pool."""
    prefix_index: str = "hash"
    """How cached prefixes are found: `hash` (a dictionary of chained keys) or `radix` (a tree); the same are."""
    prefix_stats: bool = False
    """Whether to keep account of why prompts were not hit: see engine.core.prefixstats."""
    eviction_policy: str = "lru"
    """Which cached block is given up when there is no blank one: `lru`, or see engine.core.eviction."""
    allocator: str = "paged"
    """`paged`, or how many tokens a contiguous run is reserved for: see engine.core.contiguous. Those cache nothing."""
    placement: str = "first-fit"
    """Where a contiguous run is put: see engine.core.extents."""
    preemption_mode: str = "recompute"
    """What becomes of a request that loses its blocks: `recompute` (drop them), `swap` (to the host and back), `auto`
    (what `cost_model` says is cheaper), `reject` (end it), or `swap-groups`, as vLLM V0: swap sequences of a request
    with several, recompute others. Where the host has no room, a swap becomes a recompute."""
    num_host_blocks: int = 0
    """Blocks of host memory, for swapped requests and the host tier."""
    host_tier: bool = False
    """Copy cached blocks to the host too, and bring them back on a hit that the device has lost."""
    transfer_lease_ns: int = 60_000_000_000
    """How long a transfer of the host tier may take before it counts as failed."""
    cost_model: CostModel | None = None
    """For preemption_mode `auto`."""
    scheduling_policy: str = "fcfs"
    """Who is served first: see engine.core.orders."""
    victim_policy: str = "last-in"
    """Who loses its blocks: see engine.core.victims."""
    batching: str = "mixed"
    """Prefills and decodes in a step: see engine.core.batching."""
    admission_reserve: str = "prompt"
    """What must be free for a request to be admitted: its `prompt`, or blocks up to prompt + `max_tokens`, for it and
    all that run, so that nobody is ever preempted (as in TensorRT-LLM's GUARANTEED_NO_EVICT)."""
    steps_in_flight: int = 1
    """1: schedule, run, complete. 2: schedule the next step while one runs (asynchronous scheduling)."""
    policies: tuple[Policy, ...] = field(default=())
    """A user's own policies; each replaces the built-in one of its kind."""

    def __post_init__(self) -> None:
        at_least_1 = ("num_blocks", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens")
        for name in at_least_1:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("long_prefill_token_threshold", "num_lookahead_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}; it must be at least 0 and below 1")
        if self.steps_in_flight not in (1, 2):
            raise ConfigError(f"steps_in_flight is {self.steps_in_flight}; it must be 1 or 2")
        if self.num_host_blocks < 0:
            raise ConfigError(f"num_host_blocks is {self.num_host_blocks}; it must be 0 or more")
        if self.transfer_lease_ns < 1:
            raise ConfigError(f"transfer_lease_ns is {self.transfer_lease_ns}; it must be at least 1")
        if self.preemption_mode in ("swap", "auto") and not self.num_host_blocks:
            raise ConfigError(
                f"preemption_mode is {self.preemption_mode!r}, but there are no host blocks to swap to; set swap_space"
            )
        if self.preemption_mode == "auto" and self.cost_model is None:
            raise ConfigError("preemption_mode is 'auto', which needs a cost model; give a calibration that has swaps")
        if self.host_tier and not (self.num_host_blocks and self.enable_prefix_caching):
            raise ConfigError("host_tier needs host blocks and enable_prefix_caching")
        if self.host_tier and self.allocator != "paged":
            raise ConfigError(f"host_tier needs allocator paged, but it is {self.allocator!r}, which caches nothing")
        if self.host_tier and (self.batching != "mixed" or any(isinstance(p, Batching) for p in self.policies)):
            raise ConfigError("host_tier needs batching 'mixed': a load would make other ways of batching wait")
        if self.prefix_stats and not self.caches_prefixes:
            raise ConfigError("prefix_stats needs enable_prefix_caching and allocator paged: without, nothing is hit")
        choices = {
            "preemption_mode": PREEMPTION_MODES,
            "same_step": SAME_STEP,
            "free_order": FREE_ORDERS,
            "prefix_index": PREFIX_INDICES,
            "eviction_policy": ("lru", *EVICTIONS),
            "allocator": ALLOCATORS,
            "placement": PLACEMENTS,
            "scheduling_policy": ORDERS,
            "victim_policy": VICTIMS,
            "batching": BATCHINGS,
            "admission_reserve": ADMISSION_RESERVES,
        }
        if self.eviction_policy != "lru" and self.free_order != "blank-first":
            raise ConfigError(
                f"eviction_policy is {self.eviction_policy!r}, which gives out blank blocks first; it cannot be used "
                f"with free_order {self.free_order!r}"
            )
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or some running requests would never get a turn"
            )

    @property
    def caches_prefixes(self) -> bool:
        """Whether a request can be given blocks that another one has computed."""
        return self.enable_prefix_caching and self.allocator == "paged"

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * (self.num_blocks + self.null_block))


PRESETS: dict[str, dict[str, object]] = {
    "vllm-0.19": {
        "free_order": "single-queue",
        "same_step": "share",
        "watermark": 0.0,
        "null_block": True,
        "long_prefill_threshold_alone": True,
        "scheduler_reserve_full_isl": True,
        "enable_prefix_caching": True,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
    },
    "vllm-0.33": {
        "free_order": "blank-first",
        "same_step": "share",
        "watermark": 0.0,
        "null_block": True,
        "long_prefill_threshold_alone": False,
        "scheduler_reserve_full_isl": True,
        "enable_prefix_caching": True,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
    },
    "vllm-v0": {
        "batching": "prefill-first",
        "preemption_mode": "swap-groups",
        "free_order": "single-queue",
        "same_step": "off",
        "watermark": 0.01,
        "scheduler_reserve_full_isl": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
    },
    "sglang": {
        "batching": "prefill-first",
        "scheduling_policy": "fcfs",
        "prefix_index": "radix",
        "free_order": "blank-first",
        "same_step": "off",
        "enable_prefix_caching": True,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "block_size": 1,
    },
    "trtllm-no-evict": {
        "admission_reserve": "max_tokens",
        "scheduler_reserve_full_isl": True,
        "enable_prefix_caching": True,
        "max_num_seqs": 2048,
        "max_num_batched_tokens": 8192,
        "block_size": 32,
    },
    "trtllm-max-utilization": {
        "admission_reserve": "prompt",
        "scheduler_reserve_full_isl": True,
        "enable_prefix_caching": True,
        "max_num_seqs": 2048,
        "max_num_batched_tokens": 8192,
        "block_size": 32,
    },
    "orca": {
        "allocator": "contiguous-max",
        "placement": "buddy",
        "scheduling_policy": "fcfs",
        "batching": "mixed",
        "enable_prefix_caching": False,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
    },
    "hf-static": {
        "allocator": "contiguous-max",
        "placement": "first-fit",
        "scheduling_policy": "fcfs",
        "batching": "static",
        "enable_prefix_caching": False,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 65536,
        "block_size": 16,
    },
}
"""Options by the engine and version whose scheduler they stand for; what each leaves out is in docs/policies.md.

vllm-0.19, vllm-0.33     vLLM 0.19.1 and 0.33.0: repeat recorded decisions of theirs
vllm-v0                  vLLM's first scheduler, as of 0.6, without chunked prefill
sglang                   SGLang 0.5, page size 1, schedule policy fcfs (its default; lpm is the other)
trtllm-no-evict          TensorRT-LLM 1.x, capacity scheduler policy GUARANTEED_NO_EVICT, its default
trtllm-max-utilization   the same, MAX_UTILIZATION
orca                     iteration-level scheduling, one reservation of the longest length: Orca (Max) of the paper on
                         PagedAttention
hf-static                static batches, one reservation of the longest length: transformers, FasterTransformer
"""
PRESETS["vllm-v1"] = PRESETS["vllm-0.33"]


def preset(name: str) -> dict[str, object]:
    """The options of a preset, by name.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])


def usable_blocks(num_blocks: int, preset_name: str | None) -> int:
    """How many of `num_blocks` KV blocks requests can have: vLLM keeps one of them for itself, the null block."""
    options = PRESETS.get(preset_name or "", {})
    return num_blocks - 1 if options.get("null_block") else num_blocks


def host_blocks(swap_space: float, kv_offloading_size: float, preemption_mode: str, block_bytes: int) -> int:
    """Blocks of host memory: both sizes, in GiB, over a block's bytes. Swap space counts where something swaps."""
    swaps = preemption_mode in ("swap", "auto", "swap-groups")
    return int(((swap_space if swaps else 0.0) + kv_offloading_size) * (1 << 30)) // block_bytes
