"""What a gateway records of each attempt, and the words for how one ends."""

from __future__ import annotations

from array import array

__all__ = ["ANSWERS", "CODE", "DECODE", "FAILED", "OUTCOMES", "PREFILL", "SHED", "STATUS", "WHOLE", "Attempts"]

WHOLE, PREFILL, DECODE = range(3)
"""What an attempt is for: the whole request, its prompt alone, or its output after the prompt has been handed over."""
STATUS = {
    "length": 200,
    "stop": 200,
    "rejected": 400,
    "no-memory": 500,
    "rate-limited": 429,
    "queue-full": 503,
    "no-replica": 503,
    "crashed": 502,
    "refused": 502,
    "timeout": 504,
    "handed-over": 200,
}
"""How an attempt can end, and what its client is told, as HTTP says it. `handed-over`: its prompt is computed, and
another replica goes on."""
OUTCOMES = ("unfinished", *STATUS)
"""By number, in the records."""
CODE = {name: code for code, name in enumerate(OUTCOMES)}
ANSWERS = ("length", "stop", "rejected", "no-memory")
"""Ends that a replica gives: asking again would give the same."""
SHED = ("rate-limited", "queue-full", "no-replica")
FAILED = ("crashed", "refused")


class Attempts:
    """A row an attempt, by ticket; two where prompts and outputs are computed in different places."""

    def __init__(self) -> None:
        self.row = array("q")
        self.attempt = array("q")
        self.sent_ns = array("q")
        """When the client sent it."""
        self.routed_ns = array("q")
        """When a replica was sent it; -1: none was."""
        self.replica = array("q")
        self.end_ns = array("q")
        self.outcome = array("q")
        self.leg = array("q")
        """WHOLE, PREFILL or DECODE."""

    def add(self, row: int, attempt: int, now: int, leg: int) -> int:
        for column, value in zip(
            (self.row, self.attempt, self.sent_ns, self.routed_ns, self.replica, self.end_ns, self.outcome, self.leg),
            (row, attempt, now, -1, -1, -1, 0, leg),
            strict=True,
        ):
            column.append(value)
        return len(self.row) - 1
