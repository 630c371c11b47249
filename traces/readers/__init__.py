"""Reads traces in the formats that others publish, and in our own.

A format is one entry of `FORMATS`: a name, a look at the file's beginning that recognises it, and a function from the
file to a Trace. Each family of formats is a module here; a further one is a further module in `_MODULES`. The first
format that recognises a file reads it, so a more particular one stands before a more general one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces import canonical
from traces.errors import TraceError
from traces.files import TraceFile
from traces.readers import (
    agent,
    azure,
    benchmarks,
    burstgpt,
    hashed,
    llmservingsim,
    ragpulse,
    servegen,
    sharegpt,
    vidur,
)
from traces.readers.base import Format
from traces.schema import Trace

__all__ = ["FORMATS", "Format", "load", "options_of"]

_OWN = (
    Format("kvtwin-parquet", "our own, Parquet", canonical.is_parquet, canonical.read_parquet, options={}),
    Format("kvtwin-jsonl", "our own, JSON Lines", canonical.is_jsonl, canonical.read_jsonl, options={}),
)
_GENERATOR_OPTIONS: Mapping[str, object] = {"seed": None}
_MODULES = (azure, burstgpt, vidur, servegen, sharegpt, llmservingsim, ragpulse, agent, benchmarks, hashed)
_LOOKALIKES = (ragpulse.why_no_trace, servegen.why_no_trace, benchmarks.why_no_trace)
"""Each says of a file that belongs to a format, but is no trace by itself, what is to be done instead."""

FORMATS: dict[str, Format] = {
    entry.name: entry for entry in (*_OWN, *(entry for module in _MODULES for entry in module.FORMATS))
}


def load(path: str | Path, *, format: str | None = None, **options: Any) -> Trace:
    """The trace in a file, or the one that a generator's YAML (.yaml, .yml) describes.

    Plain, .gz and .xz are told apart by content, and so are the formats unless `format` names one. `options` are the
    format's own (README.md lists them; `seed` for a generator). Raises TraceError.
    """
    path = Path(path)
    if _is_generator(path, format):
        from traces.generate import load_generator

        return load_generator(path, **_allowed(options, _GENERATOR_OPTIONS, f"{path}: a generator"))
    file, reader = _open(path, format)
    allowed = _allowed(options, reader.options, f"{path}: format {reader.name}")
    try:
        return reader.read(file, **allowed)
    except MemoryError:
        raise file.too_big("more than this process may have") from None
    except TraceError as error:
        if str(path) in str(error):
            raise
        raise TraceError(f"{path}: {error}") from None


def options_of(path: str | Path, format: str | None = None) -> Mapping[str, object]:
    """The options that `load` takes for this file, with their defaults. Raises TraceError."""
    path = Path(path)
    return _GENERATOR_OPTIONS if _is_generator(path, format) else _open(path, format)[1].options


def _is_generator(path: Path, format: str | None) -> bool:
    return format is None and path.suffix in (".yaml", ".yml")


def _open(path: Path, format: str | None) -> tuple[TraceFile, Format]:
    if format is not None and format not in FORMATS:
        raise TraceError(f"unknown trace format {format!r}; known are {', '.join(FORMATS)}")
    file = TraceFile(path)
    if not file.beginning.strip():
        raise TraceError(f"{path}: is empty; a trace needs at least one request")
    if format is None:
        return file, _guessed(file)
    file.forced = True
    return file, FORMATS[format]


def _guessed(file: TraceFile) -> Format:
    reader = next((entry for entry in FORMATS.values() if entry.recognises(file)), None)
    if reader is not None:
        return reader
    for look in _LOOKALIKES:
        reason = look(file)
        if reason is not None:
            raise TraceError(f"{file.path}: {reason}")
    beginning = (file.head(1) or [""])[0][:60]
    known = "; ".join(f"{entry.name} ({entry.about})" for entry in FORMATS.values())
    raise TraceError(f"{file.path}: begins with {beginning!r}, which is none of the formats we read: {known}")


def _allowed(options: Mapping[str, Any], known: Mapping[str, object], who: str) -> dict[str, Any]:
    for key in options:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise TraceError(f"{who} has no option {key!r}; {takes}")
    return {**known, **options}
