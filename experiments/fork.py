"""What several sequences of one prompt save by sharing its blocks: parallel sampling and beam search.

Saved is counted in blocks, as the paper counts it (Kwon et al., 2023, section 6.3): those that sharing saves over those
that the sequences would take alone, both summed over time. Sequences start with the blocks of their prompt and copy a
block when they write to one that others have too; the prefix cache is off but for the runs that serve sequences as
requests, so that nothing else is shared.

Real runs (the engine, float32, on this CPU) say what a language model's beams share; how often one sequence replaces
another there, per step, is what the simulated beams are drawn with. Simulated runs serve prompts and outputs of the
means that the paper gives for its two loads (figure 11: 19.31 and 58.45 tokens for Alpaca, 161.31 and 337.99 for
ShareGPT), drawn from exponential distributions, since it gives nothing but the means; and the lengths of 300
conversations of ShareGPT as a file has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.allocation import PAPER_MEANS
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
LOADS = {"short": "Alpaca's means", "chat": "ShareGPT's means", "file": "a ShareGPT file"}
MEANS = {"short": (19.31, 58.45), "chat": PAPER_MEANS}
"""Tokens of prompt and output."""
SHARE_GPT = "sharegpt-llama-3.1-8b-300-sps10"
REQUESTS = {"short": 60, "chat": 24, "file": 12}
CHURNS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
"""At which short beams are simulated again, to see which of them would give the paper's figures."""
BLOCK_SIZE = 16
FEW_BLOCKS = 9
"""A pool in which not all sequences of the real short prompts fit at once."""
OUTPUT_TOKENS = {"sampling": 16, "beam": 24}
"""Of real runs. What samples share depends on lengths alone; what beams share, on what the model says."""
QUESTIONS = (
    "Give three tips for staying healthy through a long winter in the north, and say briefly why each one helps.",
    "Describe how a bicycle stays upright while it moves, in words that a child of ten would understand.",
    "Write a short poem about the sea in winter, without any rhymes and with a gull in its last line.",
)
PASSAGE = (
    "A library keeps many books and few shelves. Whoever orders them by the date of their arrival can find a new one "
    "at once and an old one never; whoever orders them by name must move half of the house for every gift. The keeper "
    "of one such library, tired of moving, cut the shelves into boards of equal length. Each board holds sixteen "
    "volumes, no more, and a list by the door says which boards, in which order, make up the works of one author. When "
    "a work grows, it takes another board, wherever one is free; when it is sold, its boards go back. "
)
"""What makes a real run's prompts as long as those of a conversation. The questions alone have about 20 tokens."""


def run(context: Context) -> ExperimentResult:
    """The experiment."""
    real = context.part("real", lambda: _real_runs(context))
    churn = _churn_of(real["distinct"])
    simulated: dict[str, dict[str, dict[str, Any]]] = {}
    workloads = ["short", "chat"] + (["file"] if context.has(TRACES[SHARE_GPT]) else [])
    for load in workloads:
        for kind in context.track(("sampling", "requests", "beam"), f"{LOADS[load]}, simulated"):
            for width in WIDTHS:
                compute = partial(_simulated, context, load, kind, width, churn)
                found = context.part(f"{load}-{kind}-{width}", compute, churn=churn)
                simulated.setdefault(load, {}).setdefault(kind, {})[str(width)] = found
    churns = [
        {"churn": at} | {str(n): _beam_saved(context, n, at) for n in (WIDTHS[0], WIDTHS[-1])}
        for at in context.track(CHURNS, "short beams by churn")
    ]
    rows = _rows(real, simulated)
    columns = [
        Column("prompts"),
        Column("sequences", "served as"),
        Column("width", "n"),
        Column("real", "engine", ".1%"),
        Column("simulated", "simulated", ".1%"),
        Column("paper", "paper (n = 2 to 6)"),
        Column("copies", "copies a request", ".2f"),
    ]
    notes = [
        f"Real runs: {real['model']}, {len(QUESTIONS)} prompts, {OUTPUT_TOKENS['sampling']} tokens a sample and "
        f"{OUTPUT_TOKENS['beam']} a beam; outputs were "
        f"the same with few blocks and swaps, and as requests ({real['compared']} comparisons).",
        f"Real beams keep {_percent(real['distinct'])} of their sequences a step on average; simulated ones are drawn "
        f"with churn {churn:.2f}, which gives that share at n = 4.",
    ]
    if "file" not in simulated:
        notes.append(f"Without {TRACES[SHARE_GPT]} its lengths are left out.")
    table = Table("saved", "Blocks saved by sharing", columns, rows)
    summary = {
        "real": real,
        "churn": churn,
        "simulated": simulated,
        "short_beams_by_churn": churns,
        "paper": {" ".join(k): v for k, v in PAPER.items()},
    }
    settled = _settled(real, simulated, churn, churns)
    return ExperimentResult([table], {"saved": _picture(real, simulated)}, summary, [settled], notes)


def _beam_saved(context: Context, width: int, churn: float) -> float:
    """What beams on short prompts save at a churn."""
    part = f"short-beam-{width}-churn-{churn:g}"
    compute = partial(_simulated, context, "short", "beam", width, churn)
    return float(context.part(part, compute, churn=churn)["saved"])


def saved_share(tables: Tables) -> float:
    """Blocks that sharing saves over those that sequences would take alone, both summed over time."""
    steps = tables.steps
    ends = np.asarray(steps["end_ns"], dtype=float)
    took = np.diff(ends, prepend=float(np.asarray(steps["start_ns"])[0]))
    shared = float((took * np.asarray(steps["shared"])).sum())
    taken = sum(float((took * np.asarray(steps[name])).sum()) for name in _TAKEN)
    return shared / (shared + taken)


_TAKEN = ("held", "tail", "reserved_may", "reserved_cannot")
"""Slots of blocks that sequences have."""


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
        f"{load}-{kind}-{width}-{churn:g}",
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
    if load == "file":
        return named_trace(context, SHARE_GPT).head(count)
    rng = np.random.default_rng(context.seed)
    prompt, output = MEANS[load]
    return traces.make_trace(
        arrival_ns=np.zeros(count, dtype=np.int64),
        prompt_tokens=np.maximum(1, rng.exponential(prompt, count).round().astype(np.int64)),
        output_tokens=np.maximum(1, rng.exponential(output, count).round().astype(np.int64)),
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

    shared: dict[str, Any] = {"ignore_eos": True, "detokenize": False}
    tokens = OUTPUT_TOKENS
    return {
        "sampling": SamplingParams(n=width, temperature=1.0, seed=seed, max_tokens=tokens["sampling"], **shared),
        "beam": SamplingParams(beam_width=width, max_tokens=tokens["beam"], **shared),
    }


def _llm(name: str, loaded: Any, blocks: int, **options: Any) -> LLM:
    from engine.exec.llm import LLM

    options = {"enable_prefix_caching": False, **options}
    limits: dict[str, Any] = {"num_gpu_blocks_override": blocks, "max_model_len": 512, "block_size": BLOCK_SIZE}
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
    for load, by_kind in simulated.items():
        for kind in ("sampling", "requests", "beam"):
            for width in WIDTHS:
                found = by_kind[kind][str(width)]
                paper = PAPER.get((load, kind))
                rows.append(
                    [
                        LOADS[load],
                        words[kind],
                        width,
                        real["saved"].get(load, {}).get(kind, {}).get(str(width)),
                        found["saved"],
                        "" if paper is None else f"{paper[0]:.1%} to {paper[1]:.1%}",
                        found["copies"],
                    ]
                )
    return rows


def compared(ours: Sequence[float], theirs: tuple[float, float]) -> str:
    """How the range of our figures lies to theirs: `within`, `overlaps`, `above` or `below`."""
    low, high = min(ours), max(ours)
    if low > theirs[1]:
        return "above"
    if high < theirs[0]:
        return "below"
    return "within" if theirs[0] <= low and high <= theirs[1] else "overlaps"


def _where(ours: Sequence[float], theirs: tuple[float, float]) -> str:
    """For which numbers of sequences our figure is in the paper's range, where that is not all or none of them."""
    inside = [str(n) for n, at in zip(WIDTHS, ours, strict=True) if theirs[0] <= at <= theirs[1]]
    return f", within it with {' and '.join(inside)}" if 0 < len(inside) < len(WIDTHS) else ""


def _settled(
    real: dict[str, Any], simulated: dict[str, Any], churn: float, churns: Sequence[dict[str, float]]
) -> Settled:
    """B05: whether sequences share and copy on write, and how far the savings are the paper's."""
    short = simulated["short"]
    saves = all(found["saved"] > 0 for kind in ("sampling", "beam") for found in short[kind].values())
    copies = all(found["copies"] > 0 for found in short["sampling"].values())
    without = all(found["copies"] == 0 for found in short["requests"].values())
    numbers: dict[str, Any] = {"real_comparisons_equal": real["compared"], "churn": churn}
    for load, kinds in simulated.items():
        for kind, by in kinds.items():
            for width, found in by.items():
                numbers[f"{load}_{kind}_{width}_saved"] = round(found["saved"], 4)
    words = {"sampling": "forked samples", "beam": "beams"}
    lies: dict[tuple[str, str], str] = {}
    texts = []
    for (load, kind), paper in PAPER.items():
        ours = [simulated[load][kind][str(width)]["saved"] for width in WIDTHS]
        lies[load, kind] = numbers[f"{load}_{kind}_lies"] = compared(ours, paper)
        texts.append(
            f"{words[kind]} at {LOADS[load]} {100 * min(ours):.0f} to {100 * max(ours):.0f} % "
            f"(paper {100 * paper[0]:.0f} to {100 * paper[1]:.0f}: {lies[load, kind]}{_where(ours, paper)})"
        )
    text = "blocks saved with 2 to 6 sequences: " + "; ".join(texts)
    if not (saves and copies and without):
        return Settled("B05", "does-not-follow", text, "sequences neither shared nor copied", numbers)
    if not set(lies.values()) & {"within", "overlaps"}:
        return Settled("B05", "does-not-follow", text, "other lengths than the paper's means", numbers)
    conditions = [
        "the engine forks (vLLM V0); served as n requests, as vLLM V1 does, whole blocks are shared by the prefix "
        "cache and nothing is copied"
    ]
    if "file" in simulated:
        ours = [simulated["file"]["sampling"][str(width)]["saved"] for width in WIDTHS]
        if compared(ours, PAPER["chat", "sampling"]) != "within":
            conditions.append(
                f"prompts are short against outputs, as in the paper: on a ShareGPT file with longer ones samples save "
                f"{100 * min(ours):.0f} to {100 * max(ours):.0f} %"
            )
    if lies["short", "beam"] != "within":
        nearest = [
            min(churns, key=lambda row, n=n, at=at: abs(row[n] - at))["churn"]  # type: ignore[misc]
            for n, at in zip((str(WIDTHS[0]), str(WIDTHS[-1])), PAPER["short", "beam"], strict=True)
        ]
        numbers["churn_of_the_paper"] = nearest
        odds = " to ".join(f"{at:g}" for at in sorted(set(nearest)))
        conditions.append(
            f"for beams of all widths, one in them is replaced with probability {odds} a step, where with "
            f"{real['model']} it is with {churn:g}"
        )
    return Settled("B05", "reproduced-only-if", text, condition="; ".join(conditions), numbers=numbers)


def _picture(real: dict[str, Any], simulated: dict[str, Any]) -> bytes:
    import matplotlib.pyplot as plt

    from experiments.plots import STYLE, to_png

    colours = {"sampling": "#0072B2", "requests": "#009E73", "beam": "#D55E00"}
    words = {"sampling": "forked samples", "requests": "n requests", "beam": "beam search"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(simulated), figsize=(4.4 * len(simulated), 4.8), layout="constrained", sharey=True, squeeze=False
        )
        for axis, (load, by_kind) in zip(axes[0], simulated.items(), strict=True):
            for kind, colour in colours.items():
                values = [100 * by_kind[kind][str(width)]["saved"] for width in WIDTHS]
                # What requests share lies on the samples' line: their marks are hollow and larger.
                line: dict[str, Any] = {"marker": "o", "label": f"{words[kind]}, simulated"}
                if kind == "requests":
                    line = {"marker": "s", "linestyle": "--", "fillstyle": "none", "markersize": 9} | {
                        "label": f"{words[kind]} and prefix cache, simulated"
                    }
                axis.plot(WIDTHS, values, color=colour, **line)
                ours = real["saved"].get(load, {}).get(kind)
                if ours:
                    values = [100 * ours[str(width)] for width in WIDTHS]
                    label = f"{words[kind]}, engine (outputs of {OUTPUT_TOKENS[kind]})"
                    axis.plot(WIDTHS, values, marker="x", linestyle=":", color=colour, label=label)
                paper = PAPER.get((load, kind))
                if paper:
                    label = f"{words[kind]}, the paper's range"
                    axis.fill_between(WIDTHS, *(100 * p for p in paper), color=colour, alpha=0.12, label=label)
            title = LOADS[load]
            if load in MEANS:
                title += f" ({MEANS[load][0]:.0f} + {MEANS[load][1]:.0f} tokens)"
            axis.set(xticks=WIDTHS, xlabel="sequences of a prompt", title=title, ylim=(0, 100))
        axes[0][0].set_ylabel("blocks saved by sharing (%)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3)
        return to_png(figure)
