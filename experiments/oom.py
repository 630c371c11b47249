"""`--oom`: from the options to what watches the steps, and what to say of the events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from experiments.config import Config
from experiments.errors import UsageError

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from experiments.terminal import Terminal
    from sim.memory import Plan
    from sim.models import ModelSpec
    from sim.oom import MemoryGuard

__all__ = ["describe_oom", "guard_of", "show_oom", "unprofiled_bytes"]

_GIB = 1 << 30


def guard_of(config: Config, options: SchedulerConfig) -> MemoryGuard | None:
    """What watches the steps of a simulation; None without --oom.

    Raises:
        UsageError: there is no device whose memory could run out, or an option says something without --oom.
    """
    if config.oom == "off":
        for name in ("attention_backend", "prompt_logprobs", "memory_growth"):
            if getattr(config, name) != Config.__dataclass_fields__[name].default:
                raise UsageError(
                    f"--{name.replace('_', '-')} is about memory of a step: add --oom crash or --oom report."
                )
        return None
    if config.hardware is None:
        raise UsageError("--oom needs --hardware: the device whose memory may run out.")
    from sim.models import load_model
    from sim.oom import MemoryGuard, Transients

    made = _plan(config, load_model(config.model), unprofiled_bytes(config, load_model(config.model)))
    blocks = options.num_blocks + (1 if options.null_block else 0)
    return MemoryGuard(
        Transients(made, config.attention_backend, config.prompt_logprobs),
        config.oom,
        int(config.memory_growth * _GIB),
        blocks,
    )


def unprofiled_bytes(config: Config, spec: ModelSpec) -> int:
    """With --profile-transients, what the profiling run finds beside the layers; else 0."""
    if not config.profile_transients or config.hardware is None:
        return 0
    from sim.oom import Transients

    return Transients(_plan(config, spec), config.attention_backend, config.prompt_logprobs).unprofiled()


def _plan(config: Config, spec: ModelSpec, extra_peak: int = 0) -> Plan:
    from sim.hardware import load_device
    from sim.memory import MemoryRequest, plan

    assert config.hardware is not None
    return plan(
        MemoryRequest(
            spec,
            load_device(config.hardware),
            config.vllm_version,
            config.tensor_parallel_size,
            utilization=config.gpu_memory_utilization,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            dtype=None if config.dtype == "auto" else config.dtype,
            kv_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            quantization=config.quantization,
            extra_peak=extra_peak,
        )
    )


def describe_oom(guard: MemoryGuard, requests: Mapping[str, Any]) -> dict[str, Any]:
    """The events of a simulation, as the summary has them; of many, the first hundred."""
    return {
        "mode": guard.mode,
        "attention_backend": guard.transients.attention,
        "room_bytes": guard.room,
        "num_events": len(guard.events),
        "crashed": guard.crashed,
        "lost_requests": sum(outcome == "unfinished" for outcome in requests["outcome"]),
        "events": [asdict(event) for event in guard.events[:100]],
    }


def show_oom(found: dict[str, Any], terminal: Terminal) -> None:
    """One line on what ran out, and which batch did it."""
    if not found["num_events"]:
        terminal.print(f"Every step fitted: {found['room_bytes'] / _GIB:,.2f} GiB were there beside all that stays.")
        return
    first = found["events"][0]
    longest = max(first["prefills"], key=lambda item: item[2], default=None)
    batch = f"{first['decodes']:,} decodes"
    if longest is not None:
        batch += (
            f" and {len(first['prefills']):,} prefills, the longest of {longest[2]:,} tokens (request {longest[0]})"
        )
    end = f"ended the engine and {found['lost_requests']:,} requests" if found["crashed"] else "is the first"
    count = f"{found['num_events']:,} step" + ("s" if found["num_events"] > 1 else "")
    terminal.warn(
        f"{count} ran out of memory; the one at {first['time_ns'] / 1e9:,.3f} s {end}: "
        f"{first['need_bytes'] / _GIB:,.2f} GiB for {first['what']}, and {first['room_bytes'] / _GIB:,.2f} left, "
        f"with {batch}."
    )
