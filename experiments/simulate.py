"""`kvtwin simulate`: a trace served in simulated time, and how far to trust what comes out.

With a calibration the simulation is repeated with step times at both ends of the calibration's band, and with some of
its bootstrap refits; prediction.json gives every metric the range that results, and its elasticity: by how many percent
it changes when all steps take one percent longer.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import results
from experiments.blocks import mind_truncated, write_blocks
from experiments.config import Config
from experiments.errors import UsageError
from experiments.interruption import Interruption
from experiments.limits import limit_line
from experiments.metrics import Tables, summarize
from experiments.oom import describe_oom, guard_of, show_oom, unprofiled_bytes
from experiments.prefixtable import by_tenant, show_prefix, write_prefix
from experiments.serving import mind_rejected, scheduler_config, slo_of
from experiments.workload import load_trace
from sim.moves import FREE_MOVES, MoveTime, cost_model, moves_of_device

if TYPE_CHECKING:
    from engine.core.blockmap import BlockRecorder
    from engine.core.cost import CostModel
    from engine.core.presets import SchedulerConfig
    from engine.core.types import PrefixRow
    from experiments.terminal import Terminal
    from sim.calibration import Calibration, Hull
    from sim.models import ModelSpec
    from sim.oom import MemoryGuard
    from sim.simulate import SimResult
    from sim.steptime import StepModel
    from traces import Trace

__all__ = ["Prediction", "execute", "simulate_into", "simulate_trace", "summary_rows"]

REFITS = 4
"""Bootstrap refits of the calibration that are simulated beside the ends of its band."""
BANDED = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
_ENDS = {"low": -1, "high": 1}
ROOFLINE_BAND = 0.27
"""How far a roofline may be off, as its label says."""
MOST_ROOFLINE = 500
"""Requests up to which a roofline's simulation is repeated at the ends of that band; a larger one is not made three
times as long for a range that says so little."""
STEEP = 2.0
"""TTFT whose elasticity is above this is close to where queues grow without bound, and said to be so."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What the step times rest on."""

    step_time: StepModel
    label: str
    assumptions: tuple[str, ...]
    calibration: Calibration | None
    moves: MoveTime = FREE_MOVES
    """What block moves cost, and of how many bytes a block is."""
    hull: Hull | None = None
    """What the step times were measured for."""
    band: float | None = None
    """How far they may be off, as a factor; None: not known."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulation's tables and summary, and how far to trust them."""

    tables: Tables
    summary: dict[str, Any]
    about: dict[str, Any]
    """The content of prediction.json."""
    blocks: BlockRecorder | None = None
    complete: bool = True
    """False: it was interrupted."""
    prefix: list[PrefixRow] | None = None
    """What each prompt found in the prefix cache, with --prefix-stats."""


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin simulate`: the results folder --out; returns summary.json."""
    wall, cpu = time.perf_counter(), time.process_time()
    trace = load_trace(config)
    basis, options, assumption = scheduler_of(config)
    folder, prediction = simulate_into(config, trace, options, basis, assumption, wall, cpu)
    terminal.interrupted = not prediction.complete
    mind_rejected(prediction.tables.requests, terminal)
    mind_truncated(prediction.blocks, terminal)
    show(prediction, terminal)
    if prediction.prefix is not None:
        show_prefix(prediction.prefix, terminal)
    if not prediction.complete:
        terminal.warn(f"interrupted: {folder} holds what was simulated up to then.")
    terminal.note(f"Written to {folder} in {time.perf_counter() - wall:.1f} s.")
    return prediction.summary


def simulate_into(
    config: Config,
    trace: Trace,
    options: SchedulerConfig,
    basis: Basis,
    assumption: str = "",
    wall: float | None = None,
    cpu: float | None = None,
) -> tuple[Path, Prediction]:
    """The results folder `config.out` of a simulation, and what is in it; also of one that Ctrl-C ends early.

    Args:
        wall, cpu: when the command began, by time.perf_counter and time.process_time; default: now.
    """
    assert config.out is not None  # required by the command line
    wall = time.perf_counter() if wall is None else wall
    cpu = time.process_time() if cpu is None else cpu
    manifest = {
        "kind": "simulated",
        **results.identity(config, trace, options, "simpy"),
        "step_time": basis.label,
    }
    folder = results.begin(config.out, manifest)
    prediction = simulate_trace(config, trace, options, basis, assumption)
    results.write_json(folder / "prediction.json", prediction.about)
    if prediction.blocks is not None:
        write_blocks(folder, prediction.blocks, options)
    if prediction.prefix is not None:
        write_prefix(folder, prediction.prefix)
    timing = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    results.finish(folder, manifest, prediction.tables, prediction.summary, timing, prediction.complete)
    return folder, prediction


def scheduler_of(config: Config) -> tuple[Basis, SchedulerConfig, str]:
    """(what step times rest on, the scheduler's options, what was assumed of the KV cache's size).

    Raises:
        UsageError, SimError, CoreError: an option cannot be, or a file that it names.
    """
    spec = model_spec(config.model)
    basis = step_time_of(config, spec)
    num_blocks, assumption = kv_blocks(config, spec)
    options = scheduler_config(
        config, num_blocks, spec.max_position, basis.moves.block_bytes, _cost_model(config, basis)
    )
    return basis, options, assumption


def model_spec(model: str) -> ModelSpec:
    """The model's shape, from a preset, a config.json, a checkpoint's folder or a GGUF file."""
    from sim.models import load_model

    if model.endswith(".gguf"):
        raise UsageError(f"A simulation cannot read {model} yet; name the model's config.json or a preset.")
    return load_model(model)


def step_time_of(config: Config, spec: ModelSpec) -> Basis:
    """The step-time model that --calibration or --hardware names.

    Raises:
        UsageError: neither is given.
        SimError: it cannot be read, or is of another model.
    """
    if config.pipeline_parallel_size > 1:
        raise UsageError("--pipeline-parallel-size above 1 cannot be simulated yet; leave it at 1.")
    if config.calibration is not None and Path(config.calibration).is_dir():
        return _basis_of_tables(config, spec)
    if config.calibration is not None:
        from sim.calibration import load_calibration

        if config.hardware is not None and config.num_gpu_blocks_override is not None:
            raise UsageError(
                "--hardware is not used beside --calibration, which predicts the machine it was measured on, and "
                "--num-gpu-blocks-override; leave --hardware out."
            )
        calibration = load_calibration(config.calibration)
        calibration.check_model(spec.name)
        moves = calibration.move_time(config.block_size)
        if moves is None:
            moves = replace(FREE_MOVES, block_bytes=_block_bytes(config, spec))
        return Basis(
            calibration.step_time(), calibration.label(), (), calibration, moves, calibration.hull, calibration.band
        )
    if config.hardware is not None:
        from sim.hardware import load_device
        from sim.steptime import Assumptions, roofline

        device = load_device(config.hardware)
        kv_dtype = None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        dtype = None if config.dtype == "auto" else config.dtype
        found = roofline(spec, device, config.tensor_parallel_size, dtype, kv_dtype)
        block_bytes = _block_bytes(config, spec)
        moves = replace(FREE_MOVES, block_bytes=block_bytes)
        if device.pcie_bandwidth:
            moves = moves_of_device(device, block_bytes)
        label = f"{device.name}: {found.label}"
        return Basis(found, label, (Assumptions().text(),), None, moves, None, ROOFLINE_BAND)
    raise UsageError("`kvtwin simulate` needs --calibration FILE (a measured machine) or --hardware NAME (a roofline).")


def _basis_of_tables(config: Config, spec: ModelSpec) -> Basis:
    """The kernel tables in the folder --calibration; --hardware names the link, and where memory ends."""
    from sim.calibration import LEAST_BAND
    from sim.hardware import load_device
    from sim.tabletime import default_graph_sizes, load_table_time

    assert config.calibration is not None
    device = load_device(config.hardware) if config.hardware is not None else None
    graphs = default_graph_sizes(config.max_num_seqs)
    found, source = load_table_time(
        config.calibration, spec, config.tensor_parallel_size, device=device, graph_sizes=graphs
    )
    block_bytes = _block_bytes(config, spec)
    moves = replace(FREE_MOVES, block_bytes=block_bytes)
    if device is not None and device.pcie_bandwidth:
        moves = moves_of_device(device, block_bytes)
    notes = (f"collectives: {source}",) if source else ()
    return Basis(found, found.label, notes, None, moves, found.measured(), LEAST_BAND)


def _block_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of a KV block on one device, of the type that the options or the model's file name."""
    dtype = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return config.block_size * spec.kv_bytes_per_token(
        spec.dtype if dtype == "auto" else dtype, config.tensor_parallel_size
    )


def _cost_model(config: Config, basis: Basis) -> CostModel | None:
    """What --preemption-mode auto goes by: the costs that the simulation itself has."""
    if config.preemption_mode != "auto":
        return None
    if basis.moves.label == FREE_MOVES.label:
        raise UsageError(
            "--preemption-mode auto compares costs, and those of block moves are not known: profile and calibrate "
            "again, or name hardware with a link."
        )
    from sim.steptime import StepTime

    if not isinstance(basis.step_time, StepTime):
        raise UsageError("--preemption-mode auto needs a formula of step times: give a calibration.json or --hardware.")
    return cost_model(basis.step_time, basis.moves)


def kv_blocks(config: Config, spec: ModelSpec) -> tuple[int, str]:
    """(usable KV blocks, what was assumed to get there): as named, or what the device's memory holds.

    Raises:
        UsageError: neither the number nor a device is given.
        SimError: there is no room for any.
    """
    from engine.core.presets import usable_blocks

    if config.num_gpu_blocks_override is not None:
        return usable_blocks(config.num_gpu_blocks_override, config.preset), ""
    if config.hardware is None:
        raise UsageError(
            "A calibration does not say how much memory there is: give --num-gpu-blocks-override or --hardware."
        )
    from sim.hardware import load_device
    from sim.memory import kv_blocks as kv_budget

    budget = kv_budget(
        spec,
        load_device(config.hardware),
        config.gpu_memory_utilization,
        config.tensor_parallel_size,
        config.block_size,
        None if config.dtype == "auto" else config.dtype,
        None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.vllm_version,
        config.quantization,
        unprofiled_bytes(config, spec),
    )
    return usable_blocks(budget.num_blocks, config.preset), budget.text()


def simulate_trace(
    config: Config, trace: Trace, options: SchedulerConfig, basis: Basis, assumption: str = ""
) -> Prediction:
    """The simulation and, with a calibration, its repetitions. Ctrl-C ends it after a whole step."""
    with Interruption() as interrupted:
        return _predict(config, trace, options, basis, assumption, interrupted)


def _predict(
    config: Config, trace: Trace, options: SchedulerConfig, basis: Basis, assumption: str, interrupted: Interruption
) -> Prediction:
    from sim.simulate import share_outside_hull

    guard = guard_of(config, options)
    found = _run(config, trace, options, basis, basis.step_time, interrupted, record=config.record_blocks, guard=guard)
    tables = _tables(found, options)
    outside = None if basis.hull is None else share_outside_hull(found, basis.hull)
    blocks, prefix = found.recorder.blocks, found.recorder.prefix_rows
    del found
    gc.collect()  # what it recorded is in the tables now; metrics need the room
    summary = summarize(tables, options.num_blocks, slo_of(config))
    if guard is not None:
        summary["oom"] = describe_oom(guard, tables.requests)
    if options.num_host_blocks or config.n > 1 or config.beam_width:
        assumption = ". ".join(text for text in (assumption, basis.moves.label) if text)
    about: dict[str, Any] = {
        "basis": "calibration" if basis.calibration else "roofline" if basis.hull is None else "kernel tables",
        "label": basis.label,
        "assumptions": [*basis.assumptions, *([assumption] if assumption else [])],
        "band": None,
        "bands": None,
        "elasticity": None,
        "share_outside_hull": None,
    }
    if basis.hull is not None:
        about["share_outside_hull"] = outside
    wanted = config.bands and guard is None and (basis.hull is not None or len(trace) <= MOST_ROOFLINE)
    if basis.band is not None and wanted and not interrupted():
        if basis.calibration is not None:
            models: dict[str, StepModel] = dict(basis.calibration.band_models(REFITS))
        else:
            models = {name: basis.step_time.scaled(1 + sign * basis.band) for name, sign in _ENDS.items()}
        others = {
            name: summarize(
                _tables(_run(config, trace, options, basis, model, interrupted), options), options.num_blocks
            )
            for name, model in models.items()
        }
        if not interrupted():  # or else some of them are of a part of the trace
            about["band"] = basis.band
            about["bands"] = _bands([summary, *others.values()])
            about["elasticity"] = _elasticity(others["low"], others["high"], basis.band)
    if prefix is not None:
        summary["prefix"] = by_tenant(prefix)
    return Prediction(tables, summary, about, blocks, not interrupted(), prefix)


def _run(
    config: Config,
    trace: Trace,
    options: SchedulerConfig,
    basis: Basis,
    step_time: StepModel,
    stop: Callable[[], bool],
    record: bool = False,
    guard: MemoryGuard | None = None,
) -> SimResult:
    from sim.simulate import simulate

    return simulate(
        trace,
        options,
        step_time,
        time_scale=config.time_scale,
        fast_forward=config.fast_forward,
        record_blocks=config.record_blocks_limit if record else 0,
        stop=stop,
        moves=basis.moves,
        n=config.beam_width or config.n,
        beam=config.beam_width is not None,
        forks=config.parallel_sampling == "fork",
        seed=config.seed,
        guard=guard,
    )


def _tables(found: SimResult, options: SchedulerConfig) -> Tables:
    return Tables(found.requests(), found.steps(), found.gaps(), options.steps_in_flight, options.block_size)


def _values(summary: dict[str, Any]) -> dict[tuple[str, str], float | None]:
    """Every metric of a summary that has a band, flat."""
    flat = {(name, statistic): value for name in BANDED for statistic, value in summary[name].items()}
    return flat | {("output_tokens_per_s", ""): summary["output_tokens_per_s"]}


def _nested(flat: dict[tuple[str, str], Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (name, statistic), value in flat.items():
        if statistic:
            nested.setdefault(name, {})[statistic] = value
        else:
            nested[name] = value
    return nested


def _bands(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """[lowest, highest] of each metric over the repetitions."""
    every = [_values(summary) for summary in summaries]
    bands: dict[tuple[str, str], Any] = {}
    for key in every[0]:
        known = [value for values in every if (value := values[key]) is not None]
        bands[key] = [min(known), max(known)] if known else None
    return _nested(bands)


def _elasticity(low: dict[str, Any], high: dict[str, Any], band: float) -> dict[str, Any]:
    """d ln(metric) / d ln(step time), between both ends of the band."""
    slow, fast = _values(high), _values(low)
    width = math.log((1 + band) / max(0.05, 1 - band))
    return _nested(
        {key: math.log(slow[key] / fast[key]) / width if slow[key] and fast[key] else None for key in slow}  # type: ignore[operator]
    )


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the table of distributions: (metric, mean, p50, p90, p95, p99)."""
    titles = {
        "ttft_s": ("time to first token (s)", 1.0),
        "tpot_s": ("time per output token (ms)", 1e3),
        "itl_s": ("inter-token latency (ms)", 1e3),
        "e2e_s": ("end-to-end latency (s)", 1.0),
    }
    return [
        (title, *("–" if v is None else f"{v * factor:,.3f}" for v in summary[name].values()))
        for name, (title, factor) in titles.items()
    ]


def show_summary(summary: dict[str, Any], terminal: Terminal, title: str) -> None:
    """The metrics of a run on the terminal."""
    terminal.table(title, ("", "mean", "p50", "p90", "p95", "p99"), summary_rows(summary))
    rate = summary["output_tokens_per_s"]
    hits, prompt = summary["prefix_hit_tokens"], summary["prompt_tokens"]
    lines = [
        f"{summary['num_requests']:,} requests ({summary['num_rejected']:,} rejected) in {summary['duration_s']:,.1f} s"
        f", {'–' if rate is None else f'{rate:,.1f}'} output tokens per s, {summary['num_steps']:,} steps",
        f"{summary['kv_blocks']:,} KV blocks, {summary['num_preemptions']:,} preemptions, "
        f"{hits / prompt if prompt else 0:.1%} of prompt tokens from the prefix cache",
    ]
    factor = summary.get("overload_factor")
    if factor is not None and factor >= 1.1:
        lines.append(
            f"Overload factor {factor:.2f}: serving took that many times as long as the requests took to arrive"
        )
    if summary.get("goodput_per_s") is not None:
        lines.append(f"{summary['goodput_per_s']:,.3f} requests per s met their objectives")
    for line in lines:
        terminal.print(line + ".")
    if "waiting_share" in summary:
        terminal.print(limit_line(summary))


def show(prediction: Prediction, terminal: Terminal) -> None:
    """The metrics, and what they rest on."""
    about = prediction.about
    show_summary(prediction.summary, terminal, "Simulated")
    if "oom" in prediction.summary:
        show_oom(prediction.summary["oom"], terminal)
    terminal.print(f"Step times: {about['label']}.")
    for text in about["assumptions"]:
        terminal.print(f"{text[:1].upper()}{text[1:].removesuffix('.')}.")
    if about["bands"] is not None:
        steep = (about["elasticity"]["ttft_s"] or {}).get("mean")
        terminal.print(
            f"With step times off by ±{about['band']:.1%}"
            + (f" and {REFITS} refits: mean " if about["basis"] == "calibration" else ": mean ")
            + ", ".join(
                f"{title} {low * factor:,.3f} to {high * factor:,.3f} {unit}"
                for name, title, factor, unit in (
                    ("ttft_s", "TTFT", 1.0, "s"),
                    ("tpot_s", "TPOT", 1e3, "ms"),
                    ("e2e_s", "end-to-end", 1.0, "s"),
                )
                if about["bands"][name]["mean"] is not None
                for low, high in [about["bands"][name]["mean"]]
            )
            + "."
        )
        if steep is not None and steep > STEEP:
            terminal.warn(
                f"one percent on step times moves the mean TTFT by {steep:.1f} percent: the load is near capacity, "
                "so do not lean on it."
            )
    outside = about["share_outside_hull"]
    if outside:
        terminal.warn(f"{outside:.1%} of the simulated time is in batches beyond those that were calibrated.")
