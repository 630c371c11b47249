"""The device that the engine runs on: whether it is there, and what of its memory is left for the KV pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from engine.models.errors import OptionError

__all__ = ["CudaMemory", "DeviceMemory", "MemoryBudget", "check_device", "measure_budget"]

_GIB = 1 << 30


def check_device(name: str, cuda_is_there: Callable[[], bool] = torch.cuda.is_available) -> torch.device:
    """The device of this name. Raises OptionError where it is unknown, or not there."""
    if name not in ("cpu", "cuda"):
        raise OptionError(f"device is {name!r}; it must be 'cpu' or 'cuda'")
    if name == "cuda" and not cuda_is_there():
        raise OptionError("device is 'cuda', and torch finds no CUDA GPU on this machine; use 'cpu'")
    return torch.device(name)


class DeviceMemory(Protocol):
    """What can be asked of a device's memory; all in bytes."""

    def info(self) -> tuple[int, int]:
        """(free, total), as the driver sees it: what other programs hold is not free."""
        ...

    def allocated(self) -> int:
        """Held by tensors of this process."""
        ...

    def peak(self) -> int:
        """The most that `allocated` has been since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def release_unused(self) -> None:
        """Give back to the driver what the allocator keeps and no tensor holds."""
        ...


class CudaMemory:
    """The memory of the current CUDA device."""

    def info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        return free, total

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def release_unused(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class MemoryBudget(NamedTuple):
    """Where the device's memory goes; bytes. What is left for KV is the asked share less all that is not KV."""

    total: int
    free_at_start: int
    utilization: float
    weights: int
    peak: int
    """What a dummy step of the largest batch takes beside weights, at its height."""
    other: int
    """What the driver counts and no tensor of ours holds: context, libraries' workspaces."""
    graphs: int
    block_bytes: int

    @property
    def requested(self) -> int:
        return int(self.total * self.utilization)

    @property
    def available(self) -> int:
        """For KV; may be negative."""
        return self.requested - self.weights - self.peak - self.other - self.graphs

    @property
    def num_blocks(self) -> int:
        return max(0, self.available) // self.block_bytes

    def lines(self) -> list[str]:
        """The budget, one line a term."""
        terms = (
            ("total", self.total),
            ("free at start", self.free_at_start),
            (f"requested, {self.utilization:g} of total", self.requested),
            ("- weights", self.weights),
            ("- peak of a dummy step", self.peak),
            ("- context and workspaces", self.other),
            ("- graphs", self.graphs),
            ("left for KV", self.available),
        )
        found = [f"{name:<28}{size / _GIB:9.3f} GiB" for name, size in terms]
        return [*found, f"{'KV blocks':<28}{self.num_blocks:9,d} of {self.block_bytes:,} bytes"]


def measure_budget(
    memory: DeviceMemory,
    utilization: float,
    block_bytes: int,
    load: Callable[[], None],
    dummy_step: Callable[[], None],
    capture: Callable[[], None] | None = None,
) -> MemoryBudget:
    """Measure as vLLM does: a snapshot, then weights, then the peak of a step, then graphs, one after another.

    Args:
        load: puts the weights on the device.
        dummy_step: runs the largest step once, and keeps nothing.
        capture: records the CUDA graphs; None: there are none.

    Raises:
        OptionError: less is free than `utilization` asks for, or what is left is less than one block.
    """
    memory.release_unused()
    free, total = memory.info()
    requested = int(total * utilization)
    if free < requested:
        raise OptionError(
            f"gpu_memory_utilization {utilization:g} asks for {requested / _GIB:.2f} of {total / _GIB:.2f} GiB, and "
            f"{free / _GIB:.2f} are free; give at most {int(free / total * 100) / 100:g}, or end what holds the rest"
        )
    held = memory.allocated()
    load()
    weights = memory.allocated() - held
    memory.reset_peak()
    dummy_step()
    peak = memory.peak() - held - weights
    memory.release_unused()
    outside = free - memory.info()[0] - (memory.allocated() - held)
    graphs = 0
    if capture is not None:
        before = memory.info()[0]
        capture()
        memory.release_unused()
        graphs = max(0, before - memory.info()[0])
    budget = MemoryBudget(total, free, utilization, weights, peak, max(0, outside), graphs, block_bytes)
    if budget.num_blocks < 1:
        least = -(-(requested - budget.available + block_bytes) * 1000 // total) / 1000
        raise OptionError(
            f"gpu_memory_utilization {utilization:g} leaves {budget.available / _GIB:.3f} GiB for KV, and one block "
            f"takes {block_bytes / _GIB:.3f}; give at least {least:g}, or a smaller model or batch"
        )
    return budget
