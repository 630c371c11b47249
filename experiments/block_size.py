"""What the block size changes: waste, how many requests fit, and what the decisions cost; and what 180 -> 245 requests
by blocks of 8 in place of 16 would require.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import stepcost
from experiments.experiment import Column, Context, ExperimentResult, Settled, Table
from experiments.lengths import SHORT_ANSWERS, TRACES, final_tokens, named_trace, short_answer_tokens, waste_paged
from experiments.metrics import Tables, expand_steps

if TYPE_CHECKING:
    from traces import Trace

__all__ = ["concurrency_ratio", "mean_running", "run"]

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ANSWER = 12
"""Tokens of an answer, as the claims have it."""
BEFORE, AFTER = 180, 245
"""Concurrent requests with blocks of 16 and of 8, as claimed."""
DRAWN = 20_000
_GIB = 1 << 30
_INCIDENT = (
    *("running_16", "running_8", "ratio", "closed_form", "throughput_ratio"),
    *("preemptions_16", "preemptions_8"),
)


def run(context: Context) -> ExperimentResult:
    """Waste on lengths, requests in a full pool, measured cost, and rows A12, A16 to A18, A20 and B08."""
    notes = []
    lengths: dict[str, np.ndarray] = {"totals 10 to 20": np.arange(10, 21)}
    if context.has(SHORT_ANSWERS):
        prompt, output = short_answer_tokens(context, DRAWN)
        lengths["servegen m-small"] = prompt + output
    else:
        notes.append(f"ServeGen's short answers are left out: there is no {SHORT_ANSWERS} in the shared data.")
    present = [name for name, file in TRACES.items() if context.has(file)]
    notes += [
        f"{name} is left out: there is no {TRACES[name]} in the shared data." for name in TRACES if name not in present
    ]
    for name in context.track(present, "traces"):
        lengths[name] = final_tokens(named_trace(context, name))
    waste = {name: {size: waste_paged(tokens, size) for size in SIZES} for name, tokens in lengths.items()}
    capacity = _capacity(context, "azure2023_conv" in present)
    measured = context.part("costs", _costs)
    costs = {size: measured[str(size)] for size in SIZES}
    incident = _incident(context)

    claims = [_default(), _symptom(), _small_blocks(waste, capacity), _overhead(costs), _ratio(incident), _cpu(costs)]
    claims.sort(key=lambda claim: claim.id)
    summary = {
        "build": measured["build"],
        "waste": {name: {str(s): value for s, value in by.items()} for name, by in waste.items()},
        "capacity": capacity,
        "cost": {str(size): cost for size, cost in costs.items()},
        "incident": incident,
    }
    notes.append(f"Costs are measured on this machine, on the {measured['build']} core, and differ from run to run.")
    picture = _picture(waste, capacity, costs, measured["build"])
    return ExperimentResult(_tables(waste, capacity, costs, incident), {"block_size": picture}, summary, claims, notes)


# ---- what is computed ----


def concurrency_ratio(prompt: np.ndarray, output: np.ndarray, small: int = 8, large: int = 16) -> float:
    """How many times as many requests a full pool holds with blocks of `small` as with blocks of `large`.

    Over the life of the requests: one that has p prompt tokens and gives n answers holds p, p + 1, ... p + n - 1 slots
    for a step each, in blocks.
    """
    taken = {small: 0, large: 0}
    for p, n in zip(prompt.tolist(), output.tolist(), strict=True):
        held = np.arange(p, p + n)
        for size in taken:
            taken[size] += int((-(-held // size)).sum()) * size
    return taken[large] / taken[small]


def mean_running(tables: Tables) -> float:
    """Requests that run at once, on average over the time in which others wait: while memory is the limit."""
    steps = expand_steps(tables)
    lasted = np.diff(steps["end_ns"], prepend=steps["start_ns"][:1])
    waiting = steps["num_waiting"] > 0
    waiting &= np.cumsum(steps["admitted"]) > 0
    if not waiting.any():
        return float("nan")
    return float(np.average(steps["num_running"][waiting], weights=lasted[waiting]))


def _capacity(context: Context, chat: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Saturated pools of Mistral-7B on an A10G: who runs at once, and what the tails take."""
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset
    from sim.steptime import roofline

    spec, card = preset("mistral-7b"), device("a10g")
    slots = kv_blocks(spec, card, block_size=256).num_blocks * 256
    step_time = roofline(spec, card)
    found: dict[str, dict[str, dict[str, float]]] = {}
    loads = {"short": lambda: _load(6000, 10, 20, ANSWER, "short answers", slots // 16)}
    if chat:
        loads["chat"] = lambda: named_trace(context, "azure2023_conv").head(500)
    for name, load in loads.items():
        # Short requests are so small that no limit on their number but memory may bind: a tenth of the pool will do.
        pool = slots if name == "chat" else slots // 2560 * 256

        def measure(size: int, load: Any = load, name: str = name, pool: int = pool) -> dict[str, float]:
            from engine.core.presets import SchedulerConfig

            options = SchedulerConfig(
                num_blocks=pool // size,
                max_model_len=min(16384, pool),
                block_size=size,
                max_num_seqs=2048,
                max_num_batched_tokens=2048,
                enable_prefix_caching=False,
            )
            found, tables = context.simulate(f"{name}-{size}", load(), options, step_time, time_scale=1e-9)
            steps = expand_steps(tables)
            used = pool - steps["free"] - steps["cached"]
            weight = np.diff(steps["end_ns"], prepend=0) * (steps["num_waiting"] > 0)
            return {
                "running": mean_running(tables),
                "tail_share": float((steps["tail"] * weight).sum() / (used * weight).sum()),
                "end_s": found.end_ns / 1e9,
            }

        found[name] = {
            str(size): context.part(f"capacity-{name}-{size}", partial(measure, size))
            for size in context.track(SIZES, f"pools of {name}")
        }
    return found


def _load(count: int, low: int, high: int, output: int, name: str, concurrency: int) -> Trace:
    """Requests of `low` to `high` tokens in all, `output` of which are the answer; as many outstanding as named."""
    from traces import generate

    return generate(
        {
            "kind": "synthetic",
            "name": name,
            "num_requests": count,
            "arrival": {"process": "closed-loop", "concurrency": concurrency},
            "prompt_tokens": {"dist": "uniform", "low": max(1, low - output), "high": max(1, high - output)},
            "output_tokens": output,
        }
    )


def _costs() -> dict[str, Any]:
    return {"build": stepcost.build(), **{str(size): cost for size, cost in stepcost.costs(SIZES).items()}}


def _incident(context: Context) -> dict[str, Any]:
    """180 -> 245: the greatest ratio there can be, which prompts it takes, and the core's own answer."""
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset

    spec, card = preset("llama-3-8b"), device("a100-80g")
    token = spec.kv_bytes_per_token()
    budget = kv_blocks(spec, card, block_size=16)
    total = np.arange(1, 8193)
    ratios = (-(-total // 16) * 16) / (-(-total // 8) * 8)
    wanted = AFTER / BEFORE
    one = np.array([ANSWER])
    by_prompt = {p: concurrency_ratio(np.array([p]), one) for p in range(1, 65)}
    enough = [p for p, ratio in by_prompt.items() if ratio >= wanted]
    found: dict[str, Any] = {
        "wanted_ratio": wanted,
        "greatest_ratio_above_8": float(ratios[8:].max()),
        "greatest_at": [int(t) for t in total[8:] if ratios[t - 1] == ratios[8:].max()],
        "greatest_ratio_to_8": float(ratios[:8].max()),
        "longest_prompt": max(enough, default=0),
        "ratio_by_prompt": {str(p): ratio for p, ratio in by_prompt.items()},
        "needed_bytes": AFTER * 24 * token,
        "pool_bytes": budget.num_blocks * budget.block_bytes,
    }
    for name, low, high in (("prompts of 2", 14, 14), ("totals of 20", 20, 20), ("totals of 13 to 30", 13, 30)):
        found[name] = context.part(f"incident-{low}-{high}", partial(_closed_loop, context, low, high), before=BEFORE)
    if context.has(SHORT_ANSWERS):
        prompt, output = short_answer_tokens(context, 2000)
        found["servegen m-small"] = {"ratio": concurrency_ratio(prompt, output)}
    return found


def _closed_loop(context: Context, low: int, high: int) -> dict[str, float]:
    """Both block sizes in the memory that holds 180 requests in blocks of 16, with as many users as can be served."""
    from engine.core.presets import SchedulerConfig
    from sim.hardware import device
    from sim.models import preset
    from sim.steptime import roofline

    step_time = roofline(preset("llama-3-8b"), device("a100-80g"))
    load = _load(6000, low, high, ANSWER, f"{low} to {high} tokens", 4 * BEFORE)
    held = np.concatenate([np.arange(p, p + ANSWER) for p in load.prompt_tokens.tolist()])
    blocks = round(BEFORE * float((-(-held // 16)).mean()))
    running, rate, preempted = {}, {}, {}
    for size in (16, 8):
        options = SchedulerConfig(
            num_blocks=blocks * 16 // size,
            max_model_len=64,
            block_size=size,
            max_num_seqs=2048,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
        )
        found, tables = context.simulate(f"incident-{low}-{high}-{size}", load, options, step_time)
        running[size] = mean_running(tables)
        rate[size] = len(load) / (found.end_ns / 1e9)
        preempted[size] = int(np.sum(tables.requests["num_preemptions"]))
    return {
        "running_16": running[16],
        "running_8": running[8],
        "ratio": running[8] / running[16],
        "throughput_ratio": rate[8] / rate[16],
        "preemptions_16": preempted[16],
        "preemptions_8": preempted[8],
        "closed_form": concurrency_ratio(load.prompt_tokens, load.output_tokens),
    }


# ---- what is claimed ----


def _default() -> Settled:
    """A12."""
    from engine.core.presets import PRESETS, SchedulerConfig

    sizes = {name: fields["block_size"] for name, fields in PRESETS.items() if name.startswith("vllm")}
    same = set(sizes.values()) == {16} and SchedulerConfig(1, 2).block_size == 16
    return Settled(
        "A12",
        "reproduced" if same else "reproduced-only-if",
        f"16 in {', '.join(name for name, size in sizes.items() if size == 16)}",
        "" if same else "the version is one of these",
        sizes,
    )


def _symptom() -> Settled:
    """A16."""
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset

    slots = kv_blocks(preset("llama-3-8b"), device("a100-80g"), block_size=16).num_blocks * 16
    each = 0.99 * slots / 60
    share = (16 - 1) / 2 / each
    follows = share > 0.1
    return Settled(
        "A16",
        "reproduced" if follows else "does-not-follow",
        f"60 requests at 99 % of {slots:,} slots (Llama-3-8B, A100 80 GB) hold {each:,.0f} tokens each, of which the "
        f"last block wastes {share:.2%}",
        ""
        if follows
        else "long requests fill the pool, not empty slots: for these to take 30 % with blocks of 16, a "
        "request would hold some 20 tokens, and tens of thousands would run",
        {"slots": slots, "tokens_each": each, "tail_share": share},
    )


def _small_blocks(waste: dict[str, dict[int, float]], capacity: dict[str, Any]) -> Settled:
    """A17."""
    gains = {name: (1 - by[8]) / (1 - by[16]) for name, by in waste.items()}
    useful = [name for name, gain in gains.items() if gain >= 1.02]
    named = sorted(gains.items(), key=lambda item: -item[1])
    figures = ", ".join(f"{gain:.3f} ({name})" for name, gain in named if name in useful)
    rest = [gain for name, gain in named if name not in useful]
    figures += f", at most {max(rest):.3f} on the other {len(rest)} traces" if rest else ""
    running = capacity.get("short", {})
    measured = running["8"]["running"] / running["16"]["running"] if running else None
    return Settled(
        "A17",
        "reproduced-only-if" if useful else "does-not-follow",
        f"8 in place of 16 makes room for so many times the requests: {figures}",
        f"requests hold some ten to a few hundred tokens in all ({', '.join(useful)}), memory is the limit, and the "
        "attention kernel takes blocks of 8 (FlashAttention in vLLM 0.33 wants multiples of 16)",
        {**{f"gain {name}": gain for name, gain in gains.items()}, "measured_gain_short": measured},
    )


def _overhead(costs: dict[int, Any]) -> Settled:
    """A18."""
    steps = {size: cost["step_us"] for size, cost in costs.items()}
    factor = {size: steps[size] / steps[16] for size in (1, 8)}
    rises = all(steps[a] > steps[b] for a, b in zip((1, 4, 16), (4, 16, 64), strict=True))
    return Settled(
        "A18",
        "reproduced" if rises else "does-not-follow",
        f"a decode step of 256 requests costs the scheduler {steps[1]:,.0f} us with blocks of 1, {steps[8]:,.0f} "
        f"with 8 and {steps[16]:,.0f} with 16; a table of 8,192 tokens has {8192:,}, {1024:,} and {512:,} entries",
        "" if rises else "the cost would have to rise as blocks shrink",
        {f"step_us_{size}": value for size, value in steps.items()} | {"factor_1": factor[1], "factor_8": factor[8]},
    )


def _cpu(costs: dict[int, Any]) -> Settled:
    """B08."""
    from sim.hardware import device
    from sim.models import preset
    from sim.steptime import BatchShape, roofline

    rows, context_tokens = 256, 640
    step_ns = roofline(preset("llama-3-8b"), device("a100-80g")).duration(
        BatchShape(rows, rows, rows * context_tokens, 0, rows)
    )
    share = {size: costs[size]["step_us"] * 1e3 / step_ns for size in (1, 16)}
    prompt = {size: costs[size]["admission_us"] for size in (1, 16)}
    overload = share[1] >= 1
    return Settled(
        "B08",
        "reproduced" if overload else "reproduced-only-if",
        f"blocks of 1 cost {costs[1]['step_us'] / costs[16]['step_us']:.0f} times as much a decode step of 256 "
        f"requests as blocks of 16 ({share[1]:.0%} against {share[16]:.1%} of the step on an A100), and a prompt of "
        f"2,048 tokens {prompt[1] / 1e3:.1f} ms against {prompt[16] / 1e3:.1f}",
        ""
        if overload
        else f"the host's work on a block costs {1 / share[1]:.1f} times ours: then it takes as long as "
        "the step; with ours the cost rises as claimed but stays below it",
        {f"share_of_step_{s}": v for s, v in share.items()} | {f"prompt_us_{s}": v for s, v in prompt.items()},
    )


def _ratio(incident: dict[str, Any]) -> Settled:
    """A20."""
    wanted, above, longest = (incident[k] for k in ("wanted_ratio", "greatest_ratio_above_8", "longest_prompt"))
    needed, pool = incident["needed_bytes"] / _GIB, incident["pool_bytes"] / _GIB
    measured = {
        name: value["ratio"] for name, value in incident.items() if isinstance(value, dict) and "ratio" in value
    }
    span = incident["greatest_at"]
    rates = [
        value["throughput_ratio"] for value in incident.values() if isinstance(value, dict) and "running_8" in value
    ]
    follows = wanted <= above and needed >= pool
    return Settled(
        "A20",
        "reproduced" if follows else "does-not-follow",
        f"at most {above:.3f} times as many requests once they hold more than 8 tokens (at {span[0]} to {span[-1]}), "
        f"against {wanted:.3f}; "
        + ", ".join(f"{ratio:.2f} ({name})" for name, ratio in measured.items())
        + f"; throughput {min(rates):.2f} to {max(rates):.2f} times, as more are admitted than can grow",
        ""
        if follows
        else f"prompts of at most {longest} tokens with answers of {ANSWER}, and a pool of {needed:.2f} GiB, which "
        f"holds {AFTER} requests of 24 tokens; an A100 with 80 GB leaves Llama-3-8B {pool:.1f} GiB",
        {
            "wanted_ratio": wanted,
            "greatest_ratio": above,
            "longest_prompt": longest,
            "needed_gib": needed,
            "pool_gib": pool,
            "lowest_throughput_ratio": min(rates),
            "highest_throughput_ratio": max(rates),
            **{f"ratio {name}": ratio for name, ratio in measured.items()},
        },
    )


# ---- what is shown ----


def _tables(
    waste: dict[str, dict[int, float]], capacity: dict[str, Any], costs: dict[int, Any], incident: dict[str, Any]
) -> list[Table]:
    names = list(waste)
    sized = [Column("block_size", "block", "d")]
    tables = [
        Table(
            "waste",
            "Slots of blocks that hold nothing, at final lengths",
            [Column("lengths")] + [Column(str(size), form=".2%") for size in SIZES],
            [(name, *(waste[name][size] for size in SIZES)) for name in names],
        )
    ]
    rows = []
    for size in SIZES:
        row: list[Any] = [size]
        for name in ("short", "chat"):
            found = capacity.get(name, {}).get(str(size))
            row += [None, None] if found is None else [found["running"], found["tail_share"]]
        rows.append((*row, costs[size]["step_us"], costs[size]["admission_us"]))
    columns = [*sized]
    for name in ("short", "chat"):
        columns += [
            Column(f"{name}_running", f"running, {name}", ",.1f"),
            Column(f"{name}_tail_share", f"tail, {name}", ".2%"),
        ]
    columns += [Column("step_us", "us a step", ",.0f"), Column("admission_us", "us a prompt", ",.0f")]
    tables.append(Table("sizes", "A full pool, and what deciding costs", columns, rows))
    runs = [(name, value) for name, value in incident.items() if isinstance(value, dict) and "running_16" in value]
    tables.append(
        Table(
            "incident",
            "Memory for 180 requests in blocks of 16",
            [
                Column("load"),
                Column("running_16", "running, 16", ".1f"),
                Column("running_8", "running, 8", ".1f"),
                Column("ratio", form=".3f"),
                Column("closed_form", "closed form", ".3f"),
                Column("throughput_ratio", "throughput", ".3f"),
                Column("preemptions_16", "preempted, 16", ",d"),
                Column("preemptions_8", "preempted, 8", ",d"),
            ],
            [(name, *(value[key] for key in _INCIDENT)) for name, value in runs],
        )
    )
    return tables


def _picture(waste: dict[str, dict[int, float]], capacity: dict[str, Any], costs: dict[int, Any], build: str) -> bytes:
    from matplotlib import pyplot as plt

    from experiments.plots import STYLE, to_png

    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")
    titles = {
        "azure2023_conv": "Azure conversation",
        "azure2023_code": "Azure code",
        "mooncake_conversation": "Mooncake conversation",
        "mooncake_synthetic": "Mooncake synthetic",
        "sharegpt-llama-3.1-8b-300-sps10": "ShareGPT (Llama 3.1)",
        "sharegpt-qwen3-32b-300-sps10": "ShareGPT (Qwen3)",
        "servegen m-small": "ServeGen m-small",
        "totals 10 to 20": "10 to 20 tokens in all",
    }
    colour = dict(zip(waste, colours, strict=False))
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 5), layout="constrained")
        for name, by in waste.items():
            points = [(size, 100 * value) for size, value in by.items() if value > 0]
            left.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=colour[name], label=titles[name])
        left.set(yscale="log", ylim=(0.008, 100), ylabel="share of allocated slots (%)", title="Waste at final lengths")
        left.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
        for key, name in (("short", "totals 10 to 20"), ("chat", "azure2023_conv")):
            if key in capacity:
                running = [capacity[key][str(size)]["running"] for size in SIZES]
                relative = [value / running[SIZES.index(16)] for value in running]
                middle.plot(SIZES, relative, marker="o", markersize=3.5, color=colour[name])
        middle.set(
            ylim=(0, None), title="Requests in a full pool, simulated", ylabel="running at once, blocks of 16 = 1"
        )
        step = [costs[size]["step_us"] for size in SIZES]
        prompt = [costs[size]["admission_us"] for size in SIZES]
        right.plot(SIZES, prompt, "s--", markersize=3.5, color="#555555", label="a new prompt of 2,048 tokens")
        right.plot(SIZES, step, "s-", markersize=3.5, color="#555555", label="a decode step of 256 requests")
        right.set(yscale="log", ylabel="us", title=f"Cost of deciding, measured ({build} core)", ylim=(20, None))
        right.set_yticks([100, 1000, 10000], ["100", "1,000", "10,000"])
        right.legend()
        for axes in (left, middle, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(SIZES, [str(size) for size in SIZES])
            axes.minorticks_off()
            axes.set_xlabel("block size (tokens)")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return to_png(figure)
