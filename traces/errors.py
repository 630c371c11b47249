"""The one error of this package."""

from __future__ import annotations

__all__ = ["TraceError"]


class TraceError(ValueError):
    """A trace, a file or a description that cannot be used: one sentence with the place and the fix."""

    def __init__(self, message: str) -> None:
        # What a library says of a damaged file may run over several lines.
        super().__init__(" ".join(part.strip() for part in message.splitlines()))
