"""`kvtwin cluster`: a trace served by several replicas behind a gateway, in simulated time.

OUT/requests.parquet    one row a request: a single replica's columns, and replica, retries, ended_ns, status
OUT/attempts.parquet    one row an attempt: what was sent when to which replica, and how it ended
OUT/summary.json        see `clustermetrics`
OUT/replicas/N/         each replica's own results, as of `kvtwin simulate`; N.L for its life L after a crash
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import results
from experiments.clustermetrics import cluster_summary, life_tables
from experiments.config import Config, nearest, options, parse_value, read_config_file
from experiments.errors import UsageError
from experiments.interruption import Interruption
from experiments.metrics import Tables, summarize
from experiments.serving import mind_rejected, slo_of
from experiments.simulate import model_spec, scheduler_of, summary_rows
from experiments.workload import load_trace

if TYPE_CHECKING:
    from experiments.terminal import Terminal
    from sim.cluster import ClusterResult
    from sim.faults import Faults
    from sim.gateway import GatewayOptions
    from sim.node import NodeSpec

__all__ = ["Replicas", "execute", "faults_of", "gateway_of", "replicas_of"]

_OWN = ("model", "memory", "budget", "scheduler", "time")
"""Sections of options that a group of replicas may set for itself."""
_OWN_OPTIONS = ("restart_s", "load_gb_s", "start_s")


@dataclasses.dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a cluster, and for each the options it has and what its step times rest on."""

    specs: list[NodeSpec]
    configs: list[Config]
    labels: list[str]
    assumptions: list[str]
    """Sentences about them, each once."""


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin cluster`: the results folder --out; returns summary.json."""
    from sim.cluster import simulate_cluster
    from sim.routers import load_router

    wall, cpu = time.perf_counter(), time.process_time()
    trace = load_trace(config)
    replicas = replicas_of(config)
    router, decode_router = load_router(config.router), load_router(config.decode_router)
    gateway, faults = gateway_of(config), faults_of(config)
    faults.check(len(replicas.specs))
    _check_link(config, replicas)
    assert config.out is not None  # required by the command line
    manifest = {
        **results.identity(config, trace, replicas.specs[0].config, "simpy"),
        "kind": "cluster",
        "cluster": {name: getattr(config, name) for name, o in options().items() if o.section == "cluster"},
        "replicas": [
            {
                "name": spec.name,
                "role": spec.role,
                "kv_blocks": spec.config.num_blocks,
                "step_time": label,
                "restart_ns": spec.restart_ns,
            }
            for spec, label in zip(replicas.specs, replicas.labels, strict=True)
        ],
    }
    folder = results.begin(config.out, manifest)
    _clear(folder / "replicas")
    with Interruption() as interrupted:
        found = simulate_cluster(
            trace,
            replicas.specs,
            router,
            gateway,
            faults,
            decode_router=decode_router,
            time_scale=config.time_scale,
            fast_forward=config.fast_forward,
            stop=interrupted,
        )
    tables = [life_tables(record) for record in found.lives]
    attempts = found.attempts()
    summary = cluster_summary(found, tables, slo_of(config), attempts)
    results.write_table(folder / "requests.parquet", found.requests())
    results.write_table(folder / "attempts.parquet", attempts)
    timing = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    for record, each in zip(found.lives, tables, strict=True):
        _write_life(folder, record.replica, record.number, each, replicas, trace, found, timing)
    results.write_json(folder / "summary.json", summary)
    results.write_json(folder / "timing.json", timing)
    results.write_json(folder / "manifest.json", {**manifest, "complete": found.complete})
    terminal.interrupted = not found.complete
    mind_rejected(found.requests(), terminal)
    _show(summary, replicas, terminal)
    if not found.complete:
        terminal.warn(f"interrupted: {folder} holds what was simulated up to then.")
    terminal.note(f"Written to {folder} in {time.perf_counter() - wall:.1f} s.")
    return summary


# ---- from options to a cluster ----


def replicas_of(config: Config) -> Replicas:
    """The replicas that --replicas names.

    Raises:
        UsageError, SimError, CoreError: a number, a file or an option that cannot be.
    """
    found = Replicas([], [], [], [])
    for count, weight, role, own in _groups(config):
        _add(found, count, weight, role, own)
    return found


def _check_link(config: Config, replicas: Replicas) -> None:
    """Raises UsageError: the link or the router of replicas that decode is described, and there are none."""
    if any(spec.role == "decode" for spec in replicas.specs):
        return
    for name in ("kv_link_gb_s", "kv_link_latency_us", "decode_router"):
        option = options()[name]
        if getattr(config, name) != option.default:
            raise UsageError(
                f"{option.flag} is used by nothing: no replica receives prompts of another; "
                "give --replicas 2p3d, or roles in a file."
            )


def _groups(config: Config) -> list[tuple[int, float, str, Config]]:
    """(how many, speed beside the others, role, options) of each group of equal replicas."""
    text = config.replicas.strip()
    if re.fullmatch(r"[+-]?\d+", text):
        if not 1 <= int(text) <= 10_000:
            raise UsageError(f"--replicas must be 1 to 10,000 or a YAML file, but is {text}.")
        return [(int(text), 1.0, "both", config)]
    apart = re.fullmatch(r"(\d{1,4})p(\d{1,4})d", text.lower())
    if apart is not None:
        if "0" in apart.groups():
            raise UsageError(f"--replicas is {text}; it takes one or more of each kind.")
        return [(int(apart[1]), 1.0, "prefill", config), (int(apart[2]), 1.0, "decode", config)]
    if not Path(text).is_file():
        raise UsageError(f"--replicas is {text!r}, which is neither a whole number nor 2p3d nor a file.")
    content = read_config_file(text)
    entries = content.pop("replicas", None)
    if content:
        raise UsageError(f"{text} has the unknown key {min(content)}; it holds `replicas:` and a list below it.")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{text} must hold `replicas:` and below it a list of groups, such as `- count: 2`.")
    return [_group(config, entry, f"group {at + 1} in {text}") for at, entry in enumerate(entries)]


def _group(config: Config, entry: dict[str, Any], where: str) -> tuple[int, float, str, Config]:
    known = {name: o for name, o in options().items() if o.section in _OWN or name in _OWN_OPTIONS}
    values: dict[str, Any] = {}
    count, weight, role = 1, 1.0, "both"
    for key, value in entry.items():
        name = str(key).replace("-", "_")
        if name == "count":
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10_000:
                raise UsageError(f"count in {where} must be 1 to 10,000, but is {value!r}.")
            count = value
        elif name == "weight":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UsageError(f"weight in {where} must be a number above 0, but is {value!r}.")
            weight = float(value)
        elif name == "role":
            if value not in ("both", "prefill", "decode"):
                raise UsageError(f"role in {where} must be both, prefill or decode, but is {value!r}.")
            role = str(value)
        elif name in known:
            values[name] = parse_value(known[name], value, f"{name} in {where}")
        else:
            close = nearest(name, [*known, "count", "weight", "role"])
            raise UsageError(
                f"{where} has the unknown key {name}{close or '; it takes count, weight, role and options.'}"
            )
    return count, weight, role, dataclasses.replace(config, **values)


def _add(found: Replicas, count: int, weight: float, role: str, config: Config) -> None:
    from sim.handover import KvLink
    from sim.node import NodeSpec

    basis, scheduler, assumption = scheduler_of(config)
    name = config.hardware or config.calibration or ""
    restart = _restart_ns(config)
    link = KvLink(config.kv_link_gb_s * 1e9, round(config.kv_link_latency_us * 1e3))
    for _ in range(count):
        found.specs.append(NodeSpec(scheduler, basis.step_time, basis.moves, name, restart, weight, role, link))
        found.configs.append(config)
        found.labels.append(basis.label)
    for text in (*basis.assumptions, assumption):
        if text and text not in found.assumptions:
            found.assumptions.append(text)


def _restart_ns(config: Config) -> int:
    """From a crash until a replica serves again, where --restart-s does not say it: by its weights."""
    from sim.faults import NEVER, load_ns

    if config.restart_s is not None:
        low, high = _seconds(config.restart_s)
        return low if low == high else NEVER  # a range is drawn from for each crash
    spec = model_spec(config.model)
    dtype = None if config.dtype == "auto" else config.dtype
    packed = {None: 1, "fp8": 2, "int8": 2}.get(config.quantization, 4)
    return load_ns(spec.weights_bytes(dtype) // packed, config.load_gb_s * 1e9, config.start_s)


def _seconds(text: str) -> tuple[int, int]:
    """(least, most) ns of a time in seconds or a range of it; `never` is NEVER.

    Raises:
        UsageError: it is neither.
    """
    from sim.faults import NEVER

    if text == "never":
        return NEVER, NEVER
    low, dots, high = text.partition("..")
    try:
        times = [float(low), float(high if dots else low)]
    except ValueError:
        times = [math.nan]
    if not all(0 <= t < 1e9 for t in times) or times[0] > times[-1]:
        raise UsageError(
            f"--restart-s is {text!r}; it takes seconds, such as 180, a range, such as 120..300, or never."
        )
    return round(times[0] * 1e9), round(times[1] * 1e9)


def gateway_of(config: Config) -> GatewayOptions:
    """The gateway and its clients."""
    from sim.gateway import GatewayOptions

    return GatewayOptions(
        rate_per_s=config.rate_limit,
        burst=config.rate_burst,
        max_queue=config.max_queue,
        max_outstanding=config.max_outstanding,
        timeout_ns=0 if config.timeout_s is None else max(1, round(config.timeout_s * 1e9)),
        retries=config.retries,
        backoff_ns=round(config.backoff_s * 1e9),
        seed=config.seed,
    )


def faults_of(config: Config) -> Faults:
    """Crashes and restarts. Raises UsageError: a crash is no REPLICA@S."""
    from sim.faults import Faults

    crashes = []
    for text in config.crash:
        match = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)s?", text.strip())
        if match is None:
            raise UsageError(f"--crash takes REPLICA@S, such as 0@120, but got {text!r}.")
        crashes.append((int(match[1]), round(float(match[2]) * 1e9)))
    span = None if config.restart_s is None else _seconds(config.restart_s)
    return Faults(
        tuple(crashes),
        mtbf_ns=0 if config.mtbf_s is None else max(1, round(config.mtbf_s * 1e9)),
        restart_ns=span if span is not None and span[0] < span[1] else None,
        health_interval_ns=round(config.health_interval_s * 1e9),
        seed=config.seed,
    )


# ---- what is written and shown ----


def _clear(folder: Path) -> None:
    """Removes what an earlier run left of its replicas."""
    if folder.is_dir():
        for path in folder.iterdir():
            if re.fullmatch(r"\d+(\.\d+)?", path.name) and (path / "manifest.json").is_file():
                shutil.rmtree(path)


def _write_life(
    folder: Path,
    replica: int,
    number: int,
    tables: Tables,
    replicas: Replicas,
    trace: Any,
    found: ClusterResult,
    timing: dict[str, float],
) -> None:
    config, spec = replicas.configs[replica], replicas.specs[replica]
    manifest = {
        "kind": "simulated",
        **results.identity(config, trace, spec.config, "simpy"),
        "step_time": replicas.labels[replica],
        "replica": replica,
        "life": number,
    }
    out = results.begin(str(folder / "replicas" / (f"{replica}.{number}" if number else str(replica))), manifest)
    summary = summarize(tables, spec.config.num_blocks, slo_of(config))
    results.finish(out, manifest, tables, summary, timing, found.complete)


def _show(summary: dict[str, Any], replicas: Replicas, terminal: Terminal) -> None:
    terminal.table("Simulated", ("", "mean", "p50", "p90", "p95", "p99"), summary_rows(summary))
    hits, prompt = summary["prefix_hit_tokens"], summary["prompt_tokens"]
    rate = summary["output_tokens_per_s"]
    lost = [
        f"{summary[key]:,} {word}"
        for key, word in (("num_shed", "shed"), ("num_timed_out", "timed out"), ("num_failed", "failed"))
        if summary[key]
    ]
    lines = [
        f"{summary['num_requests']:,} requests in {summary['duration_s']:,.1f} s: {summary['num_finished']:,} "
        f"finished, {summary['num_rejected']:,} rejected, {', '.join(lost) or 'none lost'}; "
        f"{summary['num_retries']:,} retries of {summary['num_retried']:,} requests",
        f"{'–' if rate is None else f'{rate:,.1f}'} output tokens per s; {summary['wasted_tokens']:,} more were "
        "sampled for nobody",
        f"{summary['goodput_per_s'] or 0:,.3f} requests per s finished and met their objectives "
        f"({summary['good_share'] or 0:.1%} of all)",
        f"{hits / prompt if prompt else 0:.1%} of prompt tokens from the prefix cache; the busiest replica worked "
        f"{summary['imbalance'] or 1:.2f} times as long as the mean",
    ]
    for line in lines:
        terminal.print(line + ".")
    terminal.table("Replicas", _COLUMNS, _life_rows(summary["replicas"], replicas), left=2)
    for label in dict.fromkeys(replicas.labels):
        terminal.print(f"Step times: {label}.")
    for text in replicas.assumptions:
        terminal.print(f"{text[:1].upper()}{text[1:].removesuffix('.')}.")


_COLUMNS = ("replica", "hardware", "from s", "to s", "requests", "output tokens", "busy", "prefix hits")
_MOST_ROWS = 24


def _life_rows(lives: Sequence[dict[str, Any]], replicas: Replicas) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for life in lives[:_MOST_ROWS]:
        hits = life["prefix_hit_tokens"] / life["prompt_tokens"] if life["prompt_tokens"] else 0.0
        rows.append(
            (
                str(life["replica"]) + (f".{life['life']}" if life["life"] else ""),
                replicas.specs[life["replica"]].name,
                f"{life['started_s']:,.1f}",
                f"{life['ended_s']:,.1f}" + (" died" if life["crashed"] else ""),
                f"{life['requests']:,}",
                f"{life['output_tokens']:,}",
                f"{life['busy_share']:.1%}",
                f"{hits:.1%}",
            )
        )
    if len(lives) > _MOST_ROWS:
        rows.append((f"and {len(lives) - _MOST_ROWS} more", *[""] * 7))
    return rows
