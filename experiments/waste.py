"""What share of KV memory holds tokens: at final lengths, and in saturated pools, contiguous and paged."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np

from experiments import reservation
from experiments.allocation import ALLOCATORS, Load, loads, saturate
from experiments.alone import serve_alone
from experiments.experiment import Column, Context, ExperimentResult, Settled, Table
from experiments.lengths import TRACES, final_tokens, named_trace, waste_paged, waste_reserved

__all__ = ["PAPER", "final_waste", "published_differences", "run"]

PAPER = {"max": 0.204, "pow2": 0.268, "oracle": 0.382, "paged 16": 0.963}
"""Share of KV memory that holds tokens under Orca's three reservations and vLLM (PagedAttention paper, figure 2)."""
BLOCKS = (8, 16, 32, 128)
RESERVED = (2048, 4096, 8192, 32768)
STATS = "traces/stats.json"
PARTS = ("held", "reserved_may", "reserved_cannot", "tail", "external", "cached", "free")


def run(context: Context) -> ExperimentResult:
    """Both parts, the incident of article B, and the rows that they settle."""
    present = [name for name, file in TRACES.items() if context.has(file)]
    notes = [f"{name} is left out: {TRACES[name]} is not in the shared data." for name in TRACES if name not in present]
    final = {name: final_waste(final_tokens(named_trace(context, name))) for name in context.track(present, "lengths")}
    differences = published_differences(context, present) if present and context.has(STATS) else None
    if differences is not None:
        notes.append(
            f"At final lengths {differences['compared']} figures were compared with the data's own statistics: "
            f"{len(differences['different'])} differ in a digit."
        )
    every = loads(context)
    pools: dict[str, dict[str, dict[str, float]]] = {}
    for load in context.track(every, "pools"):
        pools[load.name] = {
            name: context.part(f"{load.name}-{name}", partial(saturate, context, load, name))
            for name in context.track(ALLOCATORS, load.title)
        }
    asking = context.part("paper-max-asking", partial(saturate, context, every[0], "max", every[0].longest))
    incident = reservation.incident(context)
    caches = context.part("transformers", reservation.transformers_caches)

    claims = [
        _near_zero(pools),
        _seventeen(),
        _short(),
        _classic(pools, caches),
        _fragmentation(pools),
        _paged(pools),
        _new_page(),
        *reservation.claims(incident),
    ]
    summary = {
        "final": final,
        "published": differences,
        "pools": pools,
        "paper_useful": PAPER,
        "paper_setting_max_with_senders_asking_for_2048": asking,
        "incident": incident,
        "transformers": caches,
    }
    tables = _tables(final, every, pools, incident)
    return ExperimentResult(tables, {"waste": _picture(every, pools)}, summary, claims, notes)


# ---- what is computed ----


def final_waste(tokens: np.ndarray) -> dict[str, float]:
    """Share of allocated slots that hold nothing once requests have reached their lengths, by allocator."""
    powers = 2 ** np.ceil(np.log2(tokens)).astype(np.int64)
    return {
        **{f"max {longest}": waste_reserved(tokens, longest) for longest in RESERVED},
        "pow2": 1 - int(tokens.sum()) / int(powers.sum()),
        **{f"paged {size}": waste_paged(tokens, size) for size in BLOCKS},
    }


def published_differences(context: Context, names: list[str]) -> dict[str, Any]:
    """Our waste at final lengths against the data's own statistics, to the digits that these give."""
    published = {entry["name"]: entry for entry in json.loads(context.path(STATS).read_text(encoding="utf-8"))}
    different, compared = [], 0
    for name in names:
        tokens = final_tokens(named_trace(context, name))
        for key, compute in (("waste_fixed_block", waste_paged), ("reserve_maxlen_waste", waste_reserved)):
            for size, theirs in published[name][key].items():
                digits = len(str(theirs).partition(".")[2])
                compared += 1
                if round(compute(tokens, int(size)), digits) != theirs:
                    different.append(f"{name} {key} {size}")
    return {"compared": compared, "different": different}


# ---- what is claimed ----


def _near_zero(pools: dict[str, Any]) -> Settled:
    """A02."""
    tails = {name: by["paged 16"]["tail"] / (1 - _idle(by["paged 16"])) for name, by in pools.items()}
    short = waste_paged(np.arange(10, 21), 16)
    near = max(tails.values()) < 0.04
    return Settled(
        "A02",
        "reproduced-only-if" if near else "does-not-follow",
        f"{min(tails.values()):.2%} to {max(tails.values()):.2%} of the slots in use are empty with blocks of 16, over "
        f"{len(tails)} loads",
        f"requests hold many blocks: each leaves 7.5 slots of its last one empty on average, which is {short:.0%} "
        "where requests have 10 to 20 tokens",
        {f"tail {name}": tail for name, tail in tails.items()} | {"short": short},
    )


def _idle(shares: dict[str, float]) -> float:
    return shares["free"] + shares["cached"] + shares["external"]


def _seventeen() -> Settled:
    """A14."""
    from sim.models import preset

    (step,) = serve_alone(17, 1, 16)
    empty = step.usage.tail
    size = empty * preset("llama-3-8b").kv_bytes_per_token("float16")
    same = len(step.table) == 2 and empty == 15
    return Settled(
        "A14",
        "reproduced" if same else "does-not-follow",
        f"{len(step.table)} blocks, {empty} empty slots, {size / 2**20:.3f} MiB for Llama-3-8B",
        "" if same else "another block table",
        {"blocks": len(step.table), "empty": empty, "bytes": size},
    )


def _short() -> Settled:
    """A15."""
    from engine.core.presets import SchedulerConfig
    from sim.hardware import device
    from sim.memory import kv_blocks
    from sim.models import preset

    totals = np.arange(10, 21)
    share = {size: waste_paged(totals, size) for size in (8, 16)}
    budget = kv_blocks(preset("llama-3-8b"), device("a100-80g"))
    blocks = float((-(-totals // 16)).mean())
    most = SchedulerConfig(1, 2).max_num_seqs
    used = most * blocks / budget.num_blocks
    fill = int(budget.num_blocks / blocks)
    inside = 0.3 <= share[16] <= 0.4
    return Settled(
        "A15",
        "reproduced-only-if" if inside else "does-not-follow",
        f"{share[16]:.1%} of the slots in use are empty at 10 to 20 tokens in all ({share[8]:.1%} with blocks of 8), "
        f"but {most} such requests use {used:.1%} of the pool of an A100 with 80 GB",
        f"the share is one of the blocks in use; to be one of memory, {fill:,} requests would have to run at once",
        {"waste_16": share[16], "waste_8": share[8], "pool_share_of_256": used, "requests_that_fill_it": fill},
    )


def _classic(pools: dict[str, Any], caches: dict[str, Any]) -> Settled:
    """B01."""
    held = {name: by["max"]["held"] for name, by in pools.items()}
    figures = ", ".join(f"{share:.0%} ({name})" for name, share in held.items())
    ours = f"of regions of the longest context so much holds tokens: {figures}"
    if caches["version"] is None:
        return Settled(
            "B01", "open", ours + "; transformers is not installed, so its caches were not looked at", "", held
        )
    reserves = caches["static"] > caches["tokens"] and caches["dynamic"] > caches["tokens"]
    return Settled(
        "B01",
        "reproduced" if reserves else "reproduced-only-if",
        f"{ours}; after {caches['tokens']} tokens the default cache of transformers {caches['version']} holds "
        f"{caches['dynamic']} slots, its StaticCache {caches['static']:,}",
        ""
        if reserves
        else "the system reserves, as FasterTransformer, Orca and transformers' StaticCache do; transformers' default "
        "cache grows with the text",
        {**held, **caches},
    )


def _fragmentation(pools: dict[str, Any]) -> Settled:
    """B02."""
    useful = {name: {key: by[key]["held"] for key in ("max", "pow2", "oracle")} for name, by in pools.items()}
    worst = 1 - min(min(by.values()) for by in useful.values())
    ours = "; ".join(
        f"{name}: useful " + " / ".join(f"{by[key]:.1%}" for key in ("max", "pow2", "oracle"))
        for name, by in useful.items()
    )
    near = useful["paper"]["max"] <= 0.25 and worst >= 0.75
    return Settled(
        "B02",
        "reproduced-only-if" if near else "does-not-follow",
        f"in the paper's setting {1 - useful['paper']['max']:.0%} is wasted under the longest reservation ({ours})",
        "each request reserves the longest context and texts are far shorter; the share follows the ratio of the two",
        {f"{name} {key}": value for name, by in useful.items() for key, value in by.items()} | {"worst_waste": worst},
    )


def _paged(pools: dict[str, Any]) -> Settled:
    """B03."""
    waste = {name: 1 - by["paged 16"]["held"] for name, by in pools.items()}
    more = {name: by["paged 16"]["running"] / by["max"]["running"] for name, by in pools.items()}
    rate = {name: by["paged 16"]["requests_per_s"] / by["max"]["requests_per_s"] for name, by in pools.items()}
    low = [name for name, share in waste.items() if share < 0.04]
    four = [name for name, ratio in more.items() if ratio >= 4]
    return Settled(
        "B03",
        "reproduced-only-if" if low and four else "does-not-follow",
        "of a saturated pool so much holds no token; against the longest reservation so many times the requests run, "
        "and are served a second: "
        + "; ".join(f"{name} {waste[name]:.1%}, {more[name]:.1f}, {rate[name]:.1f}" for name in pools),
        "the baseline reserves the longest context, and texts are short against it (4 times or more: "
        f"{', '.join(four)}; below 4 % waste: {', '.join(low)}); requests a second follow only where prompts do not "
        "keep the device busy as they are",
        {f"waste {name}": value for name, value in waste.items()}
        | {f"times {name}": v for name, v in more.items()}
        | {f"rate {name}": v for name, v in rate.items()},
    )


def _new_page() -> Settled:
    """B04."""
    before, after = serve_alone(16, 2, 16)
    opened = len(after.table) - len(before.table)
    kept = after.table[: len(before.table)] == before.table
    same = opened == 1 and kept and after.copies == 0
    return Settled(
        "B04",
        "reproduced" if same else "does-not-follow",
        f"token 17 opens {opened} block, copies {after.copies}, and the first block stays",
        "" if same else "another block table",
        {"opened": opened, "copies": after.copies, "kept": kept},
    )


# ---- what is shown ----


def _tables(final: dict[str, Any], every: list[Load], pools: dict[str, Any], incident: dict[str, Any]) -> list[Table]:
    tables = []
    if final:
        keys = list(next(iter(final.values())))
        columns = [Column("trace"), *(Column(key, form=".2%") for key in keys)]
        rows = [(name, *(by[key] for key in keys)) for name, by in final.items()]
        tables.append(Table("final", "Allocated slots that hold nothing, at final lengths", columns, rows))
    titles = {
        "held": "tokens",
        "reserved_may": "to come",
        "reserved_cannot": "never",
        "tail": "tail",
        "external": "holes",
        "cached": "cached",
        "free": "free",
    }
    columns = [Column("load"), Column("allocator")]
    columns += [Column(part, titles[part], ".1%") for part in PARTS if part != "cached"]
    columns += [
        Column("running", form=".1f"),
        Column("requests_per_s", "requests/s", ".2f"),
        Column("paper", "paper", ".1%"),
    ]
    rows = []
    for load in every:
        for name, by in pools[load.name].items():
            figures = [by[part] for part in PARTS if part != "cached"]
            paper = PAPER.get(name) if load.name == "paper" else None
            rows.append(
                (
                    load.name.partition("-")[0].removesuffix("_conversation"),
                    name,
                    *figures,
                    by["running"],
                    by["requests_per_s"],
                    paper,
                )
            )
    tables.append(Table("pools", "Saturated pools: shares of all slots, over time", columns, rows))
    tables.append(reservation.table(incident))
    return tables


def _picture(every: list[Load], pools: dict[str, Any]) -> bytes:
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    from experiments.plots import STYLE, USES, to_png

    with plt.rc_context(STYLE):
        columns = 3 if len(every) > 2 else len(every)
        rows = -(-len(every) // columns)
        figure, grid = plt.subplots(
            rows, columns, figsize=(13, 0.9 + 3.0 * rows), layout="constrained", squeeze=False, sharey=True
        )
        names = list(ALLOCATORS)
        seen: dict[str, Any] = {}
        for axes, load in zip(grid.flat, every, strict=False):
            left = np.zeros(len(names))
            for part in PARTS:
                widths = np.array([100 * pools[load.name][name][part] for name in names])
                bars = axes.barh(names, widths, left=left, height=0.74, color=USES[part][1], linewidth=0)
                if widths.max() > 0.05:
                    seen[part] = bars
                left += widths
            for at, name in enumerate(names):
                share = 100 * pools[load.name][name]["held"]
                # At the bar's beginning, where no mark of the paper's can be.
                axes.text(1.5, at, f"{share:.1f}", va="center", fontsize=8, color="white")
                if load.name == "paper" and name in PAPER:
                    axes.plot([100 * PAPER[name]] * 2, [at - 0.37, at + 0.37], color="#000000", linewidth=2.2)
            axes.set(xlim=(0, 100), title=f"{load.title} ({load.slots:,} slots)", xlabel="share of the pool (%)")
            axes.grid(visible=False, axis="y")
        for axes in grid.flat[len(every) :]:
            axes.set_visible(False)
        grid[0, 0].invert_yaxis()
        mark = Line2D([], [], color="#000000", linestyle="none", marker="|", markersize=12, markeredgewidth=2.2)
        labels = [USES[key][0] for key in seen] + ["tokens, by the paper"]
        figure.legend([*seen.values(), mark], labels, loc="outside lower center", ncols=4)
        return to_png(figure)
