"""The trace that a command works on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config import Config
from experiments.errors import UsageError

if TYPE_CHECKING:
    from traces import Trace

__all__ = ["load_trace"]


def load_trace(config: Config, path: str | None = None) -> Trace:
    """The trace that the options name: read or generated, cut to --num-requests.

    The seed goes to a generator, and to a format that draws at random, only where it is not 0, so that the
    description's own seed counts otherwise.

    Raises:
        TraceError: it cannot be read.
        UsageError: an option is no KEY=VALUE.
    """
    import traces

    name = path if path is not None else config.trace
    assert name is not None  # required by every command that comes here
    if Path(name).is_dir():
        raise UsageError(f"{name} is a folder; a trace is one file (of a ServeGen pool, a tar of its folder).")
    if not Path(name).is_file():
        raise FileNotFoundError(2, "No such file or directory", name)
    options = dict(_key_value(text) for text in config.trace_option)
    if config.dequantize:
        options = {"dequantize": True, "seed": config.seed, **options}
    elif config.seed and "seed" in traces.options_of(name, config.format):
        options = {"seed": config.seed, **options}
    try:
        trace = traces.load(name, format=config.format, **options)
    except traces.TraceError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise UsageError(f"{name} cannot be read as a trace: {error}.") from error
    if config.num_requests is not None and config.num_requests < len(trace):
        trace = trace.head(config.num_requests)
    if config.max_concurrency is not None:
        trace = replace(trace, concurrency=config.max_concurrency)
    return trace


def _key_value(text: str) -> tuple[str, Any]:
    """`key=value` as a name and a number, true, false, null or text."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise UsageError(f"--trace-option takes KEY=VALUE, but got {text!r}.")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = value
    return key, parsed
