"""How many KV blocks a device has room for: a budget with an allowance that is stated, until it can be measured.

    blocks = (utilization x memory - weights - allowance) / bytes of a block

The allowance stands for what an engine's profiling run finds: the CUDA context, the activations of the largest step,
and the sampler's copies of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import SimError
from sim.hardware import Device
from sim.models import ModelSpec, dtype_bytes

__all__ = ["KVBudget", "kv_blocks"]

_GIB = 1 << 30
_CONTEXT_BYTES = int(0.35 * _GIB)
"""What a process takes on a GPU before it computes anything (0.03 to 0.5 GiB in engines' logs)."""
_LOGITS_COPIES = 6
"""Float32 copies of the logits in a sampler: the logits, sorted ones, their 64-bit indices (two), probabilities and
their running sum."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Where a device's memory goes. Bytes."""

    num_blocks: int
    block_bytes: int
    memory: int
    """What the engine may use: utilization x what the device has."""
    weights: int
    context: int
    activations: int
    logits: int

    @property
    def allowance(self) -> int:
        """What is set aside besides the weights."""
        return self.context + self.activations + self.logits

    def text(self) -> str:
        """One line that states the assumption."""
        return (
            f"{self.num_blocks} KV blocks: {self.memory / _GIB:.2f} GiB usable - {self.weights / _GIB:.2f} weights - "
            f"{self.allowance / _GIB:.2f} allowance, which is assumed, not measured (CUDA context "
            f"{self.context / _GIB:.2f}, activations {self.activations / _GIB:.2f}, logits {self.logits / _GIB:.2f})"
        )


def kv_blocks(
    spec: ModelSpec,
    device: Device,
    gpu_memory_utilization: float = 0.9,
    tp: int = 1,
    block_size: int = 16,
    dtype: str | int | None = None,
    kv_dtype: str | int | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> KVBudget:
    """The KV blocks that fit on each of `tp` devices. Raises SimError where there is no room for any."""
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise SimError(f"gpu_memory_utilization must be above 0 and at most 1, not {gpu_memory_utilization}.")
    if block_size < 1:
        raise SimError(f"block_size must be 1 or more, not {block_size}.")
    element = dtype_bytes(spec.dtype if dtype is None else dtype)
    weights = spec.weights_bytes(element, tp)
    # Of a layer at its widest: the gate and up projections with their product, and three hidden states.
    wide = 3 * max(1, spec.experts_per_token) * spec.intermediate // tp
    activations = max_num_batched_tokens * (wide + 3 * spec.hidden) * element
    logits = _LOGITS_COPIES * max_num_seqs * spec.vocab * 4
    memory = int(device.memory_bytes * gpu_memory_utilization)
    block = spec.kv_bytes_per_token(element if kv_dtype is None else kv_dtype, tp) * block_size
    left = memory - weights - _CONTEXT_BYTES - activations - logits
    if left < block:
        raise SimError(
            f"Model '{spec.name}' leaves no room for KV on '{device.name}': {weights / _GIB:.1f} GiB of weights and "
            f"{(memory - weights - left) / _GIB:.1f} of allowance in {memory / _GIB:.1f} usable; use more devices, a "
            "higher gpu_memory_utilization or a smaller dtype, or set num_gpu_blocks_override."
        )
    return KVBudget(left // block, block, memory, weights, _CONTEXT_BYTES, activations, logits)
