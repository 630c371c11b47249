"""`kvtwin demo`: the whole of it in a few minutes on a laptop, and a page about it.

Text from the engine; a profile of this machine and its calibration; a small workload with shared prefixes under enough
memory pressure to preempt; three real runs of it and the simulation, interleaved with the profile, so that all of them
see the machine over the same minutes. The workload is as long as the machine can serve in the time.

It is a closed loop: a few clients, each asking again once it has its answer. With arrivals at given times near
capacity, a step time that is 1 % off moves the queueing delay by several percent, and so does the noise of a laptop:
half a minute of such a workload would compare two accidents.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traces
from engine.exec import DownloadError
from engine.exec.llm import LLM
from engine.exec.sampler import SamplingParams
from experiments import calibrate as calibrate_command
from experiments import compare, plots, report, results
from experiments.config import Config
from experiments.engine_options import engine_args
from experiments.generate import answers, vars_of
from experiments.profile import profile_engine
from experiments.run import run_trace
from experiments.serving import scheduler_config
from experiments.simulate import Basis, simulate_into
from sim.calibration import Calibration, calibrate
from sim.errors import CalibrationError
from sim.simulate import simulate
from traces import Trace

if TYPE_CHECKING:
    from engine.exec.engine import Engine
    from experiments.terminal import Terminal

__all__ = ["execute"]

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three uses of a paperclip.",
)
OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "num_gpu_blocks_override": 60,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "time_budget_s": 160.0,
}
"""A pool so small that the workload does not fit, and steps so short that a laptop makes many."""
FIRST_PART = 0.4
"""Of the profile's time: before the first real run. The rest is shared between the pauses that follow, so that a
machine that gets slower or faster meanwhile does so for the profile too."""
RUNS = 3
RUN_SECONDS = 32.0
"""What one real run should take."""
LEAST_REQUESTS, MOST_REQUESTS = 14, 400
CLIENTS = 8
PROFILE_ATTEMPTS = 4
"""Parts of the profile's time that a very slow machine may take until there are enough batches to fit."""


@dataclass
class _Story:
    """What the page tells."""

    started: float = field(default_factory=time.perf_counter)
    model: str = ""
    notes: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin demo`: everything into --out; returns the content of compare.json."""
    assert config.out is not None  # the command has a default
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    story = _Story()
    config = replace(config, **OPTIONS)
    llm, config = _load(config, story, terminal)
    try:
        with _timed(story, "text"):
            _texts(llm, story, terminal)
        return _twin(llm.engine, config, out, args.fresh, story, terminal)
    finally:
        llm.close()


class _timed:
    """Adds the time within to the story under a name."""

    def __init__(self, story: _Story, name: str) -> None:
        self._story, self._name = story, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        spent = time.perf_counter() - self._began
        self._story.seconds[self._name] = self._story.seconds.get(self._name, 0.0) + spent


def _load(config: Config, story: _Story, terminal: Terminal) -> tuple[LLM, Config]:
    """The engine with the model; with a tiny random one where the default model cannot be fetched."""
    with _timed(story, "loading"):
        try:
            with terminal.status(f"Loading {config.model} (the first time, its weights are fetched)"):
                llm = LLM(**vars_of(engine_args(config)))
        except DownloadError as error:
            story.notes.append(f"{error}. So this is the tiny random model, whose text means nothing.")
            terminal.warn(story.notes[-1])
            config = replace(config, model="tiny")
            llm = LLM(**vars_of(engine_args(config)))
    story.model = llm.engine.model.name
    return llm, config


def _texts(llm: LLM, story: _Story, terminal: Terminal) -> None:
    with terminal.status("Generating"):
        params = SamplingParams(temperature=0.0, max_tokens=48)
        outputs = answers(llm, list(PROMPTS), params, chat=True)
    terminal.print(f"[bold]Text from {story.model}, greedy, all prompts in one batch[/]")
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        done = output.outputs[0]
        text = done.text.strip() + (" ..." if done.finish_reason == "length" else "")
        story.texts.append((prompt, text))
        terminal.text(prompt, "dim")
        terminal.text(text)


def _twin(engine: Engine, config: Config, out: Path, fresh: bool, story: _Story, terminal: Terminal) -> dict[str, Any]:
    """Profile, calibrate, run, simulate, compare."""
    path = out / "profile.parquet"
    reused = not fresh and _usable(path, engine)
    if reused:
        story.notes.append(f"The profile in {path} is of this engine on this machine, so it was used again.")
        terminal.note(story.notes[-1] + " (--fresh profiles anew.)")
    else:
        path.unlink(missing_ok=True)
        (out / "compare.json").unlink(missing_ok=True)
    calibration = calibrate(path) if reused else _first_calibration(engine, config, path, story, terminal)
    config, trace = _workload(engine, config, calibration, out, terminal)

    real = []
    for number in range(1, RUNS + 1):
        folder = out / f"real-{number}"
        with _timed(story, "real runs"):
            terminal.note(f"Real run {number} of {RUNS}")
            run_trace(engine, replace(config, out=str(folder)), trace, terminal.muted())
        real.append(results.read_results(folder, "real"))
        if number < RUNS and not reused:
            _profile(engine, config, path, (1 - FIRST_PART) / (RUNS - 1), story, terminal)
        if number == RUNS - 1:
            calibration = calibrate(path)
            results.write_text(out / "calibration.json", calibration.to_json())
            with _timed(story, "simulation"):
                simulated = _simulate(engine, replace(config, out=str(out / "simulated")), trace, calibration)
    calibrate_command.show(calibration, terminal)

    content = compare.compare(real, simulated)
    content["decision_differences"], content["decision_details"] = compare.count_decisions(real, simulated)
    with _timed(story, "plots"):
        figures = plots.comparison(real, simulated)
    story.seconds["all"] = time.perf_counter() - story.started
    content["seconds"] = {name: round(spent, 1) for name, spent in story.seconds.items()}
    results.write_json(out / "compare.json", content)
    bands = compare.bands_of(simulated)
    compare.show(content, bands, terminal)
    _page(out / "index.html", content, bands, figures, calibration, trace, config, story)
    terminal.print(f"The page is {out / 'index.html'}; it took {story.seconds['all']:.0f} s.")
    return content


def _usable(path: Path, engine: Engine) -> bool:
    """Whether `path` holds a profile of this engine on this machine, from a demo that came to its end."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from engine.exec.profiler import METADATA_KEY

    if not (path.parent / "compare.json").is_file():
        return False
    try:
        about = json.loads((pq.read_schema(path).metadata or {})[METADATA_KEY])
    except (OSError, pa.ArrowInvalid, KeyError, ValueError):
        return False
    expected = {
        "model": engine.model.name,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "threads": engine.num_threads,
        "block_size": engine.config.block_size,
        "kv_blocks": engine.config.num_blocks,
        "max_model_len": engine.config.max_model_len,
    }
    same = all(about.get(name) == value for name, value in expected.items())
    here = report.machine().partition(",")[0]
    return same and str(about.get("machine", "")).startswith(here)


def _profile(engine: Engine, config: Config, path: Path, share: float, story: _Story, terminal: Terminal) -> None:
    """A share of the profile's time; goes on where an earlier part ended."""
    with _timed(story, "profile"), terminal.progress() as progress:
        task = progress.add_task("Batches timed", total=None)

        def on_batch(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        profile_engine(engine, path, config, on_batch, stop_after_s=share * config.time_budget_s)


def _first_calibration(engine: Engine, config: Config, path: Path, story: _Story, terminal: Terminal) -> Calibration:
    """From the first part of the profile: good enough to size the workload by."""
    for attempt in range(PROFILE_ATTEMPTS):
        _profile(engine, config, path, FIRST_PART, story, terminal)
        try:
            return calibrate(path)
        except CalibrationError:
            if attempt == PROFILE_ATTEMPTS - 1:
                raise
            terminal.warn("this machine is slow or busy, so the profile takes longer.")
    raise AssertionError("unreachable")


def _workload(
    engine: Engine, config: Config, calibration: Calibration, out: Path, terminal: Terminal
) -> tuple[Config, Trace]:
    """As many requests as a run has time for; also written to `out`."""
    whole = traces.generate(
        {
            "kind": "synthetic",
            "name": "demo",
            "num_requests": MOST_REQUESTS,
            "seed": config.seed,
            "arrival": {"process": "closed-loop", "concurrency": CLIENTS},
            "prompt_tokens": {"dist": "uniform", "low": 16, "high": 112},
            "output_tokens": {"dist": "uniform", "low": 12, "high": 84},
            "prefix": {"num_prefixes": 3, "tokens": {"dist": "fixed", "value": 96}, "share": 0.75},
        }
    )
    seconds = simulate(whole, engine.config, calibration.step_time()).end_ns / 1e9
    count = int(MOST_REQUESTS * RUN_SECONDS / seconds)
    trace = whole.head(min(MOST_REQUESTS, max(LEAST_REQUESTS, count)))
    traces.save(trace, out / "trace.jsonl")
    terminal.note(f"The workload: {len(trace)} requests from {CLIENTS} clients.")
    return replace(config, trace=str(out / "trace.jsonl")), trace


def _simulate(engine: Engine, config: Config, trace: Trace, calibration: Calibration) -> results.Results:
    """The simulation's results folder, as `kvtwin simulate` writes it."""
    options = scheduler_config(config, engine.config.num_blocks, engine.config.max_model_len)
    basis = Basis(calibration.step_time(), calibration.label(), (), calibration)
    folder, prediction = simulate_into(config, trace, options, basis)
    if not prediction.complete:
        raise KeyboardInterrupt
    return results.read_results(folder, "simulated")


def _page(
    path: Path,
    content: dict[str, Any],
    bands: dict[str, Any] | None,
    figures: dict[str, bytes],
    calibration: Calibration,
    trace: Trace,
    config: Config,
    story: _Story,
) -> None:
    """results/demo/index.html."""
    texts = "".join(f"<p class=small>{escape(prompt)}</p><pre>{escape(text)}</pre>" for prompt, text in story.texts)
    errors = [
        (name, str(e.batches), f"{e.bias:+.1%}", f"{e.mape:.1%}", f"{e.p90:.1%}")
        for name, e in calibration.errors.items()
    ]
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in story.seconds.items())
    body = f"""
<p>A real paged-attention engine serves a small workload three times. A simulator that shares its block manager and
scheduler, and knows this machine from a profile of separate batches only, predicts those runs.</p>
{"".join(f"<p>{escape(note)}</p>" for note in story.notes)}
<p class=small>Model {escape(story.model)} on {escape(report.machine())}. {escape(spent)}.</p>
<h2>Text from the engine</h2>
{texts}
<h2>The workload</h2>
<p>{len(trace)} requests from {CLIENTS} clients, each of which asks again once it has its answer; prompts of
{int(trace.prompt_tokens.min())} to {int(trace.prompt_tokens.max())} tokens, three quarters of them with one of three
prefixes of 96 tokens, outputs of {int(trace.output_tokens.min())} to {int(trace.output_tokens.max())} tokens. The pool
has {config.num_gpu_blocks_override} blocks of {config.block_size} tokens, too few for all at once: requests lose their
blocks (are preempted) and are recomputed later.</p>
<h2>Real and simulated</h2>
{report.comparison_body(content, bands, figures)}
<h2>The calibration</h2>
<p>{escape(calibration.label())}. Errors on batches that the fit did not see:</p>
{report.table(("batches", "number", "bias (time-weighted)", "mean |error|", "90 % below"), errors)}
"""
    results.write_text(path, report.page("kvtwin: an engine and its twin", body))
