"""From the configuration to what serves: the scheduler's options, policies, and the number of KV blocks."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.config import Config
from experiments.errors import UsageError
from experiments.metrics import Slo

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from sim.hardware import Device
    from sim.models import ModelSpec

__all__ = ["KvBlocks", "kv_blocks_of_device", "scheduler_config", "scheduler_options", "slo_of"]

CONTEXT_BYTES = int(0.35 * (1 << 30))
"""What the driver and its libraries hold beside the tensors."""
SAMPLER_COPIES = 6
"""Of float32 logits that sampling holds at once: logits, sorted ones, their 64-bit indices (two), shares, sums."""


def scheduler_options(config: Config) -> dict[str, Any]:
    """The options of engine.core's SchedulerConfig, but for the number of blocks and the longest request.

    Raises:
        PolicyError: a policy cannot be loaded.
    """
    from engine.core.policies import load_policy
    from engine.core.presets import SchedulerConfig, preset

    options = dict(preset(config.preset)) if config.preset else {}
    names = {field.name for field in fields(SchedulerConfig)}
    options |= {field.name: getattr(config, field.name) for field in fields(Config) if field.name in names}
    options["steps_in_flight"] = 2 if config.async_scheduling else 1
    options["policies"] = tuple(load_policy(name) for name in config.policy)
    options.pop("num_blocks", None)
    options.pop("max_model_len", None)
    return options


def scheduler_config(config: Config, num_blocks: int, longest: int) -> SchedulerConfig:
    """The scheduler's options.

    Args:
        longest: the model's own limit, in tokens.

    Raises:
        UsageError: --max-model-len is above it.
        CoreError: the options contradict each other, or a policy cannot be loaded.
    """
    from engine.core.presets import SchedulerConfig

    if config.max_model_len is not None and config.max_model_len > longest:
        raise UsageError(f"--max-model-len is {config.max_model_len}, but {config.model} ends at {longest} tokens.")
    return SchedulerConfig(
        num_blocks=num_blocks, max_model_len=config.max_model_len or longest, **scheduler_options(config)
    )


class KvBlocks(NamedTuple):
    """How many KV blocks there are, and why."""

    number: int
    assumption: str
    """One sentence; empty where the number was given."""


def kv_blocks_of_device(config: Config, spec: ModelSpec, device: Device) -> KvBlocks:
    """utilization x memory - weights - an allowance, in blocks; the allowance is an assumption, not a measurement.

    Raises:
        UsageError: nothing is left.
    """
    from sim.models import dtype_bytes

    tp = config.tensor_parallel_size
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    element = dtype_bytes(dtype)
    budget = int(config.gpu_memory_utilization * device.memory_bytes)
    weights = spec.weights_bytes(dtype, tp)
    activations = 3 * element * (spec.intermediate // tp + spec.hidden) * config.max_num_batched_tokens
    logits = SAMPLER_COPIES * 4 * spec.vocab * min(config.max_num_seqs, config.max_num_batched_tokens)
    allowance = CONTEXT_BYTES + max(activations, logits)
    left = budget - weights - allowance
    number = left // (spec.kv_bytes_per_token(kv_dtype, tp) * config.block_size)
    gib = 1 << 30
    sums = (
        f"{config.gpu_memory_utilization:g} x {device.memory_bytes / gib:.2f} GiB of memory - {weights / gib:.2f} GiB "
        f"of weights - {allowance / gib:.2f} GiB for the driver, activations and sampling"
    )
    if number < 1:
        raise UsageError(
            f"No memory is left for KV blocks on {device.name}: {sums}; use a smaller model, more devices, or "
            "--num-gpu-blocks-override."
        )
    return KvBlocks(int(number), f"{int(number):,} KV blocks of {config.block_size} tokens are assumed: {sums}.")


def slo_of(config: Config) -> Slo:
    """The limits that --slo-* name."""
    return Slo(config.slo_ttft_s, config.slo_tpot_s, config.slo_e2e_s)
