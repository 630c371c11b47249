"""How long a step takes by tables of measured kernels: the same protocol as the six-term formula of `sim.steptime`.

    gpu = dense(n) + rows(r) + L attention + (2 L + 1) allreduce(n h bytes) + L experts
    step = gpu + cpu with one step in flight, max(gpu, cpu) with two; cpu = u0 + u1 rows + u2 new requests

n is padded up to the size of a CUDA graph where graphs are used, and graphs save something on each kernel. Attention is
the fused kernel of all decodes, taken at their mean context (longer by what unequal contexts cost, see
`sim.tables.Skew`), beside the prefill with the most work; each further prefill adds its pairs of tokens at the rate of
the largest chunk, for all are one launch that fills the device. Experts are looked up at the expected number of
distinct ones, E (1 - (1 - k / E)^n).

With experts split over the ranks of a data-parallel group, ranks run in step: a layer's experts wait for the slowest
rank's attention, and compute what all ranks' tokens send them, between an all-gather and a reduce-scatter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from sim.calibration import Hull
from sim.errors import SimError
from sim.hardware import Device
from sim.links import allreduce_curve
from sim.models import ModelSpec
from sim.steptime import BatchShape
from sim.tables import Curve, KernelTables, read_kernel_tables

__all__ = ["LAUNCH_SAVING_NS", "ExpertGroup", "TableTime", "default_graph_sizes", "load_table_time"]

LAUNCH_SAVING_NS = 1735.0
"""What a kernel takes less in a CUDA graph than it did when profiled: 587 us over 324 kernels and 1,068 us over 644, on
an RTX PRO 6000, measured apart from any serving run (casys-kaist/LLMServingSim, profiler/README.md, 001bebb69a)."""


class ExpertGroup:
    """Data-parallel ranks that share their experts: what each rank's newest batch is.

    A rank's step lasts as long as the slowest rank's part before the experts, and its experts compute the tokens of
    all ranks. Batches of other ranks are those submitted last: with equal ranks in step, the ones that run beside.
    """

    def __init__(self, ranks: int) -> None:
        self.tokens = [1] * ranks
        """New tokens of each rank's newest batch; an idle rank computes a batch of one token that nobody needs."""
        self.alone = [0.0] * ranks
        """ns that each rank's newest batch takes without experts."""
        self.padded = [True] * ranks
        """Whether each rank's newest batch would run as a CUDA graph; only if all do is n padded to the largest."""

    def rest(self, rank: int) -> None:
        """The rank has nothing to do any more."""
        self.tokens[rank], self.alone[rank], self.padded[rank] = 1, 0.0, True


@dataclass(frozen=True, eq=False)
class TableTime:
    """Step times from kernel tables. Times in nanoseconds."""

    spec: ModelSpec
    tables: KernelTables
    buckets: tuple[int, ...] = ()
    """Ascending sizes that n is padded up to (CUDA graphs); above the last it is not padded."""
    launch_saving: float = 0.0
    """ns that a kernel takes less in a CUDA graph than launched by itself, as it was when it was profiled."""
    allreduce: Curve | None = None
    """ns of one all-reduce against its bytes, with tensor parallelism; and of an all-gather or reduce-scatter against
    one rank's share."""
    link_measured: bool = True
    """Whether `allreduce` is from a measurement, and not from the link's description."""
    element: int = 2
    """Bytes of an activation."""
    expert_ranks: int = 1
    """Over how many ranks experts are split whole."""
    group: ExpertGroup | None = None
    """The data-parallel group that shares experts, where there is one."""
    rank: int = 0
    """Which of the group this is."""
    cpu_step: float = 0.0
    """u0."""
    cpu_row: float = 0.0
    """u1."""
    cpu_new: float = 0.0
    """u2."""
    overlap: bool = False
    factor: float = 1.0
    """All steps take so many times as long."""
    label: str = "kernel tables"
    needs_rows: bool = True
    """The executor has to tell the longest decode and the prefills of a batch (see `BatchShape`)."""
    _dense: dict[int, float] = field(default_factory=dict, init=False, repr=False)
    _experts: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tables.tp > 1 and self.allreduce is None:
            raise SimError("Kernel tables of a tensor-parallel rank need the time of an all-reduce; name the link.")
        if self.group is not None and self.allreduce is None:
            raise SimError("Experts split over ranks need the time of a collective; name the link.")
        for name in ("cpu_step", "cpu_row", "cpu_new"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise SimError(f"Step time: {name} must be a number of ns that is not negative.")

    # ---- one step -------------------------------------------------------------------------------------------------

    def duration(self, batch: BatchShape, step: int = 0) -> int:
        """Nanoseconds of one step. At least 1."""
        prefills = batch.prefills
        if batch.prefill_work and not prefills:
            # All that is known is the prefills' tokens and work: one prefill with as much of both.
            chunk = batch.num_tokens - batch.num_decodes
            prefills = ((chunk, max(0, (batch.prefill_work - chunk * (chunk + 1) // 2) // chunk)),)
        attention = self._attention(prefills, batch.num_decodes, batch.context_tokens, _shortfalls(batch.contexts))
        return self._total(batch.num_tokens, batch.rows, batch.new_requests, attention)

    def durations(self, batch: BatchShape, k: int = 1, step: int = 0) -> np.ndarray:
        """Nanoseconds of k identical steps, the first being `batch`: int64[k]. Decodes' contexts grow by one a step."""
        return np.array([self.duration(batch.grown(i), step + i) for i in range(k)], dtype=np.int64)

    def decode_ends(
        self, rows: int, context: int, k: int, step: int, start: int, contexts: tuple[int, ...] = ()
    ) -> list[int]:
        """When k consecutive steps of `rows` decodes end, from `start` ns on.

        Args:
            context: cached tokens of all rows in the first of them.
            contexts: of each row, longest first, but for a number that all have in common.
        """
        shortfalls = _shortfalls(contexts)
        ends = []
        end = start
        for i in range(k):
            attention = self._attention((), rows, context + i * rows, shortfalls)
            end += self._total(rows, rows, 0, attention)
            ends.append(end)
        return ends

    def ends_until(self, rows: int, context: int, k: int, step: int, start: int, until: int) -> list[int]:
        """`decode_ends` of at most k steps of equal rows: the last is the first that ends at or after `until`."""
        ends = self.decode_ends(rows, context, k, step, start)
        return ends[: bisect_left(ends, until) + 1]

    def _total(self, n: int, rows: int, new: int, attention: float) -> int:
        group = self.group
        alone = self._dense_ns(n) + self.tables.rows(rows) + self.tables.layers * attention
        alone = max(0.0, alone - self.graph_saving(n, rows))
        if group is None:
            time = alone + self._experts_ns(n) if self.tables.experts is not None else alone
        else:
            time = self._in_step(group, n, alone)
        cpu = self.cpu_step + self.cpu_row * rows + self.cpu_new * new
        if not self.overlap:
            time += cpu
        elif cpu > time:
            time = cpu
        return int(time * self.factor + 0.5) or 1

    def graph_saving(self, n: int, rows: int) -> float:
        """ns that CUDA graphs save in a step of n new tokens.

        Ten kernels a layer and four more a step: with those the measured savings are 1,664 and 1,812 ns a kernel. A
        graph of decodes is of the whole step; beside a prefill, attention and cache writes are left out of it.
        """
        if not (self.launch_saving and self.buckets and n <= self.buckets[-1]):
            return 0.0
        return self.launch_saving * ((10 if n == rows else 8) * self.tables.layers + 4)

    def assumed_link_ns(self, n: int) -> float:
        """ns of a step's collectives where their times are assumed; 0 where they were measured."""
        if self.allreduce is None or self.link_measured:
            return 0.0
        count = 2 * self.tables.layers + 1
        return count * self.allreduce(self.padded(n) * self.spec.hidden * self.element)

    # ---- parts ----------------------------------------------------------------------------------------------------

    def padded(self, n: int) -> int:
        """n as the engine computes it."""
        buckets = self.buckets
        return buckets[bisect_right(buckets, n - 1)] if buckets and n <= buckets[-1] else n

    def _dense_ns(self, n: int) -> float:
        """Everything against the number of new tokens but experts: dense layers and all-reduces."""
        known = self._dense.get(n)
        if known is None:
            size = self.padded(n)
            known = self.tables.dense(size)
            if self.tables.tp > 1 and self.allreduce is not None:
                count = 2 * self.tables.layers + 1
                if self.group is not None:
                    count -= self.tables.layers  # experts end in a reduce-scatter of their own
                known += count * self.allreduce(size * self.spec.hidden * self.element)
            self._dense[n] = known
        return known

    def _attention(
        self, prefills: tuple[tuple[int, int], ...], decodes: int, context: int, shortfalls: list[int]
    ) -> float:
        """ns of a layer's attention."""
        tables = self.tables
        mean = context / decodes if decodes else 0.0
        chunk, behind = 0, 0
        if prefills:
            chunk, behind = max(prefills, key=_work) if len(prefills) > 1 else prefills[0]
        if len(shortfalls) > 1 and tables.skew is not None:
            mean += _excess(shortfalls, tables.skew(float(chunk), float(decodes), mean)) / decodes
        time = tables.attention(chunk, behind, decodes, mean)
        if len(prefills) > 1:
            time += tables.prefill_pair_ns * (sum(map(_work, prefills)) - _work((chunk, behind))) / 2
        return time

    def _experts_ns(self, n: int) -> float:
        """All layers' experts on one rank, for n tokens of the group together."""
        known = self._experts.get(n)
        if known is None:
            tables, ranks = self.tables, self.expert_ranks
            distinct = self.spec.expected_experts(n) / ranks
            # A table of whole experts on one device: as many (token, expert) pairs as a rank's share of them makes.
            tokens = n if tables.expert_ranks == ranks else n / ranks
            assert tables.experts is not None  # read with the model's tables
            known = self._experts[n] = tables.layers * tables.experts(distinct, tokens)
        return known

    def _in_step(self, group: ExpertGroup, n: int, alone: float) -> float:
        """One step of a rank whose group shares experts."""
        rank = self.rank
        size = self.padded(n)
        group.tokens[rank] = n
        group.alone[rank] = alone
        group.padded[rank] = bool(self.buckets) and n <= self.buckets[-1]
        most = max(group.tokens)
        tokens = len(group.tokens) * self.padded(most) if all(group.padded) else sum(group.tokens)
        share = max(size, most) * self.spec.hidden * self.element
        assert self.allreduce is not None  # checked at construction
        moved = 2 * self.tables.layers * self.allreduce(share)
        return max(group.alone) + self._experts_ns(tokens) + moved

    def measured(self) -> Hull:
        """The range of batches that the tables were measured for."""
        tokens, decodes, context, rows = self.tables.limits
        return Hull((1, tokens), (0, decodes * context), (1, min(rows, decodes)), (1, context))

    # ---- variants -------------------------------------------------------------------------------------------------

    def scaled(self, factor: float) -> TableTime:
        """The same model with every step `factor` times as long."""
        if not 0.0 < factor < float("inf"):
            raise SimError(f"Step time can be scaled by a positive factor only, not by {factor!r}.")
        return replace(self, factor=self.factor * factor)

    def with_overlap(self, steps_in_flight: int) -> TableTime:
        """The same model for an engine that keeps that many steps in flight."""
        return replace(self, overlap=steps_in_flight > 1)

    def of_rank(self, group: ExpertGroup, rank: int) -> TableTime:
        """The same model as one rank of a group that shares its experts."""
        return replace(self, group=group, rank=rank)


def _work(prefill: tuple[int, int]) -> int:
    """Twice the pairs of (new token, token it sees)."""
    chunk, behind = prefill
    return chunk * (2 * behind + chunk + 1)


def _shortfalls(contexts: tuple[int, ...]) -> list[int]:
    """By how much the j longest decodes fall short of the longest, together: j = 0, 1, ..."""
    longest = contexts[0] if contexts else 0
    return list(accumulate((longest - context for context in contexts), initial=0))


def _excess(shortfalls: list[int], rows: float) -> float:
    """The tokens that the longest `rows` decodes would have more if all were as long as the longest."""
    whole = min(int(rows), len(shortfalls) - 1)
    if whole == len(shortfalls) - 1:
        return float(shortfalls[whole])
    return shortfalls[whole] + (rows - whole) * (shortfalls[whole + 1] - shortfalls[whole])


def default_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """vLLM's capture sizes (VllmConfig._set_cudagraph_sizes): up to twice the number of sequences, and 512 at most."""
    most = min(2 * max_num_seqs, 512)
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most)


def load_table_time(
    profile: str | Path,
    spec: ModelSpec,
    tp: int = 1,
    *,
    device: Device | None = None,
    graph_sizes: tuple[int, ...] = (),
    expert_ranks: int = 1,
    element: int = 2,
) -> tuple[TableTime, str]:
    """(the step times of a profile's tables, where the times of collectives are from; empty where there are none).

    Raises:
        CalibrationError: the tables cannot be read, or are not of this size.
        SimError: ranks need a link, and there is no device or it has none.
    """
    tables = read_kernel_tables(profile, spec, tp, expert_ranks)
    allreduce, source = None, ""
    ranks = max(tp, expert_ranks)
    if ranks > 1:
        if device is None:
            raise SimError("Kernel tables of several ranks need to know the link between them; name the hardware.")
        allreduce, source = allreduce_curve(device, ranks, profile)
    label = f"kernel tables{f' of {device.name}' if device else ''}, tp{tp}"
    if tables.skew is not None:
        label += ", unequal contexts as measured"
    if graph_sizes:
        label += f", CUDA graphs save {LAUNCH_SAVING_NS / 1e3:g} us a kernel (assumed)"
    made = TableTime(
        spec,
        tables,
        graph_sizes,
        launch_saving=LAUNCH_SAVING_NS if graph_sizes else 0.0,
        allreduce=allreduce,
        link_measured=not source.startswith("assumed"),
        element=element,
        expert_ranks=expert_ranks,
        label=label,
    )
    return made, source
