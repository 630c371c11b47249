"""Ctrl-C as a question that a long computation asks, so that it leaves off between two steps and not within one."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """While entered, the first Ctrl-C only makes this true when called; a second one is raised as always.

    Outside of the main thread, where no signal arrives, it is always false.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: Any = None
        self._ours = False

    def __call__(self) -> bool:
        return self._came

    def __enter__(self) -> Interruption:
        self._ours = threading.current_thread() is threading.main_thread()
        if self._ours:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        signal.signal(signal.SIGINT, self._before)
