"""The one error of this package."""

from __future__ import annotations

__all__ = ["TraceError"]


class TraceError(ValueError):
    """A trace, a file or a description that cannot be used: one sentence with the place and the fix."""
