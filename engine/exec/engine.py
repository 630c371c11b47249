"""Scheduler, executor and clock joined: an engine that serves requests in real time.

engine = Engine(EngineArgs(model="smollm2"))
report = engine.serve(source)       # returns when the source is closed and all requests have ended
engine.close()
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.core.blockmap import BlockRecorder
from engine.core.cost import CostModel
from engine.core.drive import Abort, Add, StepHook, Wait, drive
from engine.core.errors import ConfigError
from engine.core.identity import TokenIdentity
from engine.core.policies import Policy
from engine.core.presets import SchedulerConfig, host_blocks, preset
from engine.core.records import DecisionLog, Recorder
from engine.core.scheduler import Scheduler
from engine.core.types import NO_LIMIT, BlockIdentity, Finish, RequestSpec, StepEvents, StepOutcome, StepPlan
from engine.exec.device import CudaMemory, DeviceMemory, MemoryBudget, check_device, measure_budget
from engine.exec.executor import Clock, RequestState, TorchExecutor
from engine.exec.runner import ModelRunner, Row
from engine.exec.sampler import SampleRow, SamplingParams, sample
from engine.exec.weights import LoadedModel, load_model
from engine.models.config import DecoderConfig
from engine.models.errors import OptionError
from engine.models.llama import Decoder
from kernels.cache import HostKVCache, PagedKVCache

__all__ = [
    "DTYPES",
    "Engine",
    "EngineArgs",
    "EngineRequest",
    "ListSource",
    "RequestSource",
    "Served",
    "default_dtype",
    "default_threads",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
PARALLEL_SAMPLING = ("fork", "requests")
_DEFAULT_CACHE_BYTES = 1 << 30
_MEMORY_SHARE = 0.4
"""Of the machine's available memory, at most, for a KV cache whose size nobody named."""


@dataclass(frozen=True)
class EngineArgs:
    """Options of the engine; names are vLLM's where vLLM has them. None means: decided from the model and machine."""

    model: str | Path | DecoderConfig = "smollm2"
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "cpu"
    seed: int = 0
    threads: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    preset: str | None = None
    """A preset's options, over which those named below stand where they are not None."""
    long_prefill_token_threshold: int | None = None
    long_prefill_threshold_alone: bool | None = None
    watermark: float | None = None
    null_block: bool | None = None
    scheduler_reserve_full_isl: bool | None = None
    same_step: str | None = None
    free_order: str | None = None
    allocator: str | None = None
    placement: str | None = None
    prefix_index: str | None = None
    prefix_stats: bool = False
    eviction_policy: str | None = None
    scheduling_policy: str | None = None
    victim_policy: str | None = None
    batching: str | None = None
    admission_reserve: str | None = None
    preemption_mode: str | None = None
    swap_space: float = 0.0
    """GiB of host memory for swapped sequences, where `preemption_mode` swaps."""
    kv_offloading_size: float = 0.0
    """GiB of host memory behind the prefix cache; above 0, evicted blocks are kept there."""
    cost_model: CostModel | None = None
    """For preemption_mode `auto`; both paths' costs, from a calibration."""
    parallel_sampling: str = "fork"
    """How `n` above 1 is served: `fork` shares blocks by reference, and a sequence copies the last one when it writes
    to it; `requests` makes n requests that share by the prefix cache, as vLLM V1 does."""
    async_scheduling: bool = False
    """Two steps in flight: the next step is scheduled while one runs."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for everything; decides the pool's size where neither blocks nor bytes are named."""
    policies: tuple[Policy, ...] = field(default=())


class EngineRequest(NamedTuple):
    """A request as a source hands it to the engine."""

    row: int
    """The source's own number for it."""
    prompt: Sequence[int]
    params: SamplingParams
    arrival: int = 0
    """ns on the engine's clock."""
    identity: BlockIdentity | None = None
    """What its blocks hold; None: its tokens, as they are."""
    priority: int = 0
    deadline: int = NO_LIMIT
    tenant: int = 0
    oracle_tokens: int = 0
    """The output's true length, where the source knows it, for policies and allocators named oracle; 0: not known."""


class RequestSource(Protocol):
    """Where an engine's requests come from. All its methods are called by the thread that serves."""

    def due(self, now: int) -> Iterable[EngineRequest | int]:
        """What has come up to `now`: requests, and the row numbers of requests to abort."""
        ...

    def next_ns(self) -> int | None:
        """When the next one is known to come; None: not known."""
        ...

    def is_open(self) -> bool:
        """Whether more may come."""
        ...

    def accepted(self, row: int, request: int, state: RequestState) -> None: ...

    def rejected(self, row: int, reason: str, now: int) -> None: ...

    def finished(self, row: int, state: RequestState, finish: Finish, now: int) -> None:
        """A sequence of the request has ended; `finish.reason` is stop, length, abort or no-memory.

        Called once all of the request's sequences have ended, for each of them in the order of `state.index`.
        """
        ...


class ListSource:
    """A fixed list of requests that are all there at once, and what became of each, by row."""

    def __init__(self, requests: Iterable[EngineRequest]) -> None:
        self._requests = list(requests)
        self.finishes: dict[int, list[tuple[RequestState, Finish]]] = {}
        """One entry a sequence."""
        self.reasons: dict[int, str] = {}
        """Why a request was rejected."""

    def due(self, now: int) -> list[EngineRequest]:
        due, self._requests = self._requests, []
        return due

    def next_ns(self) -> int | None:
        return None

    def is_open(self) -> bool:
        return bool(self._requests)

    def accepted(self, row: int, request: int, state: RequestState) -> None:
        pass

    def rejected(self, row: int, reason: str, now: int) -> None:
        self.reasons[row] = reason

    def finished(self, row: int, state: RequestState, finish: Finish, now: int) -> None:
        self.finishes.setdefault(row, []).append((state, finish))


class Served(NamedTuple):
    """The records of one call of `Engine.serve`."""

    recorder: Recorder
    scheduler: Scheduler
    log: DecisionLog | None
    busy_ns: list[int]
    """How long the device computed in each step."""


class _Row(NamedTuple):
    """What the inbox knows of a request that was accepted."""

    states: dict[int, RequestState]
    """Its sequences by the scheduler's ids, in the order of their index, also those that have not begun."""
    live: set[int]
    """Those that have begun and not ended."""
    ends: dict[int, Finish]


class _Inbox:
    """The core's view of a source: makes specs of requests, and tells the executor of what was accepted."""

    def __init__(
        self,
        source: RequestSource,
        executor: TorchExecutor,
        recorder: Recorder,
        config: SchedulerConfig,
        vocab_size: int,
        forks: bool = True,
    ) -> None:
        self._source = source
        self._executor = executor
        self._recorder = recorder
        self._block_size = config.block_size
        self._longest = config.max_model_len
        self._vocab_size = vocab_size
        self._forks = forks
        self._waiting: dict[int, EngineRequest] = {}
        self._rows: dict[int, _Row] = {}
        self.row_of: dict[int, int] = {}

    def drain(self, now: int) -> Iterable[Add | Abort]:
        for item in self._source.due(now):
            if isinstance(item, int):
                if item in self._rows:
                    for request in list(self._rows[item].live):
                        yield Abort(request)
                continue
            params = item.params
            together = self._forks or params.use_beam_search
            identity = item.identity or TokenIdentity(item.prompt, self._block_size)
            spec = RequestSpec(
                item.arrival,
                len(item.prompt),
                params.max_tokens,
                identity,
                item.priority,
                item.deadline,
                item.tenant,
                n=params.num_sequences if together else 1,
                oracle_tokens=item.oracle_tokens,
                beam=params.use_beam_search and params.num_sequences > 1,
            )
            reason = self._unknown_token(item)
            if reason is not None:
                self._recorder.rejected(item.row, spec, now, reason)
                self._source.rejected(item.row, reason, now)
                continue
            self._waiting[item.row] = item
            # Requests of their own each need an identity of their own, made before the first one grows.
            others = [] if together else [identity.fork() for _ in range(params.num_sequences - 1)]
            yield Add(spec, item.row)
            for other in others:
                if item.row in self._rows:
                    yield Add(spec._replace(identity=other), item.row)
            self._waiting.pop(item.row, None)

    def _unknown_token(self, item: EngineRequest) -> str | None:
        """Why the model cannot take the request's token ids; None: it can."""
        for what, tokens in (("prompt", item.prompt), ("forced output", item.params.forced_tokens or ())):
            ids = np.asarray(tokens)
            if ids.size and not (ids.min() >= 0 and ids.max() < self._vocab_size):
                return f"its {what} has a token id outside of the model's 0 to {self._vocab_size - 1}"
        return None

    def accepted(self, row: int, request: int) -> None:
        item = self._waiting[row]
        params = item.params
        longest = min(params.max_tokens, self._longest - len(item.prompt))
        known = self._rows.get(row)
        if known is None:
            self._rows[row] = known = _Row({}, set(), {})
        if self._forks or params.use_beam_search:
            state = self._executor.add(request, item.prompt, params, longest)
            known.states.update((request + sequence.index, sequence) for sequence in state.siblings)
        else:
            index = len(known.states)
            seed = None if params.seed is None else params.seed + index
            alone = replace(params, n=1, best_of=1 if params.best_of else None, seed=seed)
            state = self._executor.add(request, item.prompt, alone, longest)
            state.index = index
            known.states[request] = state
        self.row_of[request] = row
        known.live.add(request)
        if state.index == 0:
            self._source.accepted(row, request, state)

    def forked(self, parent: int, child: int) -> None:
        """A sequence has begun."""
        row = self.row_of[parent]
        self.row_of[child] = row
        self._rows[row].live.add(child)

    def rejected(self, row: int, reason: str, now: int) -> None:
        del self._waiting[row]
        self._source.rejected(row, reason, now)

    def next_ns(self) -> int | None:
        return self._source.next_ns()

    def is_open(self) -> bool:
        return self._source.is_open()

    def ended(self, finish: Finish, now: int) -> None:
        """A sequence has ended; with the last one of its request, the source is told."""
        row = self.row_of.pop(finish.request)
        known = self._rows[row]
        known.states[finish.request].finish(finish.num_output_tokens)
        known.ends[finish.request] = finish
        known.live.discard(finish.request)
        if known.live:
            return
        del self._rows[row]
        for request, state in known.states.items():
            self._executor.forget(request)
            if request not in known.ends:  # the request ended before its sequences began
                state.finish(0)
                known.ends[request] = finish._replace(request=request)
        _rank(known)
        for request, state in known.states.items():
            self._source.finished(row, state, known.ends[request], now)


def _rank(row: _Row) -> None:
    """Give the sequences of a beam what the search has found, best first."""
    for place, (request, state) in enumerate(row.states.items()):
        if state.beam is None or not state.beam.num_outputs:
            return
        state.result = found = state.beam.results()[place]
        if row.ends[request].reason in ("stop", "length"):
            row.ends[request] = row.ends[request]._replace(reason="stop" if found.stopped else "length")


class Engine:
    """A model in memory with its KV pool. Each `serve` starts with an empty pool and a clock at 0."""

    def __init__(
        self,
        args: EngineArgs,
        loaded: LoadedModel | None = None,
        on_layer: Callable[[int, int], None] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Load the model and reserve the KV pool; `loaded` is used instead of loading `args.model` again.

        `on_layer` is told which layer is being read, and of how many.

        Raises EngineError or ConfigError, each with one sentence.
        """
        self.device = check_device(args.device)
        self.num_threads = default_threads() if args.threads is None else args.threads
        if self.num_threads < 1:
            raise OptionError(f"threads is {self.num_threads}; it must be at least 1")
        torch.set_num_threads(self.num_threads)
        self.args = args
        self.model = loaded or load_model(args.model, args.load_format, args.seed)
        self.dtype = default_dtype(self.model, self.device.type) if args.dtype == "auto" else _dtype(args.dtype)
        self.budget: MemoryBudget | None = None
        """Of a GPU whose pool was sized by what it has."""
        if self.device.type == "cpu" or args.num_gpu_blocks_override or args.kv_cache_memory_bytes:
            self._load(on_layer)
        else:
            memory = memory or CudaMemory()
            block_bytes = args.block_size * self.model.config.kv_elements_per_token * self.dtype.itemsize
            step = functools.partial(self._dummy_step, args)
            load = functools.partial(self._load, on_layer)
            self.budget = measure_budget(memory, args.gpu_memory_utilization, block_bytes, load, step)
            args = self.args = replace(args, num_gpu_blocks_override=self.budget.num_blocks)
        # The decoder has its own copies in its own layout; the originals may go.
        self.model = self.model._replace(weights={})
        self.config = _scheduler_config(args, self.model.config, self.dtype)
        config = self.model.config
        cache_bytes = (
            self.config.num_blocks * self.config.block_size * config.kv_elements_per_token * self.dtype.itemsize
        )
        block_bytes = self.config.block_size * config.kv_elements_per_token * self.dtype.itemsize
        free = _available_memory()
        if self.device.type != "cpu":
            free += cache_bytes  # the pool is not in the machine's own memory
        if cache_bytes > free:
            raise OptionError(
                f"num_gpu_blocks_override: {self.config.num_blocks} KV blocks take {cache_bytes / 2**30:.1f} GiB, and "
                f"this machine has {free / 2**30:.1f} GiB free; give fewer"
            )
        if cache_bytes + self.config.num_host_blocks * block_bytes > free:
            raise OptionError(
                f"swap_space and kv_offloading_size: {self.config.num_host_blocks} host blocks take "
                f"{self.config.num_host_blocks * block_bytes / 2**30:.1f} GiB, and this machine has "
                f"{(free - cache_bytes) / 2**30:.1f} GiB free beside the KV pool; give less"
            )
        try:
            self.cache = PagedKVCache(
                config.num_layers,
                self.config.num_blocks,
                self.config.block_size,
                config.num_kv_heads,
                config.head_dim,
                self.dtype,
                self.device,
            )
            self.host = HostKVCache(self.cache, self.config.num_host_blocks) if self.config.num_host_blocks else None
        except torch.OutOfMemoryError:
            raise OptionError(
                f"num_gpu_blocks_override: {self.config.num_blocks} KV blocks take {cache_bytes / 2**30:.1f} GiB, more "
                "than the device has left beside the weights; give fewer, or none for as many as fit"
            ) from None
        self.runner = ModelRunner(self.decoder, self.cache, self.host)
        self.clock = Clock()
        self._wake = threading.Event()
        self.tokenizer = self.model.tokenizer

    def _load(self, on_layer: Callable[[int, int], None] | None) -> None:
        self.decoder = Decoder(self.model.config, self.model.weights, self.dtype, on_layer, self.device)

    def _dummy_step(self, args: EngineArgs) -> None:
        """The largest step, all of whose tokens write to one block: as many rows as may run, and all new tokens."""
        config = self.model.config
        longest = args.max_model_len or config.max_position
        tokens = min(args.max_num_batched_tokens, args.max_num_seqs * longest)
        rows = max(1, min(args.max_num_seqs, tokens))
        share, more = divmod(tokens, rows)
        cache = PagedKVCache(
            config.num_layers, 1, args.block_size, config.num_kv_heads, config.head_dim, self.dtype, self.device
        )
        table = np.zeros(-(-longest // args.block_size) + 1, dtype=np.int64)
        runner = ModelRunner(self.decoder, cache)
        made = runner.order([Row(i, 0, share + (i < more), True, table) for i in range(rows)])
        params = SamplingParams(max_tokens=1, detokenize=False)
        logits = runner.run(made, np.zeros(tokens, dtype=np.int64))
        sample(logits, [SampleRow(params, i, 0, ()) for i in range(rows)])

    def serve(
        self,
        source: RequestSource,
        *,
        log_decisions: bool = False,
        record_blocks: int = 0,
        check: bool = False,
        on_step: StepHook | None = None,
    ) -> Served:
        """Serve until the source is closed and every request has ended; in real time, from 0 on the engine's clock.

        `record_blocks`: how many changes of blocks to record at most, in `recorder.blocks`; 0: none.

        The records of an interrupted run (KeyboardInterrupt) are complete up to its last finished step: they hang on
        `self.served`.
        """
        scheduler = Scheduler(self.config)
        recorder = Recorder(scheduler, BlockRecorder(scheduler, record_blocks) if record_blocks else None)
        log = DecisionLog(scheduler) if log_decisions else None
        executor = self.make_executor()
        forks = self.args.parallel_sampling == "fork"
        inbox = _Inbox(source, executor, recorder, self.config, self.model.config.vocab_size, forks)

        def step_done(plan: StepPlan, outcome: StepOutcome, events: StepEvents) -> None:
            for parent, child in events.forked:
                inbox.forked(parent, child)
            for finish in events.finished:
                inbox.ended(finish, outcome.end)
            if on_step is not None:
                on_step(plan, outcome, events)

        self.served = Served(recorder, scheduler, log, executor.busy_ns)
        self.clock.restart()
        self._wake.clear()
        loop = drive(
            scheduler,
            executor,
            inbox,
            recorder,
            self.clock(),
            log=log,
            on_step=step_done,
            on_abort=lambda finish: inbox.ended(finish, self.clock()),
            check=check,
        )
        try:
            wait = next(loop)
            while True:
                if wait.idle:
                    self._sleep(wait)
                wait = loop.send(self.clock())
        except StopIteration:
            return self.served
        finally:
            loop.close()
            executor.close()

    def wake(self) -> None:
        """Something has arrived at a source whose next arrival was not known; may be called from any thread."""
        self._wake.set()

    def close(self) -> None:
        """Give the memory back. The engine cannot serve afterwards."""
        for name in ("runner", "cache", "host", "decoder"):
            self.__dict__.pop(name, None)

    def make_executor(self) -> TorchExecutor:
        """An executor of this engine's model and pool, knowing no request yet; to be closed by the caller."""
        return TorchExecutor(
            self.runner,
            self.clock,
            self.tokenizer,
            self.model.config.eos_token_ids,
            self.config.steps_in_flight,
            self.args.seed,
            self.num_threads,
            self.config.enable_prefix_caching,
        )

    def _sleep(self, wait: Wait) -> None:
        timeout = None if wait.until is None else (wait.until - self.clock()) / 1e9
        if timeout is None or timeout > 0:
            self._wake.wait(timeout)
        self._wake.clear()


def default_threads() -> int:
    """Two threads where there are two cores: beyond that the small matrices of a decode step gain little."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def default_dtype(model: LoadedModel, device: str = "cpu") -> torch.dtype:
    """bfloat16 on a GPU and where this CPU multiplies it in hardware, else float32, as always for the tiny model."""
    if model.name == "tiny":
        return torch.float32
    return torch.bfloat16 if device != "cpu" or _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        probe = getattr(torch.cpu, name, None)
        if probe is not None and probe():
            return True
    return False


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise OptionError(f"dtype is {name!r}; on a CPU it must be auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _scheduler_config(args: EngineArgs, model: DecoderConfig, dtype: torch.dtype) -> SchedulerConfig:
    """The scheduler's options, with the pool's size and the longest request decided."""
    if args.block_size < 1:
        raise ConfigError(f"block_size is {args.block_size}; it must be at least 1")
    if args.max_model_len is not None and not 2 <= args.max_model_len <= model.max_position:
        raise OptionError(
            f"max_model_len is {args.max_model_len}; it must lie between 2 and the model's own {model.max_position}"
        )
    longest = args.max_model_len or model.max_position
    num_blocks = _num_blocks(args, model, dtype, longest)
    options: dict[str, object] = dict(preset(args.preset)) if args.preset else {}
    for name in (
        "long_prefill_token_threshold",
        "long_prefill_threshold_alone",
        "watermark",
        "null_block",
        "scheduler_reserve_full_isl",
        "same_step",
        "free_order",
        "allocator",
        "placement",
        "prefix_index",
        "prefix_stats",
        "eviction_policy",
        "scheduling_policy",
        "victim_policy",
        "batching",
        "admission_reserve",
        "preemption_mode",
        "cost_model",
    ):
        value = getattr(args, name)
        if value is not None:
            options[name] = value
    for name in ("swap_space", "kv_offloading_size"):
        if not getattr(args, name) >= 0:
            raise OptionError(f"{name} is {getattr(args, name)}; it must be 0 or more GiB")
    if args.parallel_sampling not in PARALLEL_SAMPLING:
        raise OptionError(
            f"parallel_sampling is {args.parallel_sampling!r}; choose one of {', '.join(PARALLEL_SAMPLING)}"
        )
    block_bytes = model.kv_elements_per_token * args.block_size * dtype.itemsize
    mode = str(options.get("preemption_mode", "recompute"))
    options.update(
        num_host_blocks=host_blocks(args.swap_space, args.kv_offloading_size, mode, block_bytes),
        host_tier=args.kv_offloading_size > 0,
        num_blocks=num_blocks,
        max_model_len=longest,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=args.enable_prefix_caching,
        steps_in_flight=2 if args.async_scheduling else 1,
        policies=args.policies,
    )
    return SchedulerConfig(**options)  # type: ignore[arg-type]


def _num_blocks(args: EngineArgs, model: DecoderConfig, dtype: torch.dtype, longest: int) -> int:
    """Blocks of the pool: as named; or what the named bytes hold; or a gigabyte's worth, less where less is enough."""
    if args.num_gpu_blocks_override is not None:
        if args.num_gpu_blocks_override < 1:
            raise OptionError(f"num_gpu_blocks_override is {args.num_gpu_blocks_override}; it must be at least 1")
        return args.num_gpu_blocks_override
    block_bytes = model.kv_elements_per_token * args.block_size * dtype.itemsize
    if args.kv_cache_memory_bytes is not None:
        blocks = args.kv_cache_memory_bytes // block_bytes
        if blocks < 1:
            raise OptionError(
                f"kv_cache_memory_bytes is {args.kv_cache_memory_bytes}; one block of {args.block_size} tokens "
                f"takes {block_bytes} bytes"
            )
        return blocks
    budget = min(_DEFAULT_CACHE_BYTES, int(_MEMORY_SHARE * _available_memory()))
    enough = args.max_num_seqs * -(-longest // args.block_size)
    return max(1, min(budget // block_bytes, enough))


def _available_memory() -> int:
    """Bytes that programs may still take on this machine; a cautious guess where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30
