"""Where a device's memory goes, term by term, and how many KV blocks are left: what vLLM finds out at start.

    blocks = (utilization x memory - weights - what is there all the time - the profiled peak) / bytes of a block

The peak is the larger of layers and sampler. Which terms count inside the budget, and which fall into the share that
utilization leaves, is a matter of the release (`sim.releases`); the terms themselves are the same for all. What a step
needs is in `sim.transients`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim import releases
from sim.errors import SimError
from sim.hardware import Device
from sim.models import ModelSpec, dtype_bytes
from sim.releases import Release, release
from sim.transients import cublas_bytes, peak_bytes, sampler_persistent_bytes
from sim.weights import WeightBytes, weight_bytes, weight_format

__all__ = ["DEFAULT_VERSION", "KVBudget", "MemoryRequest", "Plan", "Term", "kv_blocks", "longest", "plan"]

_GIB = 1 << 30
DEFAULT_VERSION = "0.19.1"
"""The release whose rules size a simulation's KV cache unless another one is named."""


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What somebody wants to serve, and how. None: the release's own default."""

    spec: ModelSpec
    device: Device
    version: str = DEFAULT_VERSION
    tp: int = 1
    pp: int = 1
    utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    chunked: bool | None = None
    """Whether prompts may be cut, as --enable-chunked-prefill says."""
    block_size: int = 16
    dtype: str | int | None = None
    kv_dtype: str | int | None = None
    quantization: str | None = None
    swap_gib: float | None = None
    enforce_eager: bool = False
    num_blocks: int | None = None
    """--num-gpu-blocks-override."""
    layers_peak: int | None = None
    """Bytes of the layers' peak, traced elsewhere, instead of vLLM's declared liveness."""
    expert_ranks: int = 1
    """Ranks over which experts are split whole (expert parallelism), tensor- times data-parallel size; 1: not so."""
    extra_peak: int = 0
    """Bytes that the profiling run finds beside the layers: see sim.oom.Transients.unprofiled."""

    def __post_init__(self) -> None:
        if self.utilization is not None and not 0.0 < self.utilization <= 1.0:
            raise SimError(f"gpu_memory_utilization must be above 0 and at most 1, not {self.utilization}.")
        for name in (
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_blocks",
            "pp",
            "expert_ranks",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SimError(f"{name} must be 1 or more, not {value}.")


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the budget."""

    name: str
    bytes: int
    inside: bool
    """Whether it counts within utilization x memory."""
    what: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A budget, and what follows from it."""

    request: MemoryRequest
    rules: Release
    utilization: float
    usable: int
    """utilization x memory, in bytes."""
    terms: tuple[Term, ...]
    block_bytes: int
    num_blocks: int
    """As vLLM counts them: the null block is one of them."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked: bool
    weights: WeightBytes
    layers_peak: int
    sampler_peak: int
    num_cpu_blocks: int
    refusal: str | None
    """What vLLM would say instead of starting; None: it starts."""

    @property
    def available(self) -> int:
        """Bytes left for KV; negative where the rest alone is too much."""
        return self.usable - sum(term.bytes for term in self.terms if term.inside)

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can have."""
        return max(0, self.num_blocks - self.rules.null_block)

    @property
    def kv_tokens(self) -> int:
        return self.usable_blocks * self.request.block_size

    @property
    def outside(self) -> int:
        """Bytes that are needed and counted in no budget."""
        return sum(term.bytes for term in self.terms if not term.inside)

    @property
    def headroom(self) -> int:
        """Bytes of the device that nobody has asked for when the engine serves: neither budget nor what lies outside.

        Negative: the engine runs out of memory after it has started, at the latest while it captures graphs.
        """
        return self.request.device.memory_bytes - self.usable - self.outside

    def concurrency(self, length: int) -> float:
        """Requests of `length` tokens that the blocks hold at once."""
        if self.rules.engine == "V0":
            return self.num_blocks * self.request.block_size / length
        return self.num_blocks / -(-length // self.request.block_size)

    def running(self, length: int) -> tuple[int, str]:
        """(requests of `length` tokens that run at once, what limits them: `kv` or `max_num_seqs`)."""
        fit = self.usable_blocks // -(-length // self.request.block_size)
        return (fit, "kv") if fit < self.max_num_seqs else (self.max_num_seqs, "max_num_seqs")

    def budget_bytes(self) -> dict[str, int]:
        """Every term by its name, what is left for KV, and what utilization leaves out."""
        found = {"total": self.request.device.memory_bytes, "usable": self.usable}
        found |= {term.name: term.bytes for term in self.terms}
        return found | {"kv_cache": max(0, self.available), "headroom": self.headroom}

    def largest_term(self) -> Term:
        """The largest term of the budget beside the weights: the one to cut first."""
        return max((t for t in self.terms if t.inside and t.name != "weights"), key=lambda term: term.bytes)


def plan(request: MemoryRequest) -> Plan:
    """The budget of a request, and whether vLLM would start with it.

    Raises:
        SimError: the version, the format or the split over devices cannot be.
    """
    rules = release(request.version)
    spec, device, tp = request.spec, request.device, request.tp
    element = dtype_bytes(spec.dtype if request.dtype is None else request.dtype)
    length = request.max_model_len or spec.max_position
    tokens, seqs, chunked = _batch(request, rules, length)
    weights = weight_bytes(spec, weight_format(request.quantization), element, tp, request.expert_ranks)
    share = _stage(request.pp)
    replicas = max(1, request.expert_ranks // tp)
    layers, sampler = peak_bytes(
        spec, rules, device, tokens, min(seqs, tokens), element, tp, request.expert_ranks, replicas
    )
    if request.layers_peak is not None:
        layers = request.layers_peak + cublas_bytes(device)
    layers += request.extra_peak
    utilization = rules.utilization if request.utilization is None else request.utilization
    usable = int(device.memory_bytes * utilization)
    terms = _terms(request, rules, int(weights.total * share), max(layers, sampler), layers >= sampler, seqs, element)
    kv = request.kv_dtype if request.kv_dtype is not None else element
    block = spec.kv_bytes_per_token(kv, tp) * request.block_size
    block = max(1, int(block * share))
    available = usable - sum(term.bytes for term in terms if term.inside)
    blocks = max(0, available // block) if request.num_blocks is None else request.num_blocks
    swap = rules.swap_gib if request.swap_gib is None or rules.engine == "V1" else request.swap_gib
    made = Plan(
        request,
        rules,
        utilization,
        usable,
        terms,
        block,
        blocks,
        length,
        seqs,
        tokens,
        chunked,
        weights,
        layers,
        sampler,
        int(swap * _GIB) // block if rules.engine == "V0" else 0,
        None,
    )
    return replace(made, refusal=_refusal(made))


def _batch(request: MemoryRequest, rules: Release, length: int) -> tuple[int, int, bool]:
    """(max_num_batched_tokens, max_num_seqs, whether prompts are cut), as the release sets what nobody named."""
    if rules.engine == "V1":
        tokens, seqs = rules.batch_defaults(request.device)
        chunked = True if request.chunked is None else request.chunked
        if not chunked:
            tokens = max(tokens, length)
        seqs = request.max_num_seqs or seqs
        return request.max_num_batched_tokens or max(tokens, seqs), seqs, chunked
    chunked = request.chunked if request.chunked is not None else 0 < rules.chunked_above < length
    tokens = rules.chunked_tokens if chunked else max(length, 2048)
    seqs = request.max_num_seqs or 256
    return request.max_num_batched_tokens or max(tokens, seqs), seqs, chunked


def _stage(pp: int) -> float:
    """The share of layers on one of `pp` stages; tables are on the first and the last, which this spreads evenly."""
    return 1.0 / pp


def _terms(
    request: MemoryRequest, rules: Release, weights: int, peak: int, of_layers: bool, seqs: int, element: int
) -> tuple[Term, ...]:
    spec, v1 = request.spec, rules.engine == "V1"
    rotary = spec.max_position * spec.head_dim * element
    found = [
        Term("weights", weights, True, "parameters of one device"),
        Term("rotary_tables", rotary, True, "cosines and sines of every position, kept beside the weights"),
        Term(
            "activations",
            peak,
            True,
            "peak of the profiling run: " + ("layers, gate and up" if of_layers else "sampler, copies of the logits"),
        ),
    ]
    if rules.counts_context:
        found.append(Term("context", releases.CONTEXT_BYTES, True, "CUDA context and kernels"))
    else:
        found.append(Term("kernels", rules.growth_bytes, True, "libraries and kernels loaded while profiling"))
        found.append(Term("context", releases.CONTEXT_BYTES, False, "CUDA context, before the engine's first look"))
    if request.tp > 1:
        # V1 looks after its communicators are there.
        found.append(Term("nccl", releases.NCCL_BYTES, not v1, "buffers of the communicators"))
    if rules.graph_profiling_bytes and not request.enforce_eager:
        found.append(Term("graph_profiling", rules.graph_profiling_bytes, True, "left behind by the trial of graphs"))
    if rules.counts_reserved:
        found.append(Term("fragmentation", releases.FRAGMENTATION_BYTES, True, "reserved by the allocator, not used"))
    if not request.enforce_eager:
        graphs = _num_graphs(seqs, v1) * releases.GRAPH_BYTES
        found.append(Term("graphs", graphs, rules.counts_graphs, "captured CUDA graphs"))
    persistent = sampler_persistent_bytes(rules.sampler, seqs, spec)
    if persistent:
        found.append(Term("sampler_state", persistent, True, "counts of tokens for penalties"))
    return tuple(found)


def _num_graphs(seqs: int, v1: bool) -> int:
    """Graphs that are captured: sizes 1, 2, 4, then by 8 to 256 and by 16 to 512.

    V1 captures mixed batches of up to 512 tokens (twice max_num_seqs at most) and decodes of up to max_num_seqs.
    """

    def sizes(limit: int) -> int:
        return sum(1 for n in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if n <= limit)

    return sizes(min(512, 2 * seqs)) + sizes(min(512, seqs)) if v1 else sizes(min(256, seqs))


def _refusal(made: Plan) -> str | None:
    """The error with which vLLM ends instead of serving."""
    rules, length = made.rules, made.max_model_len
    size = made.request.block_size
    if made.request.num_blocks is None:
        if rules.engine == "V1":
            total = made.request.device.memory_bytes
            free = total - releases.CONTEXT_BYTES - (releases.NCCL_BYTES if made.request.tp > 1 else 0)
            if free < made.usable:
                return (
                    f"Free memory on device ({_gib(free)}/{_gib(total)} GiB) on startup is less than desired GPU "
                    f"memory utilization ({made.utilization:g}, {_gib(made.usable)} GiB). Decrease GPU memory "
                    "utilization or reduce GPU memory used by other processes."
                )
        if made.available < made.block_bytes:
            hint = "" if rules.engine == "V0" else _SEE
            return (
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
                f"the engine.{hint}"
            )
    if rules.engine == "V0":
        if length <= made.num_blocks * size:
            return None
        return (
            f"The model's max seq len ({length}) is larger than the maximum number of tokens that can be stored in KV "
            f"cache ({made.num_blocks * size}). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` "
            "when initializing the engine."
        )
    if -(-length // size) <= made.num_blocks:
        return None
    needed = -(-length // size) * made.block_bytes
    return (
        f"To serve at least one request with the models's max seq len ({length}), ({_gib(needed)} GiB KV cache is "
        f"needed, which is larger than the available KV cache memory ({_gib(made.num_blocks * made.block_bytes)} GiB). "
        f"Based on the available memory, the estimated maximum model length is {made.num_blocks * size}. Try "
        f"increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.{_SEE}"
    )


_SEE = " See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


def _gib(value: int) -> str:
    return f"{round(value / _GIB, 2)}"


def longest(request: MemoryRequest) -> list[tuple[int, int]]:
    """The values of max_model_len with which the engine starts, as ranges of tokens within the model's own limit.

    More than one where a release cuts prompts above some length: below it the profiled step, and with it the peak,
    grows with the length; above it the step is short again.
    """
    top = request.spec.max_position
    split = release(request.version).chunked_above if request.chunked is None else 0
    pieces = [(1, top)] if not 0 < split < top else [(1, split), (split + 1, top)]

    def starts(length: int) -> bool:
        return plan(replace(request, max_model_len=length)).refusal is None

    found: list[tuple[int, int]] = []
    for low, high in pieces:
        if not starts(low):
            continue
        good, bad = low, high + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if starts(middle) else (good, middle)
        if found and found[-1][1] + 1 == low:
            found[-1] = (found[-1][0], good)
        else:
            found.append((low, good))
    return found


# ---- for simulations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The KV cache of a simulated device, and the plan it follows from."""

    num_blocks: int
    block_bytes: int
    plan: Plan

    @property
    def memory(self) -> int:
        """What the engine may use: utilization x what the device has. Bytes."""
        return self.plan.usable

    @property
    def weights(self) -> int:
        return self.plan.terms[0].bytes

    @property
    def activations(self) -> int:
        """The layers' peak."""
        return self.plan.layers_peak

    @property
    def allowance(self) -> int:
        """What is set aside besides the weights."""
        return sum(term.bytes for term in self.plan.terms[1:] if term.inside)

    def text(self) -> str:
        """One line that states where the number is from."""
        parts = ", ".join(f"{t.name} {t.bytes / _GIB:.2f}" for t in self.plan.terms[1:] if t.inside)
        return (
            f"{self.num_blocks} KV blocks by the rules of vLLM {self.plan.rules.name}, predicted, not measured: "
            f"{self.memory / _GIB:.2f} GiB usable - {self.weights / _GIB:.2f} weights - {self.allowance / _GIB:.2f} "
            f"({parts})"
        )


def kv_blocks(
    spec: ModelSpec,
    device: Device,
    gpu_memory_utilization: float = 0.9,
    tp: int = 1,
    block_size: int = 16,
    dtype: str | int | None = None,
    kv_dtype: str | int | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    version: str = DEFAULT_VERSION,
    quantization: str | None = None,
    extra_peak: int = 0,
) -> KVBudget:
    """The KV blocks that fit on each of `tp` devices. Raises SimError where there is no room for any."""
    request = MemoryRequest(
        spec,
        device,
        version,
        tp,
        utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        extra_peak=extra_peak,
    )
    made = plan(request)
    if made.available < made.block_bytes:
        weights = made.terms[0].bytes
        raise SimError(
            f"Model '{spec.name}' leaves no room for KV on '{device.name}': {weights / _GIB:.1f} GiB of weights and "
            f"{(made.usable - made.available - weights) / _GIB:.1f} beside them in {made.usable / _GIB:.1f} usable; "
            "use more devices, a higher gpu_memory_utilization or a smaller dtype, or set num_gpu_blocks_override."
        )
    return KVBudget(made.num_blocks, made.block_bytes, made)
