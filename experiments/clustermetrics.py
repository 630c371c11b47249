"""Metrics of a cluster, from the same tables and by the same functions as those of one replica.

Requests that were shed, too slow or lost have no latency and no output: they are counted beside, and whoever compares
latencies has to look at `num_lost` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.metrics import Slo, Tables, distribution, good, inter_token_gaps, latencies
from sim.attempts import DECODE, PREFILL
from sim.faults import NEVER

if TYPE_CHECKING:
    from sim.cluster import ClusterResult, LifeRecord

__all__ = ["LOST", "cluster_summary", "life_tables", "lives_table"]

LOST = ("shed", "timeout", "failed")
"""Outcomes of requests that got no answer from a replica."""


def life_tables(record: LifeRecord) -> Tables:
    """What one life of a replica recorded."""
    result = record.life.result()
    config = result.scheduler.config
    return Tables(result.requests(), result.steps(), result.gaps(), config.steps_in_flight, config.block_size)


def cluster_summary(
    result: ClusterResult, tables: Sequence[Tables], slo: Slo, attempts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of a cluster's summary.json. `tables` are those of its lives, in order."""
    requests = result.requests()
    attempts = result.attempts() if attempts is None else attempts
    outcome = Counter(requests["outcome"])
    kinds = Counter(attempts["outcome"])
    arrival, ended = requests["arrival_ns"], requests["ended_ns"]
    seconds = max(0, int(ended.max()) - int(arrival.min())) / 1e9 if len(arrival) else 0.0
    values = latencies(requests)
    output = int(requests["output_tokens"].sum())
    sampled = int(attempts["output_tokens"][attempts["leg"] != PREFILL].sum())
    met = int(good(requests, slo).sum())
    gaps = [inter_token_gaps(each) for each in tables]
    admitted = (attempts["admitted_ns"] >= 0) & (attempts["leg"] != DECODE)
    prompt = np.asarray(result.trace.prompt_tokens, dtype=np.int64)[attempts["row"]]
    work = _work(result, tables)
    return {
        "num_requests": len(arrival),
        "num_finished": outcome["length"] + outcome["stop"],
        "num_rejected": outcome["rejected"] + outcome["no-memory"],
        "num_shed": outcome["shed"],
        "num_timed_out": outcome["timeout"],
        "num_failed": outcome["failed"],
        "num_lost": sum(outcome[name] for name in LOST),
        "num_retried": int((requests["retries"] > 0).sum()),
        "num_retries": int(requests["retries"].sum()),
        "attempts": {name: kinds[name] for name in sorted(kinds)},
        "num_crashes": sum(record.ended_ns != NEVER for record in result.lives),
        "duration_s": seconds,
        "output_tokens_per_s": output / seconds if seconds else None,
        "wasted_tokens": sampled - output,
        "goodput_per_s": met / seconds if seconds else None,
        "good_share": met / len(arrival) if len(arrival) else None,
        "ttft_s": distribution(values["ttft_s"]),
        "tpot_s": distribution(values["tpot_s"]),
        "itl_s": distribution(np.concatenate([v for v, _ in gaps]), np.concatenate([c for _, c in gaps])),
        "e2e_s": distribution(values["e2e_s"]),
        "num_preemptions": int(attempts["num_preemptions"].sum()),
        "prefix_hit_tokens": int(attempts["cached_tokens"][admitted].sum()),
        "prompt_tokens": int(prompt[admitted].sum()),
        "imbalance": max(work) / (sum(work) / len(work)) if sum(work) else None,
        "replicas": lives_table(result, tables),
    }


def _work(result: ClusterResult, tables: Sequence[Tables]) -> list[int]:
    """ns that each replica's device was busy, over all its lives."""
    work: dict[int, int] = {}
    for record, each in zip(result.lives, tables, strict=True):
        work[record.replica] = work.get(record.replica, 0) + int(np.sum(each.steps["gpu_busy_ns"]))
    return list(work.values())


def lives_table(result: ClusterResult, tables: Sequence[Tables]) -> list[dict[str, Any]]:
    """What each life of each replica did."""
    rows = []
    for record, each in zip(result.lives, tables, strict=True):
        ended = result.end_ns if record.ended_ns == NEVER else record.ended_ns
        lasted = max(1, ended - record.started_ns)
        hits, admitted = np.asarray(each.requests["cached_tokens"]), np.asarray(each.requests["admitted_ns"]) >= 0
        rows.append(
            {
                "replica": record.replica,
                "life": record.number,
                "started_s": record.started_ns / 1e9,
                "ended_s": ended / 1e9,
                "crashed": record.ended_ns != NEVER,
                "requests": len(each.requests["row"]),
                "output_tokens": int(np.asarray(each.requests["output_tokens"]).sum()),
                "busy_share": int(np.sum(each.steps["gpu_busy_ns"])) / lasted,
                "prefix_hit_tokens": int(hits[admitted].sum()),
                "prompt_tokens": int(np.asarray(each.requests["prompt_tokens"])[admitted].sum()),
                "num_preemptions": int(np.asarray(each.requests["num_preemptions"]).sum()),
            }
        )
    return rows
