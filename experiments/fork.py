"""What several sequences of one prompt save by sharing its blocks: parallel sampling and beam search.

Saved is the share of the sequences' tokens that need no slot of their own, over time: logical minus physical, over
logical. Sequences start with the blocks of their prompt and copy a block when they write to one that others have too;
the prefix cache is off but for the runs that serve sequences as requests, so that nothing else is shared.

Real runs (the engine, float32, on this CPU) say what a language model's beams share; how often one sequence replaces
another there, per step, is what the simulated beams are drawn with. Simulated runs serve lengths like those of the
paper (Kwon et al., 2023, figures 15 and 16): short prompts of 19 and outputs of 58 tokens on average, as it gives for
Alpaca, drawn from exponential distributions; and the lengths of 300 ShareGPT conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.experiment import Column, Context, ExperimentResult, Settled, Table
from experiments.lengths import TRACES, named_trace
from experiments.metrics import Tables

if TYPE_CHECKING:
    from engine.exec.llm import LLM
    from engine.exec.sampler import SamplingParams
    from traces import Trace

__all__ = ["run", "saved_share"]

WIDTHS = (2, 4, 6)
PAPER = {
    ("short", "sampling"): (0.061, 0.098),
    ("short", "beam"): (0.376, 0.552),
    ("chat", "sampling"): (0.162, 0.305),
    ("chat", "beam"): (0.443, 0.663),
}
"""Least and most over the three widths, as the paper gives them (OPT-13B on an A100)."""
SHARE_GPT = "sharegpt-llama-3.1-8b-300-sps10"
REQUESTS = {"short": 60, "chat": 12}
BLOCK_SIZE = 16
FEW_BLOCKS = 9
"""A pool in which not all sequences of the real short prompts fit at once."""
OUTPUT_TOKENS = 24
QUESTIONS = (
    "Give three tips for staying healthy.",
    "Describe how a bicycle stays upright while it moves.",
    "Write a short poem about the sea in winter.",
)
PASSAGE = (
    "A library keeps many books and few shelves. Whoever orders them by the date of their arrival can find a new one "
    "at once and an old one never; whoever orders them by name must move half of the house for every gift. The keeper "
    "of one such library, tired of moving, cut the shelves into boards of equal length. Each board holds sixteen "
    "volumes, no more, and a list by the door says which boards, in which order, make up the works of one author. When "
    "a work grows, it takes another board, wherever one is free; when it is sold, its boards go back. "
)
"""What makes a real run's prompts as long as those of a conversation."""


def run(context: Context) -> ExperimentResult:
    """The experiment."""
    real = context.part("real", lambda: _real_runs(context))
    churn = _churn_of(real["distinct"])
    simulated: dict[str, dict[str, dict[str, Any]]] = {}
    workloads = ["short"] + (["chat"] if context.has(TRACES[SHARE_GPT]) else [])
    for load in workloads:
        for kind in context.track(("sampling", "requests", "beam"), f"{load} prompts, simulated"):
            for width in WIDTHS:
                compute = partial(_simulated, context, load, kind, width, churn)
                found = context.part(f"{load}-{kind}-{width}", compute, churn=churn)
                simulated.setdefault(load, {}).setdefault(kind, {})[str(width)] = found
    rows = _rows(real, simulated)
    columns = [
        Column("prompts"),
        Column("sequences", "how sequences are served"),
        Column("width", "n"),
        Column("real", "saved, real", ".1%"),
        Column("simulated", "saved, simulated", ".1%"),
        Column("paper", "the paper, n = 2 to 6"),
        Column("copies", "copied blocks a request, simulated", ".2f"),
    ]
    notes = [
        f"Real runs: {real['model']}, {len(QUESTIONS)} prompts, {OUTPUT_TOKENS} tokens each; outputs were "
        f"the same with few blocks and swaps, and as requests ({real['compared']} comparisons).",
        f"Real beams keep {_percent(real['distinct'])} of their sequences a step on average; simulated ones are drawn "
        f"with churn {churn:.2f}, which gives that share at n = 4.",
    ]
    if "chat" not in simulated:
        notes.append(f"Without {TRACES[SHARE_GPT]} nothing was simulated for chat lengths.")
    table = Table("saved", "Memory saved by sharing", columns, rows)
    summary = {
        "real": real,
        "churn": churn,
        "simulated": simulated,
        "paper": {" ".join(k): v for k, v in PAPER.items()},
    }
    return ExperimentResult([table], {"saved": _picture(real, simulated)}, summary, [_settled(real, simulated)], notes)


def saved_share(tables: Tables) -> float:
    """Slots that sharing saves over those that sequences would take alone, both summed over time."""
    steps = tables.steps
    ends = np.asarray(steps["end_ns"], dtype=float)
    took = np.diff(ends, prepend=float(np.asarray(steps["start_ns"])[0]))
    shared = float((took * np.asarray(steps["shared"])).sum())
    return shared / (shared + float((took * np.asarray(steps["held"])).sum()))


def _simulated(context: Context, load: str, kind: str, width: int, churn: float) -> dict[str, Any]:
    """One simulated run: {saved, copies a request, sequences}."""
    from engine.core.presets import SchedulerConfig
    from sim.steptime import StepTime

    trace = _workload(context, load)
    options = SchedulerConfig(
        num_blocks=20_000,
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        max_num_seqs=48,
        max_num_batched_tokens=2048,
        enable_prefix_caching=kind == "requests",
    )
    found, tables = context.simulate(
        f"{load}-{kind}-{width}",
        trace,
        options,
        StepTime(step=2e7, token=2e4, label="20 ms a step and 20 us a token"),
        n=width,
        beam=kind == "beam",
        forks=kind != "requests",
        beam_churn=churn,
        seed=context.seed,
    )
    copied = int(np.asarray(found.steps()["copied_blocks"]).sum())
    return {"saved": saved_share(tables), "copies": copied / len(trace), "sequences": len(found.requests()["request"])}


def _workload(context: Context, load: str) -> Trace:
    import traces

    count = context.config.num_requests or REQUESTS[load]
    if load == "chat":
        return named_trace(context, SHARE_GPT).head(count)
    rng = np.random.default_rng(context.seed)
    return traces.make_trace(
        arrival_ns=np.zeros(count, dtype=np.int64),
        prompt_tokens=np.maximum(1, rng.exponential(19.31, count).round().astype(np.int64)),
        output_tokens=np.maximum(1, rng.exponential(58.45, count).round().astype(np.int64)),
    )


# ---- real runs ----


def _real_runs(context: Context) -> dict[str, Any]:
    """The engine's own: {model, distinct, compared, saved: {load: {kind: {width: share}}}}."""
    from engine.exec.smollm2 import is_cached
    from engine.exec.weights import load_model

    name = "smollm2" if is_cached() else "tiny"
    loaded = load_model(name)
    llm = _llm(name, loaded, 400)
    saved: dict[str, dict[str, dict[str, float]]] = {}
    kept: list[float] = []
    first: dict[str, Any] = {}
    for load in context.track(("short", "chat"), f"{name}, real runs"):
        for width in WIDTHS:
            for kind, params in _asked(width, context.seed).items():
                outputs, share, parents = _serve(context, f"real-{load}-{kind}-{width}", llm, _prompts(load), params)
                saved.setdefault(load, {}).setdefault(kind, {})[str(width)] = share
                kept += parents
                first.setdefault(kind, outputs)
    llm.close()
    # Less memory (sequences are preempted and swapped), and requests of their own: the same outputs.
    compared = 0
    ways: tuple[tuple[int, dict[str, Any]], ...] = (
        (FEW_BLOCKS, {"preemption_mode": "swap", "swap_space": 0.05}),
        (400, {"parallel_sampling": "requests", "enable_prefix_caching": True}),
    )
    for blocks, options in ways:
        llm = _llm(name, loaded, blocks, **options)
        for kind, params in _asked(WIDTHS[0], context.seed).items():
            if _serve(context, f"real-again-{compared}", llm, _prompts("short"), params)[0] != first[kind]:
                raise AssertionError(f"outputs of {kind} depend on how they are served: {options}")
            compared += 1
        llm.close()
    return {"model": name, "distinct": float(np.mean(kept)), "compared": compared, "saved": saved}


def _prompts(load: str) -> list[str]:
    return [(PASSAGE if load == "chat" else "") + question for question in QUESTIONS]


def _asked(width: int, seed: int) -> dict[str, SamplingParams]:
    from engine.exec.sampler import SamplingParams

    shared: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "detokenize": False}
    return {
        "sampling": SamplingParams(n=width, temperature=1.0, seed=seed, **shared),
        "beam": SamplingParams(beam_width=width, **shared),
    }


def _llm(name: str, loaded: Any, blocks: int, **options: Any) -> LLM:
    from engine.exec.llm import LLM

    options = {"enable_prefix_caching": False, **options}
    limits = {"num_gpu_blocks_override": blocks, "max_model_len": 512, "block_size": BLOCK_SIZE}
    return LLM(name, loaded, dtype="float32", **limits, **options)


def _serve(
    context: Context, run: str, llm: LLM, prompts: Sequence[str], params: Any
) -> tuple[list[list[list[int]]], float, list[float]]:
    """(outputs, share saved, share of distinct parents of each step of each beam)."""
    from engine.exec.engine import EngineRequest, ListSource

    engine = llm.engine
    assert engine.tokenizer is not None
    source = ListSource(
        EngineRequest(row, engine.tokenizer.encode(prompt), params) for row, prompt in enumerate(prompts)
    )
    served = engine.serve(source, check=False)
    recorder = served.recorder
    tables = Tables(recorder.requests(), recorder.steps(), recorder.gaps(), 1, BLOCK_SIZE)
    context.check_usage(run, tables, engine.config.num_blocks)
    outputs = [[state.output_tokens for state, _ in source.finishes[row]] for row in range(len(prompts))]
    kept = []
    for row in range(len(prompts)):
        beam = source.finishes[row][0][0].beam
        if beam is not None:
            kept += [len(set(parents)) / len(parents) for parents in beam.history[1:]]
    return outputs, saved_share(tables), kept


def _churn_of(distinct: float) -> float:
    """The churn at which simulated beams of four keep that share of their sequences a step, to 0.01."""
    from sim.executor import beam_parents

    def kept(churn: float) -> float:
        return float(np.mean([len(set(beam_parents(0, 0, step, 4, churn))) / 4 for step in range(2000)]))

    return min((round(0.01 * i, 2) for i in range(101)), key=lambda churn: abs(kept(churn) - distinct))


# ---- what is shown ----


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _rows(real: dict[str, Any], simulated: dict[str, Any]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    words = {"sampling": "forked samples", "requests": "requests, prefix cache", "beam": "beam search"}
    for load in ("short", "chat"):
        for kind in ("sampling", "requests", "beam"):
            for width in WIDTHS:
                found = simulated.get(load, {}).get(kind, {}).get(str(width))
                paper = PAPER.get((load, kind))
                rows.append(
                    [
                        load,
                        words[kind],
                        width,
                        real["saved"][load].get(kind, {}).get(str(width)),
                        found and found["saved"],
                        "" if paper is None else f"{paper[0]:.1%} to {paper[1]:.1%}",
                        found and found["copies"],
                    ]
                )
    return rows


def _settled(real: dict[str, Any], simulated: dict[str, Any]) -> Settled:
    """B05: whether sequences share and copy on write, and how far the savings are the paper's."""
    short = simulated["short"]
    saves = all(found["saved"] > 0 for kind in ("sampling", "beam") for found in short[kind].values())
    copies = all(found["copies"] > 0 for found in short["sampling"].values())
    without = all(found["copies"] == 0 for found in short["requests"].values())
    numbers: dict[str, float] = {"real_comparisons_equal": real["compared"]}
    for load, kinds in simulated.items():
        for kind, by in kinds.items():
            for width, found in by.items():
                numbers[f"{load}_{kind}_{width}_saved"] = round(found["saved"], 4)
    widest = str(WIDTHS[-1])
    text = (
        f"short prompts: {short['sampling']['2']['saved']:.1%} to {short['sampling'][widest]['saved']:.1%} saved by "
        f"forked samples, {short['beam']['2']['saved']:.1%} to {short['beam'][widest]['saved']:.1%} by beams (2 to 6 "
        "sequences)"
    )
    if saves and copies and without:
        condition = (
            "an engine that forks (vLLM V0); served as n requests, as vLLM V1 does, whole blocks are shared by the "
            "prefix cache and nothing is copied"
        )
        return Settled("B05", "reproduced-only-if", text, condition=condition, numbers=numbers)
    return Settled("B05", "does-not-follow", text, condition="sequences neither shared nor copied", numbers=numbers)


def _picture(real: dict[str, Any], simulated: dict[str, Any]) -> bytes:
    import matplotlib.pyplot as plt

    from experiments.plots import STYLE, to_png

    colours = {"sampling": "#0072B2", "requests": "#009E73", "beam": "#D55E00"}
    words = {"sampling": "forked samples", "requests": "n requests", "beam": "beam search"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
        for axis, load in zip(axes, ("short", "chat"), strict=True):
            for kind, colour in colours.items():
                by = simulated.get(load, {}).get(kind)
                if by:
                    values = [100 * by[str(width)]["saved"] for width in WIDTHS]
                    style = "--" if kind == "requests" else "-"  # it lies on the samples' line
                    axis.plot(
                        WIDTHS, values, marker="o", linestyle=style, color=colour, label=f"{words[kind]}, simulated"
                    )
                ours = real["saved"][load].get(kind)
                if ours:
                    values = [100 * ours[str(width)] for width in WIDTHS]
                    axis.plot(WIDTHS, values, marker="x", linestyle=":", color=colour, label=f"{words[kind]}, real")
                paper = PAPER.get((load, kind))
                if paper:
                    label = f"{words[kind]}, the paper"
                    axis.fill_between(WIDTHS, *(100 * p for p in paper), color=colour, alpha=0.12, label=label)
            title = {"short": "Short prompts (mean 19 + 58 tokens)", "chat": "Conversations (ShareGPT lengths)"}[load]
            axis.set(xticks=WIDTHS, xlabel="sequences of a prompt", title=title, ylim=(0, 100))
        axes[0].set_ylabel("memory saved by sharing (%)")
        axes[0].legend(fontsize=8, loc="upper left")
        return to_png(figure)
