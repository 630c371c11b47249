"""What it costs to move KV blocks: to the host, back, and within the device.

    one batch = latency + copies x (cost of a copy) + bytes x (cost of a byte)

for each of three directions. A batch is all that a step moves in one direction, or one transfer of the host tier; its
copies are its blocks times the pieces that a block is moved in. The cost of a copy is what makes many small ones slow
where the bandwidth alone would not (4 GiB as copies of 32 KiB are 131,072 copies).

Coefficients are fitted to a profile (`kvtwin calibrate`), or follow from a device's link and memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.core.cost import LinearCost
from engine.core.types import Transfer
from sim.errors import SimError
from sim.hardware import Device
from sim.steptime import StepTime

__all__ = ["FREE_MOVES", "CopyTime", "MoveTime", "cost_model", "moves_of_device"]

LINK_EFFICIENCY = 0.8
"""Of the link's rate after line coding, in long copies from page-locked memory: 22 to 26 of 31.5 GB/s are measured."""
MEMORY_EFFICIENCY = 0.75
"""Of the device memory's bandwidth, in copies of whole blocks; each byte is read and written."""
LATENCY_NS = 20_000.0
"""Of a batch: launching a gather, the copy, and waiting for both."""
COPY_NS = 10_000.0
"""Of every further copy over the link, as engines that copy block by block see it."""


@dataclass(frozen=True, slots=True)
class CopyTime:
    """One direction. Nanoseconds; none is negative."""

    latency: float = 0.0
    """Of a batch."""
    copy: float = 0.0
    """Of each copy in it."""
    byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency", "copy", "byte"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise SimError(f"Block moves: {name} must be nanoseconds, not negative, not {getattr(self, name)!r}.")

    def ns(self, copies: int, num_bytes: int) -> int:
        """Time of a batch in ns; 0 where there is nothing to move."""
        return int(self.latency + self.copy * copies + self.byte * num_bytes + 0.5) if copies else 0

    @property
    def bandwidth(self) -> float:
        """Bytes per second that long copies tend to."""
        return 1e9 / self.byte if self.byte else float("inf")


@dataclass(frozen=True, slots=True)
class MoveTime:
    """All three directions."""

    block_bytes: int
    store: CopyTime
    """Device to host."""
    load: CopyTime
    """Host to device."""
    local: CopyTime
    """Within the device."""
    pieces: int = 1
    """Copies that a block takes over the link: 1 where blocks are gathered first, 2 x layers as vLLM V0 does it."""
    beside: bool = True
    """Whether transfers of the host tier run beside steps, over a link. If not (a CPU), they are part of the step that
    begins them."""
    label: str = "given coefficients"
    """Where the coefficients are from."""

    def store_ns(self, blocks: int) -> int:
        return self.store.ns(blocks * self.pieces, blocks * self.block_bytes)

    def load_ns(self, blocks: int) -> int:
        return self.load.ns(blocks * self.pieces, blocks * self.block_bytes)

    def local_ns(self, blocks: int) -> int:
        return self.local.ns(blocks, blocks * self.block_bytes)

    def transfer_ns(self, transfer: Transfer) -> int:
        """Time of a transfer that has its direction of the link to itself; at least 1."""
        blocks = len(transfer.copies)
        return max(1, self.load_ns(blocks) if transfer.load else self.store_ns(blocks))

    def to_dict(self) -> dict[str, Any]:
        """For calibration.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MoveTime:
        """Raises KeyError, TypeError or SimError where the values are not what `to_dict` gives."""
        return cls(
            block_bytes=int(values["block_bytes"]),
            store=CopyTime(**values["store"]),
            load=CopyTime(**values["load"]),
            local=CopyTime(**values["local"]),
            pieces=int(values["pieces"]),
            beside=bool(values["beside"]),
            label=str(values["label"]),
        )


FREE_MOVES = MoveTime(0, CopyTime(), CopyTime(), CopyTime(), beside=False, label="block moves cost nothing")


def moves_of_device(device: Device, block_bytes: int, pieces: int = 1) -> MoveTime:
    """From a device's link and memory; not measured, and labelled so. Raises SimError where it has no link.

    Args:
        pieces: copies that a block takes; above 1, each costs as much as a copy call does.
    """
    if not device.pcie_bandwidth:
        raise SimError(f"Device '{device.name}' has no link to its host; add pcie_gb_s to it.")
    link = CopyTime(LATENCY_NS, COPY_NS if pieces > 1 else 0.0, 1e9 / (device.pcie_bandwidth * LINK_EFFICIENCY))
    local = CopyTime(LATENCY_NS / 2, 0.0, 2e9 / (device.memory_bandwidth * MEMORY_EFFICIENCY))
    label = (
        f"block moves assumed, not measured: {device.name}'s link of {device.pcie_bandwidth / 1e9:g} GB/s at "
        f"{LINK_EFFICIENCY:.0%}, {LATENCY_NS / 1e3:g} us a batch, "
        f"{f'{pieces} copies a block at {COPY_NS / 1e3:g} us' if pieces > 1 else 'blocks gathered first'}, "
        f"copies on the device at {MEMORY_EFFICIENCY:.0%} of memory bandwidth"
    )
    return MoveTime(block_bytes, link, link, local, pieces, label=label)


def cost_model(step_time: StepTime, moves: MoveTime) -> LinearCost:
    """The scheduler's choice between recompute and swap (`preemption_mode auto`), from the same coefficients.

    Recomputing t tokens costs (a1 + a2) t + a5 t (t + 1) / 2 (see steptime.py): the tokens ride along in a step that
    happens anyway, so a0 is not counted, and that step has enough tokens to be compute-bound, so each pays a1 and a2.
    Swapping b blocks costs both ways a batch's latency, b times its copies and b times its bytes; the scheduler has one
    figure for both ways, which is their mean.
    """

    def block(direction: CopyTime) -> float:
        return direction.copy * moves.pieces + direction.byte * moves.block_bytes

    return LinearCost(
        step_ns=0.0,
        token_ns=step_time.token + step_time.token_above,
        pair_ns=step_time.work,
        swap_latency_ns=(moves.store.latency + moves.load.latency) / 2,
        block_ns=(block(moves.store) + block(moves.load)) / 2,
    )
