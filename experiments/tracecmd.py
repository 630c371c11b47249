"""`kvtwin trace stats|generate|convert`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config import Config
from experiments.errors import UsageError
from experiments.workload import load_trace

if TYPE_CHECKING:
    from experiments.terminal import Terminal
    from traces import Trace

__all__ = ["convert", "generate", "stats"]


def stats(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Numbers about a trace; with --out also stats.json and a plot there."""
    import traces
    from experiments.results import write_json

    trace = load_trace(config, args.file)
    found = traces.stats(trace, lru_tokens=_sizes(args.lru_tokens))
    _show(found, terminal)
    if config.out is not None:
        out = Path(config.out)
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {out} is a file; name a folder.")
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "stats.json", found)
        traces.plot_stats(trace, out / "stats.png")
        terminal.note(f"Written to {out}: stats.json and stats.png.")
    return found


def _sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return [int(part.replace("_", "")) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--lru-tokens takes whole numbers with commas between them, but got {text!r}.") from None


def _show(found: dict[str, Any], terminal: Terminal) -> None:
    def number(value: Any) -> str:
        if value is None:
            return "–"
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

    rows = [(key, number(value)) for key, value in found.items() if isinstance(value, int | float)]
    for key in ("input", "output"):
        rows += [(f"{key} tokens, {name}", number(value)) for name, value in found[key].items()]
    for key, value in (found.get("prefix_reuse_share") or {}).items():
        rows.append((f"prefix reuse, {key.replace('_', ' ')}", _share(value)))
    for size, shares in (found.get("lru_hit_share") or {}).items():
        rows += [
            (f"hits with {int(size):,} tokens of LRU, {k.replace('_', ' ')}", _share(v)) for k, v in shares.items()
        ]
    terminal.table(str(found.get("name", "trace")), ("", "value"), rows)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def generate(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Writes the trace that a generator's YAML describes."""
    if Path(args.file).suffix not in (".yaml", ".yml"):
        raise UsageError(f"{args.file} is no generator's description: it must be a .yaml file.")
    return _save(load_trace(config, args.file), config, terminal)


def convert(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Writes a trace in our own format, or in the one that --to names."""
    return _save(load_trace(config, args.file), config, terminal, args.to)


def _save(trace: Trace, config: Config, terminal: Terminal, format: str | None = None) -> dict[str, Any]:
    import traces

    assert config.out is not None  # required by the command line
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    traces.save(trace, config.out, format)
    terminal.print(f"{len(trace):,} requests written to {config.out}.")
    lost = traces.lost(trace, format) if format is not None else []
    if lost:
        terminal.note(f"The format {format} has no place for: {', '.join(lost)}.")
    return {"num_requests": len(trace), "digest": trace.digest(), "out": config.out, "lost": lost}
