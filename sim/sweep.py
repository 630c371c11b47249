"""Which batches to time so that the step-time formula can be fitted: lists of rows, no tensors.

Contexts within a batch are lognormal, never equal: grids of equal contexts make a fit that is 5 to 14 % too fast.
Everything is scaled to what the engine at hand can hold and to the time one is willing to wait, and is a function of
the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sim.errors import SimError
from sim.hardware import Device
from sim.models import ModelSpec
from sim.steptime import BatchShape, StepTime, roofline

__all__ = [
    "Limits",
    "SweepBatch",
    "anchor",
    "cpu_guess",
    "decode_grid",
    "mixed_grid",
    "pick_trace_like",
    "prefill_grid",
    "sweep",
    "with_anchors",
]

SIGMA = 0.6
"""Of the logarithm of contexts."""
ANCHOR_EVERY = 25
RUNS_PER_BATCH = 13
"""Three warm-ups and ten timed."""

_DECODE_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_DECODE_CONTEXTS = (128, 512, 1024, 2048, 4096)
_CHUNKS = (16, 32, 64, 128, 192, 256, 320, 512, 768, 1024, 1536, 2048)
_MIXED_TOKENS = (64, 256, 512, 1024, 1536, 2048)
_MIXED_ROWS = (4, 16, 32, 64, 96, 128, 200)
_MIXED_CONTEXTS = (512, 1280)
# How the time is shared out between the kinds of batches.
_SHARES = {"decode": 0.35, "prefill": 0.2, "mixed": 0.25, "trace": 0.2}


class SweepBatch(NamedTuple):
    """A batch to time: rows of (new tokens, tokens already in the cache)."""

    kind: str
    """decode, prefill, mixed, trace or anchor."""
    rows: tuple[tuple[int, int], ...]

    def shape(self) -> BatchShape:
        return BatchShape.from_rows(self.rows)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold."""

    max_rows: int
    max_tokens: int
    """New tokens in a step."""
    max_context: int
    """Tokens of one request."""
    pool_tokens: int
    """Slots of the KV pool."""
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_tokens", "max_context", "pool_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise SimError(f"The sweep's limit {name} must be 1 or more, not {getattr(self, name)}.")

    def fit(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Whether the engine can run these rows as one step."""
        size = self.block_size
        slots = sum(-(-(q + c) // size) * size for q, c in rows)
        return (
            0 < len(rows) <= self.max_rows
            and sum(q for q, _ in rows) <= self.max_tokens
            and all(q + c <= self.max_context for q, c in rows)
            and slots <= self.pool_tokens
        )


def _contexts(rng: np.random.Generator, mean: int, count: int, most: int) -> list[int]:
    """`count` lognormal contexts around `mean`, between 1 and `most`."""
    values = mean * np.exp(SIGMA * rng.standard_normal(count) - SIGMA**2 / 2)
    contexts: list[int] = np.clip(values.round(), 1, most).astype(int).tolist()
    return contexts


def _means(choices: Sequence[int], limits: Limits) -> list[int]:
    """The mean contexts that fit; fractions of the longest one where few do."""
    fitting = [mean for mean in choices if mean <= 0.7 * limits.max_context]
    if len(fitting) < min(3, len(choices)):
        fitting += [limits.max_context // part for part in (16, 8, 4, 2)]
    return sorted({max(1, mean) for mean in fitting})


def decode_grid(limits: Limits, rng: np.random.Generator) -> list[SweepBatch]:
    """Decodes only: rows x mean context."""
    batches = []
    for rows in sorted({*(r for r in _DECODE_ROWS if r <= limits.max_rows), limits.max_rows}):
        for mean in _means(_DECODE_CONTEXTS, limits):
            batch = tuple((1, c) for c in _contexts(rng, mean, rows, limits.max_context - 1))
            if limits.fit(batch):
                batches.append(SweepBatch("decode", batch))
    return batches


def prefill_grid(limits: Limits) -> list[SweepBatch]:
    """One prefill: chunk x tokens already in the cache."""
    longest = min(limits.max_tokens, limits.max_context)
    chunks = sorted({*(q for q in _CHUNKS if q <= longest), longest})
    behind = 1024 if limits.max_context >= 2048 else limits.max_context // 2
    batches = [SweepBatch("prefill", ((q, c),)) for q in chunks if q > 1 for c in (0, behind)]
    return [batch for batch in batches if limits.fit(batch.rows)]


def mixed_grid(limits: Limits, rng: np.random.Generator) -> list[SweepBatch]:
    """Decodes beside one to four prefills: tokens x rows x mean context."""
    batches = []
    totals = {total for total in _MIXED_TOKENS if total <= limits.max_tokens}
    if limits.max_tokens < _MIXED_TOKENS[-1]:
        totals |= {limits.max_tokens // part for part in (1, 2, 3, 4, 6, 8)}
    for total in sorted(totals):
        for rows in _MIXED_ROWS:
            for mean in _means(_MIXED_CONTEXTS, limits):
                prefills = int(rng.integers(1, min(4, rows - 1) + 1))
                decodes = rows - prefills
                chunk = total - decodes
                if chunk < 2 * prefills:
                    continue
                cuts = np.sort(rng.choice(np.arange(1, chunk // 2), prefills - 1, replace=False)) * 2
                parts = np.diff([0, *cuts.tolist(), chunk]).tolist()
                batch = [(1, c) for c in _contexts(rng, mean, decodes, limits.max_context - 1)]
                # Half of the prefills begin a prompt, the others go on with one.
                behind = _contexts(rng, mean, prefills, limits.max_context)
                batch += [
                    (q, max(0, min(c, limits.max_context - q)) if rng.random() < 0.5 else 0)
                    for q, c in zip(parts, behind, strict=True)
                ]
                if limits.fit(batch):
                    batches.append(SweepBatch("mixed", tuple(batch)))
    return batches


def pick_trace_like(
    steps: Sequence[Sequence[tuple[int, int]]], limits: Limits, decode: int = 80, mixed: int = 80
) -> list[SweepBatch]:
    """Of the steps of a simulation, given as rows: decode-only ones evenly spaced in K, others evenly spaced in n."""
    shapes = [(BatchShape.from_rows(rows), tuple(rows)) for rows in steps if limits.fit(rows)]
    only = sorted((s for s in shapes if not s[0].has_prefill), key=lambda s: (s[0].context_tokens, s[0].num_tokens))
    both = sorted((s for s in shapes if s[0].has_prefill), key=lambda s: (s[0].num_tokens, s[0].prefill_work))
    picked = _evenly([rows for _, rows in only], [float(s.context_tokens) for s, _ in only], decode)
    picked += _evenly([rows for _, rows in both], [float(s.num_tokens) for s, _ in both], mixed)
    return [SweepBatch("trace", rows) for rows in picked]


def _evenly(
    items: list[tuple[tuple[int, int], ...]], values: list[float], count: int
) -> list[tuple[tuple[int, int], ...]]:
    """Up to `count` of the items, whose ascending `values` lie as evenly as they can."""
    if len(items) <= count:
        return items
    targets = np.linspace(values[0], values[-1], count)
    chosen = sorted({int(i) for i in np.searchsorted(values, targets).clip(0, len(items) - 1)})
    # Steps of equal value leave gaps; fill up with steps spread over the whole.
    for i in np.linspace(0, len(items) - 1, count).astype(int).tolist():
        if len(chosen) >= count:
            break
        if i not in chosen:
            chosen.append(i)
    return [items[i] for i in sorted(chosen)]


def cpu_guess(spec: ModelSpec, cores: int = 2, dtype: str = "float32") -> StepTime:
    """A rough step time on a CPU, to size a sweep with before anything is measured; never to predict with."""
    guess = Device(
        name="cpu",
        peak_flops=40e9 * cores * 2,  # of 16-bit operations; float32 runs at half of that
        memory_bandwidth=10e9 * min(cores, 4),
        memory_bytes=1 << 33,
        source="a guess",
    )
    return roofline(spec, guess, dtype=dtype)


def _thin(batches: list[SweepBatch], budget_ns: float, estimate: StepTime, runs: int) -> list[SweepBatch]:
    """As many batches as the time allows, spread evenly over the range of their sizes."""
    costs = [estimate.duration(batch.shape()) * runs for batch in batches]
    order = sorted(range(len(batches)), key=lambda i: (costs[i], i))
    # A batch that alone would eat a third of the time tells less than the many that fit instead.
    order = [i for i in order if costs[i] <= budget_ns / 3] or order[:1]
    for count in range(len(order), 0, -1):
        chosen = sorted({order[int(j)] for j in np.linspace(0, len(order) - 1, count)})
        if sum(costs[i] for i in chosen) <= budget_ns:
            return [batches[i] for i in chosen]
    return [batches[order[0]]] if order else []


def anchor(limits: Limits) -> SweepBatch:
    """A batch of middling size, to be repeated now and then: it shows how the machine drifts."""
    rows = max(1, min(16, limits.max_rows // 2))
    context = max(1, min(512, limits.max_context // 4))
    while rows > 1 and not limits.fit([(1, context)] * rows):
        rows //= 2
    return SweepBatch("anchor", tuple((1, max(1, context * (i + 1) // rows)) for i in range(rows)))


def with_anchors(batches: Sequence[SweepBatch], limits: Limits, seed: int = 0) -> list[SweepBatch]:
    """The batches in random order, an anchor before every 25th and at the end."""
    order = np.random.default_rng(seed).permutation(len(batches))
    reference = anchor(limits)
    result = []
    for i, which in enumerate(order):
        if i % ANCHOR_EVERY == 0:
            result.append(reference)
        result.append(batches[int(which)])
    result.append(reference)
    return result


def sweep(
    limits: Limits,
    *,
    trace_like: Sequence[SweepBatch] = (),
    budget_s: float | None = None,
    estimate: StepTime | None = None,
    runs: int = RUNS_PER_BATCH,
    passes: int = 1,
    seed: int = 0,
) -> list[SweepBatch]:
    """All batches to time, in the order in which to time them, anchors among them.

    With a budget in seconds, each kind is thinned evenly until `runs` runs of its batches in each of the `passes` fit
    its share by the `estimate`. Several passes over the same batches, each in an order of its own, keep a moment in
    which another program has the machine from spoiling all measurements of a batch. Raises SimError where a budget
    comes without an estimate, or there is no pass.
    """
    if passes < 1:
        raise SimError(f"A sweep needs 1 or more passes, not {passes}.")
    rng = np.random.default_rng(seed)
    kinds = {
        "decode": decode_grid(limits, rng),
        "prefill": prefill_grid(limits),
        "mixed": mixed_grid(limits, rng),
        "trace": list(trace_like),
    }
    if budget_s is not None:
        if estimate is None:
            raise SimError("A sweep with a time budget needs an estimate of step times.")
        if budget_s <= 0:
            raise SimError(f"The sweep's budget must be positive, not {budget_s} s.")
        present = sum(share for kind, share in _SHARES.items() if kinds[kind])
        for kind, batches in kinds.items():
            if batches:
                kinds[kind] = _thin(batches, budget_s * 1e9 * _SHARES[kind] / present, estimate, runs * passes)
    every = [batch for batches in kinds.values() for batch in batches]
    return [batch for i in range(passes) for batch in with_anchors(every, limits, seed + i)]
