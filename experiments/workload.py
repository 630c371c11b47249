"""The trace that a command works on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config import Config
from experiments.errors import UsageError

if TYPE_CHECKING:
    from traces import Trace

__all__ = ["load_trace"]


def load_trace(config: Config, path: str | None = None) -> Trace:
    """The trace that the options name: read or generated, cut to --num-requests.

    The seed changes a generator only where it is not 0, so that the description's own seed counts otherwise.

    Raises:
        TraceError: it cannot be read.
    """
    import traces

    name = path if path is not None else config.trace
    assert name is not None  # required by every command that comes here
    if not Path(name).is_file():
        raise FileNotFoundError(2, "No such file or directory", name)
    options: dict[str, Any] = {}
    if config.dequantize:
        options = {"dequantize": True, "seed": config.seed}
    elif config.seed and Path(name).suffix in (".yaml", ".yml"):
        options = {"seed": config.seed}
    try:
        trace = traces.load(name, **options)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise UsageError(f"{name} cannot be read as a trace: {error}.") from error
    if config.num_requests is not None and config.num_requests < len(trace):
        trace = trace.head(config.num_requests)
    return trace
