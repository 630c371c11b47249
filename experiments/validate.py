"""`kvtwin validate`: a real run simulated from what it was asked, and how far off that is.

Nothing is fitted to the run. Arrivals, lengths and identities of blocks are the log's; the scheduler's options are
those of engine.json; step times are those of the kernel tables beside it (else a calibration's, else a roofline's); KV
blocks are as recorded, or with --predict-blocks as the memory model has them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import metrics, results
from experiments.config import Config
from experiments.enginefacts import EngineFacts, engine_facts
from experiments.errors import UsageError
from experiments.rundir import RealRun, read_run
from sim.fleet import simulate_fleet
from sim.simulate import SimResult, share_outside_hull, simulate
from sim.steptime import StepModel, roofline
from sim.tabletime import ExpertGroup, TableTime, load_table_time

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from experiments.terminal import Terminal
    from sim.calibration import Hull

__all__ = ["LATENCIES", "Basis", "Predicted", "basis_of", "compare_run", "execute", "predict"]

LATENCIES = ("ttft_s", "ttft_queued_s", "tpot_s", "e2e_s", "e2e_queued_s")
STATISTICS = ("mean", "p50", "p90", "p99")
WARM_UP = 5
"""First requests that are left out of errors of single requests: the engine was still warming up."""
_LINK_DOUBT = 0.25
"""How far a link's description may be off where nobody has measured it: a share of what collectives take."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What the prediction rests on."""

    facts: EngineFacts
    step_time: StepModel
    hull: Hull | None
    kv_blocks: int
    """Usable ones of a replica."""
    kv_blocks_source: str
    """`recorded`, `predicted` or `given`."""
    notes: tuple[str, ...]
    band: float | None
    """Predictions are given for step times within this factor; None: it follows from what is assumed."""

    @property
    def options(self) -> SchedulerConfig:
        return self.facts.scheduler(self.kv_blocks)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The simulated run, in the order of the log; seconds from the first arrival."""

    replicas: tuple[SimResult, ...]
    requests: dict[str, Any]
    latencies: dict[str, np.ndarray]
    """`LATENCIES`, in seconds; NaN where a request has none."""
    num_preemptions: int

    def series(self, times: np.ndarray) -> dict[str, np.ndarray]:
        """`running`, `waiting` and `kv_cache_pct` at each of the times, over all replicas.

        Counts are those of the newest completed step, before anything is admitted or preempted again: what vLLM logs.
        """
        running, waiting, used, slots = (np.zeros(len(times)) for _ in range(4))
        for result in self.replicas:
            config = result.scheduler.config
            tables = metrics.Tables(
                result.requests(), result.steps(), result.gaps(), config.steps_in_flight, config.block_size
            )
            steps = metrics.expand_steps(tables)
            starts = np.append(steps["start_ns"], result.end_ns) / 1e9
            held = sum(steps[name] for name in metrics.USAGE if name not in ("cached", "free"))
            slots += config.num_blocks * config.block_size
            begun = steps["admitted"] - steps["preempted"]
            columns = (steps["num_running"] - begun, steps["num_waiting"] + begun, held)
            for total, values in zip((running, waiting, used), columns, strict=True):
                total += metrics.time_weighted(starts, np.append(values, 0), times)
        return {"running": running, "waiting": waiting, "kv_cache_pct": 100 * used / np.maximum(slots, 1)}


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin validate`: prints the comparison, writes --out; returns validate.json."""
    began = time.perf_counter()
    run = read_run(args.run)
    basis = basis_of(run, config, predict_blocks=args.predict_blocks, model=args.model, form=args.step_time)
    predicted = predict(run, basis)
    report = compare_run(run, basis, predicted, bands=config.bands)
    show(report, terminal)
    if config.out is not None:
        from experiments.validateplot import pictures

        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        for name, png in pictures(run, predicted, report).items():
            results.write_bytes(folder / f"{name}.png", png)
        results.write_json(folder / "validate.json", report)
        terminal.note(f"Written to {folder} in {time.perf_counter() - began:.1f} s.")
    return report


def basis_of(
    run: RealRun,
    config: Config,
    *,
    predict_blocks: bool = False,
    model: str | None = None,
    form: str = "auto",
) -> Basis:
    """What to simulate the run with.

    Args:
        form: `auto` (kernel tables where the run has them), or `six-terms`, fitted to a sweep of those tables.

    Raises:
        UsageError, SimError: something is missing or malformed.
    """
    facts = engine_facts(run.settings, model=model, hardware=config.hardware)
    notes = [*run.notes, *facts.notes]
    blocks, source = _kv_blocks(facts, config, predict_blocks)
    if source == "predicted":
        notes.append(f"the memory model gives a replica {blocks:,} KV blocks")
    step_time, hull, band, more = _step_time(run, config, facts, blocks, form)
    return Basis(facts, step_time, hull, blocks, source, (*notes, *more), band)


def _kv_blocks(facts: EngineFacts, config: Config, predict_blocks: bool) -> tuple[int, str]:
    from engine.core.presets import usable_blocks

    if config.num_gpu_blocks_override is not None:
        return usable_blocks(config.num_gpu_blocks_override, facts.preset), "given"
    if facts.num_gpu_blocks is not None and not predict_blocks:
        return usable_blocks(facts.num_gpu_blocks, facts.preset), "recorded"
    if facts.hardware is None:
        raise UsageError(
            "The run records no KV blocks, and no hardware to predict them from: give --hardware or "
            "--num-gpu-blocks-override."
        )
    from sim.memory import DEFAULT_VERSION, MemoryRequest, plan

    made = plan(
        MemoryRequest(
            facts.model,
            facts.hardware,
            facts.version or DEFAULT_VERSION,
            facts.tp,
            utilization=facts.utilization,
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            block_size=facts.block_size,
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            enforce_eager=not facts.graph_sizes,
            expert_ranks=facts.expert_ranks,
        )
    )
    if made.refusal is not None:
        raise UsageError(f"By the memory model the run would not have started: {' '.join(made.refusal.split())}")
    return usable_blocks(made.num_blocks, facts.preset), "predicted"


def _step_time(
    run: RealRun, config: Config, facts: EngineFacts, blocks: int, form: str
) -> tuple[StepModel, Hull | None, float | None, list[str]]:
    """(the model, what it was measured for, its band, notes)."""
    if config.calibration is not None:
        from sim.calibration import load_calibration

        calibration = load_calibration(config.calibration)
        return calibration.step_time(), calibration.hull, calibration.band, []
    if run.profile is None:
        if form == "six-terms":
            raise UsageError(f"'{run.path}' has no profile/ to fit six terms to; leave --step-time out.")
        if facts.hardware is None:
            raise UsageError(f"'{run.path}' has no profile/ and names no hardware; give --calibration or --hardware.")
        spec, device = facts.model, facts.hardware
        found = roofline(spec, device, facts.tp, facts.dtype, facts.kv_dtype)
        return found, None, 0.27, [f"there is no profile: step times are a {found.label}"]
    table, source = load_table_time(
        run.profile,
        facts.model,
        facts.tp,
        device=facts.hardware,
        graph_sizes=facts.graph_sizes,
        expert_ranks=facts.expert_ranks,
    )
    notes = [f"collectives: {source}"] if source else []
    if form != "six-terms":
        return table, table.measured(), None, notes
    from sim.tablefit import fit_six_terms

    calibration = fit_six_terms(table, run.trace, facts.scheduler(blocks))
    return calibration.step_time(), calibration.hull, calibration.band, [*notes, calibration.label()]


def predict(run: RealRun, basis: Basis, factor: float = 1.0) -> Predicted:
    """The run as simulated, with every step `factor` times as long."""
    facts, options = basis.facts, basis.options
    model = basis.step_time if factor == 1.0 else basis.step_time.scaled(factor)
    replicas: tuple[SimResult, ...]
    if facts.dp == 1:
        found = simulate(run.trace, options, model)
        replicas, requests = (found,), found.requests()
    else:
        group = None
        models: list[StepModel] = [model] * facts.dp
        if facts.expert_ranks > 1 and isinstance(model, TableTime):
            group = ExpertGroup(facts.dp)
            models = [model.of_rank(group, rank) for rank in range(facts.dp)]
        fleet = simulate_fleet(run.trace, options, models, group=group)
        replicas, requests = fleet.replicas, fleet.requests()
    order = np.argsort(np.asarray(requests["row"]), kind="stable")
    requests = {name: np.asarray(values)[order] for name, values in requests.items()}
    refused = [str(reason) for reason in requests["reason"] if reason]
    if refused:
        raise UsageError(f"{len(refused)} requests of the run could not be served in simulation: {refused[0]}.")
    arrival, queued, first, last = (
        np.asarray(requests[name], dtype=np.int64) / 1e9
        for name in ("arrival_ns", "queued_ns", "first_token_ns", "finish_ns")
    )
    tokens = run.output_tokens - 1
    latencies = {
        "ttft_s": first - arrival,
        "ttft_queued_s": first - queued,
        "tpot_s": np.where(tokens > 0, (last - first) / np.maximum(tokens, 1), np.nan),
        "e2e_s": last - arrival,
        "e2e_queued_s": last - queued,
    }
    return Predicted(replicas, requests, latencies, int(np.sum(requests["num_preemptions"])))


# What to say of it


def _statistics(values: np.ndarray) -> dict[str, float | None]:
    """mean, p50, p90, p99 of those that are not NaN."""
    found = metrics.distribution(values * 1e9)
    return {name: found[name] for name in STATISTICS}


def _error_pct(predicted: float | None, real: float | None) -> float | None:
    return None if predicted is None or not real else 100.0 * (predicted / real - 1.0)


def _mape(predicted: np.ndarray, real: np.ndarray) -> float | None:
    """Mean absolute relative error in percent, the first `WARM_UP` requests left out."""
    keep = (np.arange(len(real)) >= WARM_UP) & np.isfinite(predicted) & (np.nan_to_num(real) > 0)
    if not keep.any():
        return None
    return float(100.0 * np.mean(np.abs(predicted[keep] / real[keep] - 1.0)))


def _table(predicted: dict[str, np.ndarray], real: dict[str, np.ndarray]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name in LATENCIES:
        if name not in predicted or not np.isfinite(real[name]).any():
            continue
        ours, theirs = _statistics(predicted[name]), _statistics(real[name])
        table[name] = {
            key: {"real": theirs[key], "predicted": ours[key], "error_pct": _error_pct(ours[key], theirs[key])}
            for key in STATISTICS
        }
    return table


def compare_run(run: RealRun, basis: Basis, predicted: Predicted, bands: bool = True) -> dict[str, Any]:
    """The content of validate.json."""
    real = run.latencies()
    public = _public(run, real)
    facts = basis.facts
    report: dict[str, Any] = {
        "run": run.path.name,
        "model": facts.model.name,
        "hardware": facts.hardware.name if facts.hardware else None,
        "vllm_version": facts.version or None,
        "preset": facts.preset,
        "tensor_parallel_size": facts.tp,
        "data_parallel_size": facts.dp,
        "num_requests": len(run),
        "step_time": basis.step_time.label,
        "kv_blocks": basis.kv_blocks,
        "kv_blocks_source": basis.kv_blocks_source,
        "kv_blocks_recorded": facts.num_gpu_blocks,
        "metrics": _table(predicted.latencies, real),
        "per_request_mape_pct": {name: _mape(predicted.latencies[name], real[name]) for name in LATENCIES},
        "requests_left_out": WARM_UP,
        "num_preemptions": predicted.num_preemptions,
        "running_mean_abs_error": None,
        "kv_cache_pct_mean_abs_error": None,
        "public_simulator": public,
        **_trust(run, basis, predicted, bands),
        "notes": list(basis.notes),
    }
    if run.series is not None:
        ours = predicted.series(run.series["t"])
        for name, key in (
            ("running", "running_mean_abs_error"),
            ("kv_cache_pct", "kv_cache_pct_mean_abs_error"),
        ):
            if name in run.series and len(run.series["t"]):
                report[key] = float(np.mean(np.abs(ours[name] - run.series[name])))
    return report


def _public(run: RealRun, real: dict[str, np.ndarray]) -> dict[str, Any] | None:
    """What the public simulator said against the same real values, from when the engine took a request in, if known."""
    if run.public is None:
        return None
    ttft, e2e = run.public["ttft_s"], run.public["latency_s"]
    tokens = run.output_tokens - 1
    ours = {"tpot_s": np.where(tokens > 0, (e2e - ttft) / np.maximum(tokens, 1), np.nan)}
    if run.queued_s is not None:
        ours |= {"ttft_queued_s": ttft, "e2e_queued_s": e2e}
    else:
        ours |= {"ttft_s": ttft, "e2e_s": e2e}
    return {
        "metrics": _table(ours, real),
        "per_request_mape_pct": {name: _mape(values, real[name]) for name, values in ours.items()},
    }


def _trust(run: RealRun, basis: Basis, predicted: Predicted, bands: bool) -> dict[str, Any]:
    """Band, elasticity, and the share of simulated time outside of what was measured."""
    outside = None
    if basis.hull is not None:
        shares = [(share_outside_hull(result, basis.hull), _busy_ns(result)) for result in predicted.replicas]
        total = sum(busy for _, busy in shares)
        outside = sum(share * busy for share, busy in shares) / total if total else 0.0
    band = basis.band if basis.band is not None else _assumed_share(basis, predicted.replicas)
    trust: dict[str, Any] = {"band": band, "bands": None, "elasticity": None, "share_outside_hull": outside}
    if not bands:
        return trust
    low, high = (predict(run, basis, factor).latencies for factor in (1.0 - band, 1.0 + band))
    trust["bands"], trust["elasticity"] = {}, {}
    for name in LATENCIES:
        values = [_statistics(each[name])["mean"] for each in (low, predicted.latencies, high)]
        known = [value for value in values if value is not None]
        trust["bands"][name] = [min(known), max(known)] if known else None
        slow, fast = values[2], values[0]
        trust["elasticity"][name] = (
            math.log(slow / fast) / math.log((1.0 + band) / (1.0 - band)) if slow and fast else None
        )
    return trust


def _busy_ns(result: SimResult) -> float:
    steps = result.steps()
    return float(np.sum(np.asarray(steps["end_ns"]) - np.asarray(steps["start_ns"]))) or 1.0


def _assumed_share(basis: Basis, replicas: Sequence[SimResult]) -> float:
    """How much of the simulated time rests on what was assumed and not measured: the band of kernel tables.

    What graphs save, and a part of what collectives take where their link was not measured; at least 1 %.
    """
    from sim.calibration import LEAST_BAND

    table = basis.step_time
    if not isinstance(table, TableTime):
        return LEAST_BAND
    assumed = total = 0.0
    for result in replicas:
        steps = result.steps()
        counts = np.asarray(steps["num_steps"], dtype=np.int64)
        total += _busy_ns(result)
        tokens = np.asarray(steps["num_decodes"]) + np.asarray(steps["prefill_tokens"])
        rows = np.asarray(steps["num_decodes"]) + np.asarray(steps["num_prefills"])
        for n, r, count in zip(tokens.tolist(), rows.tolist(), counts.tolist(), strict=True):
            assumed += count * (table.graph_saving(n, r) + _LINK_DOUBT * table.assumed_link_ns(n))
    return max(LEAST_BAND, min(0.5, assumed / total))


def show(report: dict[str, Any], terminal: Terminal) -> None:
    """The comparison on the terminal."""
    titles = {
        "ttft_s": ("TTFT (s)", 1.0),
        "ttft_queued_s": ("TTFT from queued (s)", 1.0),
        "tpot_s": ("TPOT (ms)", 1e3),
        "e2e_s": ("latency (s)", 1.0),
        "e2e_queued_s": ("latency from queued (s)", 1.0),
    }
    public = report["public_simulator"]
    rows = []
    for name, table in report["metrics"].items():
        title, factor = titles[name]
        other = (public or {}).get("metrics", {}).get(name, {})
        for key, entry in table.items():
            theirs = other.get(key, {}).get("error_pct")
            rows.append(
                (
                    f"{title} {key}",
                    f"{entry['real'] * factor:,.3f}",
                    f"{entry['predicted'] * factor:,.3f}",
                    "–" if entry["error_pct"] is None else f"{entry['error_pct']:+.2f} %",
                    "" if theirs is None else f"{theirs:+.2f} %",
                )
            )
        mape = report["per_request_mape_pct"][name]
        theirs = (public or {}).get("per_request_mape_pct", {}).get(name)
        if mape is not None:
            rows.append(
                (f"{title} single requests", "", "", f"{mape:.2f} %", "" if theirs is None else f"{theirs:.2f} %")
            )
    columns = ("", "real", "predicted", "error", "public simulator's" if public else "")
    terminal.table(f"{report['run']}: {report['num_requests']:,} requests", columns, rows)
    terminal.print(f"Step times: {report['step_time']}.")
    text = (
        f"{report['kv_blocks']:,} KV blocks ({report['kv_blocks_source']}), {report['num_preemptions']:,} preemptions"
    )
    for key, what in (("running_mean_abs_error", "running"), ("kv_cache_pct_mean_abs_error", "% of KV")):
        if report[key] is not None:
            text += f", {what} off by {report[key]:.2f} on average"
    terminal.print(text + ".")
    if report["bands"] is not None:
        steep = report["elasticity"]["ttft_s"]
        low, high = report["bands"]["e2e_s"]
        terminal.print(
            f"With step times off by ±{report['band']:.1%}: mean latency {low:,.3f} to {high:,.3f} s. One percent on "
            f"step times moves mean TTFT by {steep:.2f} and latency by {report['elasticity']['e2e_s']:.2f} percent."
        )
        if steep is not None and steep > 2.0:
            terminal.warn("the load is near capacity: do not lean on TTFT.")
    if report["share_outside_hull"]:
        terminal.warn(f"{report['share_outside_hull']:.1%} of the simulated time is in batches beyond those measured.")
    for note in report["notes"]:
        terminal.note(f"{note[:1].upper()}{note[1:]}.")
