"""What a collective takes by its algorithm, and what stages of layers cost: two parameters each, in closed form.

An all-reduce of b bytes over p devices, with a latency a per message and bandwidth B of each device's link:

    ring       2 (p - 1) messages of b / p bytes, one after another      2 (p - 1) (a + b / (p B))
    tree       up and down, whole messages                               2 ceil(log2 p) (a + b / B)
    one-shot   every device reads the others' whole buffers at once      a + (p - 1) b / B

(Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005; one-shot as in the
custom all-reduce kernels of TensorRT-LLM and vLLM.)

Tensor parallelism needs two all-reduces a layer, behind attention and behind the MLP, and one behind the embedding.
Pipeline parallelism sends the hidden states from stage to stage; with m microbatches in p stages of equal time t a
batch takes (m + p - 1) t, of which each stage works m t (Huang et al.: GPipe, 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sim.errors import CalibrationError, SimError

__all__ = [
    "ALGORITHMS",
    "AllReduce",
    "all_reduce_ns",
    "all_reduces_per_step",
    "fit_all_reduce",
    "pipeline_bubble",
    "pipeline_ns",
    "quickest",
]


def _ring(ranks: int) -> tuple[float, float]:
    return 2.0 * (ranks - 1), 2.0 * (ranks - 1) / ranks


def _tree(ranks: int) -> tuple[float, float]:
    hops = 2.0 * (ranks - 1).bit_length()
    return hops, hops


def _one_shot(ranks: int) -> tuple[float, float]:
    return 1.0, float(ranks - 1)


ALGORITHMS: Mapping[str, Callable[[int], tuple[float, float]]] = {"ring": _ring, "tree": _tree, "one-shot": _one_shot}
"""By name: how many latencies, and how many times its bytes over a link, an all-reduce over so many devices takes."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An algorithm on a link."""

    algorithm: str
    latency_ns: float
    """Of one message."""
    bandwidth: float
    """Bytes a second of one device's link, in one direction."""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise SimError(f"There is no all-reduce {self.algorithm!r}; there are {', '.join(ALGORITHMS)}.")
        if not self.latency_ns >= 0 or not self.bandwidth > 0:
            raise SimError(
                f"An all-reduce needs a latency of 0 or more and a bandwidth above 0, not {self.latency_ns} ns and "
                f"{self.bandwidth} bytes/s."
            )

    def time_ns(self, num_bytes: float, ranks: int) -> float:
        """ns for `num_bytes` on each of `ranks` devices; 0 for a device alone."""
        if ranks < 1 or num_bytes < 0:
            raise SimError(f"An all-reduce is of 0 or more bytes over 1 or more devices, not {num_bytes} over {ranks}.")
        if ranks == 1:
            return 0.0
        messages, shares = ALGORITHMS[self.algorithm](ranks)
        return messages * self.latency_ns + shares * num_bytes * 1e9 / self.bandwidth


def quickest(choices: Sequence[AllReduce], num_bytes: float, ranks: int) -> AllReduce:
    """Of several, the one that is quickest for that size: what libraries choose by tables."""
    if not choices:
        raise SimError("There is no all-reduce to choose from.")
    return min(choices, key=lambda choice: choice.time_ns(num_bytes, ranks))


def all_reduces_per_step(layers: int) -> int:
    """Of a forward pass under tensor parallelism."""
    return 2 * layers + 1


def all_reduce_ns(
    choices: Sequence[AllReduce], layers: int, tokens: int, hidden: int, itemsize: int, ranks: int
) -> float:
    """ns that a step of `tokens` rows spends in all-reduces: each has a hidden state of `hidden` numbers a token."""
    size = tokens * hidden * itemsize
    return all_reduces_per_step(layers) * quickest(choices, size, ranks).time_ns(size, ranks)


def fit_all_reduce(algorithm: str, ranks: int, points: Sequence[tuple[float, float]]) -> AllReduce:
    """Latency and bandwidth from measured (bytes, ns), such that the sum of squared relative errors is least.

    Raises:
        CalibrationError: fewer than two sizes, or times that do not grow with the size.
    """
    if algorithm not in ALGORITHMS:
        raise SimError(f"There is no all-reduce {algorithm!r}; there are {', '.join(ALGORITHMS)}.")
    if ranks < 2:
        raise CalibrationError(f"An all-reduce is measured over 2 devices or more, not {ranks}.")
    if len({size for size, _ in points}) < 2 or any(not time > 0 for _, time in points):
        raise CalibrationError(
            f"{len(points)} points do not give two parameters: two sizes and times above 0 are needed."
        )
    # (a + c b) / t = 1 for every point, by least squares in a and c.
    aa = sum(1 / time**2 for _, time in points)
    ab = sum(size / time**2 for size, time in points)
    bb = sum(size**2 / time**2 for size, time in points)
    a1 = sum(1 / time for _, time in points)
    b1 = sum(size / time for size, time in points)
    determinant = aa * bb - ab * ab
    start, slope = (bb * a1 - ab * b1) / determinant, (aa * b1 - ab * a1) / determinant
    if not slope > 0:
        raise CalibrationError("The measured times do not grow with the size, so they give no bandwidth.")
    if start < 0:  # no negative latency: the line through the origin that is nearest
        start, slope = 0.0, b1 / bb
    messages, shares = ALGORITHMS[algorithm](ranks)
    return AllReduce(algorithm, start / messages, shares * 1e9 / slope)


def pipeline_ns(stage_ns: float, stages: int, microbatches: int, send_ns: float = 0.0) -> float:
    """ns from the first microbatch's start to the last one's end, through stages of equal time, each sending on."""
    if stages < 1 or microbatches < 1:
        raise SimError(f"A pipeline has 1 or more stages and microbatches, not {stages} and {microbatches}.")
    return (microbatches + stages - 1) * stage_ns + (stages - 1) * send_ns


def pipeline_bubble(stages: int, microbatches: int) -> float:
    """Share of a stage's time that it waits, with sends that take no time."""
    whole = pipeline_ns(1.0, stages, microbatches)
    return 1.0 - microbatches / whole
