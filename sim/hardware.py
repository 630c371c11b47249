"""Devices: how fast they compute, how fast they read memory, how much of it there is, and how they are connected.

Every entry of the catalogue says where its numbers are from. Peak rates are the vendor's, dense (no sparsity), for
16-bit inputs with 32-bit accumulation: bfloat16, or float16 on devices before Ampere. Memory is what the driver reports
to a program, which is less than the number on the box.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import HardwareError

__all__ = ["CATALOGUE", "Device", "device", "from_description", "load_device"]

_GIB = 1 << 30
# Bytes per second and direction of 16 lanes, after line coding: 8, 16 and 32 GT/s a lane, 128b/130b.
_PCIE_X16 = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or CPU) as a roofline sees it. Rates are peaks; how much of them is reached is the model's."""

    name: str
    peak_flops: float
    """Dense 16-bit operations per second, 32-bit accumulation."""
    memory_bandwidth: float
    """Bytes per second."""
    memory_bytes: int
    """As the driver reports it."""
    pcie_bandwidth: float = 0.0
    """Bytes per second in one direction; 0 where there is no such link."""
    pcie_generation: int = 0
    nvlink_bandwidth: float = 0.0
    """Bytes per second in one direction, all links together; 0 where there is none."""
    multiprocessors: int = 100
    """Streaming multiprocessors; some kernels have a buffer for each."""
    hopper: bool = False
    """Whether torch gives cuBLAS the larger workspace of the H100 and its successors."""
    source: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        for field in ("peak_flops", "memory_bandwidth", "memory_bytes"):
            if not getattr(self, field) > 0:
                raise HardwareError(f"Device '{self.name}': {field} must be positive, not {getattr(self, field)!r}.")
        for field in ("pcie_bandwidth", "nvlink_bandwidth"):
            if getattr(self, field) < 0:
                raise HardwareError(f"Device '{self.name}': {field} must not be negative.")

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second in one direction to a neighbour: NVLink where there is one, else PCIe."""
        return self.nvlink_bandwidth or self.pcie_bandwidth


def _gpu(
    name: str,
    tflops: float,
    gb_s: float,
    memory: int | float,
    pcie: int,
    source: str,
    *,
    nvlink: float = 0.0,
    lanes: int = 16,
    sms: int,
    hopper: bool = False,
) -> Device:
    """`memory` in bytes, or in GiB where it is a float; `nvlink` in GB/s, both directions, as vendors quote it."""
    return Device(
        name=name,
        peak_flops=tflops * 1e12,
        memory_bandwidth=gb_s * 1e9,
        memory_bytes=memory if isinstance(memory, int) else int(memory * _GIB),
        pcie_bandwidth=_PCIE_X16[pcie] * lanes / 16,
        pcie_generation=pcie,
        nvlink_bandwidth=nvlink * 1e9 / 2,
        multiprocessors=sms,
        hopper=hopper,
        source=source,
    )


_TORCH = "memory: total capacity as PyTorch prints it"
_DEVICES = [
    _gpu("a100-40g", 312, 1555, 39.39, 4, f"NVIDIA A100 datasheet (SXM4 40GB); {_TORCH}", nvlink=600, sms=108),
    _gpu("a100-80g", 312, 2039, 79.35, 4, f"NVIDIA A100 datasheet (SXM4 80GB); {_TORCH}", nvlink=600, sms=108),
    _gpu(
        "h100", 989.4, 3350, 79.11, 5, f"NVIDIA H100 datasheet (SXM5 80GB); {_TORCH}", nvlink=900, sms=132, hopper=True
    ),
    _gpu(
        "h200",
        989.4,
        4800,
        139.81,
        5,
        f"NVIDIA H200 datasheet (SXM5 141GB); {_TORCH}",
        nvlink=900,
        sms=132,
        hopper=True,
    ),
    # 8 TB/s in the datasheet; the driver reports a bus of 7,680 bits at 3,996 MHz, which is 7.67 TB/s.
    _gpu(
        "b200",
        2250,
        7672,
        178.35,
        5,
        "NVIDIA DGX B200 datasheet (compute, NVLink); bandwidth from the driver's bus width and clock; "
        "memory from the driver's device properties",
        nvlink=1800,
        sms=148,
        hopper=True,
    ),
    _gpu(
        "rtx4090",
        165.2,
        1008,
        25_250_627_584,
        4,
        "NVIDIA Ada whitepaper, appendix A; memory: device properties of a card",
        sms=128,
    ),
    _gpu(
        "rtx4060", 30.2, 272, 7.996, 4, f"NVIDIA Ada product page, scaled as the whitepaper; {_TORCH}", lanes=8, sms=24
    ),
    _gpu("rtx3090", 71.0, 936.2, 23.58, 4, f"NVIDIA GA102 whitepaper; {_TORCH}", nvlink=112.5, sms=82),
    _gpu("rtx5090", 209.5, 1792, 31.37, 5, f"NVIDIA Blackwell whitepaper; {_TORCH}", sms=170),
    _gpu(
        "rtxpro6000",
        503.8,
        1792,
        94.97,
        5,
        f"NVIDIA RTX PRO 6000 Blackwell Workstation datasheet (FP4 / 8); {_TORCH}",
        sms=188,
    ),
    _gpu(
        "a6000",
        154.8,
        768,
        47.54,
        4,
        f"NVIDIA RTX A6000 datasheet (half of the sparse rate); {_TORCH}",
        sms=84,
        nvlink=112.5,
    ),
    _gpu("a10g", 70.0, 600, 22.49, 4, f"NVIDIA A10G datasheet (AWS G5); {_TORCH}", sms=80),
    _gpu("l4", 121.0, 300, 22.04, 4, f"NVIDIA L4 datasheet (half of the sparse rate); {_TORCH}", sms=58),
    _gpu("l40s", 362.05, 864, 44.39, 4, f"NVIDIA L40S datasheet; {_TORCH}", sms=142),
    _gpu("v100-16g", 125.0, 900, 15.77, 3, f"NVIDIA V100 datasheet (SXM2, float16); {_TORCH}", nvlink=300, sms=80),
    _gpu("v100-32g", 125.0, 900, 31.73, 3, f"NVIDIA V100 datasheet (SXM2, float16); {_TORCH}", nvlink=300, sms=80),
    _gpu("t4", 65.0, 320, 14.56, 3, f"NVIDIA T4 datasheet (float16); {_TORCH}", sms=40),
]

CATALOGUE: dict[str, Device] = {entry.name: entry for entry in _DEVICES}
"""Devices by name."""

_ALIASES = {
    "a100": "a100-80g",
    "a100-80gb": "a100-80g",
    "a100-40gb": "a100-40g",
    "h100-80g": "h100",
    "v100": "v100-32g",
    "rtx-4090": "rtx4090",
    "rtx-3090": "rtx3090",
    "rtx-4060": "rtx4060",
    "rtx-5090": "rtx5090",
    "rtx-a6000": "a6000",
    "rtx-pro-6000": "rtxpro6000",
    "4090": "rtx4090",
    "3090": "rtx3090",
    "4060": "rtx4060",
}


def device(name: str) -> Device:
    """The catalogue's device of that name. Raises HardwareError with the nearest names."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = CATALOGUE.get(_ALIASES.get(key, key))
    if found is not None:
        return found
    near = difflib.get_close_matches(key, CATALOGUE, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"known devices are {', '.join(CATALOGUE)}."
    raise HardwareError(f"Unknown hardware '{name}'; {hint} A YAML or JSON file may describe another.")


# key -> (field of Device, factor)
_KEYS: dict[str, tuple[str, float]] = {
    "peak_tflops": ("peak_flops", 1e12),
    "memory_bandwidth_gb_s": ("memory_bandwidth", 1e9),
    "memory_gib": ("memory_bytes", _GIB),
    "memory_bytes": ("memory_bytes", 1),
    "pcie_gb_s": ("pcie_bandwidth", 1e9),
    "nvlink_gb_s": ("nvlink_bandwidth", 1e9),
}
_REQUIRED = {"peak_flops": "peak_tflops", "memory_bandwidth": "memory_bandwidth_gb_s", "memory_bytes": "memory_gib"}


def from_description(description: Mapping[str, Any], name: str = "custom") -> Device:
    """A device from a user's description.

    Keys: `peak_tflops` (dense, 16-bit), `memory_bandwidth_gb_s`, `memory_gib` or `memory_bytes`; optional `name`,
    `pcie_gb_s` and `nvlink_gb_s` (one direction), `source`, and `base`, a device of the catalogue whose numbers stand
    where the description has none. Raises HardwareError naming the key.
    """
    label = str(description.get("name", name))
    values: dict[str, Any] = {"name": label, "source": str(description.get("source", "described by the user"))}
    base = description.get("base")
    if base is not None:
        parent = device(str(base))
        values = {
            field: getattr(parent, field)
            for field in (
                "peak_flops",
                "memory_bandwidth",
                "memory_bytes",
                "pcie_bandwidth",
                "pcie_generation",
                "nvlink_bandwidth",
                "multiprocessors",
                "hopper",
            )
        } | values
    for key, value in description.items():
        if key in {"name", "source", "base"}:
            continue
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys are name, source, base, {', '.join(_KEYS)}."
            raise HardwareError(f"Hardware '{label}': unknown key '{key}'; {hint}")
        field, factor = _KEYS[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise HardwareError(f"Hardware '{label}': {key} must be a number that is not negative, not {value!r}.")
        values[field] = int(value * factor) if field == "memory_bytes" else value * factor
    for field, key in _REQUIRED.items():
        if field not in values:
            raise HardwareError(f"Hardware '{label}' has no {key}; add it, or a 'base' to take it from.")
    return Device(**values)


def load_device(hardware: str | Path | Mapping[str, Any]) -> Device:
    """A device from a name of the catalogue, a YAML or JSON file, or a description. Raises HardwareError."""
    if isinstance(hardware, Mapping):
        return from_description(hardware)
    path = Path(hardware)
    if path.suffix not in {".yaml", ".yml", ".json"}:
        return device(str(hardware))
    if not path.is_file():
        raise HardwareError(f"There is no hardware file '{hardware}'; name a file or one of {', '.join(CATALOGUE)}.")
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            description = json.loads(text)
        else:
            import yaml

            try:
                description = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(str(error).replace("\n", " ")) from error
    except ValueError as error:
        raise HardwareError(f"The hardware file '{path}' cannot be read: {error}.") from error
    if not isinstance(description, dict):
        raise HardwareError(f"The hardware file '{path}' must hold keys and values, such as 'peak_tflops: 312'.")
    return from_description(description, name=path.stem)
