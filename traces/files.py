"""Trace files as bytes and numbered lines, whatever they are packed with."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces.errors import TraceError

__all__ = ["TraceFile", "is_integer", "write_packed"]

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
INT64_MAX = 2**63 - 1


class TraceFile:
    """One file, unpacked. Packing is told by the first bytes, not by the name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        for suffix in (".gz", ".xz"):
            self.name = self.name.removesuffix(suffix)
        self.stem = Path(self.name).stem
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise TraceError(f"{path}: there is no such file") from None
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
        try:
            if raw.startswith(_GZIP):
                raw = gzip.decompress(raw)
            elif raw.startswith(_XZ):
                raw = lzma.decompress(raw)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise TraceError(f"{path}: is damaged or cut off ({error}); fetch it again") from None
        self.data: bytes = raw

    def lines(self) -> Iterator[tuple[int, str]]:
        """(number from 1, text) of each line that is not blank, without its line end (LF or CRLF)."""
        try:
            text = self.data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            number = self.data.count(b"\n", 0, error.start) + 1
            raise self.error(number, "is not UTF-8 text; save the file as UTF-8") from None
        for number, line in enumerate(text.split("\n"), 1):
            line = line.rstrip("\r")
            if line and not line.isspace():
                yield number, line

    def head(self, count: int) -> list[str]:
        """The first `count` lines that are not blank; bytes that are no text show as replacement characters."""
        text = self.data[: 1 << 20].decode("utf-8-sig", errors="replace")
        return [line.rstrip("\r") for line in text.split("\n") if line.strip()][:count]

    def json_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, object) of a JSON Lines file."""
        for number, line in self.lines():
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise self.error(number, f"is not JSON ({error}); each line needs one object") from None
            if not isinstance(row, dict):
                raise self.error(number, f"holds a JSON {type(row).__name__}; each line needs one object")
            yield number, row

    def error(self, line: int, what: str) -> TraceError:
        """A TraceError that names this file and a line of it."""
        return TraceError(f"{self.path}, line {line}: {what}")

    def whole(self, line: int, row: dict[str, Any], key: str, least: int) -> int:
        """row[key] as an integer of at least `least`; a whole float is taken too."""
        value: Any = row.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_integer(value) or not least <= value <= INT64_MAX:
            said = f"{key} is missing" if key not in row else f"{key} is {json.dumps(value)}"
            raise self.error(line, f"{said}; it must be a whole number of {least} or more")
        return int(value)


def is_integer(value: object) -> bool:
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def write_packed(path: Path, data: bytes) -> None:
    """Writes `data`, packed as the name ends: .gz, .xz or neither. The bytes depend on nothing but `data`."""
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif path.suffix == ".xz":
        data = lzma.compress(data)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from None
