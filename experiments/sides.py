"""The two sides of `kvtwin ab`: what a word such as `sjf`, `vllm-v0`, `mine.py:Mine` or `block_size=32` stands for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from experiments.config import Config, nearest, options, parse_value
from experiments.errors import UsageError

__all__ = ["side_of"]

_NAMED = (
    *("scheduling_policy", "victim_policy", "batching", "eviction_policy", "allocator", "preemption_mode"),
    *("prefix_index", "free_order"),
)
"""Options whose values are names that stand for themselves."""
_FIXED = ("model", "trace", "num_requests", "seed", "out", "calibration", "hardware", "dtype", "threads", "device")
"""Options that both sides have in common: they are the experiment, not a side of it."""


def side_of(text: str, config: Config) -> Config:
    """The options of one side: `config`, changed as `text` says.

    `text` is `default`, a preset's name, a value of an option that has names (`sjf`, `most-memory`, `static`, ...),
    `path/file.py:Class`, or `key=value,key=value` with any of the run's options (`policy=file.py:Class` among them).

    Raises:
        UsageError: it is none of these, or stands for several.
    """
    if text == "default":
        return config
    if "=" in text:
        return _changed(text, config)
    if ".py:" in text:
        return replace(config, policy=(*config.policy, text))
    from engine.core.presets import PRESETS

    if text in PRESETS:
        return _with_preset(text, config)
    known = options()
    owners = [name for name in _NAMED if name in known and text in known[name].choices]
    if len(owners) == 1:
        chosen: dict[str, Any] = {owners[0]: text}
        return replace(config, **chosen)
    if owners:
        ways = " or ".join(f"{name}={text}" for name in owners)
        raise UsageError(f"A side called {text!r} may be several things; write {ways}.")
    names = {*PRESETS, *(choice for name in _NAMED if name in known for choice in known[name].choices)}
    raise UsageError(
        f"There is no side called {text!r}{nearest(text, sorted(names)) or ''}; give a preset, a policy's name, "
        "path/file.py:Class, or key=value,key=value."
    )


def _changed(text: str, config: Config) -> Config:
    known = options()
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise UsageError(f"A side is written key=value,key=value, but has {part!r} in it.")
        if key not in known:
            raise UsageError(f"A side names the unknown option {key}{nearest(key, known) or '.'}")
        if key in _FIXED:
            raise UsageError(f"{key} is the same for both sides; give it as {known[key].flag}.")
        values[key] = parse_value(known[key], value, key)
    if "preset" in values:
        config = _with_preset(values.pop("preset"), config)
    return replace(config, **values)


def _with_preset(name: str, config: Config) -> Config:
    from engine.core.presets import preset

    fields_of = {field.name for field in fields(Config)}
    chosen = preset(name)
    values: dict[str, Any] = {key: value for key, value in chosen.items() if key in fields_of}
    if "steps_in_flight" in chosen:
        values["async_scheduling"] = chosen["steps_in_flight"] == 2
    return replace(config, preset=name, **values)
