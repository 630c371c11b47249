"""Results folders of a toy server, for tests of what reads them: no scheduler, no model, only plausible tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments import metrics, results

STEP_COLUMNS = (
    *("step", "num_steps", "start_ns", "end_ns", "num_decodes", "decode_context_tokens", "num_prefills"),
    *("prefill_tokens", "prefill_context_work", "num_waiting", "num_running", "admitted", "preempted", "finished"),
    *("held", "tail", "reserved_may", "reserved_cannot", "external", "transfer", "cached", "free", "shared"),
)


def toy_tables(
    num_requests: int = 40,
    seed: int = 0,
    speed: float = 1.0,
    noise: float = 0.0,
    noise_seed: int = 0,
    num_blocks: int = 120,
    block_size: int = 16,
    rate_per_s: float = 8.0,
) -> metrics.Tables:
    """Serves random requests first come first served, one prefill a step, each step written out.

    Args:
        seed: of the workload.
        speed: factor on every step's time.
        noise: relative spread of a step's time, drawn from `noise_seed`.
    """
    rng, jitter = np.random.default_rng(seed), np.random.default_rng(noise_seed)
    arrival = np.cumsum(rng.exponential(1e9 / rate_per_s, num_requests)).astype(np.int64)
    arrival -= arrival[0]
    prompt = rng.integers(20, 200, num_requests)
    output = rng.integers(1, 90, num_requests)
    cached = np.where(rng.random(num_requests) < 0.4, block_size * rng.integers(0, 2, num_requests), 0)
    admitted, first, finish = (np.full(num_requests, -1, dtype=np.int64) for _ in range(3))
    done = np.zeros(num_requests, dtype=np.int64)
    rows: list[list[int]] = []
    running: list[int] = []
    waiting = list(range(num_requests))
    now = seq = 0
    cold = 0  # slots that carry reusable content of finished requests
    while waiting or running:
        if not running and arrival[waiting[0]] > now:
            now = int(arrival[waiting[0]])
        seq += 1
        decodes = list(running)
        blocks = {i: -(-(prompt[i] + done[i] + 1) // block_size) for i in running}
        used = sum(blocks.values())
        prefill = -1
        if waiting and arrival[waiting[0]] <= now:
            need = -(-(prompt[waiting[0]] + 1) // block_size)
            if used + need <= num_blocks - 8:
                prefill = waiting.pop(0)
                used += need
                admitted[prefill] = now
        context = int(sum(prompt[i] + done[i] for i in decodes))
        fresh = int(prompt[prefill] - cached[prefill]) if prefill >= 0 else 0
        held = context + len(decodes) + (int(prompt[prefill]) if prefill >= 0 else 0)
        seconds = speed * (0.012 + 0.0006 * len(decodes) + 2e-6 * context + 0.0004 * fresh)
        end = now + int(seconds * 1e9 * (1 + noise * jitter.standard_normal()))
        batch = decodes + ([prefill] if prefill >= 0 else [])
        for i in batch:
            done[i] += 1
            if done[i] == 1:
                first[i] = end
        gone = [i for i in batch if done[i] >= output[i]]
        for i in gone:
            finish[i] = end
        work = int(fresh * (cached[prefill] + (fresh + 1) / 2)) if prefill >= 0 else 0
        cold = min(cold, (num_blocks - used) * block_size)
        late = sum(1 for i in waiting if arrival[i] <= now)
        rows.append(
            [
                *[seq, 1, now, end, len(decodes), context, int(prefill >= 0), fresh, work, late, len(batch)],
                *[int(prefill >= 0), 0, len(gone), held, used * block_size - held, 0, 0, 0, 0, cold],
                *[(num_blocks - used) * block_size - cold, int(cached[prefill]) if prefill >= 0 else 0],
            ]
        )
        cold += sum(int(prompt[i] + done[i]) // block_size * block_size for i in gone)
        running = [i for i in batch if done[i] < output[i]]
        now = end
    steps: dict[str, Any] = dict(zip(STEP_COLUMNS, np.array(rows, dtype=np.int64).T, strict=True))
    for name in (
        "step_ends_ns",
        "run_takes",
        "step_finished",
        "step_cached",
        "step_reserved_may",
        "step_reserved_cannot",
    ):
        steps[name] = [np.empty(0, dtype=np.int64)] * len(rows)
    requests = {
        "request": np.arange(num_requests),
        "row": np.arange(num_requests),
        "arrival_ns": arrival,
        "queued_ns": arrival,
        "admitted_ns": admitted,
        "first_token_ns": first,
        "finish_ns": finish,
        "prompt_tokens": prompt,
        "output_tokens": done,
        "max_tokens": output,
        "cached_tokens": cached,
        "num_preemptions": np.zeros(num_requests, dtype=np.int64),
        "outcome": np.array(["length"] * num_requests, dtype=object),
        "reason": np.array([""] * num_requests, dtype=object),
        "tenant": np.zeros(num_requests, dtype=np.int64),
    }
    return metrics.Tables(requests, steps, np.empty(0, dtype=np.int64), 1, block_size)


def write_toy(path: Path, kind: str, **settings: Any) -> Path:
    """A complete results folder of `toy_tables(**settings)`."""
    tables = toy_tables(**settings)
    manifest = {
        "kind": kind,
        "configuration": {"block_size": tables.block_size, "model": "toy"},
        "trace_digest": f"toy-{settings.get('seed', 0)}",
        "kv_blocks": settings.get("num_blocks", 120),
        "seed": 0,
    }
    folder = results.begin(str(path), manifest)
    summary = metrics.summarize(tables, manifest["kv_blocks"])
    results.finish(folder, manifest, tables, summary, {"wall_s": 0.0, "cpu_s": 0.0})
    return folder
