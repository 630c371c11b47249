"""What a collective between devices takes: measured where somebody has, else from the link's description.

An all-reduce of b bytes over p devices sends 2 (p - 1) / p of them over each link. An all-gather or reduce-scatter in
which each rank has a share of b bytes takes as long as an all-reduce of b bytes between two devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.errors import CalibrationError, SimError
from sim.hardware import Device
from sim.steptime import Assumptions
from sim.tables import Curve

__all__ = ["allreduce_curve", "measured_allreduce"]

_MEASURED: dict[str, tuple[tuple[int, float], ...]] = {
    # NCCL between two cards over PCIe 5 through the host, bfloat16, replayed from a graph.
    "rtxpro6000": (
        (10_240, 16.24),
        (40_960, 17.5),
        (139_264, 22.78),
        (327_680, 30.6),
        (557_056, 42.64),
        (1_114_112, 78.36),
        (1_310_720, 90.59),
        (2_228_224, 148.95),
        (5_242_880, 335.41),
        (8_912_896, 566.73),
        (16_777_216, 1051.83),
        (20_971_520, 1309.13),
    ),
}
"""Bytes and microseconds of an all-reduce between two devices. Source: casys-kaist/LLMServingSim,
profiler/perf/RTXPRO6000/hardware.yaml at commit e08dc388d0 (2026-09-08), a measurement of the link by itself."""


def allreduce_curve(device: Device, ranks: int, profile: str | Path | None = None) -> tuple[Curve, str]:
    """(ns of an all-reduce over `ranks` devices against its bytes, where that is from).

    From the profile's own measurement, else the catalogue's, else latency and bandwidth of the link. More ranks than
    were measured send more over each link, and take a latency more for each. Raises SimError where there is no link.
    """
    if ranks < 2:
        raise SimError(f"An all-reduce needs two devices or more, not {ranks}.")
    sent = 2 * (ranks - 1) / ranks
    points: tuple[tuple[int, float], ...] | None = None
    source = ""
    if profile is not None:
        found = measured_allreduce(profile)
        if found is not None:
            points, source = found
    if points is None and device.name in _MEASURED:
        points, source = _MEASURED[device.name], f"measured between two {device.name}"
    if points is not None:
        first = points[0][1] * 1e3
        return Curve([size / sent for size, _ in points], [us * 1e3 + (ranks - 2) * first for _, us in points]), source
    if not device.link_bandwidth:
        raise SimError(f"Device '{device.name}' has no link between devices; add pcie_gb_s or nvlink_gb_s to it.")
    assume = Assumptions()
    latency = assume.nvlink_latency_ns if device.nvlink_bandwidth else assume.pcie_latency_ns
    rate = device.link_bandwidth * assume.link_efficiency / 1e9
    size = 1 << 24
    text = f"assumed: {latency / 1e3:g} us and {rate:.0f} GB/s of {device.name}'s link"
    return Curve([0, size], [latency, latency + size * sent / rate]), text


def measured_allreduce(profile: str | Path) -> tuple[tuple[tuple[int, float], ...], str] | None:
    """(bytes and microseconds of an all-reduce between two devices, where from) of a profile's folder, if it has any:
    allreduce.csv (bytes, time_us), or the samples of hardware.yaml. Raises CalibrationError for one that is damaged."""
    for folder in (Path(profile), Path(profile).parent):
        table, description = folder / "allreduce.csv", folder / "hardware.yaml"
        if table.is_file():
            return _sorted(_of_csv(table), table), f"measured ({table.name})"
        if description.is_file():
            points = _of_yaml(description)
            return (_sorted(points, description), f"measured ({description.name})") if points else None
    return None


def _of_csv(path: Path) -> list[tuple[int, float]]:
    import pandas as pd

    try:
        table = pd.read_csv(path)
        return [(int(size), float(us)) for size, us in zip(table["bytes"], table["time_us"], strict=True)]
    except (KeyError, ValueError, OSError) as error:
        raise CalibrationError(f"'{path}' must have columns bytes and time_us, all numbers: {error}.") from error


def _of_yaml(path: Path) -> list[tuple[int, float]]:
    import yaml

    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        samples = (((content or {}).get("measured") or {}).get("interconnect") or {}).get("samples") or []
        return [(int(s["bytes"]), float(s["us"])) for s in samples if s.get("collective", "all_reduce") == "all_reduce"]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"'{path}' is not a description of hardware that can be read: {error}.") from error


def _sorted(points: list[tuple[int, float]], path: Path) -> tuple[tuple[int, float], ...]:
    by_size = dict(sorted(points))
    if len(by_size) < 2:
        raise CalibrationError(f"'{path}' has {len(by_size)} all-reduces; at least 2 sizes are needed.")
    return tuple(by_size.items())
