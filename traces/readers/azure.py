"""Azure's LLM inference traces of 2023 and 2024: CSV with TIMESTAMP,ContextTokens,GeneratedTokens.

2023 has CRLF line ends, 7 fractional digits and no time zone. 2024 writes `+00:00` after each time, and leaves the
fraction out where it is zero. Rows of 2024 without input or output tokens were not served and are left out.
"""

from __future__ import annotations

import datetime
import re

from traces.files import TraceFile
from traces.readers.base import Format, Rows
from traces.schema import Trace

__all__ = ["FORMATS", "HEADER"]

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_EPOCH = datetime.date(1970, 1, 1).toordinal()


def _is_2023(file: TraceFile) -> bool:
    return set(HEADER) <= set(file.columns()) and not _has_zone(file)


def _is_2024(file: TraceFile) -> bool:
    return set(HEADER) <= set(file.columns()) and _has_zone(file)


def _has_zone(file: TraceFile) -> bool:
    head = file.head(2)
    return len(head) > 1 and re.search(r":\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)", head[1]) is not None


def _read_2023(file: TraceFile) -> Trace:
    rows, clock = Rows(file), _Clock(file, "2023-11-16 18:15:46.6805900, without a time zone", zone=False)
    for number, (when, prompt, output) in file.csv_rows(HEADER):
        rows.add(
            number,
            clock.ns(number, when),
            file.whole_cell(number, HEADER[1], prompt),
            file.whole_cell(number, HEADER[2], output),
        )
    return rows.trace()


def _read_2024(file: TraceFile) -> Trace:
    rows, clock = Rows(file), _Clock(file, "2024-05-12 00:00:00.004102+00:00 or 2024-05-12 00:00:20+00:00", zone=True)
    for number, (when, prompt, output) in file.csv_rows(HEADER):
        ns = clock.ns(number, when)
        counts = file.whole_cell(number, HEADER[1], prompt, 0), file.whole_cell(number, HEADER[2], output, 0)
        if 0 in counts:
            rows.dropped += 1
        else:
            rows.add(number, ns, *counts)
    return rows.trace()


class _Clock:
    """Text to ns since 1970. A time zone moves it to UTC; without one it is taken as UTC."""

    def __init__(self, file: TraceFile, example: str, zone: bool) -> None:
        self._file, self._example, self._zone = file, example, zone
        self._days: dict[str, int] = {}
        self._last = ("", "", 0)

    def ns(self, number: int, when: str) -> int:
        """The moment in ns; times of one second, which mostly follow each other, are taken apart once."""
        second, tail = when[:19], when[19:]
        zone = tail.lstrip(".0123456789")
        if (second, zone) != self._last[:2]:
            # Without the fraction, so that the whole second is kept, once the time is known to be one.
            fraction = self._parsed(number, when) % 10**9
            self._last = (second, zone, self._parsed(number, when) - fraction)
            return self._last[2] + fraction
        digits = tail[: len(tail) - len(zone)]
        if digits and not (digits[0] == "." and 2 <= len(digits) <= 10 and "." not in digits[1:]):
            return self._parsed(number, when)  # which says what is wrong
        return self._last[2] + (int(digits[1:].ljust(9, "0")) if digits else 0)

    def _parsed(self, number: int, when: str) -> int:
        match = _TIME.fullmatch(when)
        if match is None or (match[6] and not self._zone):
            raise self._file.error(number, f"TIMESTAMP is {when!r}; it must look like {self._example}")
        day, hour, minute, second, fraction, zone = match.groups()
        if day not in self._days:
            if not "1970" <= day[:4] < "2262":
                raise self._file.error(number, f"TIMESTAMP is {when!r}; the year must be from 1970 to 2261")
            try:
                self._days[day] = datetime.date.fromisoformat(day).toordinal() - _EPOCH
            except ValueError:
                raise self._no_such_time(number, when) from None
        seconds = int(hour) * 3600 + int(minute) * 60 + int(second)
        if int(hour) > 23 or int(minute) > 59 or int(second) > 59:
            raise self._no_such_time(number, when)
        if zone and zone != "Z":
            digits = zone[1:].replace(":", "")
            seconds -= int(zone[0] + "1") * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
        return (self._days[day] * 86_400 + seconds) * 10**9 + (int(fraction.ljust(9, "0")) if fraction else 0)

    def _no_such_time(self, number: int, when: str) -> Exception:
        return self._file.error(number, f"TIMESTAMP {when!r} is no date and time that exists; correct it")


FORMATS = (
    Format("azure-2023", f"CSV, {','.join(HEADER)}", _is_2023, _read_2023, options={}),
    Format("azure-2024", f"CSV, {','.join(HEADER)}, times with a zone (+00:00)", _is_2024, _read_2024, options={}),
)
