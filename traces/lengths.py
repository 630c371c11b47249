"""Distributions of lengths and pauses, as a generator's YAML describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.errors import TraceError
from traces.files import TraceFile, is_integer

__all__ = ["Distribution", "Section"]

_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # name: (required keys, optional keys)
    "fixed": (("value",), ()),
    "uniform": (("low", "high"), ()),
    "lognormal": (("mean", "sigma"), ("low", "high")),
    "empirical": (("file",), ("low", "high")),
}


@dataclass
class Section:
    """One mapping of a YAML file, read key by key; whatever is left unread at the end is an unknown key."""

    values: Mapping[str, Any]
    where: str
    """File and path of keys, for messages: `demo.yaml: arrival`."""
    base: Path
    """The folder that file names are relative to."""
    _read: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, value: object, where: str, base: Path) -> Section:
        if not isinstance(value, Mapping):
            raise TraceError(f"{where} is {value!r}; it must be a mapping of keys to values")
        return cls(value, where, base)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        self._read.add(key)
        if not self.has(key):
            raise TraceError(f"{self.where}: {key} is missing; add it")
        return self.values[key]

    def section(self, key: str) -> Section:
        return Section.of(self.get(key), self.label(key), self.base)

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.get(key)
        if value not in allowed:
            raise TraceError(f"{self.label(key)} is {value!r}; it must be one of {', '.join(allowed)}")
        return str(value)

    def integer(self, key: str, least: int, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = default if default is not None and not self.has(key) else self.get(key)
        self._read.add(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_integer(value) or not least <= value <= most:
            raise TraceError(f"{self.label(key)} is {value!r}; it must be a whole number from {least} to {most}")
        return int(value)

    def number(
        self, key: str, least: float, *, above: bool = False, most: float = math.inf, default: float | None = None
    ) -> float:
        """A finite number of at least `least` (greater than it if `above`) and at most `most`."""
        value = default if default is not None and not self.has(key) else self.get(key)
        self._read.add(key)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < least or (above and value == least) or value > most:
            need = f"a number {'above' if above else 'from'} {least:g}" + (f" to {most:g}" if most < math.inf else "")
            raise TraceError(
                f"{self.label(key)} is {value!r}; it must be {need}{'' if most < math.inf or above else ' up'}"
            )
        return float(value)

    def file(self, key: str) -> Path:
        value = self.get(key)
        if not isinstance(value, str):
            raise TraceError(f"{self.label(key)} is {value!r}; it must be the name of a file")
        return self.base / value

    def label(self, key: str) -> str:
        return f"{self.where}.{key}" if ": " in self.where else f"{self.where}: {key}"

    def done(self, known: tuple[str, ...]) -> None:
        """Raises TraceError if a key was given that nobody asked for."""
        for key in self.values:
            if key not in self._read and self.values[key] is not None:
                if key in known:
                    raise TraceError(f"{self.label(str(key))} has no effect with what else is given; remove it")
                raise TraceError(f"{self.where}: unknown key {key!r}; known are {', '.join(known)}")


@dataclass(frozen=True)
class Distribution:
    """Draws n numbers; `whole` ones are integers of at least `least`.

    The parameters are about the numbers themselves: a lognormal's `mean` is the mean of the lengths, its `sigma` the
    standard deviation of their logarithm. `low` and `high` of `uniform` are both possible; of the others, bounds that
    what is drawn is moved to.
    """

    draw: Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
    least: float
    low: float
    high: float
    source: Path | None = None
    """The trace that an empirical distribution draws from."""

    @classmethod
    def of(cls, owner: Section, key: str, *, least: float = 1, column: str = "", whole: bool = True) -> Distribution:
        """The distribution under `key`: a mapping with `dist`, or just a number. `column` is what an empirical one
        takes from a trace file."""
        value = owner.get(key)
        if not isinstance(value, Mapping):
            return cls._fixed(Section({"value": value}, owner.label(key), owner.base), least, whole)
        section = owner.section(key)
        kind = section.choice("dist", tuple(_KINDS))
        made = {"fixed": cls._fixed, "uniform": cls._uniform, "lognormal": cls._lognormal}.get(kind)
        result = made(section, least, whole) if made else cls._empirical(section, least, column, whole)
        required, optional = _KINDS[kind]
        section.done(("dist", *required, *optional))
        return result

    @classmethod
    def _fixed(cls, section: Section, least: float, whole: bool) -> Distribution:
        value = _value(section, "value", least, whole)
        return cls(lambda rng, n: np.full(n, value), least, -math.inf, math.inf)

    @classmethod
    def _uniform(cls, section: Section, least: float, whole: bool) -> Distribution:
        low, high = _value(section, "low", least, whole), _value(section, "high", least, whole)
        if low > high:
            raise TraceError(f"{section.where}: low is {low:g} and high {high:g}; low must not be above high")

        def draw(rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
            return low + np.floor(rng.random(n) * (high - low + 1)) if whole else low + rng.random(n) * (high - low)

        return cls(draw, least, low, high)

    @classmethod
    def _lognormal(cls, section: Section, least: float, whole: bool) -> Distribution:
        mean = section.number("mean", 0, above=True, most=1e9)
        sigma = section.number("sigma", 0, most=20)
        mu = math.log(mean) - sigma * sigma / 2
        low, high = _bounds(section, least, whole)
        return cls(lambda rng, n: np.exp(mu + sigma * rng.standard_normal(n)), least, low, high)

    @classmethod
    def _empirical(cls, section: Section, least: float, column: str, whole: bool) -> Distribution:
        path = section.file("file")
        values, is_trace = empirical_values(path, column, least, whole)
        low, high = _bounds(section, least, whole)

        def draw(rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
            return values[(rng.random(n) * len(values)).astype(np.int64)]

        return cls(draw, least, low, high, path if is_trace else None)

    def whole_numbers(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
        """int64[n], rounded to the nearest."""
        return np.rint(self.numbers(rng, n)).astype(np.int64).clip(int(self.least))

    def numbers(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
        """float64[n]."""
        drawn = self.draw(rng, n).clip(max(self.low, self.least), min(self.high, 2.0**31 - 1))
        return np.asarray(drawn, dtype=np.float64)


def _value(section: Section, key: str, least: float, whole: bool) -> float:
    return float(section.integer(key, int(least))) if whole else section.number(key, least)


def _bounds(section: Section, least: float, whole: bool) -> tuple[float, float]:
    low = _value(section, "low", least, whole) if section.has("low") else least
    high = _value(section, "high", least, whole) if section.has("high") else math.inf
    if low > high:
        raise TraceError(f"{section.where}: low is {low:g} and high {high:g}; low must not be above high")
    return low, high


def empirical_values(path: Path, column: str, least: float, whole: bool) -> tuple[npt.NDArray[np.float64], bool]:
    """The numbers of a file: a column of a trace (True), or a text of one number a line (False)."""
    file = TraceFile(path)
    first = (file.head(1) or [""])[0].strip()
    if not _is_number(first):
        if not column:
            raise TraceError(f"{path}: begins with {first[:60]!r}; it must hold one number a line")
        from traces.readers import load

        return np.asarray(getattr(load(path), column), dtype=np.float64), True
    values = []
    for number, line in file.lines():
        if not _is_number(line.strip()) or float(line) < least or (whole and not float(line).is_integer()):
            need = "a whole number" if whole else "a number"
            raise file.error(number, f"is {line.strip()[:60]!r}; it must be {need} of {least:g} or more")
        values.append(float(line))
    return np.array(values), False


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
