"""From the configuration to the engine's own options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.config import Config
from experiments.errors import UsageError
from experiments.serving import cost_of, scheduler_options

if TYPE_CHECKING:
    from engine.exec.engine import EngineArgs

__all__ = ["engine_args"]

_SHARED = (
    *("long_prefill_token_threshold", "long_prefill_threshold_alone", "watermark", "null_block"),
    *("scheduler_reserve_full_isl", "same_step", "free_order", "prefix_index", "prefix_stats", "eviction_policy"),
    *("victim_policy", "batching", "admission_reserve"),
    *("scheduling_policy", "block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "policies"),
    *("allocator", "placement"),
)
"""Options of the scheduler that the engine takes by the same name."""


def engine_args(config: Config) -> EngineArgs:
    """The engine's options.

    Raises:
        UsageError: the engine cannot do what an option asks.
        CoreError: an option of the scheduler is out of range, or a policy cannot be loaded.
    """
    from engine.core.presets import usable_blocks
    from engine.exec.engine import EngineArgs

    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config, name) > 1:
            raise UsageError(f"--{name.replace('_', '-')} above 1 is not supported by the engine yet; leave it at 1.")
    if config.kv_cache_dtype not in ("auto", config.dtype):
        raise UsageError("--kv-cache-dtype must be auto or that of --dtype: the engine has no other KV cache yet.")
    scheduler = scheduler_options(config)
    if scheduler["max_num_batched_tokens"] < scheduler["max_num_seqs"]:
        raise UsageError(
            f"--max-num-batched-tokens ({config.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({config.max_num_seqs}), or some running requests would never get a turn."
        )
    blocks = config.num_gpu_blocks_override
    return EngineArgs(
        model=config.model,
        load_format=config.load_format,
        dtype=config.dtype,
        device=config.device,
        seed=config.seed,
        threads=config.threads,
        max_model_len=config.max_model_len,
        num_gpu_blocks_override=None if blocks is None else usable_blocks(blocks, config.preset),
        async_scheduling=config.async_scheduling,
        gpu_memory_utilization=config.gpu_memory_utilization,
        preemption_mode=config.preemption_mode,
        swap_space=config.swap_space,
        kv_offloading_size=config.kv_offloading_size,
        cost_model=cost_of(config),
        parallel_sampling=config.parallel_sampling,
        **{name: scheduler[name] for name in _SHARED},
    )
