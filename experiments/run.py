"""`kvtwin run`: a trace played to the real engine in real time, and everything that happened.

Prompts are the trace's synthetic token ids. A request generates exactly the trace's number of tokens: stop tokens are
ignored, and where the trace gives its output an identity, the tokens are those that later prompts repeat.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.identity import TokenIdentity
from engine.core.types import NO_LIMIT, Finish
from engine.exec.engine import Engine, EngineRequest, ListSource, Served
from engine.exec.executor import RequestState
from engine.exec.sampler import SamplingParams
from experiments import results
from experiments.blocks import mind_truncated, write_blocks
from experiments.config import Config
from experiments.engine_options import engine_args
from experiments.generate import EARLY
from experiments.metrics import Tables, summarize
from experiments.prefixtable import by_tenant, show_prefix, write_prefix
from experiments.recording import write_recording
from experiments.serving import mind_rejected, slo_of
from experiments.simulate import show_summary
from experiments.workload import load_trace

if TYPE_CHECKING:
    from experiments.terminal import Terminal
    from traces import Trace

__all__ = ["TracePlayer", "execute", "run_trace", "warm_up"]

WARM_UP_PROMPT, WARM_UP_TOKENS, WARM_UP_REQUESTS = 48, 6, 4


class TracePlayer:
    """Hands a trace's requests to the engine as they fall due (a `RequestSource` of the engine).

    Prompts are made before the clock starts, so that making them takes nothing from the steps.
    """

    def __init__(
        self,
        trace: Trace,
        vocab_size: int,
        block_size: int,
        time_scale: float = 1.0,
        seed: int = 0,
        params: SamplingParams | None = None,
    ) -> None:
        """`params`: how to sample, but for lengths and outputs, which are the trace's; default: greedily."""
        import traces

        self.params = params or SamplingParams(temperature=0.0)
        self._source = trace.source(time_scale)
        self._trace = trace
        self._requests = [self._request(traces, row, vocab_size, block_size, seed) for row in range(len(trace))]
        self.outputs: dict[int, list[list[int]]] = {}
        """Tokens that each sequence of each row generated."""
        self.parents: dict[int, list[list[int]]] = {}
        """Rows that were beams: which sequence each continued, step by step."""
        self.num_finished = 0
        self.on_finish: Any = None
        """Called without arguments whenever a request has ended."""

    def _request(self, traces: Any, row: int, vocab_size: int, block_size: int, seed: int) -> EngineRequest:
        trace = self._trace
        prompt = traces.token_ids(trace, row, vocab_size, seed=seed).tolist()
        forced = None
        if trace.output_id(row) is not None and not self.params.use_beam_search:
            forced = tuple(traces.output_token_ids(trace, row, vocab_size, seed=seed).tolist())
        params = replace(
            self.params,
            max_tokens=int(trace.output_tokens[row]),
            ignore_eos=True,
            detokenize=False,
            forced_tokens=forced,
        )
        tenant = int(trace.tenant[row])
        salt = tenant.to_bytes(8, "little", signed=True) if tenant else b""
        return EngineRequest(
            row,
            prompt,
            params,
            identity=TokenIdentity(prompt, block_size, salt=salt),
            priority=int(trace.priority[row]),
            tenant=tenant,
            oracle_tokens=params.max_tokens,
        )

    def due(self, now: int) -> Iterable[EngineRequest | int]:
        # A rejected request may release another that is due at once.
        while found := self._source.due(now):
            for row, arrival in found:
                deadline = int(self._trace.deadline[row])
                yield self._requests[row]._replace(
                    arrival=arrival, deadline=arrival + deadline if deadline else NO_LIMIT
                )

    def next_ns(self) -> int | None:
        return self._source.next_ns()

    def is_open(self) -> bool:
        return self._source.remaining > 0

    def accepted(self, row: int, request: int, state: RequestState) -> None:
        pass

    def rejected(self, row: int, reason: str, now: int) -> None:
        self._ended(row, now)

    def finished(self, row: int, state: RequestState, finish: Finish, now: int) -> None:
        self.outputs.setdefault(row, []).append(state.output_tokens)
        if state.index < self.params.num_sequences - 1:
            return
        if state.beam is not None:
            self.parents[row] = state.beam.history
        self._ended(row, now)

    def _ended(self, row: int, now: int) -> None:
        self.num_finished += 1
        self._source.finished(row, now)
        if self.on_finish is not None:
            self.on_finish()

    def prompt(self, row: int) -> list[int]:
        return list(self._requests[row].prompt)


def sequences(config: Config) -> SamplingParams:
    """How the sequences of a row are sampled: one greedily, several from the whole distribution, or as a beam."""
    if config.beam_width is not None:
        early = EARLY[config.early_stopping]
        return SamplingParams(beam_width=config.beam_width, length_penalty=config.length_penalty, early_stopping=early)
    return SamplingParams(n=config.n, temperature=1.0 if config.n > 1 else 0.0)


def warm_up(engine: Engine) -> None:
    """A few steps that nobody measures: the first ones after loading are slower than all others."""
    longest = engine.config.max_model_len
    prompt = min(WARM_UP_PROMPT, max(1, longest // 2), max(1, engine.config.num_blocks * engine.config.block_size // 4))
    count = max(1, min(WARM_UP_TOKENS, longest - prompt))
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    vocab = engine.model.config.vocab_size
    prompts = [rng.integers(0, vocab, prompt).tolist() for _ in range(WARM_UP_REQUESTS)]
    engine.serve(
        ListSource(EngineRequest(row, tokens, params, oracle_tokens=count) for row, tokens in enumerate(prompts))
    )


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin run`: the results folder --out; returns summary.json."""
    trace = load_trace(config)
    options = engine_args(config)
    with terminal.loading(str(config.model)) as on_layer:
        engine = Engine(options, on_layer=on_layer)
    for line in engine.budget.lines() if engine.budget is not None else ():
        terminal.note(line)
    try:
        return run_trace(engine, config, trace, terminal)
    finally:
        engine.close()


def run_trace(engine: Engine, config: Config, trace: Trace, terminal: Terminal) -> dict[str, Any]:
    """Serves the trace and writes the results folder `config.out`, also of an interrupted run; returns the summary."""
    assert config.out is not None  # required by the command line
    wall, cpu = time.perf_counter(), time.process_time()
    manifest = {
        "kind": "real",
        **results.identity(config, trace, engine.config, "torch"),
        "engine": {
            "model": engine.model.name,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "threads": engine.num_threads,
        },
    }
    folder = results.begin(config.out, manifest)
    player = TracePlayer(
        trace,
        engine.model.config.vocab_size,
        engine.config.block_size,
        config.time_scale,
        config.seed,
        sequences(config),
    )
    warm_up(engine)
    # What exists by now stays: a collection during the run then looks at what the run itself made, not at all of torch.
    gc.collect()
    gc.freeze()
    complete = True
    with terminal.progress() as progress:
        task = progress.add_task("Requests served", total=len(trace))
        player.on_finish = lambda: progress.advance(task)
        try:
            limit = config.record_blocks_limit if config.record_blocks else 0
            served = engine.serve(player, log_decisions=True, record_blocks=limit)
        except KeyboardInterrupt:
            served, complete = engine.served, False
            terminal.interrupted = True
        finally:
            gc.unfreeze()
    tables = _tables(served, engine)
    summary = summarize(tables, engine.config.num_blocks, slo_of(config))
    write_recording(folder, served, player, engine.args.parallel_sampling == "fork")
    blocks = served.recorder.blocks
    if blocks is not None:
        write_blocks(folder, blocks, engine.config)
    mind_truncated(blocks, terminal)
    prefix = served.recorder.prefix_rows
    if prefix is not None:
        write_prefix(folder, prefix)
        summary["prefix"] = by_tenant(prefix)
    timing = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    results.finish(folder, manifest, tables, summary, timing, complete)
    mind_rejected(tables.requests, terminal)
    show_summary(summary, terminal, "Real" if complete else "Real, interrupted")
    if prefix is not None:
        show_prefix(prefix, terminal)
    terminal.note(f"Written to {folder} in {timing['wall_s']:.1f} s.")
    return summary


def _tables(served: Served, engine: Engine) -> Tables:
    recorder = served.recorder
    steps = recorder.steps()
    steps["gpu_busy_ns"] = np.array(served.busy_ns[: len(steps["step"])], dtype=np.int64)
    return Tables(recorder.requests(), steps, recorder.gaps(), engine.config.steps_in_flight, engine.config.block_size)
