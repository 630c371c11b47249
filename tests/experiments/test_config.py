"""The configuration: where values come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.config import Config, options, resolve
from experiments.errors import UsageError


def test_later_sources_override_earlier_ones(tmp_path: Path) -> None:
    """Defaults rank below the preset, then the config file, then --set, then the flag."""
    file = tmp_path / "c.yaml"
    file.write_text("block-size: 32\nmax_num_seqs: 8\nwatermark: 0.1\n")
    preset = {"preset": "vllm-0.19"}
    assert resolve({}).free_order == "blank-first"
    assert resolve(preset).free_order == "single-queue"
    assert resolve(preset, config_file=str(file)).block_size == 32
    config = resolve({**preset, "max_num_seqs": "4"}, ["max-num-seqs=6", "watermark=0.2"], str(file))
    assert (config.block_size, config.watermark, config.max_num_seqs) == (32, 0.2, 4)
    assert resolve({**preset, "free_order": "blank-first"}).free_order == "blank-first"


def test_the_preset_may_come_from_any_source(tmp_path: Path) -> None:
    """A preset named in a file or by --set counts like one named by the flag, below everything explicit."""
    file = tmp_path / "c.yaml"
    file.write_text("preset: vllm-0.19\nblock_size: 8\n")
    config = resolve({}, config_file=str(file))
    assert (config.free_order, config.block_size) == ("single-queue", 8)
    assert resolve({}, ["preset=vllm-0.19"]).free_order == "single-queue"


def test_a_config_file_may_serve_several_commands_and_set_may_not(tmp_path: Path) -> None:
    """Options that a command does not use are passed over in a file, and refused where they are named for it."""
    file = tmp_path / "c.yaml"
    file.write_text("block_size: 8\nmax_tokens: 3\n")
    taken = {"block_size"}
    assert resolve({}, ["block_size=4"], str(file), command="kvtwin x", taken=taken).block_size == 4
    with pytest.raises(UsageError, match="`kvtwin x` does not take max_tokens"):
        resolve({}, ["max-tokens=4"], str(file), command="kvtwin x", taken=taken)


def test_command_defaults_rank_below_everything(tmp_path: Path) -> None:
    """A command's own default gives way to any source."""
    assert resolve({}, defaults={"out": "a"}).out == "a"
    assert resolve({}, ["out=b"], defaults={"out": "a"}).out == "b"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"block_size": "0"}, ["--block-size", "at least 1", "0"]),
        ({"block_size": "many"}, ["--block-size", "whole number", "many"]),
        ({"gpu_memory_utilization": "1.5"}, ["--gpu-memory-utilization", "at most 1", "1.5"]),
        ({"gpu_memory_utilization": "nan"}, ["--gpu-memory-utilization", "number"]),
        ({"time_scale": "0"}, ["--time-scale", "above 0"]),
        ({"swap_space": "-4"}, ["--swap-space", "at least 0"]),
        ({"preemption_mode": "swop"}, ["--preemption-mode", "swap"]),
        ({"free_order": "single-que"}, ["--free-order", "single-queue"]),
    ],
)
def test_values_that_cannot_be_are_named_with_their_limits(flags: dict[str, str], words: list[str]) -> None:
    """The message names the flag, the limit and the value."""
    with pytest.raises(UsageError) as error:
        resolve(flags)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("text", ["blok_size: 3", "- 1", "block_size: [1]", "a: b: c"])
def test_a_bad_config_file_is_named(tmp_path: Path, text: str) -> None:
    """Unknown keys, no mapping, wrong types and broken YAML are refused, and the file is named."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"c\.yaml"):
        resolve({}, config_file=str(file))


def test_unknown_keys_name_the_nearest_valid_one() -> None:
    """--set with a misspelt key suggests the right one."""
    with pytest.raises(UsageError, match="did you mean block_size"):
        resolve({}, ["blok_size=3"])
    with pytest.raises(UsageError, match="key=value"):
        resolve({}, ["block_size"])


def test_defaults_satisfy_their_own_limits() -> None:
    """Every default could also have been given by hand."""
    for option in options().values():
        if option.default is not None and not option.repeated:
            assert resolve({option.name: str(option.default)}) == Config()


def test_every_option_has_help_and_a_section() -> None:
    """No option goes without an explanation."""
    assert all(option.help and option.section for option in options().values())


def test_repeated_options_collect() -> None:
    """A repeatable option takes one value or a list, from any source."""
    assert resolve({"stop": ["a", "b"]}).stop == ("a", "b")
    assert resolve({}, ["policy=p.py:P"]).policy == ("p.py:P",)
