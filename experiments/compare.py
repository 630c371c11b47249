"""A real run and a simulated one side by side: every metric with its error, beside how much real runs differ.

The value of a metric of several real runs is their mean; `error_pct` is (simulated - real) / real in percent, signed;
`real_range_pct` is (largest - smallest) / mean of the real runs in percent, and only given for three runs or more.
The verdict:

    inconclusive   the real runs' range is above 10 %: they differ too much to judge a simulation by
    within         the error is at most 5 %, or the simulated value lies within the real runs' range
    outside        neither

With fewer than three real runs the range is unknown, and the 5 % alone decide; a note says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import metrics
from experiments.config import Config
from experiments.errors import ResultsError, UsageError
from experiments.results import Results, read_json, read_results, write_json

if TYPE_CHECKING:
    from experiments.terminal import Terminal

__all__ = ["MAX_ERROR_PCT", "MAX_RANGE_PCT", "MIN_RUNS", "VERDICTS", "compare", "execute", "table_rows", "verdict"]

MAX_ERROR_PCT = 5.0
MAX_RANGE_PCT = 10.0
MIN_RUNS = 3
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90", "p99")

VERDICTS = {
    "within": f"The error is at most {MAX_ERROR_PCT:g} %, or the simulated value lies within the real runs' range.",
    "outside": f"The error is above {MAX_ERROR_PCT:g} % and the simulated value outside the real runs' range.",
    "inconclusive": f"The real runs differ by more than {MAX_RANGE_PCT:g} % among themselves, too much to judge by.",
}

_MUST_AGREE = (
    "model",
    "block_size",
    "enable_prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "long_prefill_threshold_alone",
    "watermark",
    "null_block",
    "scheduler_reserve_full_isl",
    "same_step",
    "free_order",
    "allocator",
    "placement",
    "prefix_index",
    "eviction_policy",
    "scheduling_policy",
    "victim_policy",
    "batching",
    "admission_reserve",
    "async_scheduling",
    "policy",
    "time_scale",
)
"""Options that change what happens; a comparison across different ones is noted."""


def verdict(real: Sequence[float], simulated: float | None) -> dict[str, Any]:
    """One metric: `real`, `simulated`, `error_pct`, `real_range_pct`, `verdict`.

    Args:
        real: the metric of each real run.
        simulated: of the simulation; None where it has none, and then nothing can be said.
    """
    known = [value for value in real if value is not None]
    if not known or simulated is None:
        mean = float(np.mean(known)) if known else None
        return _entry(mean, simulated, None, None, "inconclusive")
    mean = float(np.mean(known))
    low, high = min(known), max(known)
    error = spread = None
    if mean:
        error = (simulated - mean) / mean * 100
        if len(known) >= MIN_RUNS:
            spread = (high - low) / mean * 100
    close = abs(error) <= MAX_ERROR_PCT if error is not None else simulated == mean
    if spread is not None and spread > MAX_RANGE_PCT:
        word = "inconclusive"
    elif close or (spread is not None and low <= simulated <= high):
        word = "within"
    else:
        word = "outside"
    return _entry(mean, simulated, error, spread, word)


def _entry(real: Any, simulated: Any, error: Any, spread: Any, word: str) -> dict[str, Any]:
    return {"real": real, "simulated": simulated, "error_pct": error, "real_range_pct": spread, "verdict": word}


def compare(real: Sequence[Results], simulated: Results) -> dict[str, Any]:
    """The content of compare.json, without the decisions.

    Raises:
        ResultsError: the runs are not of the same trace.
    """
    _check_same_work(real, simulated)
    summaries = [run.summary for run in real]
    found: dict[str, Any] = {
        name: {
            statistic: verdict([s[name][statistic] for s in summaries], simulated.summary[name][statistic])
            for statistic in STATISTICS
        }
        for name in LATENCIES
    }
    throughput = "output_tokens_per_s"
    found[throughput] = verdict([s[throughput] for s in summaries], simulated.summary[throughput])
    counts = {
        name: {"real": [s[name] for s in summaries], "simulated": simulated.summary[name]}
        for name in ("num_requests", "num_rejected", "num_preemptions", "prefix_hit_tokens", "num_steps", "kv_blocks")
    }
    return {
        "metrics": found,
        "decision_differences": None,
        "kv_usage": _usage_error(real, simulated),
        "per_request": _per_request(real, simulated),
        "counts": counts,
        "num_real_runs": len(real),
        "notes": _notes(real, simulated, found),
        "verdicts": VERDICTS,
    }


def _check_same_work(real: Sequence[Results], simulated: Results) -> None:
    digest = simulated.manifest.get("trace_digest")
    for run in real:
        if run.manifest.get("trace_digest") != digest:
            raise ResultsError(f"{run.path} and {simulated.path} served different traces, so they cannot be compared.")


def _notes(real: Sequence[Results], simulated: Results, found: dict[str, Any]) -> list[str]:
    notes = []
    if len(real) < MIN_RUNS:
        notes.append(
            f"{len(real)} real run{'s' if len(real) > 1 else ''}: fewer than {MIN_RUNS}, so how much real runs differ "
            f"is unknown and {MAX_ERROR_PCT:g} % alone decide the verdicts."
        )
    for run in (*real, simulated):
        if not run.manifest.get("complete", False):
            notes.append(f"{run.path} was interrupted; its metrics cover a part of the trace.")
    ours = simulated.manifest.get("configuration", {})
    for run in real:
        theirs = run.manifest.get("configuration", {})
        different = [n for n in _MUST_AGREE if n in ours and n in theirs and _plain(ours[n]) != _plain(theirs[n])]
        if run.manifest.get("kv_blocks") != simulated.manifest.get("kv_blocks"):
            different.append("the number of KV blocks")
        if different:
            notes.append(f"{run.path} and {simulated.path} differ in {', '.join(different)}.")
    wide = [
        f"{name} ({entry['real_range_pct']:.0f} %)"
        for name, entry in _flat(found)
        if entry["verdict"] == "inconclusive" and entry["real_range_pct"] is not None
    ]
    if wide:
        notes.append(f"The real runs differ by more than {MAX_RANGE_PCT:g} % in {', '.join(wide)}: inconclusive.")
    return notes


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _flat(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, entry) of every metric in the order of the table."""
    entries = [(f"{name} {stat}", found[name][stat]) for name in LATENCIES for stat in STATISTICS]
    return [*entries, ("output_tokens_per_s", found["output_tokens_per_s"])]


def used_share(run: Results, grid: np.ndarray) -> np.ndarray:
    """Share of the pool that requests hold at each time of `grid` (ns after the first arrival)."""
    times, slots = metrics.usage_over_time(run.tables)
    if not len(times):
        return np.zeros(len(grid))
    total = sum(slots[name] for name in metrics.USAGE)
    used = (total - slots["cached"] - slots["free"]) / np.maximum(total, 1)
    return metrics.time_weighted(np.append(times, last_end(run)), np.append(used, 0.0), grid + first_arrival(run))


def first_arrival(run: Results) -> int:
    return int(np.asarray(run.tables.requests["arrival_ns"]).min(initial=1 << 62))


def last_end(run: Results) -> int:
    return int(np.asarray(run.tables.steps["end_ns"]).max(initial=0))


def _usage_error(real: Sequence[Results], simulated: Results) -> dict[str, Any]:
    """How far apart the used shares of the pool are over time, in percentage points of the pool."""
    longest = max(last_end(run) - first_arrival(run) for run in (*real, simulated))
    grid = np.linspace(0, max(longest, 1), 4001)
    ours = used_share(simulated, grid)
    theirs = [used_share(run, grid) for run in real]
    pairs = [float(np.abs(a - b).mean()) * 100 for a, b in combinations(theirs, 2)]
    return {
        "mean_abs_error_points": float(np.mean([np.abs(ours - t).mean() for t in theirs])) * 100,
        "mean_real_to_real_points": float(np.mean(pairs)) if pairs else None,
        "mean_used_pct": {"real": float(np.mean(theirs)) * 100, "simulated": float(ours.mean()) * 100},
        "peak_used_pct": {"real": float(np.max(theirs)) * 100, "simulated": float(ours.max()) * 100},
    }


def _per_request(real: Sequence[Results], simulated: Results) -> dict[str, Any]:
    """Mean over requests of |simulated - real| / real in percent, real being the mean of the runs that have it."""
    ours = metrics.latencies(simulated.tables.requests)
    theirs = [metrics.latencies(run.tables.requests) for run in real]
    if any(len(t["e2e_s"]) != len(ours["e2e_s"]) for t in theirs):
        return dict.fromkeys(LATENCIES)
    result: dict[str, Any] = {}
    for name in LATENCIES:
        values = np.stack([_by_row(run, t[name]) for run, t in zip(real, theirs, strict=True)]).mean(axis=0)
        mine = _by_row(simulated, ours[name])
        both = ~np.isnan(values) & ~np.isnan(mine) & (values > 0)
        errors = np.abs(mine[both] - values[both]) / values[both]
        result[name] = {"mean_abs_error_pct": float(errors.mean()) * 100} if len(errors) else None
    return result


def _by_row(run: Results, values: np.ndarray) -> np.ndarray:
    """Per-request values in the order of the trace's rows."""
    return values[np.argsort(np.asarray(run.tables.requests["row"]), kind="stable")]


# -- the command ----------------------------------------------------------------------------------------------------

_UNITS = {"ttft_s": ("TTFT", "s", 1.0), "tpot_s": ("TPOT", "ms", 1e3), "e2e_s": ("end to end", "s", 1.0)}


def table_rows(found: dict[str, Any], bands: dict[str, Any] | None = None) -> list[tuple[str, ...]]:
    """Rows (metric, real, range, simulated, band, error, verdict) of the table that every report shows."""
    rows = []
    for name in LATENCIES:
        title, unit, factor = _UNITS[name]
        for statistic in STATISTICS:
            band = ((bands or {}).get(name) or {}).get(statistic)
            rows.append(_row(f"{title} {statistic} ({unit})", found[name][statistic], factor, band))
    band = (bands or {}).get("output_tokens_per_s")
    rows.append(_row("output tokens per s", found["output_tokens_per_s"], 1.0, band))
    return rows


def _row(title: str, entry: dict[str, Any], factor: float, band: Sequence[float] | None) -> tuple[str, ...]:
    return (
        title,
        _figure(entry["real"], factor),
        _percent(entry["real_range_pct"], sign=False),
        _figure(entry["simulated"], factor),
        f"{_figure(band[0], factor)}–{_figure(band[1], factor)}" if band else "–",
        _percent(entry["error_pct"]),
        entry["verdict"],
    )


COLUMNS = ("metric", "real", "range", "simulated", "band", "error", "verdict")


def without_empty(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table without columns that say nothing in any row."""
    kept = [i for i in range(len(columns)) if any(row[i] != "–" for row in rows)]
    return tuple(columns[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def _figure(value: float | None, factor: float = 1.0) -> str:
    if value is None:
        return "–"
    scaled = value * factor
    digits = 3 if abs(scaled) < 10 else 2 if abs(scaled) < 100 else 1
    return f"{scaled:,.{digits}f}"


def _percent(value: float | None, sign: bool = True) -> str:
    return "–" if value is None else f"{value:{'+' if sign else ''}.1f} %"


def bands_of(run: Results) -> dict[str, Any] | None:
    """The bands that the simulation gave its metrics, where it did."""
    path = run.path / "prediction.json"
    return read_json(path).get("bands") if path.is_file() else None


def show(content: dict[str, Any], bands: dict[str, Any] | None, terminal: Terminal) -> None:
    """The table and what belongs beside it, on the terminal."""
    colours = {"within": "green", "outside": "red", "inconclusive": "yellow"}
    rows = [(*row[:-1], f"[{colours[row[-1]]}]{row[-1]}[/]") for row in table_rows(content["metrics"], bands)]
    runs = content["num_real_runs"]
    terminal.table(f"Real ({runs} run{'s' if runs != 1 else ''}) and simulated", *without_empty(COLUMNS, rows))
    for line in sentences(content):
        terminal.print(line)


def sentences(content: dict[str, Any]) -> list[str]:
    """What compare.json says beside the table, in words."""
    usage = content["kv_usage"]
    lines = [
        f"KV pool in use over time: off by {usage['mean_abs_error_points']:.1f} points of the pool on average"
        + (
            f" (real runs among themselves: {usage['mean_real_to_real_points']:.1f})."
            if usage["mean_real_to_real_points"] is not None
            else "."
        )
    ]
    counts = content["counts"]["num_preemptions"]
    lines.append(f"Preemptions: real {', '.join(map(str, counts['real']))}; simulated {counts['simulated']}.")
    differences = content["decision_differences"]
    if differences is not None:
        lines.append(
            "Decisions, given what the engine recorded: every step is the same."
            if differences == 0
            else f"Decisions, given what the engine recorded: {differences} steps differ."
        )
    return lines + [f"Note: {note}" for note in content["notes"]]


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin compare`: compare.json, the plots and a page in --out; the table on the terminal."""
    folders = [args.real, *(folder for group in args.again for folder in group)]
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise UsageError("A real run is named twice; further runs (--again) must be folders of their own.")
    real = [read_results(folder, "real") for folder in folders]
    simulated = read_results(args.simulated, "simulated")
    content = compare(real, simulated)
    if args.decisions:
        content["decision_differences"], details = count_decisions(real, simulated)
        content["decision_details"] = details
    assert config.out is not None  # required by the command line
    write_report(Path(config.out), content, real, simulated)
    bands = bands_of(simulated)
    show(content, bands, terminal)
    terminal.note(f"Written to {config.out}: compare.json, index.html and plots.")
    return content


def count_decisions(real: Sequence[Results], simulated: Results) -> tuple[int, list[str]]:
    """(steps that differ over all real runs, the first few differences in words)."""
    from experiments.replay import replay_differences

    found = [difference for run in real for difference in replay_differences(run.path, simulated.path)]
    return len(found), [str(difference) for difference in found[:20]]


def write_report(out: Path, content: dict[str, Any], real: Sequence[Results], simulated: Results) -> None:
    """compare.json, three PNGs and index.html."""
    from experiments import plots, report

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "compare.json", content)
    figures = plots.comparison(real, simulated)
    for name, data in figures.items():
        (out / f"{name}.png").write_bytes(data)
    report.write_comparison(out / "index.html", content, bands_of(simulated), figures, real, simulated)
