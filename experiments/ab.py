"""`kvtwin ab`: two sides on the same trace, in the simulator and on the real engine, and whether both say the same.

The real runs are interleaved (A B, B A, A B, ...), each in a folder of its own, so that a command that was interrupted
goes on where it was when it is given again. The simulation is one run a side. `--pairs FILE` does so for a list of
pairs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import results
from experiments.config import Config, nearest, options, parse_value, read_config_file
from experiments.errors import ResultsError, UsageError
from experiments.paired import METRICS, difference, value_of
from experiments.sides import side_of
from experiments.workload import load_trace

if TYPE_CHECKING:
    from engine.exec.weights import LoadedModel
    from experiments.terminal import Terminal
    from traces import Trace

__all__ = ["HEADLINE", "Pair", "execute", "read_pairs"]

HEADLINE = "e2e_s.mean"
"""The metric that a pair is judged by where it names no other."""
_PAIR_KEYS = ("name", "a", "b", "metric", "options")
_FILE_KEYS = ("trace", "repeat", "options", "pairs")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sides to be compared, by name and as options."""

    name: str
    texts: tuple[str, str]
    sides: tuple[Config, Config]
    metric: str = HEADLINE


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin ab`: ab.json, table and plot in --out; returns what is in ab.json."""
    where = _places(args.where)
    pairs, repeat, config = _pairs_of(config, args)
    if "sim" in where and config.calibration is None and config.hardware is None:
        raise UsageError("The simulator needs --calibration FILE (or --hardware NAME); --where engine does without.")
    trace = load_trace(config)
    assert config.out is not None  # required by the command line
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {config.out} is a file; name a folder.")
    for pair in pairs:
        for side in pair.sides:
            _check(side, trace, where)
    content: dict[str, Any] = {"repeat": repeat, "where": list(where), "trace_digest": trace.digest(), "pairs": []}
    loaded: LoadedModel | None = None
    for number, pair in enumerate(pairs, 1):
        folder = out / pair.name if args.pairs else out
        simulated = None
        if "sim" in where:
            simulated = [_simulated(side, trace, folder / f"sim-{name}", terminal) for name, side in _named(pair)]
        runs: list[tuple[Any, Any]] = []
        if "engine" in where:
            terminal.note(f"Pair {number} of {len(pairs)}, {pair.name}: {pair.texts[0]} against {pair.texts[1]}.")
            if loaded is None:
                from engine.exec.weights import load_model

                with terminal.status(f"Loading {config.model}"):
                    loaded = load_model(config.model, config.load_format, config.seed)
            runs = _real(pair, trace, folder, repeat, loaded, terminal)
        content["pairs"].append(_compared(pair, runs, simulated))
        results.write_json(out / "ab.json", content)
        if terminal.interrupted:
            terminal.warn("interrupted; the same command goes on where it was.")
            break
    out.mkdir(parents=True, exist_ok=True)
    from experiments import abplot

    content["summary"] = _counted(content["pairs"])
    results.write_json(out / "ab.json", content)
    results.write_bytes(out / "ab.png", abplot.forest(content["pairs"]))
    _show(content, terminal)
    terminal.note(f"Written to {out}: ab.json, ab.png and a folder for each run.")
    return content


def _places(text: str) -> tuple[str, ...]:
    places = tuple(part.strip() for part in text.split(",") if part.strip())
    for place in places:
        if place not in ("sim", "engine"):
            raise UsageError(f"--where takes sim, engine, or both with a comma, but has {place!r} in it.")
    if not places:
        raise UsageError("--where is empty; name sim, engine, or both.")
    return places


def _pairs_of(config: Config, args: argparse.Namespace) -> tuple[list[Pair], int, Config]:
    """The pairs of the command line or of --pairs FILE, how often, and the options that both sides share."""
    if args.pairs is not None:
        if args.a is not None or args.b is not None:
            raise UsageError("Give either --a and --b or --pairs FILE.")
        pairs, repeat, config = read_pairs(args.pairs, config)
    else:
        if args.a is None or args.b is None:
            raise UsageError("`kvtwin ab` needs --a and --b, or --pairs FILE.")
        pairs, repeat = [_pair("ab", args.a, args.b, config, args.metric)], None
    if config.trace is None:
        raise UsageError("`kvtwin ab` needs --trace.")
    times = args.repeat if args.repeat is not None else repeat or 3
    if times < 1:
        raise UsageError(f"--repeat must be at least 1, but is {times}.")
    return pairs, times, config


def _pair(name: str, a: str, b: str, config: Config, metric: str | None) -> Pair:
    if metric is not None and metric not in METRICS:
        close = nearest(metric, METRICS) or f"; there are {', '.join(METRICS)}."
        raise UsageError(f"There is no metric {metric}{close}")
    return Pair(name, (a, b), (side_of(a, config), side_of(b, config)), metric or HEADLINE)


def read_pairs(path: str, config: Config) -> tuple[list[Pair], int | None, Config]:
    """The pairs of a YAML file, how often each is run, and the shared options: those of the file, over `config`.

    Raises:
        UsageError: it cannot be.
    """
    content = read_config_file(path)
    for key in content:
        if key not in _FILE_KEYS:
            raise UsageError(f"{path} has the unknown key {key}{nearest(key, _FILE_KEYS) or '.'}")
    if config.trace is None and "trace" in content:
        named = Path(str(content["trace"]))
        config = replace(config, trace=str(named if named.is_absolute() else Path(path).parent / named))
    config = _with(config, content.get("options"), path)
    beside = Path(path).parent / config.model
    if config.model.endswith(".json") and not Path(config.model).is_absolute() and beside.is_file():
        config = replace(config, model=str(beside))
    repeat = content.get("repeat")
    if repeat is not None and (not isinstance(repeat, int) or repeat < 1):
        raise UsageError(f"repeat in {path} must be a whole number of 1 or more, but is {repeat!r}.")
    listed = content.get("pairs")
    if not isinstance(listed, list) or not listed:
        raise UsageError(f"{path} must list pairs: each with name, a and b.")
    pairs: list[Pair] = []
    for number, entry in enumerate(listed, 1):
        if not isinstance(entry, dict) or not {"name", "a", "b"} <= entry.keys():
            raise UsageError(f"Pair {number} in {path} must have name, a and b.")
        for key in entry:
            if key not in _PAIR_KEYS:
                raise UsageError(f"Pair {number} in {path} has the unknown key {key}{nearest(key, _PAIR_KEYS) or '.'}")
        name = str(entry["name"])
        if not name or "/" in name or name.startswith(".") or name in {pair.name for pair in pairs}:
            raise UsageError(f"Pair {number} in {path} needs a name of its own that can name a folder, not {name!r}.")
        own = _with(config, entry.get("options"), path)
        metric = entry.get("metric")
        pairs.append(_pair(name, str(entry["a"]), str(entry["b"]), own, None if metric is None else str(metric)))
    return pairs, repeat, config


def _with(config: Config, changes: Any, path: str) -> Config:
    if changes is None:
        return config
    if not isinstance(changes, dict):
        raise UsageError(f"options in {path} must be `option: value` lines.")
    known = options()
    values = {}
    for key, value in changes.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError(f"{path} has the unknown option {key}{nearest(name, known) or '.'}")
        values[name] = parse_value(known[name], value, f"{key} in {path}")
    return replace(config, **values)


def _check(side: Config, trace: Trace, where: Sequence[str]) -> None:
    """That a side can run at all, before anything takes time."""
    if "engine" in where:
        from experiments.engine_options import engine_args

        engine_args(side)
    if "sim" in where:
        from experiments.simulate import scheduler_of

        scheduler_of(side)


def _named(pair: Pair) -> list[tuple[str, Config]]:
    return list(zip("ab", pair.sides, strict=True))


# ---- runs


def _kept(folder: Path, config: Config, trace: Trace) -> Mapping[str, Any] | None:
    """The summary of a finished run with just these options; None if it has to be run."""
    try:
        found = results.read_results(folder)
    except ResultsError:
        return None
    manifest = found.manifest
    same = manifest.get("configuration") == json.loads(json.dumps(results.configuration(config)))
    return found.summary if manifest.get("complete") and same and manifest["trace_digest"] == trace.digest() else None


def _simulated(side: Config, trace: Trace, folder: Path, terminal: Terminal) -> Mapping[str, Any]:
    """The summary of a side's simulation."""
    from experiments.serving import mind_rejected
    from experiments.simulate import scheduler_of, simulate_into

    basis, scheduler, assumption = scheduler_of(side)
    side = replace(side, out=str(folder), bands=False)
    _, prediction = simulate_into(side, trace, scheduler, basis, assumption)
    mind_rejected(prediction.tables.requests, terminal)
    return prediction.summary


def _real(
    pair: Pair, trace: Trace, folder: Path, repeat: int, loaded: LoadedModel, terminal: Terminal
) -> list[tuple[Any, Any]]:
    """The summaries of all pairs of real runs, interleaved: A B, B A, ..."""
    from engine.exec.engine import Engine
    from experiments.engine_options import engine_args
    from experiments.run import run_trace

    engines: dict[str, Engine] = {}
    found: list[dict[str, Any]] = []
    sides = dict(_named(pair))
    try:
        with terminal.progress() as progress:
            task = progress.add_task(f"Runs of {pair.name}", total=2 * repeat)
            for turn in range(repeat):
                found.append({})
                for name in "ab" if turn % 2 == 0 else "ba":
                    side = replace(sides[name], out=str(folder / f"real-{name}-{turn + 1}"))
                    assert side.out is not None
                    summary = _kept(Path(side.out), side, trace)
                    if summary is None:
                        if name not in engines:
                            engines[name] = Engine(engine_args(side), loaded)
                        summary = run_trace(engines[name], side, trace, terminal.muted())
                        if not results.read_json(Path(side.out) / "manifest.json")["complete"]:
                            terminal.interrupted = True
                            return [(pair_["a"], pair_["b"]) for pair_ in found if len(pair_) == 2]
                    found[-1][name] = summary
                    progress.advance(task)
    finally:
        for engine in engines.values():
            engine.close()
    return [(pair_["a"], pair_["b"]) for pair_ in found]


# ---- what they say


def _compared(pair: Pair, runs: Sequence[tuple[Any, Any]], simulated: Sequence[Any] | None) -> dict[str, Any]:
    """A pair's part of ab.json."""
    metrics = {}
    for metric in METRICS:
        real = [(value_of(a, metric), value_of(b, metric)) for a, b in runs]
        sim = None
        if simulated is not None:
            sim = (value_of(simulated[0], metric), value_of(simulated[1], metric))
        metrics[metric] = difference(real, sim)
    differs = {
        field.name: [str(getattr(side, field.name)) for side in pair.sides]
        for field in fields(Config)
        if getattr(pair.sides[0], field.name) != getattr(pair.sides[1], field.name)
    }
    return {
        "name": pair.name,
        "a": pair.texts[0],
        "b": pair.texts[1],
        "options": differs,
        "metric": pair.metric,
        "verdict": metrics[pair.metric]["verdict"],
        "metrics": metrics,
    }


def _counted(pairs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    verdicts = [pair["verdict"] for pair in pairs]
    return {
        "pairs": len(pairs),
        "clear": verdicts.count("same sign") + verdicts.count("other sign"),
        "same_sign": verdicts.count("same sign"),
        "other_sign": verdicts.count("other sign"),
    }


def _show(content: Mapping[str, Any], terminal: Terminal) -> None:
    pairs = content["pairs"]
    columns = ("metric", "A", "B", "B - A", "95 %", "simulated", "verdict")
    if len(pairs) == 1:
        pair = pairs[0]
        rows = [_row(METRICS[name][0], name, entry) for name, entry in pair["metrics"].items()]
        terminal.table(f"A: {pair['a']}, B: {pair['b']}", columns, rows)
    else:
        rows = []
        for pair in pairs:
            metric = pair["metric"]
            rows.append(_row(f"{pair['name']}: {METRICS[metric][0]}", metric, pair["metrics"][metric]))
        terminal.table("Pairs", ("pair and metric", *columns[1:]), rows)
    counts = content["summary"]
    if counts["clear"]:
        terminal.print(
            f"Of {counts['pairs']} pair{'s' if counts['pairs'] > 1 else ''}, {counts['clear']} differ clearly in "
            f"reality (95 % interval without 0); the simulator has the sign of {counts['same_sign']}."
        )


def _row(title: str, metric: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    _, unit, factor = METRICS[metric]
    real, simulated = entry["real"], entry["simulated"]
    source = real or simulated
    if source is None:
        return (title, *["–"] * 6)
    values = [f"{source[side] * factor:,.3g}" for side in "ab"]
    shown = "–" if real is None else _percent(real["difference_pct"], real["difference"] * factor)
    limits = "–"
    if real is not None and real["interval"] is not None:
        limits = (
            "{:+.1f} to {:+.1f} %".format(*real["interval_pct"])
            if real["interval_pct"] is not None
            else "{:+.3g} to {:+.3g}".format(*(limit * factor for limit in real["interval"]))
        )
    said = "–" if simulated is None else _percent(simulated["difference_pct"], simulated["difference"] * factor)
    return (f"{title} ({unit})" if unit else title, *values, shown, limits, said, entry["verdict"] or "–")


def _percent(value: float | None, absolute: float) -> str:
    return f"{absolute:+.3g}" if value is None else f"{value:+.1f} %"
