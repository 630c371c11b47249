"""What a crash costs: requests and goodput lost while a replica restarts, with N replicas and with one to spare.

Three replicas, each Llama-3.1-70B on four A100-80G, serve chats at a share of what they can; one of them dies. All
times are a roofline's, and predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.clustermetrics import cluster_summary
from experiments.experiment import Column, Context, ExperimentResult, Settled, Table
from experiments.failoverplot import picture
from experiments.metrics import Slo, expand_steps, good
from sim.faults import Faults, load_ns
from sim.gateway import GatewayOptions
from sim.node import NodeSpec
from sim.routers import ROUTERS, LeastLoaded

if TYPE_CHECKING:
    from traces import Trace

__all__ = ["run"]

AZURE = "traces/azure2023/AzureLLMInferenceTrace_conv.csv.xz"
MODEL, DEVICE, TP = "llama-3.1-70b", "a100-80g", 4
REPLICAS = 3
"""N: enough for the load; N + 1 has one to spare."""
LOADS = (0.5, 0.65, 0.8)
"""Of what N replicas serve at most."""
HIGH = 0.8
RESTARTS = (120, 180, 240, 300)
"""Seconds; the article's 2 to 5 minutes."""
RESTART = 180
CRASH_S, LENGTH_S, AFTER_S = 150, 750, 540
"""When the replica dies, how long requests come, and how long after the crash they are counted."""
SLO = Slo(ttft_s=3.0, tpot_s=0.15)
PATIENT_S, IMPATIENT_S = 600, 120
"""How long a client waits for an answer: as OpenAI's Python client does, and less."""
HEALTH = (0, 5, 10, 30)
"""Seconds between health checks."""
BIN_S = 15
BASE, IMPATIENT = "2 retries, 600 s", "2 retries, 120 s"
CLIENTS = {
    "no retries, 600 s": GatewayOptions(timeout_ns=PATIENT_S * 10**9),
    BASE: GatewayOptions(timeout_ns=PATIENT_S * 10**9, retries=2),
    IMPATIENT: GatewayOptions(timeout_ns=IMPATIENT_S * 10**9, retries=2),
    "the same, short queue": GatewayOptions(
        timeout_ns=IMPATIENT_S * 10**9, retries=2, max_outstanding=96, max_queue=32
    ),
}
"""Clients and gateways; in the last at most 96 requests a replica are on the way, and 32 wait."""
MODELS = (("llama-3.1-8b", 1), ("llama-3.1-70b", 4), ("llama-3.1-405b", 16))
LOAD_GB_S = (0.5, 1.0, 2.0, 5.0)
START_S = 60.0


def run(context: Context) -> ExperimentResult:
    """Losses over restart time, load and what clients do; health checks; rows A08 and A47."""
    notes = []
    if not context.has(AZURE):
        notes.append(f"Lengths are drawn with the means of the Azure chats: there is no {AZURE} in the shared data.")
    rate = context.part("capacity", partial(_capacity, context))
    wanted = {(HIGH, restart, BASE) for restart in RESTARTS}
    wanted |= {(load, RESTART, BASE) for load in LOADS}
    wanted |= {(HIGH, RESTART, clients) for clients in CLIENTS}
    runs = []
    cases = [(*case, spare) for case in sorted(wanted) for spare in (0, 1)]
    for load, restart, clients, spare in context.track(cases, "crashes"):
        name = f"{load:g}-{restart}-{clients}-{REPLICAS + spare}".replace(" ", "-").replace(",", "")
        runs.append(context.part(name, partial(_crash, context, load, restart, clients, spare, rate)))
    health = [
        context.part(f"health-{at}-{router}", partial(_health, context, at, router, rate))
        for at in HEALTH
        for router in ("round-robin", "least-loaded")
    ]
    single = context.part("single", partial(_single, context, rate))
    starts = _starts()
    notes += [
        f"One replica serves {rate:.2f} requests/s at most (as many as it can at once); load is a share of what "
        f"{REPLICAS} serve. Counted are requests that arrive within {AFTER_S} s of the crash.",
        f"Good: first token within {SLO.ttft_s:g} s and {1e3 * (SLO.tpot_s or 0):g} ms a token. Degraded: until the "
        f"last {BIN_S} s in which fewer than 95 % of the arrivals were good.",
        f"Clients that give up after {IMPATIENT_S} s and come again keep an overloaded cluster busy with what nobody "
        "waits for any more: it does not recover after the replica has. A short queue ends that.",
        "A replica that is dead and not yet noticed answers at once, with an error: to whoever counts outstanding "
        "requests it is the least loaded.",
        "Times are simulated on a roofline and predicted. How long a start takes is given, not predicted.",
    ]
    summary = {"capacity_per_s": rate, "runs": runs, "health": health, "single": single, "starts": starts}
    tables = [_runs_table(runs), _health_table(health), _starts_table(starts)]
    claims = [_a08(single), _a47(runs, health, starts)]
    return ExperimentResult(tables, {"failover": picture(runs, single, BASE, IMPATIENT)}, summary, claims, notes)


# ---- runs ----


def _lengths(context: Context, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of prompts and outputs: those of the Azure chats, or lognormal ones with their means."""
    if context.has(AZURE):
        trace = context.trace(AZURE)
        rows = np.random.default_rng([context.seed, 1]).integers(0, len(trace), n)
        return trace.prompt_tokens[rows], trace.output_tokens[rows]
    rng = np.random.default_rng([context.seed, 2])
    prompts = np.clip(rng.lognormal(np.log(1155) - 0.5, 1.0, n), 8, 8000)
    return prompts.astype(np.int64), np.clip(rng.lognormal(np.log(211) - 0.32, 0.8, n), 4, 1000).astype(np.int64)


def _node(restart_s: float) -> NodeSpec:
    from engine.core.presets import SchedulerConfig
    from experiments.scenarios import step_time
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset

    blocks = kv_blocks(preset(MODEL), device(DEVICE), 0.9, TP).num_blocks
    config = SchedulerConfig(num_blocks=blocks, max_model_len=16_384)
    return NodeSpec(config, step_time(MODEL, DEVICE, TP), name=DEVICE, restart_ns=round(restart_s * 1e9))


def _load(context: Context, rate: float, seconds: float) -> Trace:
    """Poisson arrivals of chats."""
    from traces import make_trace

    n = round(rate * seconds)
    gaps = np.random.default_rng([context.seed, 3]).exponential(1e9 / rate, n)
    return make_trace(np.cumsum(gaps).astype(np.int64), *_lengths(context, n), name=f"chats, {rate:.2f}/s")


def _capacity(context: Context) -> float:
    """Requests a second that one replica serves where there is no end of them."""
    from traces import make_trace

    n = 1500
    trace = make_trace(np.zeros(n, dtype=np.int64), *_lengths(context, n), name="chats at once")
    found, _ = context.simulate_cluster("capacity", trace, [_node(0)])
    return n / (found.end_ns / 1e9)


def _crash(context: Context, load: float, restart: int, clients: str, spare: int, rate: float) -> dict[str, Any]:
    """Figures of one run in which the first replica dies."""
    trace = _load(context, load * REPLICAS * rate, LENGTH_S)
    faults = Faults(((0, CRASH_S * 10**9),))
    nodes = [_node(restart)] * (REPLICAS + spare)
    name = f"load {load:g}, restart {restart} s, {clients}, {REPLICAS + spare} replicas"
    found, tables = context.simulate_cluster(name, trace, nodes, LeastLoaded(), CLIENTS[clients], faults)
    requests, attempts = found.requests(), found.attempts()
    whole = cluster_summary(found, tables, SLO, attempts)
    at = requests["arrival_ns"] / 1e9 - CRASH_S
    met = good(requests, SLO)
    after = (at >= 0) & (at < AFTER_S)
    lost = np.isin(np.array(requests["outcome"], dtype=object).astype(str), ("shed", "timeout", "failed"))
    edges = np.arange(-120, AFTER_S + 1, BIN_S)
    share = [_share(met[(at >= low) & (at < low + BIN_S)]) for low in edges[:-1]]
    bad = [low + BIN_S for low, value in zip(edges[:-1].tolist(), share, strict=True) if low >= 0 and value < 0.95]
    before = (at < 0) & (at >= -120)
    died = [name == "crashed" for name in attempts["outcome"]]
    return {
        "load": load,
        "restart_s": restart,
        "clients": clients,
        "replicas": REPLICAS + spare,
        "spare": spare,
        "good_before": _share(met[before]),
        "good_after": _share(met[after]),
        "requests_after": int(after.sum()),
        "lost": int((lost & (at < AFTER_S)).sum()),
        "not_good": int((~met & after).sum()),
        "killed": int(sum(died)),
        "retries": whole["num_retries"],
        "wasted_tokens": whole["wasted_tokens"],
        "ttft_p99_s": float(np.nanpercentile(_ttft(requests)[after], 99)),
        "degraded_s": float(max(bad, default=0)),
        "bins_s": edges[:-1].tolist(),
        "good_share": share,
    }


def _share(met: np.ndarray) -> float:
    """Of those that are true; 1 where there are none."""
    return float(met.mean()) if len(met) else 1.0


def _ttft(requests: Mapping[str, Any]) -> np.ndarray:
    first = np.asarray(requests["first_token_ns"], dtype=np.float64)
    return np.where(first >= 0, (first - requests["arrival_ns"]) / 1e9, np.nan)


def _health(context: Context, interval: int, router: str, rate: float) -> dict[str, Any]:
    """Attempts that were sent to a dead replica before a health check finds it, without retries and at the least load.

    It dies a third of an interval after the check at 60 s.
    """
    crash = 60 + interval // 3
    trace = _load(context, LOADS[0] * REPLICAS * rate, 120)
    faults = Faults(((0, crash * 10**9),), health_interval_ns=interval * 10**9)
    nodes = [_node(RESTART)] * REPLICAS
    name = f"health checks each {interval} s, {router}"
    found, _ = context.simulate_cluster(name, trace, nodes, ROUTERS[router](), None, faults)
    outcomes = found.attempts()["outcome"]
    return {
        "interval_s": interval,
        "router": router,
        "unnoticed_s": interval - interval // 3,
        "crashed": outcomes.count("crashed"),
        "refused": outcomes.count("refused"),
        "requests_per_s": LOADS[0] * REPLICAS * rate,
    }


def _single(context: Context, rate: float) -> dict[str, Any]:
    """One replica alone that dies: requests running over time, and what became of those that came."""
    trace = _load(context, LOADS[1] * rate, LENGTH_S)
    faults = Faults(((0, CRASH_S * 10**9),))
    found, tables = context.simulate_cluster(
        "one replica", trace, [_node(RESTART)], LeastLoaded(), CLIENTS[BASE], faults
    )
    requests = found.requests()
    at = requests["arrival_ns"] / 1e9 - CRASH_S
    lost = np.isin(np.array(requests["outcome"], dtype=object).astype(str), ("shed", "timeout", "failed"))
    times, running = [], []
    for each in tables:
        steps = expand_steps(each)
        times.append(steps["start_ns"] / 1e9 - CRASH_S)
        running.append(steps["num_running"])
        times.append(steps["end_ns"][-1:] / 1e9 - CRASH_S)
        running.append(np.zeros(1, dtype=np.int64))
    when, count = np.concatenate(times), np.concatenate(running)
    grid = np.arange(-120, AFTER_S, 2.0)
    index = np.searchsorted(when, grid, side="right") - 1
    first, second = tables
    return {
        "grid_s": grid.tolist(),
        "running": count[index].tolist(),
        "running_before": int(first.steps["num_running"][-1]),
        "killed": found.attempts()["outcome"].count("crashed"),
        "first_step_after_s": float(np.asarray(second.steps["start_ns"])[0]) / 1e9 - CRASH_S,
        "steps_while_down": int(((when > 0.001) & (when < RESTART - 0.001) & (count > 0)).sum()),
        "requests_while_down": int(((at >= 0) & (at < RESTART)).sum()),
        "lost": int(lost.sum()),
    }


def _starts() -> list[dict[str, Any]]:
    """How long a start takes, by model and by how fast its weights are loaded."""
    from sim.models import preset

    found = []
    for model, gpus in MODELS:
        weights = preset(model).weights_bytes()
        row: dict[str, Any] = {"model": model, "gpus": gpus, "weights_gb": weights / 1e9}
        for rate in LOAD_GB_S:
            row[f"at_{rate:g}"] = load_ns(weights, rate * 1e9, START_S) / 1e9
        found.append(row)
    return found


# ---- rows of the ledger ----


def _a08(single: Mapping[str, Any]) -> Settled:
    fell = single["running_before"] > 0 and single["steps_while_down"] == 0 and single["killed"] > 0
    return Settled(
        "A08",
        "reproduced" if fell else "does-not-follow",
        f"one replica alone: {single['running_before']} run when it dies and none until it has restarted, "
        f"{single['first_step_after_s']:.0f} s later; {single['killed']} requests are cut off and tried again, "
        f"{single['requests_while_down']} come meanwhile, and "
        + (f"{single['lost']} are never answered" if single["lost"] else "all are answered, late"),
        numbers={key: value for key, value in single.items() if not isinstance(value, list)},
    )


def _find(runs: list[dict[str, Any]], load: float, restart: int, clients: str, spare: int) -> dict[str, Any]:
    return next(
        r for r in runs if (r["load"], r["restart_s"], r["clients"], r["spare"]) == (load, restart, clients, spare)
    )


def _a47(runs: list[dict[str, Any]], health: list[dict[str, Any]], starts: list[dict[str, Any]]) -> Settled:
    high, spared = (_find(runs, HIGH, RESTART, BASE, spare) for spare in (0, 1))
    low, idle = (_find(runs, LOADS[0], RESTART, BASE, spare) for spare in (0, 1))
    times = [row[f"at_{rate:g}"] for row in starts for rate in LOAD_GB_S]
    inside = [t for t in times if 120 <= t <= 300]
    helps = spared["good_after"] - high["good_after"]
    storm = _find(runs, HIGH, RESTART, IMPATIENT, 0)
    even, slow = health[-2:]
    without = _find(runs, HIGH, RESTART, "no retries, 600 s", 1)
    return Settled(
        "A47",
        "reproduced-only-if" if helps > 0.05 and inside else "does-not-follow",
        f"a restart of {RESTART} s at {HIGH:.0%} of what {REPLICAS} replicas serve: {high['good_after']:.0%} of the "
        f"requests of the next {AFTER_S // 60} min are good with {REPLICAS} replicas and {spared['good_after']:.0%} "
        f"with {REPLICAS + 1} (degraded for {high['degraded_s']:.0f} s and {spared['degraded_s']:.0f} s); at "
        f"{LOADS[0]:.0%} load {low['good_after']:.0%} and {idle['good_after']:.0%}",
        condition=f"the load is above what N - 1 replicas serve (here {(REPLICAS - 1) / REPLICAS:.0%}); below it a "
        f"spare changes little. It saves nobody who ran on the dead replica: without retries {without['killed']} "
        f"requests are lost. Clients that give up after {IMPATIENT_S} s and come again leave {storm['good_after']:.0%} "
        f"good with {REPLICAS} replicas, long after the restart. 2 to 5 minutes are those of a 70B whose weights are "
        f"loaded at 1 to 2 GB/s ({len(inside)} of {len(times)} cases). Unnoticed for {slow['unnoticed_s']} s, a dead "
        f"replica is sent {slow['refused']} requests by a least-loaded router and {even['refused']} in turn",
        numbers={
            "good_n": high["good_after"],
            "good_n_plus_1": spared["good_after"],
            "degraded_n_s": high["degraded_s"],
            "degraded_n_plus_1_s": spared["degraded_s"],
            "lost_without_retries_n_plus_1": without["lost"],
            "lost_by_restart_n": {r["restart_s"]: r["lost"] for r in runs if _is_swept(r) and not r["spare"]},
            "lost_by_restart_n_plus_1": {r["restart_s"]: r["lost"] for r in runs if _is_swept(r) and r["spare"]},
            "good_by_restart_n": {r["restart_s"]: r["good_after"] for r in runs if _is_swept(r) and not r["spare"]},
            "good_n_impatient": storm["good_after"],
            "refused_by_interval_and_router": {f"{h['interval_s']}-{h['router']}": h["refused"] for h in health},
            "start_s": times,
        },
    )


def _is_swept(row: Mapping[str, Any]) -> bool:
    return bool(row["load"] == HIGH and row["clients"] == BASE)


# ---- what is shown ----


def _runs_table(runs: list[dict[str, Any]]) -> Table:
    columns = [
        Column("clients"),
        Column("load", form=".0%"),
        Column("restart_s", "restart s", "d"),
        Column("replicas", form="d"),
        Column("good_after", "good", ".1%"),
        Column("degraded_s", "degraded s", ".0f"),
        Column("killed", "cut off", "d"),
        Column("retries", form=",d"),
        Column("lost", form=",d"),
        Column("ttft_p99_s", "TTFT p99 s", ".1f"),
    ]
    order = sorted(runs, key=lambda r: (list(CLIENTS).index(r["clients"]), r["load"], r["restart_s"], r["spare"]))
    title = f"One of the replicas dies; requests of the next {AFTER_S // 60} min, predicted"
    return Table("crashes", title, columns, [[row[c.name] for c in columns] for row in order])


def _health_table(health: list[dict[str, Any]]) -> Table:
    columns = [
        Column("router"),
        Column("interval_s", "checks each s", "d"),
        Column("unnoticed_s", "unnoticed s", "d"),
        Column("crashed", "cut off", "d"),
        Column("refused", "sent to the dead", "d"),
    ]
    rows = [[row[c.name] for c in columns] for row in health]
    return Table("health", "Requests lost until a health check finds the dead replica, without retries", columns, rows)


def _starts_table(starts: list[dict[str, Any]]) -> Table:
    columns = [Column("model"), Column("weights_gb", "weights GB", ".1f")]
    columns += [Column(f"at_{rate:g}", f"at {rate:g} GB/s", ".0f") for rate in LOAD_GB_S]
    rows = [[row[c.name] for c in columns] for row in starts]
    return Table("starts", f"Seconds of a start: loading the weights, and {START_S:.0f} s beside it", columns, rows)
