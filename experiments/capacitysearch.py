"""`kvtwin capacity`: the highest rate of requests at which objectives are met.

The arrival times of the trace are stretched and shrunk (`--time-scale`), so that its burstiness stays. The rate is
doubled or halved until one is known that meets the objectives and one that does not, and then halved between. A trace
that is generated is made with several seeds; each has its own highest rate, and the result is their mean with a 95 %
interval. Where step times have a band, the search is repeated at both of its ends.

    capacity.json    the rates, and every one that was tried
    capacity.png     the objectives over the rate
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments import results
from experiments.config import Config, nearest
from experiments.errors import UsageError

if TYPE_CHECKING:
    from experiments.terminal import Terminal

__all__ = ["Knee", "Objective", "Tried", "execute", "find_knee", "interval", "parse_objective"]

FARTHEST = 2.0**14
"""How far from the trace's own rate, as a factor, rates are tried."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom."""
MOST_REPLICATIONS = len(T_95) + 1


@dataclass(frozen=True, slots=True)
class Objective:
    """What must hold: a metric is at most, or at least, a value."""

    metric: str
    at_most: bool
    value: float

    def __str__(self) -> str:
        return f"{self.metric}{'<=' if self.at_most else '>='}{self.value:g}"

    def met(self, metrics: dict[str, Any]) -> bool:
        """Raises UsageError: there is no such metric."""
        if self.metric not in metrics:
            raise UsageError(
                f"--objective {self}: there is no metric {self.metric}{nearest(self.metric, metrics) or '.'}"
            )
        found = metrics[self.metric]
        if found is None:
            return False
        return bool(found <= self.value if self.at_most else found >= self.value)


class Tried(NamedTuple):
    """A rate that was tried."""

    rate_per_s: float
    met: bool
    metrics: dict[str, Any]


class Knee(NamedTuple):
    """What a search has found."""

    rate_per_s: float
    """The middle between the highest rate that meets the objectives and the lowest that does not."""
    low: float
    high: float
    tried: list[Tried]


def parse_objective(text: str) -> Objective:
    """`METRIC<=X` or `METRIC>=X`. Raises UsageError."""
    match = re.fullmatch(r"\s*([\w.]+)\s*(<=|>=)\s*(\S+)\s*", text)
    if match is None:
        raise UsageError(f"--objective takes METRIC<=X or METRIC>=X, such as 'ttft_s.p99<=1', but got {text!r}.")
    try:
        value = float(match[3])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"--objective {text!r} compares with {match[3]!r}, which is no number.")
    return Objective(match[1], match[2] == "<=", value)


def find_knee(
    measure: Callable[[float], dict[str, Any]],
    objectives: Sequence[Objective],
    start: float,
    tolerance: float = 0.01,
    tell: Callable[[Tried], None] | None = None,
) -> Knee:
    """The highest rate at which `measure(rate)` meets all objectives, to a relative width of `tolerance`.

    Rates are taken to be alike on either side: above one that fails all fail. `start` is where the search begins.

    Raises:
        UsageError: no rate, or every rate, within a factor of `FARTHEST` of `start` meets them.
    """
    tried: list[Tried] = []

    def holds(rate: float) -> bool:
        metrics = measure(rate)
        found = Tried(rate, all(objective.met(metrics) for objective in objectives), metrics)
        tried.append(found)
        if tell is not None:
            tell(found)
        return found.met

    low = high = start
    said = " and ".join(map(str, objectives))
    if holds(start):
        while holds(high := high * 2):
            low = high
            if high >= start * FARTHEST:
                raise UsageError(f"{said} is met at {high:.4g} requests per s and above: it limits nothing.")
    else:
        while not holds(low := low / 2):
            high = low
            if low <= start / FARTHEST:
                alone = ", ".join(f"{o.metric} is {tried[-1].metrics.get(o.metric)}" for o in objectives)
                raise UsageError(f"No rate meets {said}: even at {low:.4g} requests per s {alone}.")
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return Knee(math.sqrt(low * high), low, high, tried)


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half-width of its 95 % interval; None for one value)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, T_95[len(values) - 2] * math.sqrt(variance / len(values))


# ---- the command ----


class _Search(NamedTuple):
    """One search: a trace by its seed, and step times at a place within their band."""

    config: Config
    objectives: tuple[Objective, ...]
    tolerance: float
    band: float
    """Step times are this share longer (or shorter, below 0)."""


def _searched(search: _Search) -> Knee:
    """Run a search, in the process that calls."""
    from experiments.simulate import scheduler_of, simulate_trace
    from experiments.workload import load_trace

    config = search.config
    trace = load_trace(config)
    basis, scheduler, assumption = scheduler_of(config)
    if search.band:
        basis = replace(basis, step_time=basis.step_time.scaled(1 + search.band))
    own = _rate_of(trace)

    def measure(rate: float) -> dict[str, Any]:
        scaled = replace(config, time_scale=config.time_scale * own / rate)
        found = simulate_trace(scaled, trace, scheduler, basis, assumption)
        if not found.complete:
            raise KeyboardInterrupt
        return _metrics(found.summary)

    return find_knee(measure, search.objectives, own, search.tolerance)


def _metrics(summary: dict[str, Any]) -> dict[str, Any]:
    from experiments.sweeprun import flat

    found = flat(summary)
    if summary.get("goodput_per_s") is not None and summary["num_requests"]:
        found["good_share"] = round(summary["goodput_per_s"] * summary["duration_s"]) / summary["num_requests"]
    return found


def _rate_of(trace: Any) -> float:
    """Requests a second over the trace's own span."""
    arrivals = trace.arrival_ns
    first, last = int(arrivals.min()), int(arrivals.max())
    if len(arrivals) < 2 or last == first:
        raise UsageError("All requests of the trace come at once, so it has no rate; give one with arrival times.")
    return (len(arrivals) - 1) * 1e9 / (last - first)


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin capacity`: the folder --out; returns capacity.json."""
    from experiments.sweep import num_jobs

    objectives = _objectives(config, args.objective)
    if not 1e-4 <= args.tolerance <= 0.5:
        raise UsageError(f"--tolerance must be from 0.0001 to 0.5, but is {args.tolerance}.")
    if config.max_concurrency is not None:
        raise UsageError("--max-concurrency makes a closed loop, which has no rate of its own; leave it out.")
    config = replace(config, bands=False)
    searches, band = _searches(config, objectives, args)
    jobs = num_jobs(args.jobs)
    assert config.out is not None  # required by the command line
    folder = Path(config.out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {config.out} is a file; name a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    knees = _run(searches, jobs, terminal)
    found = [knee for search, knee in zip(searches, knees, strict=True) if not search.band]
    mean, half = interval([knee.rate_per_s for knee in found])
    ends = sorted(knee.rate_per_s for search, knee in zip(searches, knees, strict=True) if search.band)
    summary = {
        "objectives": [str(objective) for objective in objectives],
        "rate_per_s": mean,
        "half_width_per_s": half,
        "replications": [
            {"seed": search.config.seed, "rate_per_s": knee.rate_per_s, "low": knee.low, "high": knee.high}
            for search, knee in zip(searches, knees, strict=True)
            if not search.band
        ],
        "tolerance": args.tolerance,
        "band": band or None,
        "rates_in_band_per_s": ends or None,
        "tried": [
            {"rate_per_s": one.rate_per_s, "met": one.met} | {o.metric: one.metrics.get(o.metric) for o in objectives}
            for knee in found
            for one in sorted(knee.tried, key=lambda one: one.rate_per_s)
        ],
    }
    results.write_json(folder / "capacity.json", summary)
    from experiments.capacityplot import picture

    results.write_bytes(folder / "capacity.png", picture(found, objectives, mean, ends))
    _show(summary, terminal, folder)
    return summary


def _searches(
    config: Config, objectives: tuple[Objective, ...], args: argparse.Namespace
) -> tuple[list[_Search], float]:
    """The searches: a seed each, and both ends of the band with the first seed; and how wide that is."""
    import traces
    from experiments.simulate import scheduler_of
    from experiments.workload import load_trace

    _rate_of(load_trace(config))  # whatever is wrong is said before anything takes time
    basis, _, _ = scheduler_of(config)
    assert config.trace is not None
    generated = "seed" in traces.options_of(config.trace, config.format)
    count = args.replications if args.replications is not None else 3 if generated else 1
    if not 1 <= count <= MOST_REPLICATIONS:
        raise UsageError(f"--replications must be 1 to {MOST_REPLICATIONS}, but is {count}.")
    if count > 1 and not generated:
        raise UsageError(
            "--replications above 1 needs a generated trace, which a seed changes; a recorded one is what it is."
        )
    first = config.seed if config.seed or count == 1 else 1
    searches = [
        _Search(replace(config, seed=first + number), objectives, args.tolerance, 0.0) for number in range(count)
    ]
    band = basis.band or 0.0
    if band:
        searches += [replace_band(searches[0], sign * band) for sign in (-1, 1)]
    return searches, band


def replace_band(search: _Search, band: float) -> _Search:
    """The same search with step times longer by that share."""
    return search._replace(band=band)


def _objectives(config: Config, given: Sequence[str]) -> tuple[Objective, ...]:
    objectives = tuple(parse_objective(text) for text in given)
    slo = any(value is not None for value in (config.slo_ttft_s, config.slo_tpot_s, config.slo_e2e_s))
    if not objectives and not slo:
        raise UsageError(
            "`kvtwin capacity` needs what must hold: --objective 'ttft_s.p99<=1', or --slo-ttft-s, --slo-tpot-s, "
            "--slo-e2e-s for 99 % of the requests."
        )
    if not objectives:
        return (Objective("good_share", False, 0.99),)
    if not slo and any(objective.metric == "good_share" for objective in objectives):
        raise UsageError(
            "good_share is the share of requests that meet --slo-ttft-s, --slo-tpot-s, --slo-e2e-s; give one."
        )
    return objectives


def _run(searches: Sequence[_Search], jobs: int, terminal: Terminal) -> list[Knee]:
    with terminal.progress() as progress:
        task = progress.add_task("Searches", total=len(searches))
        if jobs == 1:
            knees = []
            for search in searches:
                knees.append(_searched(search))
                progress.advance(task)
            return knees
        from joblib import Parallel, delayed

        run = Parallel(n_jobs=min(jobs, len(searches)), return_as="generator", batch_size=1)
        knees = []
        for knee in run(delayed(_searched)(search) for search in searches):
            knees.append(knee)
            progress.advance(task)
        return knees


def _show(summary: dict[str, Any], terminal: Terminal, folder: Path) -> None:
    half = summary["half_width_per_s"]
    count = len(summary["replications"])
    text = f"{summary['rate_per_s']:,.4g} requests per s"
    if half is not None:
        text += f" ± {half:.2g} (95 % of {count} seeds)"
    terminal.print(f"Highest rate with {' and '.join(summary['objectives'])}: {text}.")
    if summary["rates_in_band_per_s"]:
        low, high = summary["rates_in_band_per_s"][0], summary["rates_in_band_per_s"][-1]
        terminal.print(f"With step times off by ±{summary['band']:.1%}: {low:,.4g} to {high:,.4g} requests per s.")
    terminal.note(f"Written to {folder}.")
