"""Trace files as bytes, numbered lines and rows, whatever they are packed with; in pieces where that is possible."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from traces.errors import TraceError

__all__ = ["INT64_MAX", "TraceFile", "available_bytes", "is_integer", "write_packed"]

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_HEAD_BYTES = 1 << 20
_READ_BYTES = 1 << 18
INT64_MAX = 2**63 - 1


class TraceFile:
    """One file, unpacked. Packing is told by the first bytes, not by the name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        for suffix in (".gz", ".xz"):
            self.name = self.name.removesuffix(suffix)
        self.stem = Path(self.name).stem
        self.forced = False
        """Whether the user named the format, so that it is not to be doubted."""
        self._data: bytes | None = None
        try:
            with path.open("rb") as raw:
                first = raw.read(6)
        except FileNotFoundError:
            raise TraceError(f"{path}: there is no such file") from None
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
        self._packing = "gz" if first.startswith(_GZIP) else "xz" if first.startswith(_XZ) else ""
        with self._open() as stream:
            self.beginning = self._some(stream, _HEAD_BYTES)
            """The first MiB, or all if there is less."""

    @property
    def data(self) -> bytes:
        """Everything at once, for formats that cannot be read in pieces."""
        if self._data is None:
            parts: list[bytes] = []
            size, room = 0, available_bytes() // 2  # what is read is parsed beside it
            with self._open() as stream:
                while part := self._some(stream, 1 << 24):
                    parts.append(part)
                    size += len(part)
                    if size > room:
                        raise self.too_big(f"over {size >> 20:,} MiB")
            self._data = b"".join(parts)
        return self._data

    def too_big(self, what: str) -> TraceError:
        return TraceError(
            f"{self.path}: does not fit in memory ({what} and more to come); "
            "cut it into several files, or use a machine with more memory"
        )

    def _open(self) -> IO[bytes]:
        if self._packing == "gz":
            return cast(IO[bytes], gzip.open(self.path, "rb"))
        if self._packing == "xz":
            return lzma.open(self.path, "rb")
        return self.path.open("rb")

    def _some(self, stream: IO[bytes], size: int) -> bytes:
        try:
            return stream.read(size)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> TraceError:
        return TraceError(f"{self.path}: is damaged or cut off ({error}); fetch it again")

    def lines(self) -> Iterator[tuple[int, str]]:
        """(number from 1, text) of each line that is not blank, without its line end (LF or CRLF)."""
        number = 0
        with self._open() as stream:
            try:
                for number, line in enumerate(io.BufferedReader(stream, _READ_BYTES), 1):  # type: ignore[type-var]
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                    if text and not text.isspace():
                        yield number, text
            except UnicodeDecodeError:
                raise self.error(number, "is not UTF-8 text; save the file as UTF-8") from None
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise self._damaged(error) from None

    def head(self, count: int) -> list[str]:
        """The first `count` lines that are not blank; bytes that are no text show as replacement characters."""
        text = self.beginning.decode("utf-8-sig", errors="replace")
        return [line.rstrip("\r") for line in text.split("\n") if line.strip()][:count]

    def first_object(self) -> dict[str, Any]:
        """The JSON object on the first line; empty if there is none."""
        first = (self.head(1) or [""])[0]
        if not first.startswith("{"):
            return {}
        try:
            row = json.loads(first)
        except (ValueError, RecursionError):
            return {}
        return row if isinstance(row, dict) else {}

    def columns(self) -> list[str]:
        """The names in the first line of a CSV file."""
        first = (self.head(1) or [""])[0]
        return [] if first.startswith(("{", "[")) else [name.strip() for name in _cells(first)]

    def csv_rows(self, needed: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """(line number, the cells of the columns `needed`, in that order) of a CSV file with a header.

        Columns are found by name: others, and another order, change nothing.
        """
        lines = self.lines()
        number, header = next(lines)
        names = [name.strip() for name in _cells(header)]
        missing = [name for name in needed if name not in names]
        if missing:
            raise self.error(
                number,
                f"begins with {header[:60]!r}; the header must be a list of columns with {', '.join(needed)} "
                f"({missing[0]} is missing)",
            )
        places = [names.index(name) for name in needed]
        for number, line in lines:
            cells = _cells(line)
            if len(cells) != len(names):
                raise self.error(
                    number, f"has {len(cells)} columns; it needs the {len(names)} of the header {header.strip()[:80]!r}"
                )
            yield number, [cells[place].strip() for place in places]

    def json_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, object) of a JSON Lines file."""
        for number, line in self.lines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
                raise self.error(number, f"is not JSON ({error}); each line needs one object") from None
            if not isinstance(row, dict):
                raise self.error(number, f"holds a JSON {type(row).__name__}; each line needs one object")
            yield number, row

    def json_object(self) -> dict[str, Any]:
        """The one object that the file is."""
        try:
            value = json.loads(self.data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            number = self.data.count(b"\n", 0, error.start) + 1
            raise self.error(number, "is not UTF-8 text; save the file as UTF-8") from None
        except json.JSONDecodeError as error:
            if error.msg == "Extra data":
                raise self.error(error.lineno, "begins a second JSON value; keep one to a file") from None
            raise self.error(error.lineno, f"is not JSON ({error.msg}); fetch or write the file again") from None
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{self.path}: is not JSON of this kind ({error}); write the file again") from None
        if not isinstance(value, dict):
            raise TraceError(f"{self.path}: holds a JSON {type(value).__name__}; it must be one object")
        return value

    def json_items(self) -> Iterator[tuple[int, Any]]:
        """(line number of its beginning, value) of each entry of the JSON list that the file is, read in pieces."""
        decoder = json.JSONDecoder()
        with self._open() as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig")
            buffer, at, number, ended, begun = "", 0, 1, False, False
            while True:
                while at < len(buffer) and buffer[at] in " \t\r\n,[" and not (begun and buffer[at] == "["):
                    begun = begun or buffer[at] == "["
                    number += buffer[at] == "\n"
                    at += 1
                if at < len(buffer) and (buffer[at] == "]" or not begun):
                    if not begun:
                        raise self.error(number, "does not begin a JSON list; the file must be one")
                    return
                try:
                    value, end = decoder.raw_decode(buffer, at)
                    complete = end < len(buffer) or ended
                except (ValueError, RecursionError) as error:
                    if ended:
                        what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                        raise self.error(number, f"begins what is not JSON ({what}); fetch the file again") from None
                    complete = False
                if complete:
                    yield number, value
                    number += buffer.count("\n", at, end)
                    at = end
                    continue
                try:
                    # Doubling what is read keeps long entries from being tried over and over.
                    more = text.read(max(_READ_BYTES, len(buffer) - at))
                except UnicodeDecodeError:
                    raise TraceError(f"{self.path}: is not UTF-8 text; save the file as UTF-8") from None
                except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                    raise self._damaged(error) from None
                ended = not more
                buffer, at = buffer[at:] + more, 0

    def error(self, line: int, what: str) -> TraceError:
        """A TraceError that names this file and a line of it."""
        return TraceError(f"{self.path}, line {line}: {what}")

    def whole(self, line: int, row: dict[str, Any], key: str, least: int, most: int = INT64_MAX) -> int:
        """row[key] as an integer of at least `least`; a whole float is taken too."""
        value: Any = row.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_integer(value) or not least <= value <= most:
            said = f"{key} is missing" if key not in row else f"{key} is {_short(value)}"
            upper = f" and at most {most}" if is_integer(value) and value > most else ""
            raise self.error(line, f"{said}; it must be a whole number of {least} or more{upper}")
        return int(value)

    def number(self, line: int, row: dict[str, Any], key: str, least: float = 0.0, most: float = 1e15) -> float:
        """row[key] as a finite number from `least` to `most`."""
        value: Any = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            said = f"{key} is missing" if key not in row else f"{key} is {_short(value)}"
            raise self.error(line, f"{said}; it must be a number from {least:g} to {most:g}")
        return float(value)

    def whole_cell(self, line: int, column: str, cell: str, least: int = 1) -> int:
        """A CSV cell as an integer of at least `least` that fits in 31 bits; `12.0` is taken too."""
        if len(cell) < 10 and cell.isascii() and cell.isdigit() and int(cell) >= least:
            return int(cell)
        digits = cell[:30].partition(".")
        if (
            not (digits[0].isascii() and digits[0].isdigit())
            or digits[2].strip("0")
            or not least <= int(digits[0]) < 2**31
        ):
            advice = " (or drop the row)" if least else ""
            raise self.error(line, f"{column} is {cell!r}; it must be a whole number of {least} or more{advice}")
        return int(digits[0])


def _cells(line: str) -> list[str]:
    """The cells of one line of CSV."""
    if '"' in line:
        try:
            return next(csv.reader([line]), [])
        except csv.Error:
            pass  # not quoted as CSV is: the cells are what stands between commas
    return line.split(",")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_integer(value: object) -> bool:
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def available_bytes() -> int:
    """How much memory can still be taken: what Linux calls available, or what a control group leaves, if that is less.

    Where neither can be read, it is unlimited.
    """
    room = INT64_MAX
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                room = int(line.split()[1]) * 1024
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            room = min(room, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass
    return max(room, 0)


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
