"""Rows of the ledger that only numbers settle, computed from the project's own shapes, devices, links and core."""

from __future__ import annotations

import math
from collections.abc import Callable

from experiments.alone import serve_alone
from experiments.decisions import replay_recorded
from experiments.experiment import ROOT, Column, Context, ExperimentResult, Settled, Table
from experiments.promql import histogram_quantile, rate
from sim.hardware import CATALOGUE, device
from sim.models import preset
from sim.steptime import Assumptions, allreduce_ns

__all__ = ["run"]

_MIB = 1 << 20
RECORDED = {"0.19.1": "vllm-0.19", "0.33.0": "vllm-0.33"}
"""Versions of vLLM with recorded decisions, and our preset for each."""
CACHE_GAUGES = ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc")
"""The gauge of KV usage in vLLM's releases: the first name up to 0.11, the second one from 0.9.2 on
(vllm/engine/metrics.py, vllm/v1/metrics/loggers.py)."""
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper bounds of vllm:time_to_first_token_seconds (vllm/v1/metrics/loggers.py)."""


def run(context: Context) -> ExperimentResult:
    """All rows of this experiment; A52 needs the recorded decisions."""
    questions: list[Callable[[], Settled]] = [
        kv_bytes,
        short_answers,
        links,
        allreduces,
        nvlink,
        cache_alert,
        swapped_alert,
        ttft_alert,
        gauge_name,
    ]
    claims = [question() for question in context.track(questions, "rows")]
    notes = []
    recorded = [f"vllm_decisions/{version}.json.xz" for version in RECORDED]
    if context.has(*recorded):
        claims.append(decision_code(context))
    else:
        notes.append(f"A52 needs {' and '.join(recorded)} of the shared data, which are not there.")
    claims.sort(key=lambda claim: claim.id)
    rows = [(claim.id, name, value) for claim in claims for name, value in claim.numbers.items()]
    table = Table("figures", "", [Column("id"), Column("figure"), Column("value", form=",.6g")], rows, shown=False)
    return ExperimentResult([table], {}, {claim.id: dict(claim.numbers) for claim in claims}, claims, notes)


def kv_bytes() -> Settled:
    """A13: keys and values of Llama-3-8B, a token and a block of 16."""
    token = preset("llama-3-8b").kv_bytes_per_token("float16")
    block = 16 * token
    same = token == 128 * 1024 and block == 2 * _MIB
    return Settled(
        "A13",
        "reproduced" if same else "does-not-follow",
        f"{token:,} B a token, {block / _MIB:.2f} MiB a block",
        "" if same else f"{token:,} B a token",
        {"token_bytes": token, "block_bytes": block},
    )


def short_answers() -> Settled:
    """A19: blocks that an answer of 12 tokens adds to those of its prompt, over all prompts of one to four blocks."""
    size, answer = 16, 12
    added, own = [], 0
    for prompt in range(1, 4 * size + 1):
        steps = serve_alone(prompt, answer, size)
        added.append(len(steps[-1].table) - len(steps[0].table))
        own += prompt % size == 0 and added[-1] == 1
    mean = sum(added) / len(added)
    all_own = own == len(added)
    return Settled(
        "A19",
        "reproduced" if all_own else "does-not-follow",
        f"an answer of {answer} tokens adds {min(added)} or {max(added)} blocks to its prompt's, {mean:.2f} on average",
        ""
        if all_own
        else f"an answer has a block of its own only after a prompt that fills its last block: "
        f"{own} of {len(added)} prompt lengths",
        {"mean_blocks_added": mean, "prompts": len(added), "answers_with_a_block_of_their_own": own},
    )


def links() -> Settled:
    """A31: PCIe 4.0 x16, one direction, beside the memory of both A100."""
    large, small = device("a100-80g"), device("a100-40g")
    pcie, memory = large.pcie_bandwidth / 1e9, large.memory_bandwidth / 1e9
    close = abs(pcie / 32 - 1) < 0.05 and abs(memory / 2000 - 1) < 0.05
    return Settled(
        "A31",
        "reproduced-only-if" if close else "does-not-follow",
        f"{pcie:.1f} GB/s a direction after line coding; {memory:,.0f} GB/s",
        f"peaks of the A100 with 80 GB; the one with 40 GB reads {small.memory_bandwidth / 1e9:,.0f} GB/s"
        if close
        else f"{pcie:.1f} and {memory:,.0f} GB/s",
        {
            "pcie4_x16_gb_s": pcie,
            "a100_80g_gb_s": memory,
            "a100_40g_gb_s": small.memory_bandwidth / 1e9,
            "ratio": memory / pcie,
        },
    )


def allreduces() -> Settled:
    """A38: all-reduces of a forward pass, from the communication model that the simulator uses."""
    spec = preset("llama-3-70b")
    assume = Assumptions()
    step_ns, _ = allreduce_ns(spec, device("a100-80g"), 4, 2, assume)
    count = round(step_ns / assume.nvlink_latency_ns)
    return Settled(
        "A38",
        "reproduced" if count == spec.layers else "does-not-follow",
        f"{count} all-reduces for {spec.layers} layers",
        "" if count == spec.layers else "each layer has two, after attention and after the MLP, and the embedding one",
        {"layers": spec.layers, "allreduces": count},
    )


def nvlink() -> Settled:
    """A39: NVLink by device, both directions together."""
    rates = {entry.name: 2 * entry.nvlink_bandwidth / 1e9 for entry in CATALOGUE.values()}
    holds = [name for name, value in rates.items() if math.isclose(value, 600)]
    none = [name for name, value in rates.items() if value == 0]
    others = sorted({value for name, value in rates.items() if value and name not in holds})
    status = "reproduced-only-if" if holds else "does-not-follow"
    return Settled(
        "A39",
        status,
        f"{rates['a100-80g']:,.0f} GB/s on the A100",
        f"the device is one of {', '.join(holds)}; others have {', '.join(f'{v:,g}' for v in others)} GB/s, and "
        f"{', '.join(none)} have none",
        {name: value for name, value in rates.items() if value},
    )


def cache_alert() -> Settled:
    """A44: the largest value that a full pool can give, from the core, against the threshold."""
    steps = serve_alone(64, 64, 16)
    pool = sum(steps[-1].usage[:8])
    largest = max((pool - step.usage.cached - step.usage.free) / pool for step in steps)
    fires = largest > 95
    return Settled(
        "A44",
        "reproduced" if fires else "does-not-follow",
        f"the share in use is at most {largest:g}, with every block taken",
        f"a threshold of 0.95, and the name {CACHE_GAUGES[1]} since 0.9.2",
        {"largest_share": largest, "threshold": 95},
    )


def swapped_alert() -> Settled:
    """A45: when the alert fires while a gauge rises to 30, stays there for 10 minutes, and falls to 0."""
    step, hold = 15, 40
    gauge = [0.0, *(10.0 * i for i in range(4)), *[30.0] * hold, *(float(v) for v in range(28, -1, -2)), *[0.0] * 8]
    samples = [(step * i, value) for i, value in enumerate(gauge)]
    fires = [(rate(samples, at, 60) or 0) > 0 for at, _ in samples]
    swapped = [value > 0 for value in gauge]
    quiet = sum(s and not f for s, f in zip(swapped, fires, strict=True))
    false = sum(f and not s for s, f in zip(swapped, fires, strict=True))
    right = quiet == 0 and false == 0
    return Settled(
        "A45",
        "reproduced" if right else "does-not-follow",
        f"silent for {quiet * step / 60:.1f} of the {sum(swapped) * step / 60:.1f} minutes in which requests were "
        "swapped; fires when their number changes",
        "" if right else "the gauge itself (> 0), or the rate of a counter such as vllm:num_preemptions_total",
        {"swapped_s": sum(swapped) * step, "silent_s": quiet * step, "fires_without_s": false * step},
    )


def ttft_alert() -> Settled:
    """A46: what the estimated p99 says where the true one lies between the bounds around 1.5 s."""
    low = max(bound for bound in TTFT_BUCKETS_S if bound <= 1.5)
    high = min(bound for bound in TTFT_BUCKETS_S if bound > 1.5)
    if low == 1.5:
        return Settled("A46", "reproduced", "1.5 s is the bound of a bucket", numbers={"low_s": low})
    estimates = {share: _estimated_p99(share, low) for share in (0.0101, 0.012, 0.015, 0.02, 0.05, 1.0)}
    # The slow share, wherever it lies between the bounds, decides alone; its true p99 is anywhere in there.
    turn = next(share / 10000 for share in range(101, 10001) if _estimated_p99(share / 10000, low) > 1.5)
    return Settled(
        "A46",
        "reproduced-only-if",
        f"for one true p99 the estimates run from {min(estimates.values()):.2f} to {max(estimates.values()):.2f} s",
        f"the true p99 is outside of {low:g} to {high:g} s, the nearest bounds of buckets; in between the alert fires "
        f"when more than {turn:.1%} of the requests are in there, whatever they took; sum by (le, model_name)",
        {
            "low_s": low,
            "high_s": high,
            "fires_from_share": turn,
            **{f"p99_of_{s:g}_slow_s": e for s, e in estimates.items()},
        },
    )


def _estimated_p99(slow: float, low: float) -> float:
    """p99 by the buckets, where a share `slow` of the requests took just above `low` seconds and the others less."""
    counts = [(bound, 1.0 if bound > low else 1.0 - slow) for bound in TTFT_BUCKETS_S]
    return histogram_quantile(0.99, [*counts, (math.inf, 1.0)])


def gauge_name() -> Settled:
    """B10: whether a release has a gauge of that name."""
    name = "gpu_cache_usage_factor"
    known = sum(gauge.removeprefix("vllm:") == name for gauge in CACHE_GAUGES)
    return Settled(
        "B10",
        "reproduced" if known else "does-not-follow",
        f"the gauge has had {len(CACHE_GAUGES)} names, and {known} of them is this one",
        f"the name {CACHE_GAUGES[0]}, or {CACHE_GAUGES[1]} since 0.9.2",
        {"names": len(CACHE_GAUGES), "equal": known},
    )


def decision_code(context: Context) -> Settled:
    """A52: vLLM's decisions, recorded from its scheduler and block manager, repeated by the core, which is Python."""

    def replay() -> dict[str, dict[str, int]]:
        found = {}
        for version, name in RECORDED.items():
            result = replay_recorded(context.path(f"vllm_decisions/{version}.json.xz"), name)
            found[version] = {"workloads": result["workloads"], "identical": result["identical"]}
        return found

    found = context.part("recorded-decisions", replay)
    languages = {path.suffix for path in (ROOT / "engine" / "core").iterdir() if path.is_file()} - {".typed", ".md"}
    same = all(counts["identical"] == counts["workloads"] for counts in found.values())
    plain = languages == {".py"}
    counts = ", ".join(f"{c['identical']} of {c['workloads']} workloads of {version}" for version, c in found.items())
    return Settled(
        "A52",
        "does-not-follow" if same and plain else "open",
        f"plain Python repeats every decision of vLLM's block manager: {counts}",
        "vLLM's block manager and scheduler are Python modules as well (their decisions were recorded by importing "
        "them on a CPU); only kernels are CUDA",
        {f"identical_{version}": c["identical"] for version, c in found.items()}
        | {f"workloads_{version}": c["workloads"] for version, c in found.items()},
    )
