"""How long a step takes: six terms with a physical meaning each, from a profile or from a device's description.

    gpu = a0 + a1 n + a2 max(0, n - n*) + a3 K + a4 K P + a5 F   (+ a6 rows)
    cpu = u0 + u1 rows + u2 new requests
    step = gpu + cpu with one step in flight, max(gpu, cpu) with two

    n   new tokens of the step                    a0  weights and head, read once a step
    n*  where GEMMs turn from memory- to          a1  what a token costs below n*, a2 what it costs more above
        compute-bound                             a3  reading one token's keys and values, for a row of one token
    K   cached tokens that rows of one new        a4  the same, extra, in a step that also has a prefill
        token read                                a5  attention of a prefill, per pair that F counts
    P   1 if a row has more new tokens than one   a6  sampling and head, a row; 0 unless a profile calls for it
    F   pairs of (new token, token it sees) of
        rows with more than one new token:
        sum of q (c + (q + 1) / 2)

All coefficients are in nanoseconds and none is negative. A run of k identical decode steps differs from k single steps
in nothing: both round the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from sim.errors import SimError
from sim.hardware import Device
from sim.models import ModelSpec, dtype_bytes

__all__ = [
    "ROOFLINE_LABEL",
    "Assumptions",
    "BatchShape",
    "StepModel",
    "StepTime",
    "allreduce_ns",
    "noise_factor",
    "noise_factors",
    "roofline",
]

ROOFLINE_LABEL = "roofline, not calibrated: 4 to 27 % off"

_SHORT_RUN = 40
"""Up to so many steps, plain Python is faster than numpy."""
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


class BatchShape(NamedTuple):
    """What of a batch decides how long it takes."""

    num_tokens: int
    """n: new tokens over all rows."""
    num_decodes: int
    """Rows with one new token."""
    context_tokens: int
    """K: tokens in the cache before the step, summed over rows with one new token."""
    prefill_work: int = 0
    """F: pairs of (new token, token it sees) over rows with more than one new token."""
    rows: int = 0
    new_requests: int = 0
    max_context: int = 0
    """The longest row's tokens, new ones included."""
    contexts: tuple[int, ...] = ()
    """Tokens in the cache of each row with one new token, longest first. Told only to models that need it."""
    prefills: tuple[tuple[int, int], ...] = ()
    """(new tokens, cached tokens) of each row with more than one new token. Told only to models that need it."""

    @property
    def has_prefill(self) -> bool:
        """P: whether any row has more than one new token. Such a row always does some work of F."""
        return self.prefill_work > 0

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[int, int]], new_requests: int = 0) -> BatchShape:
        """The shape of rows (new tokens q, cached tokens c)."""
        tokens = decodes = context = work = count = longest = 0
        prefills = []
        contexts = []
        for q, c in rows:
            tokens += q
            count += 1
            longest = max(longest, q + c)
            if q == 1:
                decodes += 1
                context += c
                contexts.append(c)
            else:
                work += q * c + q * (q + 1) // 2
                prefills.append((q, c))
        contexts.sort(reverse=True)
        return cls(tokens, decodes, context, work, count, new_requests, longest, tuple(contexts), tuple(prefills))

    def grown(self, steps: int) -> BatchShape:
        """The shape of the batch that repeats this one so many steps later: every decode has that many tokens more."""
        if not steps:
            return self
        return self._replace(
            context_tokens=self.context_tokens + steps * self.num_decodes,
            max_context=self.max_context + steps,
            contexts=tuple(c + steps for c in self.contexts),
        )


def noise_factor(seed: int, step: int, sigma: float) -> float:
    """A factor around 1 with standard deviation `sigma` that depends on (seed, step) only.

    The sum of the four 16-bit parts of a 64-bit hash (splitmix64 of a counter): close to normal, within 3.5 sigma,
    and exact integer arithmetic, so that one step at a time and many at once agree to the bit.
    """
    z = (seed * 0xD1342543DE82EF95 + (step + 1) * _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    total = (z & 0xFFFF) + ((z >> 16) & 0xFFFF) + ((z >> 32) & 0xFFFF) + (z >> 48)
    return 1.0 + sigma * ((total - 131070) / _IRWIN_HALL_STD)


# The standard deviation of a sum of four numbers that are uniform over 0 .. 65535.
_IRWIN_HALL_STD = float(np.sqrt(4 * (65536.0**2 - 1) / 12))


def noise_factors(seed: int, first: int, count: int, sigma: float) -> np.ndarray:
    """`noise_factor` of the steps first .. first + count - 1: float64[count]."""
    base = (seed * 0xD1342543DE82EF95 + (first + 1) * _GAMMA) & _MASK
    with np.errstate(over="ignore"):
        z = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    part = np.uint64(0xFFFF)
    total = (z & part) + ((z >> np.uint64(16)) & part) + ((z >> np.uint64(32)) & part) + (z >> np.uint64(48))
    factors: np.ndarray = 1.0 + sigma * ((total.astype(np.int64) - 131070) / _IRWIN_HALL_STD)
    return factors


class StepModel(Protocol):
    """What a simulation asks how long steps take. All times in ns; a step takes at least 1."""

    @property
    def needs_rows(self) -> bool:
        """Whether batches have to tell `contexts` and `prefills`."""
        ...

    @property
    def label(self) -> str:
        """What the times rest on, as printed beside each prediction."""
        ...

    def duration(self, batch: BatchShape, step: int = 0) -> int:
        """One step; `step` numbers it."""
        ...

    def durations(self, batch: BatchShape, k: int = 1, step: int = 0) -> np.ndarray:
        """k steps, the first being `batch`, each with one more cached token a decode: int64[k]."""
        ...

    def decode_ends(
        self, rows: int, context: int, k: int, step: int, start: int, contexts: tuple[int, ...] = ()
    ) -> list[int]:
        """When k consecutive steps of `rows` decodes end, from `start` on; `context` is K of the first of them.

        `contexts` are the rows' own, longest first, up to a number that is the same for all; for models that need it.
        """
        ...

    def ends_until(self, rows: int, context: int, k: int, step: int, start: int, until: int) -> list[int]:
        """`decode_ends` of at most k steps (1 or more): the last is the first of them that ends at or after `until`.

        Only asked of models that need no rows.
        """
        ...

    def scaled(self, factor: float) -> StepModel:
        """The same with every step `factor` times as long."""
        ...

    def with_overlap(self, steps_in_flight: int) -> StepModel:
        """The same for an engine that keeps that many steps in flight."""
        ...


@dataclass(frozen=True)
class StepTime:
    """The six-term model. Times in nanoseconds."""

    step: float = 0.0
    """a0."""
    token: float = 0.0
    """a1."""
    token_above: float = 0.0
    """a2."""
    ridge: float = 256.0
    """n*."""
    context: float = 0.0
    """a3."""
    context_mixed: float = 0.0
    """a4."""
    work: float = 0.0
    """a5."""
    row: float = 0.0
    """a6."""
    cpu_step: float = 0.0
    """u0."""
    cpu_row: float = 0.0
    """u1."""
    cpu_new: float = 0.0
    """u2."""
    overlap: bool = False
    """Two steps in flight: the CPU's part of a step hides behind the GPU's, or the other way round."""
    buckets: tuple[int, ...] = ()
    """Ascending sizes that n is padded up to (CUDA graphs); above the last it is not padded."""
    table: tuple[tuple[int, float], ...] = ()
    """(n, ns) points between which the a1 and a2 terms are interpolated instead (mixtures of experts, stairs)."""
    table_mixed: tuple[tuple[int, float], ...] = ()
    """The same for steps with a prefill, where they have a table of their own."""
    noise: float = 0.0
    """Standard deviation of independent relative noise per step."""
    seed: int = 0
    label: str = "given coefficients"
    """Where the coefficients are from, as printed beside each prediction."""
    _padded: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _padded_mixed: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def needs_rows(self) -> bool:
        return False  # not a class variable: compiled, a dataclass takes that for a field

    def __post_init__(self) -> None:
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise SimError(
                    f"Step time: {name} must be a number of nanoseconds that is not negative, not {value!r}."
                )
        if not 0.0 <= self.noise <= 0.25:
            raise SimError(f"Step time: noise must be between 0 and 0.25, not {self.noise!r}.")
        if list(self.buckets) != sorted(set(self.buckets)) or any(size < 1 for size in self.buckets):
            raise SimError("Step time: the padding buckets must be positive and ascending.")

    def mixed_ns(self, n: int) -> float:
        """`tokens_ns` of a step with a prefill."""
        if not self.table_mixed:
            return self.tokens_ns(n)
        known = self._padded_mixed.get(n)
        if known is None:
            known = self._padded_mixed[n] = self.step + _interpolate(self.table_mixed, self._bucket(n))
        return known

    def _bucket(self, n: int) -> int:
        if self.buckets and n <= self.buckets[-1]:
            return self.buckets[bisect_right(self.buckets, n - 1)]
        return n

    def tokens_ns(self, n: int) -> float:
        """What n new tokens cost by themselves: the terms a0, a1 and a2, or the table, after padding."""
        known = self._padded.get(n)
        if known is not None:
            return known
        size = self._bucket(n)
        if self.table:
            value = self.step + _interpolate(self.table, size)
        else:
            value = self.step + self.token * size + self.token_above * max(0.0, size - self.ridge)
        self._padded[n] = value
        return value

    def duration(self, batch: BatchShape, step: int = 0) -> int:
        """Nanoseconds of one step; `step` numbers it for the noise. At least 1."""
        n, _, context, work, rows, new = batch[:6]
        slope = self.context + self.context_mixed if work else self.context
        base = self.mixed_ns(n) if work else self.tokens_ns(n)
        time = (base + self.work * work + self.row * rows) + slope * context
        cpu = self.cpu_step + self.cpu_row * rows + self.cpu_new * new
        if self.overlap:
            if cpu > time:
                time = cpu
        else:
            time += cpu
        if self.noise:
            time *= noise_factor(self.seed, step, self.noise)
        return int(time + 0.5) or 1

    def durations(self, batch: BatchShape, k: int = 1, step: int = 0) -> np.ndarray:
        """Nanoseconds of k identical steps, the first being `batch` and number `step`: int64[k].

        The cached tokens K grow by the number of decoding rows from one step to the next.
        """
        if k == 1:
            return np.array([self.duration(batch, step)], dtype=np.int64)
        n, decodes, context, work, rows, new = batch[:6]
        slope = self.context + self.context_mixed if work else self.context
        contexts = context + decodes * np.arange(k, dtype=np.int64)
        base = self.mixed_ns(n) if work else self.tokens_ns(n)
        times = (base + self.work * work + self.row * rows) + slope * contexts
        cpu = self.cpu_step + self.cpu_row * rows + self.cpu_new * new
        times = np.maximum(times, cpu) if self.overlap else times + cpu
        if self.noise:
            times *= noise_factors(self.seed, step, k, self.noise)
        rounded: np.ndarray = np.maximum((times + 0.5).astype(np.int64), 1)
        return rounded

    def decode_ends(
        self, rows: int, context: int, k: int, step: int, start: int, contexts: tuple[int, ...] = ()
    ) -> list[int]:
        """When k consecutive steps of `rows` decodes end, from `start` ns on; `context` is K of the first of them.

        The same as adding up `durations`, only quicker where k is small.
        """
        if k > _SHORT_RUN or self.noise:
            times = self.durations(BatchShape(rows, rows, context, 0, rows), k, step)
            return list(accumulate(times.tolist(), initial=start))[1:]
        base = self.tokens_ns(rows) + self.row * rows
        slope = self.context
        cpu = self.cpu_step + self.cpu_row * rows
        overlap = self.overlap
        ends = []
        end = start
        for _ in range(k):
            time = base + slope * context
            if not overlap:
                time += cpu
            elif cpu > time:
                time = cpu
            end += int(time + 0.5) or 1
            ends.append(end)
            context += rows
        return ends

    def ends_until(self, rows: int, context: int, k: int, step: int, start: int, until: int) -> list[int]:
        """`decode_ends` of at most k steps (1 or more): the last is the first of them that ends at or after `until`."""
        if self.noise:
            ends: list[int] = []
            while len(ends) < k and start < until:
                at = len(ends)
                ends += self.decode_ends(rows, context + at * rows, min(k - at, _SHORT_RUN), step + at, start)
                start = ends[-1]
            return ends[: bisect_left(ends, until) + 1]
        base = self.tokens_ns(rows) + self.row * rows
        slope = self.context
        cpu = self.cpu_step + self.cpu_row * rows
        overlap = self.overlap
        ends = []
        end = start
        for _ in range(k):
            time = base + slope * context
            if not overlap:
                time += cpu
            elif cpu > time:
                time = cpu
            end += int(time + 0.5) or 1
            ends.append(end)
            if end >= until:
                break
            context += rows
        return ends

    def scaled(self, factor: float) -> StepTime:
        """The same model with every step `factor` times as long."""
        if not 0.0 < factor < float("inf"):
            raise SimError(f"Step time can be scaled by a positive factor only, not by {factor!r}.")
        changed: dict[str, Any] = {name: getattr(self, name) * factor for name in _SCALED}
        changed["table"] = tuple((n, ns * factor) for n, ns in self.table)
        changed["table_mixed"] = tuple((n, ns * factor) for n, ns in self.table_mixed)
        return replace(self, **changed)

    def with_overlap(self, steps_in_flight: int) -> StepTime:
        """The same model for an engine that keeps that many steps in flight."""
        return replace(self, overlap=steps_in_flight > 1)

    def coefficients(self) -> dict[str, float]:
        """All numbers of the formula by name, for files and reports."""
        return {name: float(getattr(self, name)) for name in _COEFFICIENTS}

    @classmethod
    def from_coefficients(cls, values: Mapping[str, float], **more: Any) -> StepTime:
        """The model of such numbers. Raises SimError naming one that is unknown or out of range."""
        for name, value in values.items():
            if name not in _COEFFICIENTS:
                raise SimError(f"Step time: unknown coefficient '{name}'; known ones are {', '.join(_COEFFICIENTS)}.")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SimError(f"Step time: {name} must be a number, not {value!r}.")
        given: dict[str, Any] = {name: float(value) for name, value in values.items()}
        return cls(**given, **more)


_SCALED = (
    "step",
    "token",
    "token_above",
    "context",
    "context_mixed",
    "work",
    "row",
    "cpu_step",
    "cpu_row",
    "cpu_new",
)
_COEFFICIENTS = (*_SCALED[:3], "ridge", *_SCALED[3:])


def _interpolate(points: tuple[tuple[int, float], ...], n: int) -> float:
    """Linear between points (ascending in n), and beyond the ends along the outermost pair."""
    if len(points) == 1:
        return points[0][1]
    i = min(max(bisect_right(points, (n, float("inf"))), 1), len(points) - 1)
    (n0, t0), (n1, t1) = points[i - 1], points[i]
    return max(0.0, t0 + (t1 - t0) * (n - n0) / (n1 - n0))


@dataclass(frozen=True)
class Assumptions:
    """How much of a device's peaks a good engine reaches; printed with each roofline.

    Chosen from public kernel measurements on several devices, not fitted to one; they are the reason for the width of
    the roofline's error.
    """

    gemm_efficiency: float = 0.80
    """Of peak operations, in large matrix products: 0.65 to 1.0 measured."""
    weight_bandwidth: float = 0.85
    """Of peak bandwidth, in matrix products of few tokens: 0.75 to 0.95 measured."""
    kv_bandwidth: float = 0.75
    """Of peak bandwidth, in paged decode attention over unequal contexts."""
    attention_efficiency: float = 0.50
    """Of peak operations, in prefill attention: 0.3 to 0.65 measured."""
    mixed_kv_penalty: float = 0.6
    """Decodes that share a step with a prefill pay this much more per cached token: 0.4 to 2.1 measured."""
    layer_overhead_ns: float = 15_000.0
    """Norms, rotary embedding, activation and cache write of a layer at few tokens: five kernels of about 3 us."""
    step_overhead_ns: float = 500_000.0
    """Sampling and what the host adds to a step."""
    link_efficiency: float = 0.8
    nvlink_latency_ns: float = 5_000.0
    """Of one all-reduce between NVLink neighbours."""
    pcie_latency_ns: float = 20_000.0
    """Of one all-reduce over PCIe."""

    def text(self) -> str:
        """One line that states them all."""
        parts = [
            f"GEMM {self.gemm_efficiency:.0%} of peak",
            f"weights at {self.weight_bandwidth:.0%} and KV at {self.kv_bandwidth:.0%} of bandwidth",
            f"prefill attention {self.attention_efficiency:.0%} of peak",
            f"decodes beside a prefill +{self.mixed_kv_penalty:.0%} per KV token",
            f"{self.layer_overhead_ns / 1e3:g} us a layer",
            f"{self.step_overhead_ns / 1e3:g} us a step",
        ]
        return "assumes " + ", ".join(parts)


def allreduce_ns(
    spec: ModelSpec, device: Device, tp: int, element: int, assumptions: Assumptions | None = None
) -> tuple[float, float]:
    """What tensor parallelism adds to a step: (ns per step, ns per new token).

    2 L + 1 all-reduces (after attention, after the MLP, after the embedding), each of hidden x element bytes a token.
    A ring sends 2 (tp - 1) / tp of that over each link. Raises SimError where the device has no link.
    """
    if tp == 1:
        return 0.0, 0.0
    if not device.link_bandwidth:
        raise SimError(f"Device '{device.name}' has no link between devices; add pcie_gb_s or nvlink_gb_s to it.")
    assume = assumptions or Assumptions()
    latency = assume.nvlink_latency_ns if device.nvlink_bandwidth else assume.pcie_latency_ns
    count = 2 * spec.layers + 1
    sent = spec.hidden * element * 2 * (tp - 1) / tp
    return count * latency, count * sent / (device.link_bandwidth * assume.link_efficiency) * 1e9


def roofline(
    spec: ModelSpec,
    device: Device,
    tp: int = 1,
    dtype: str | int | None = None,
    kv_dtype: str | int | None = None,
    assumptions: Assumptions | None = None,
) -> StepTime:
    """The six terms from operations, bytes and a device's peaks; `kv_dtype` is `dtype` unless given.

    For "what if I had a ..." questions: its label says that it is not calibrated. Raises ModelError or SimError where
    the model cannot be split over `tp` devices.
    """
    assume = assumptions or Assumptions()
    element = dtype_bytes(spec.dtype if dtype is None else dtype)
    kv_element = element if kv_dtype is None else dtype_bytes(kv_dtype)
    weights = spec.weights_bytes(element, tp)
    # A step reads the rows of the embedding table that it needs, not all of it; a tied table is read as the head.
    if not spec.tied:
        weights -= -(-spec.vocab // tp) * spec.hidden * element
    flops_rate = device.peak_flops * assume.gemm_efficiency * min(1.0, 2 / element)
    weight_rate = device.memory_bandwidth * assume.weight_bandwidth
    flop_ns = spec.gemm_flops_per_token() / tp / flops_rate * 1e9
    # Activations that pass through memory: about eight hidden states and three MLP widths a layer.
    wide = 3 * max(1, spec.experts_per_token) * spec.intermediate
    touched = spec.layers * (8 * spec.hidden + wide / tp) * element
    touch_ns = touched / weight_rate * 1e9
    link_step, link_token = allreduce_ns(spec, device, tp, element, assume)
    kv_ns = spec.kv_bytes_per_token(kv_element, tp) / (device.memory_bandwidth * assume.kv_bandwidth) * 1e9
    work_ns = spec.attention_flops() / tp / (device.peak_flops * assume.attention_efficiency) * 1e9
    overhead = assume.step_overhead_ns + spec.layers * assume.layer_overhead_ns + link_step
    token_ns = touch_ns + link_token
    weights_ns = weights / weight_rate * 1e9
    shared: dict[str, Any] = {
        "context": kv_ns,
        "context_mixed": kv_ns * assume.mixed_kv_penalty,
        "work": work_ns,
        "label": ROOFLINE_LABEL,
    }
    if not spec.experts:
        return StepTime(
            step=overhead + weights_ns,
            token=token_ns,
            token_above=flop_ns,
            ridge=weights_ns / flop_ns,
            **shared,
        )
    expert = 3 * spec.hidden * spec.intermediate * element / tp
    always = weights - spec.layers * spec.experts * expert
    points = []
    for n in sorted({round(2 ** (i / 4)) for i in range(61)}):
        read = (always + spec.layers * spec.expected_experts(n) * expert) / weight_rate * 1e9
        points.append((n, max(read, n * flop_ns) + n * token_ns))
    return StepTime(step=overhead, table=tuple(points), **shared)
