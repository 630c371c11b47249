"""Tables and picture of the experiment prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.experiment import Column, Table

__all__ = ["curve_table", "cycle_table", "picture", "same_curves", "served_table"]


def curve_table(curves: Sequence[Mapping[str, Any]]) -> Table:
    columns = [
        Column("workload"),
        Column("policy"),
        Column("index"),
        Column("capacity_tokens", "capacity, tokens", ",d"),
        Column("hit_share", "hits", ".1%"),
    ]
    return Table("curves", "Hits by size of the cache", columns, [[r[c.name] for c in columns] for r in curves], False)


def served_table(served: Sequence[Mapping[str, Any]]) -> Table:
    columns = [
        Column("order"),
        Column("cache"),
        Column("ttft_mean_s", "mean TTFT s", ".2f"),
        Column("ttft_p99_s", "p99 TTFT s", ".2f"),
        Column("hit_share", "hits", ".1%"),
        Column("requests_per_s", "requests/s", ".2f"),
        Column("preemptions", "preempted", "d"),
    ]
    return Table(
        "served", "A slice of 2,000 requests, simulated", columns, [[r[c.name] for c in columns] for r in served]
    )


def cycle_table(cycle: Sequence[Mapping[str, Any]], holds: Mapping[str, int]) -> Table:
    columns = [
        Column("documents", form="d"),
        Column("cache"),
        Column("seconds", "s", ".1f"),
        Column("hit_share", "hits", ".1%"),
    ]
    title = "Documents in a cycle; " + ", ".join(f"the {holder} holds {num}" for holder, num in holds.items())
    return Table("documents", title, columns, [[r[c.name] for c in columns] for r in cycle])


def same_curves(curves: Sequence[Mapping[str, Any]], workload: str) -> dict[tuple[float, ...], list[str]]:
    """Hit shares in percent over cache size, to 0.1, and the policies that have them: equal curves hide each other."""
    found: dict[tuple[float, ...], list[str]] = {}
    for policy in dict.fromkeys(row["policy"] for row in curves):
        rows = [r for r in curves if (r["workload"], r["policy"], r["index"]) == (workload, policy, "hash")]
        found.setdefault(tuple(round(100 * row["hit_share"], 1) for row in rows), []).append(policy)
    return found


def picture(
    curves: Sequence[Mapping[str, Any]],
    served: Sequence[Mapping[str, Any]],
    cycle: Sequence[Mapping[str, Any]],
    holds: Mapping[str, int],
) -> bytes:
    """PNG: hits by size of the cache, TTFT of served runs, and the document cycle. `holds`: documents that fit."""
    from matplotlib import pyplot as plt

    from experiments.plots import STYLE, to_png

    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
    orders = list(dict.fromkeys(row["order"] for row in served))
    cycles = list(dict.fromkeys(row["documents"] for row in cycle))
    workloads = list(dict.fromkeys(row["workload"] for row in curves))
    below: dict[str, Any] = {"fontsize": 8, "loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
    with plt.rc_context(STYLE):
        num = len(workloads) + 2
        figure, grid = plt.subplots(2, (num + 1) // 2, figsize=(5.4 * ((num + 1) // 2), 9.2), layout="constrained")
        axes = grid.ravel()
        for ax in axes[num:]:
            ax.set_axis_off()
        for ax, workload in zip(axes, workloads, strict=False):
            ticks = sorted({row["capacity_tokens"] / 1e6 for row in curves if row["workload"] == workload})
            for i, (values, names) in enumerate(same_curves(curves, workload).items()):
                future = names == ["belady"]
                ax.plot(
                    ticks,
                    values,
                    linestyle="--" if future else "-",
                    marker="" if future else "os^Dv"[i % 5],
                    markersize=4,
                    color="black" if future else colours[i],
                    label="belady (knows the future)" if future else ", ".join(names),
                )
            ax.set(xscale="log", xlabel="cache (million tokens)", ylabel="prompt tokens hit (%)", title=workload)
            ax.set_ylim(bottom=0)
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()
            ax.legend(ncols=3, **below)
        bars: list[tuple[str, Callable[[Mapping[str, Any]], bool]]] = [
            ("off", lambda r: r["cache"] == "off"),
            ("hash", lambda r: r["cache"] == "hash"),
            ("radix", lambda r: r["cache"] == "radix"),
        ]
        ax = axes[len(workloads)]
        for i, (name, wanted) in enumerate(bars):
            rows = [r for r in served if wanted(r)]
            at = [orders.index(r["order"]) + (i - 1) * 0.27 for r in rows]
            ax.bar(
                at,
                [r["ttft_mean_s"] for r in rows],
                0.25,
                label=name,
                color=colours[i],
            )
        for r in served:
            place = orders.index(r["order"]) + (("off", "hash", "radix").index(r["cache"]) - 1) * 0.27
            ax.text(place, r["ttft_mean_s"], f"{r['ttft_mean_s']:.0f}", ha="center", va="bottom", fontsize=8)
        if not any(r["order"] == "lpm" and r["cache"] == "off" for r in served):
            ax.text(orders.index("lpm") - 0.27, 0, "off: fcfs", ha="center", va="bottom", fontsize=8, rotation=90)
        ax.set_xticks(range(len(orders)), orders)
        ax.set(ylabel="mean TTFT (s)", xlabel="order", title="2,000 requests, by order and prefix cache")
        ax.legend(ncols=3, **below)
        ax = axes[len(workloads) + 1]
        for i, cache in enumerate(("off", "device", "device and host")):
            rows = [r for r in cycle if r["cache"] == cache]
            # Beyond what the caches hold the lines lie on each other: the marks are of three sizes.
            ax.plot(
                [r["documents"] for r in rows],
                [r["seconds"] for r in rows],
                marker="o",
                markersize=11 - 3 * i,
                linestyle=("-", "--", ":")[i],
                color=colours[i],
                label=cache,
            )
        for holder, limit in holds.items():
            ax.axvline(limit, color="#999999", linestyle=":")
            words = f" the {holder} holds {limit}"
            ax.text(limit, 0.98, words, transform=ax.get_xaxis_transform(), rotation=90, fontsize=8, va="top")
        ax.set(
            xscale="log",
            yscale="log",
            xlabel="documents in a cycle",
            ylabel="three rounds (s)",
            title="Documents in turn: the cliff of LRU",
        )
        ax.set_xticks(cycles, [str(num) for num in cycles])
        ax.minorticks_off()
        ax.set_yticks([10, 30, 100], ["10", "30", "100"])
        ax.legend(ncols=3, **below)
        return to_png(figure)
