"""The catalogue of devices and what users may describe themselves."""

from __future__ import annotations

import json

import pytest

from sim.errors import HardwareError
from sim.hardware import CATALOGUE, device, from_description, load_device


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=CATALOGUE)
def test_every_device_is_plausible_and_has_a_source(entry) -> None:
    """Each device says where its numbers are from, and they lie where a device's can (a slipped unit would not)."""
    assert "NVIDIA" in entry.source
    assert 2e13 < entry.peak_flops < 3e15
    assert 2e11 < entry.memory_bandwidth < 1e13
    assert 7 * 2**30 < entry.memory_bytes < 200 * 2**30
    assert 10e9 < entry.pcie_bandwidth < 70e9
    assert entry.nvlink_bandwidth < 1e12
    # The ridge of 16-bit GEMMs lies at 90 to 500 operations a byte on all of these.
    assert 70 < entry.peak_flops / entry.memory_bandwidth < 500


def test_known_numbers() -> None:
    """Memory of cards whose drivers' figures are known, and the bandwidths of the two A100 models."""
    assert device("rtx4090").memory_bytes == 25_250_627_584
    assert device("a100-80g").memory_bytes / 2**30 == pytest.approx(79.35)
    assert device("a100").memory_bandwidth == 2.039e12
    assert device("A100_40G").memory_bandwidth == 1.555e12
    assert device("h100").nvlink_bandwidth == 450e9
    assert device("rtx4090").link_bandwidth == 31.5e9


def test_an_unknown_device_names_the_nearest() -> None:
    """A misspelt device is answered with the names that look like it."""
    with pytest.raises(HardwareError, match="rtx4090"):
        device("rtx4900")
    with pytest.raises(HardwareError, match="known devices are"):
        device("zzz")


def test_descriptions_from_yaml_and_json(tmp_path) -> None:
    """A user's file describes a device in TFLOP/s, GB/s and GiB; `base` fills what it leaves out."""
    yaml_file = tmp_path / "mine.yaml"
    yaml_file.write_text("peak_tflops: 100\nmemory_bandwidth_gb_s: 500\nmemory_gib: 10\n")
    mine = load_device(yaml_file)
    assert (mine.name, mine.peak_flops, mine.memory_bandwidth, mine.memory_bytes) == ("mine", 1e14, 5e11, 10 * 2**30)
    json_file = tmp_path / "slow.json"
    json_file.write_text(json.dumps({"base": "h100", "memory_bandwidth_gb_s": 1000}))
    slow = load_device(str(json_file))
    assert slow.peak_flops == device("h100").peak_flops
    assert slow.memory_bandwidth == 1e12


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"peak_tflops": 1}, "memory_bandwidth_gb_s"),
        ({"base": "h100", "peak_tflop": 1}, "peak_tflops"),
        ({"base": "h100", "memory_gib": "80"}, "memory_gib"),
        ({"base": "h100", "memory_gib": 0}, "memory_bytes must be positive"),
        ({"base": "h100", "pcie_gb_s": -1}, "pcie_gb_s"),
        ({"base": "h1"}, "Unknown hardware"),
    ],
)
def test_wrong_descriptions_name_the_key(description, message) -> None:
    """Whatever is wrong in a description, the error names the key."""
    with pytest.raises(HardwareError, match=message):
        from_description(description)


def test_unreadable_files_are_clear_errors(tmp_path) -> None:
    """A file that is absent, malformed or holds no mapping says so."""
    with pytest.raises(HardwareError, match="no hardware file"):
        load_device(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1")
    with pytest.raises(HardwareError, match="cannot be read"):
        load_device(path)
    path.write_text("- 1")
    with pytest.raises(HardwareError, match="keys and values"):
        load_device(path)
