"""Output text, token by token, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from engine.exec.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_REPLACEMENT = "\ufffd"
_WINDOW = 6
"""Tokens before the newest that are decoded again with it, because text depends on neighbours (bytes, spaces)."""


class Detokenizer:
    """The text of one request's output so far.

    Text is held back while it ends in the middle of a character. `push` says which stop string the text has met.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self.text = ""

    def push(self, token: int, check_stops: bool = True) -> str | None:
        """Add one token; returns the stop string that the text now contains, and cuts the text there, or None."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        after = self._tokenizer.decode(self._ids[self._prefix :])
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return None
        return self._extend(after[len(before) :], check_stops)

    def flush(self) -> None:
        """The output has ended: what was held back is text now, with replacement marks for broken characters."""
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        after = self._tokenizer.decode(self._ids[self._prefix :])
        self.text += after[len(before) :]
        self._read = len(self._ids)

    def _extend(self, piece: str, check_stops: bool) -> str | None:
        self._read = len(self._ids)
        self._prefix = max(self._prefix, self._read - _WINDOW)
        old = len(self.text)
        self.text += piece
        if not check_stops:
            return None
        found: tuple[int, str] | None = None
        for stop in self._stops:
            at = self.text.find(stop, max(0, old - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        self.text = self.text[: found[0] + (len(found[1]) if self._include_stop else 0)]
        return found[1]
