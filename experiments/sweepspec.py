"""What to sweep: a YAML file, read into configurations of a command.

    command: simulate            # or cluster
    base:                        # options that all have, as in a file for --config
      model: llama-3-8b
      hardware: a100-80g
      trace: chat.yaml           # a path is taken from the folder of this file
    vary:                        # options that differ
      block_size: [8, 16, 32]
      max_num_seqs: {low: 16, high: 256, num: 5, log: true}
    search: grid                 # grid (all combinations), random, or optuna
    num: 100                     # configurations of random and optuna
    objectives:                  # metrics of summary.json
      ttft_s.p99: min
      output_tokens_per_s: max

The i-th configuration of a random search depends on the seed and on i only, so that a longer search begins with the
shorter one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import Config, Option, nearest, options, parse_value, read_config_file, resolve
from experiments.errors import UsageError
from sim.draws import uniform

__all__ = ["PATHS", "Axis", "Sweep", "read_sweep"]

SEARCHES = ("grid", "random", "optuna")
COMMANDS = ("simulate", "cluster")
PATHS = ("trace", "calibration", "replicas", "policy", "router", "model", "hardware")
"""Options that may name a file."""
_KEYS = ("command", "base", "vary", "search", "num", "seed", "objectives", "batch")
MOST = 1_000_000
"""Configurations of a grid."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An option that varies: over a list of values, or within a range."""

    option: Option
    values: tuple[Any, ...] = ()
    """What a grid takes; empty: a range that only random searches can draw from."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    is_range: bool = False

    @property
    def name(self) -> str:
        return self.option.name

    def drawn(self, share: float) -> Any:
        """The value at `share` (from 0 up to 1) of the range, or of the list."""
        if not self.is_range:
            return self.values[int(share * len(self.values))]
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        if self.option.kind is int:
            return min(int(self.high), max(math.ceil(self.low), round(value)))
        return value


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep file, checked."""

    path: Path
    command: str
    base: dict[str, Any]
    axes: tuple[Axis, ...]
    search: str
    num: int
    seed: int
    batch: int
    """Trials that optuna is asked for at once, whatever the number of processes: its proposals depend on it."""
    objectives: tuple[tuple[str, bool], ...]
    """(metric, whether less is better)."""

    def __len__(self) -> int:
        """How many configurations there are."""
        if self.search == "grid":
            return math.prod(len(axis.values) for axis in self.axes)
        return self.num

    def points(self) -> Iterator[dict[str, Any]]:
        """What varies, by option, of each configuration of a grid or random search, in order."""
        names = [axis.name for axis in self.axes]
        if self.search == "grid":
            for values in itertools.product(*(axis.values for axis in self.axes)):
                yield dict(zip(names, values, strict=True))
            return
        for index in range(self.num):
            yield {axis.name: axis.drawn(uniform(self.seed, 17, index, at)) for at, axis in enumerate(self.axes)}

    def config(self, point: Mapping[str, Any]) -> Config:
        """The whole configuration of a point. Raises UsageError: a value that cannot be."""
        from experiments.cli import COMMANDS as ALL
        from experiments.cli import taken_by

        command = ALL[self.command]
        defaults = {**dict(command.defaults), "bands": False}
        return resolve(
            {**self.base, **point}, defaults=defaults, command=f"kvtwin {self.command}", taken=taken_by(command)
        )


def read_sweep(path: str | Path) -> Sweep:
    """Read a sweep file.

    Raises:
        UsageError: it is no such file; an option that does not exist or that the command does not take; a value of
            another kind or out of range; nothing to vary.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"There is no sweep file '{path}'.")
    content = read_config_file(path)
    for key in content:
        if key not in _KEYS:
            raise UsageError(f"{path} has the unknown key {key}{nearest(key, _KEYS) or '.'}")
    command = _one_of(content.get("command", "simulate"), COMMANDS, f"command in {path}")
    base = _options(content.get("base") or {}, command, path, "base")
    if "out" in base:
        raise UsageError(f"{path}: base names out; a sweep has one --out for all.")
    base = {name: _from_folder(name, value, path.parent) for name, value in base.items()}
    vary = _options(content.get("vary") or {}, command, path, "vary")
    if not vary:
        raise UsageError(
            f"{path} varies nothing: give `vary:` with an option and its values, such as block_size: [8, 16]."
        )
    search = _one_of(content.get("search", "grid"), SEARCHES, f"search in {path}")
    axes = tuple(_axis(name, given, search, path) for name, given in vary.items())
    num = _whole(content.get("num", 0), f"num in {path}", 0)
    if search == "grid" and num:
        raise UsageError(f"{path} has num, which a grid does not use; leave it out, or say search: random.")
    if search != "grid" and not num:
        raise UsageError(f"{path} needs num, the number of configurations, for search: {search}.")
    sweep = Sweep(
        path,
        command,
        base,
        axes,
        search,
        num,
        _whole(content.get("seed", 0), f"seed in {path}", 0),
        _whole(content.get("batch", 8), f"batch in {path}", 1),
        _objectives(content.get("objectives") or {}, search, path),
    )
    if len(sweep) > MOST:
        raise UsageError(f"{path} has {len(sweep):,} combinations; at most {MOST:,} are swept, or use search: random.")
    needed = ("trace",)
    for name in needed:
        if name not in base and name not in vary:
            raise UsageError(f"{path} names no {name}; give one under base.")
    return sweep


def _options(content: Any, command: str, path: Path, part: str) -> dict[str, Any]:
    from experiments.cli import COMMANDS as ALL
    from experiments.cli import taken_by

    if not isinstance(content, dict):
        raise UsageError(f"{path}: {part} must hold `option: value` lines, not {type(content).__name__}.")
    known, taken = options(), taken_by(ALL[command])
    found = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError(f"{path}: {part} has the unknown option {key}{nearest(name, taken) or '.'}")
        if name not in taken:
            raise UsageError(f"{path}: {part} has {key}, which `kvtwin {command}` does not take.")
        found[name] = value
    return found


def _axis(name: str, given: Any, search: str, path: Path) -> Axis:
    option = options()[name]
    said = f"{name} in {path}"
    if name == "out":
        raise UsageError(f"{path} varies out; a sweep has one --out for all.")
    if isinstance(given, dict):
        return _range(option, given, search, said)
    if not isinstance(given, list):
        raise UsageError(f"{said} must be a list of values or a range with low and high, not {given!r}.")
    if not given:
        raise UsageError(f"{said} is an empty list; give at least one value.")
    values = []
    for item in given:
        place = _from_folder(name, item, path.parent)
        value = parse_value(option, place, said)
        values.append(list(value) if option.repeated else value)
    if any(values.count(value) > 1 for value in values):
        raise UsageError(f"{said} names a value twice.")
    return Axis(option, tuple(values))


def _range(option: Option, given: Mapping[str, Any], search: str, said: str) -> Axis:
    for key in given:
        if key not in ("low", "high", "num", "log"):
            raise UsageError(f"{said} has the unknown key {key}; a range has low, high, num and log.")
    if option.kind not in (int, float) or option.repeated:
        raise UsageError(f"{said} is no number, so it has no range; give a list of values.")
    if "low" not in given or "high" not in given:
        raise UsageError(f"{said} must have low and high.")
    low, high = (parse_value(option, given[key], said) for key in ("low", "high"))
    log = given.get("log", False)
    if not isinstance(log, bool):
        raise UsageError(f"log of {said} must be true or false, but is {log!r}.")
    if not low < high:
        raise UsageError(f"{said} must have a low below its high, but has {low} and {high}.")
    if log and not low > 0:
        raise UsageError(f"{said} must have a low above 0 to be spread in the logarithm.")
    axis = Axis(option, (), low, high, log, True)
    if search != "grid":
        return axis
    if "num" not in given:
        raise UsageError(f"{said} needs num, the number of values, in a grid.")
    num = _whole(given["num"], f"num of {said}", 2)
    values = list(dict.fromkeys(axis.drawn(i / (num - 1)) for i in range(num)))
    return Axis(option, tuple(values))


def _objectives(content: Any, search: str, path: Path) -> tuple[tuple[str, bool], ...]:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: objectives must hold lines such as `ttft_s.p99: min`.")
    found = []
    for name, direction in content.items():
        if direction not in ("min", "max"):
            raise UsageError(f"{path}: the objective {name} must be min or max, but is {direction!r}.")
        found.append((str(name), direction == "min"))
    if search == "optuna" and not found:
        raise UsageError(f"{path}: search: optuna needs objectives, such as `ttft_s.p99: min`.")
    return tuple(found)


def _from_folder(name: str, value: Any, folder: Path) -> Any:
    """A path that lies beside the sweep file, from where the command runs."""
    if name not in PATHS:
        return value
    if isinstance(value, list):
        return [_from_folder(name, item, folder) for item in value]
    if not isinstance(value, str):
        return value
    file, colon, rest = value.partition(":") if name in ("policy", "router") else (value, "", "")
    there = folder / Path(file).expanduser()
    return f"{there}{colon}{rest}" if there.exists() and not Path(file).exists() else value


def _one_of(value: Any, choices: Sequence[str], said: str) -> str:
    if value not in choices:
        raise UsageError(f"{said} must be one of {', '.join(choices)}, but is {value!r}.")
    return str(value)


def _whole(value: Any, said: str, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(f"{said} must be a whole number of at least {low}, but is {value!r}.")
    return value
