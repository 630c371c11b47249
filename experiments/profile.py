"""`kvtwin profile`: batches of many shapes, timed through the real engine.

How many batches fit the time is decided from a rough guess of the machine's speed, put right by a probe of three
batches. Block moves are timed first, which takes a few seconds. The batches come in random order and the clock has the
last word, so that a machine which is slower than that still gives a profile of the whole range, only a sparser one.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.exec.copies import measure_copies
from engine.exec.engine import Engine
from engine.exec.profiler import METADATA_KEY, profile
from experiments.config import Config
from experiments.engine_options import engine_args
from experiments.errors import UsageError
from sim.models import ModelSpec
from sim.steptime import StepTime
from sim.sweep import Limits, SweepBatch, cpu_guess, pick_trace_like, sweep

if TYPE_CHECKING:
    from engine.core.types import StepPlan
    from experiments.terminal import Terminal

__all__ = ["execute", "profile_engine", "spec_of_engine", "trace_like"]

SATURATED_REQUESTS = 160
REPEATS, WARM_UPS = 2, 1
"""A CPU's step takes long enough for few repetitions; more batches tell more. They are spread over passes, so that
another program which has the machine for a moment does not spoil all of a batch's measurements."""
PLANS = ((3, 1.0), (2, 1.0), (1, 1.0), (1, 2.0), (1, 4.0), (1, 8.0))
"""(passes, factor on the time), in the order of preference."""
LEAST = {"decode": 12, "prefill": 7, "mixed": 10}
"""Different batches without which a fit means little."""
LEAST_TO_FIT = {"decode": 8, "prefill": 5}
"""Different batches before which the clock does not end a profile."""
MARGIN = 1.3
"""More batches are prepared than should fit: what the clock cuts off was not needed."""


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin profile`: writes --out; returns `{out, batches, model, device}`."""
    assert config.out is not None  # the command has a default
    options = engine_args(config)
    with terminal.loading(str(config.model)) as on_layer:
        engine = Engine(options, on_layer=on_layer)
    try:
        with terminal.progress() as progress:
            task = progress.add_task("Batches timed", total=None)
            count = profile_engine(
                engine,
                Path(config.out),
                config,
                lambda done, total: progress.update(task, completed=done, total=total),
            )
        name = engine.model.name
    except KeyboardInterrupt:
        terminal.note(f"Interrupted; the same command continues {config.out}.")
        raise
    finally:
        engine.close()
    terminal.print(f"{count} batches of {name} on {config.device} timed; written to {config.out}.")
    return {"out": config.out, "batches": count, "model": name, "device": config.device}


def profile_engine(
    engine: Engine,
    out: Path,
    config: Config,
    on_batch: Callable[[int, int], None] | None = None,
    stop_after_s: float | None = None,
) -> int:
    """Profiles within --time-budget-s, or continues a profile of the same engine in `out`; returns its batches.

    Args:
        stop_after_s: ends this call then, whatever there is by then; a further one goes on.

    Raises:
        EngineError: `out` holds something else.
    """
    limits = Limits(
        max_rows=config.max_rows or engine.config.max_num_seqs,
        max_tokens=engine.config.max_num_batched_tokens,
        max_context=engine.config.max_model_len,
        pool_tokens=engine.config.num_blocks * engine.config.block_size,
        block_size=engine.config.block_size,
    )
    guess = cpu_guess(spec_of_engine(engine), engine.num_threads)
    stored = _stored(out)
    scale = _scale(stored)
    if scale is None:
        scale = _probe(engine, limits, guess)
    copies = stored.get("copies") or measure_copies(engine.cache, config.seed)
    estimate = guess.scaled(scale)
    batches = _planned(limits, estimate, config)
    seconds = config.time_budget_s if stop_after_s is None else stop_after_s
    while True:
        count = profile(
            engine,
            batches,
            out,
            repeats=REPEATS,
            warm_ups=WARM_UPS,
            stop_after_s=seconds,
            seed=config.seed,
            about={"speed_scale": scale, "copies": copies, "block_bytes": engine.cache.block_bytes},
            on_batch=on_batch,
        )
        if stop_after_s is not None or count == len(batches) or _is_enough(batches[:count]):
            return count
        seconds = config.time_budget_s / 4


def _is_enough(batches: Sequence[SweepBatch]) -> bool:
    """Whether these batches can be fitted; the clock must not leave a profile that is good for nothing."""
    different = Counter(batch.kind for batch in set(batches))
    return all(different[kind] >= least for kind, least in LEAST_TO_FIT.items())


def _planned(limits: Limits, estimate: StepTime, config: Config) -> list[SweepBatch]:
    """The sweep: as many passes as leave each kind of batch its least number; on a slow machine, more time instead."""
    like = trace_like(limits, estimate, seed=config.seed)
    batches: list[SweepBatch] = []
    for passes, factor in PLANS:
        batches = sweep(
            limits,
            trace_like=like,
            budget_s=config.time_budget_s * MARGIN * factor,
            estimate=estimate,
            runs=REPEATS + WARM_UPS + 1,
            passes=passes,
            seed=config.seed,
        )
        different = Counter(batch.kind for batch in set(batches))
        if all(different[kind] >= least for kind, least in LEAST.items()):
            break
    return batches


def spec_of_engine(engine: Engine) -> ModelSpec:
    """The simulator's description of the model that the engine has loaded."""
    model = engine.model.config
    return ModelSpec(
        name=engine.model.name,
        layers=model.num_layers,
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab=model.vocab_size,
        max_position=model.max_position,
        tied=model.tie_word_embeddings,
        dtype=str(engine.dtype).removeprefix("torch."),
    )


def _probe(engine: Engine, limits: Limits, guess: StepTime) -> float:
    """How many times slower than the guess this machine is, to the next power of two."""
    context = max(1, limits.max_context // 4)
    rows = max(1, min(8, limits.max_rows, limits.pool_tokens // (2 * (context + limits.block_size))))
    chunk = max(1, min(128, limits.max_tokens, limits.max_context, limits.pool_tokens))
    batches = [
        SweepBatch("decode", ((1, context),)),
        SweepBatch("decode", tuple((1, context + i) for i in range(rows))),
        SweepBatch("prefill", ((chunk, 0),)),
    ]
    fitting = [batch for batch in batches if limits.fit(batch.rows)]
    if not fitting:
        raise UsageError("The KV pool is too small to profile anything; give more --num-gpu-blocks-override.")
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.parquet"
        profile(engine, fitting, path, repeats=3, warm_ups=1)
        times = pq.read_table(path).column("wall_ns_median").to_pylist()
    slower = sum(math.log2(t / guess.duration(b.shape())) for t, b in zip(times, fitting, strict=True)) / len(fitting)
    return float(2.0 ** round(slower))


def _stored(path: Path) -> dict[str, Any]:
    """What a profile in `path` says about itself; empty where there is none."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        return {}
    try:
        stored = json.loads((pq.read_schema(path).metadata or {})[METADATA_KEY])
    except (OSError, pa.ArrowInvalid, KeyError, ValueError, TypeError):
        return {}  # profile() says what is wrong with the file
    return stored if isinstance(stored, dict) else {}


def _scale(stored: dict[str, Any]) -> float | None:
    """The scale that a profile was planned with, so that continuing it plans the same batches."""
    try:
        return float(stored["speed_scale"])
    except (KeyError, ValueError, TypeError):
        return None


def trace_like(limits: Limits, estimate: StepTime, count: int = 160, seed: int = 0) -> list[SweepBatch]:
    """Batches as they come up in service: steps of a simulation near saturation, half decodes, half mixed."""
    import traces
    from engine.core.presets import SchedulerConfig
    from sim.simulate import simulate

    prompt, output = max(2, limits.max_context // 4), max(2, limits.max_context // 8)
    trace = traces.generate(
        {
            "kind": "synthetic",
            "num_requests": SATURATED_REQUESTS,
            "seed": seed,
            "arrival": {"process": "closed-loop", "concurrency": max(1, limits.max_rows)},
            "prompt_tokens": {"dist": "lognormal", "mean": prompt, "sigma": 0.6},
            "output_tokens": {"dist": "lognormal", "mean": output, "sigma": 0.6},
        }
    )
    options = SchedulerConfig(
        num_blocks=max(1, limits.pool_tokens // limits.block_size),
        max_model_len=limits.max_context,
        block_size=limits.block_size,
        max_num_seqs=min(limits.max_rows, limits.max_tokens),
        max_num_batched_tokens=limits.max_tokens,
    )
    steps: list[Sequence[tuple[int, int]]] = []

    def observe(plan: StepPlan) -> None:
        rows = [*plan.prefills, *plan.decodes.rows()]
        steps.append([(row.num_tokens, row.start) for row in rows])

    simulate(trace, options, estimate, fast_forward=False, observe=observe)
    # Every request starts at once in such a run; what follows after the first crowd is typical.
    typical = steps[len(steps) // 10 :]
    return pick_trace_like(typical, limits, count // 2, count // 2)
