"""Every exception of the experiments, and what the command line says of anybody's.

ExperimentError
├── UsageError      an option, a key or a value that cannot be; the message names it and the fix
└── ResultsError    a results folder that is missing, unfinished or does not fit the question
"""

from __future__ import annotations

import re
import sys

__all__ = ["ExperimentError", "ResultsError", "UsageError", "one_sentence"]

_FOREIGN = (
    ("engine.core.errors", "CoreError"),
    ("traces", "TraceError"),
    ("sim", "SimError"),
    ("engine.exec", "EngineError"),
)
"""Where the other packages keep the base of their errors."""


class ExperimentError(Exception):
    """Base of all errors that the experiments raise."""


class UsageError(ExperimentError):
    """The command as given cannot be run; the message says in one sentence what to change."""


class ResultsError(ExperimentError):
    """A results folder is missing, unfinished, or does not fit what was asked of it."""


def one_sentence(error: BaseException) -> str | None:
    """What to tell the user about `error`, on one line; None if it is a fault of ours, which keeps its traceback.

    The other packages' error classes are looked up among the modules already loaded: an error that was raised
    comes from a module that is.
    """
    if isinstance(error, OSError) and error.filename is not None:
        problem = (error.strerror or "cannot be opened").lower()
        return f"{error.filename}: {problem}." if error.filename else f"{error}."
    if isinstance(error, MemoryError):
        return "There is not enough memory for this: cut the trace into smaller files, or use a larger machine."
    invariant = getattr(sys.modules.get("engine.core.errors"), "InvariantError", ())
    if isinstance(error, invariant):
        return None
    bases: list[type[BaseException]] = [ExperimentError]
    for module, name in _FOREIGN:
        base = getattr(sys.modules.get(module), name, None)
        if base is not None:
            bases.append(base)
    if isinstance(error, tuple(bases)):
        text = " ".join(str(error).split())
        if not isinstance(error, ExperimentError):
            text = _with_flags(text)
        return text if text.endswith((".", "?", "!")) else text + "."
    return None


def _with_flags(text: str) -> str:
    """The other packages know options by their names in Python; here they are called as on the command line."""
    from experiments.config import options

    for option in options().values():
        if "_" in option.name:
            text = re.sub(rf"(?<![\w./-]){option.name}(?![\w./])", option.flag, text)
    return text
