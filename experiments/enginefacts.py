"""What a run's engine.json says of the engine, and what stands in where it says nothing.

Keys that are read: `model`, `model_dims` (a config.json), `hardware`, `vllm_version`, and within `engine_kwargs`,
`scheduler`, `kv_cache`, `cudagraph` and `hardware_facts` what vLLM calls them. The same key on the command line wins.

Where nothing is said, vLLM's own defaults hold: tensor and data parallel size 1, block size 16, prefix caching, 128 or
256 sequences (see `_MAX_NUM_SEQS`), 2,048 tokens a step, the model's own longest request, two steps in flight from 0.14
on, graphs of up to twice the number of sequences and at most 512. What was assumed so is told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.core.presets import PRESETS, SchedulerConfig, preset
from experiments.errors import UsageError
from sim.hardware import CATALOGUE, Device, load_device
from sim.models import ModelSpec, load_model
from sim.tabletime import default_graph_sizes

__all__ = ["EngineFacts", "engine_facts"]

_ASYNC_SINCE = (0, 14)
"""vLLM's release in which asynchronous scheduling became the default."""
_MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine of a run."""

    model: ModelSpec
    hardware: Device | None
    version: str
    """vLLM's; empty where it is not known."""
    preset: str
    """The preset of the core that stands for it."""
    tp: int
    dp: int
    expert_parallel: bool
    block_size: int
    num_gpu_blocks: int | None
    """KV blocks of one replica as vLLM counts them, the null block included; None where not recorded."""
    utilization: float | None
    prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int
    reserve_full_isl: bool
    steps_in_flight: int
    graph_sizes: tuple[int, ...]
    dtype: str | None
    kv_dtype: str | None
    notes: tuple[str, ...]
    """What was assumed."""

    @property
    def expert_ranks(self) -> int:
        """Over how many ranks experts are split whole."""
        return self.tp * self.dp if self.expert_parallel and self.model.experts else 1

    def scheduler(self, num_blocks: int) -> SchedulerConfig:
        """The core's options, with so many usable blocks. Raises ConfigError where they contradict each other."""
        options: dict[str, Any] = dict(preset(self.preset)) | {
            "block_size": self.block_size,
            "enable_prefix_caching": self.prefix_caching,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            "scheduler_reserve_full_isl": self.reserve_full_isl,
            "steps_in_flight": self.steps_in_flight,
        }
        return SchedulerConfig(num_blocks=num_blocks, max_model_len=self.max_model_len, **options)


def engine_facts(settings: Mapping[str, Any], *, model: str | None = None, hardware: str | None = None) -> EngineFacts:
    """What the settings say, with defaults. `model` and `hardware` stand above them.

    Raises:
        UsageError: a value that cannot be, or a model that nobody named.
        SimError: an unknown model or device.
    """
    found = _Settings(settings)
    notes: list[str] = []
    spec = _model(found, model)
    name = hardware or found.text("hardware") or found.text("device_name", "hardware_facts")
    device = _device(name) if name else None
    memory = found.number("device_total_memory_bytes", None, "hardware_facts")
    if device is not None and memory and not hardware:
        device = replace(device, memory_bytes=memory)
    version = found.text("vllm_version") or ""
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    chosen = "vllm-0.33" if release >= (0, 26) else "vllm-0.19"
    if not version:
        notes.append("no vllm_version is recorded: the scheduler of vLLM 0.19 is taken")
    elif release not in ((0, 19), (0, 33)):
        notes.append(f"vLLM {version} is simulated with the scheduler of {chosen.removeprefix('vllm-')}")
    dp = found.number("data_parallel_size", 1)
    seqs = found.number("max_num_seqs", None)
    if seqs is None:
        seqs = _MAX_NUM_SEQS
        notes.append(f"max_num_seqs is not recorded: {seqs} is taken")
    tokens = found.number("max_num_batched_tokens", None)
    if tokens is None:
        tokens = int(str(PRESETS[chosen]["max_num_batched_tokens"]))
        notes.append(f"max_num_batched_tokens is not recorded: {tokens} is taken")
    in_flight = found.flag("async_scheduling", None)
    if in_flight is None:
        in_flight = not version or release >= _ASYNC_SINCE
        notes.append(f"async_scheduling is not recorded: {'on' if in_flight else 'off'} is taken")
    blocks = found.number("num_gpu_blocks", None) or found.number("num_gpu_blocks_override", None)
    if blocks is not None and dp > 1:
        # vLLM reports the sum over data-parallel engines.
        notes.append(f"the {blocks:,} recorded KV blocks are those of {dp} replicas together")
        blocks //= dp
    sizes = found.sizes("cudagraph_capture_sizes")
    if sizes is None:
        sizes = () if found.flag("enforce_eager", False) else default_graph_sizes(seqs)
        if sizes:
            notes.append(f"sizes of CUDA graphs are not recorded: vLLM's own, up to {sizes[-1]}, are taken")
    kv_dtype = found.text("kv_cache_dtype") or "auto"
    return EngineFacts(
        model=spec,
        hardware=device,
        version=version,
        preset=chosen,
        tp=found.number("tensor_parallel_size", 1),
        dp=dp,
        expert_parallel=bool(found.flag("enable_expert_parallel", False)),
        block_size=found.number("block_size", 16),
        num_gpu_blocks=blocks,
        utilization=found.share("gpu_memory_utilization"),
        prefix_caching=bool(found.flag("enable_prefix_caching", True)),
        max_num_seqs=seqs,
        max_num_batched_tokens=max(tokens, seqs),
        max_model_len=found.number("max_model_len", None) or spec.max_position,
        long_prefill_token_threshold=found.number("long_prefill_token_threshold", 0, least=0),
        reserve_full_isl=bool(found.flag("scheduler_reserve_full_isl", True)),
        steps_in_flight=2 if in_flight else 1,
        graph_sizes=sizes,
        dtype=None if (dtype := found.text("dtype") or "auto") == "auto" else dtype,
        kv_dtype=None if kv_dtype == "auto" else kv_dtype,
        notes=tuple(notes),
    )


def _model(found: _Settings, model: str | None) -> ModelSpec:
    named = model or found.text("model") or found.text("model", "engine_kwargs")
    dims = found.part("model_dims")
    if dims and not model:
        return load_model({"_name_or_path": named, **dims} if named else dims)
    if not named:
        raise UsageError("engine.json names no model; add `model`, or give --model.")
    return load_model(named)


def _device(name: str) -> Device:
    """A device by the catalogue's name, or by the name that its driver has for it."""
    plain = re.sub(r"nvidia|geforce|blackwell|(server|workstation|max-q workstation) edition|[\s-]", "", name.lower())
    return load_device(plain if plain in CATALOGUE else name)


_SECTIONS = ("engine_kwargs", "scheduler", "kv_cache", "cudagraph")


class _Settings:
    """Looks keys up in engine.json: at its top, then in its sections."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def part(self, name: str) -> Mapping[str, Any]:
        value = self._content.get(name) or {}
        if not isinstance(value, Mapping):
            raise UsageError(f"engine.json: {name} must hold keys and values, not {value!r}.")
        return value

    def get(self, key: str, section: str | None = None) -> Any:
        """The first value that is not null."""
        parts = [self.part(section)] if section else [self._content, *(self.part(name) for name in _SECTIONS)]
        return next((part[key] for part in parts if part.get(key) is not None), None)

    def text(self, key: str, section: str | None = None) -> str | None:
        value = self.get(key, section)
        if value is not None and not isinstance(value, str):
            raise UsageError(f"engine.json: {key} must be text, not {value!r}.")
        return value

    def number(self, key: str, default: Any, section: str | None = None, least: int = 1) -> Any:
        value = self.get(key, section)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"engine.json: {key} must be an integer of {least} or more, not {value!r}.")
        return value

    def share(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise UsageError(f"engine.json: {key} must be above 0 and at most 1, not {value!r}.")
        return float(value)

    def flag(self, key: str, default: bool | None) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"engine.json: {key} must be true or false, not {value!r}.")
        return default if value is None else value

    def sizes(self, key: str) -> tuple[int, ...] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in value):
            raise UsageError(f"engine.json: {key} must be a list of positive sizes, not {value!r}.")
        return tuple(sorted(set(value)))
