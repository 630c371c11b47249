"""Whether each step fits: its true need against what the device has left beside weights, KV pool and all that stays.

The pool never grows, so what runs out is the room for a moment's tensors: a prompt whose score matrix, or whose logits,
nobody profiled; or memory that is lost as time goes by. An event ends the engine, as it does in life (`crash`), or is
counted (`report`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.types import PlanItem, StepPlan
from sim.errors import SimError
from sim.memory import Plan
from sim.models import dtype_bytes
from sim.transients import (
    cublas_bytes,
    eager_attention_bytes,
    eager_decode_bytes,
    expert_bytes,
    layer_bytes,
    prompt_logprobs_bytes,
    sampler_bytes,
)

__all__ = ["BACKENDS", "MemoryGuard", "OomEvent", "Transients", "asks_for_logprobs"]

BACKENDS = ("flash", "eager")
MODES = ("crash", "report")
_HOUR_NS = 3600 * 10**9
_MASK = (1 << 64) - 1


def asks_for_logprobs(request: int, share: float) -> bool:
    """Whether a request is one of the `share` that ask for the log-probabilities of their prompts; by its id alone."""
    z = (request * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 32) * 2.0**-32 < share


@dataclass(frozen=True, slots=True)
class Transients:
    """What a step of a planned engine needs for a moment, in bytes on one device."""

    plan: Plan
    attention: str = "flash"
    """`flash`: linear in the step's tokens; `eager`: one request's score matrix at a time, in float32."""
    prompt_logprobs: float = 0.0
    """Share of requests that ask for them."""

    def __post_init__(self) -> None:
        if self.attention not in BACKENDS:
            raise SimError(f"Unknown attention backend '{self.attention}'; known ones are {', '.join(BACKENDS)}.")
        if not 0.0 <= self.prompt_logprobs <= 1.0:
            raise SimError(f"prompt_logprobs must be from 0 to 1, not {self.prompt_logprobs}.")

    def need(self, chunks: list[PlanItem], decodes: int, context: int) -> tuple[int, str]:
        """(bytes, what takes them) of a step: rows outside the cohort, and a cohort of `decodes` over `context`."""
        made = self.plan
        request, spec = made.request, made.request.spec
        element = dtype_bytes(spec.dtype if request.dtype is None else request.dtype)
        tokens = decodes + sum(item.num_tokens for item in chunks)
        rows = decodes + sum(item.samples for item in chunks)
        layers = layer_bytes(spec, tokens, element, request.tp)
        parts = [(layers, "layers")]
        if self.attention == "eager":
            matrix = max(
                [
                    eager_decode_bytes(spec, context, request.tp),
                    *(eager_attention_bytes(spec, i.num_tokens, i.start + i.num_tokens, request.tp) for i in chunks),
                ]
            )
            parts.append((layers + matrix, "attention"))
        if rows:
            kept = 0
            if made.rules.expert_workspace:  # grown to the largest step while profiling
                kept = expert_bytes(spec, made.max_num_batched_tokens, element, request.tp)
            drawn = sampler_bytes(made.rules.sampler, rows, spec, element, request.device, tokens)
            parts.append((kept + drawn, "sampler"))
        if self.prompt_logprobs:
            asked = [item.num_tokens for item in chunks if asks_for_logprobs(item.request, self.prompt_logprobs)]
            if asked:
                v0 = made.rules.engine == "V0"
                hidden = tokens * spec.hidden * element
                wanted = prompt_logprobs_bytes(spec, sum(asked) if v0 else max(asked), element, made.rules.engine)
                parts.append((hidden + wanted, "prompt_logprobs"))
        most, what = max(parts)
        return most + cublas_bytes(request.device), what

    def unprofiled(self) -> int:
        """Bytes that the longest prompt alone needs beyond what a profiling run of its layers finds.

        What an engine that had profiled its attention and its log-probabilities would set aside.
        """
        made = self.plan
        spec, tp = made.request.spec, made.request.tp
        element = dtype_bytes(spec.dtype if made.request.dtype is None else made.request.dtype)
        tokens = min(made.max_num_batched_tokens, made.max_model_len)
        matrix = eager_attention_bytes(spec, tokens, made.max_model_len, tp) if self.attention == "eager" else 0
        logits = prompt_logprobs_bytes(spec, tokens, element, made.rules.engine) if self.prompt_logprobs else 0
        return max(matrix, logits)


@dataclass(frozen=True, slots=True)
class OomEvent:
    """A step that did not fit."""

    time_ns: int
    step: int
    need_bytes: int
    room_bytes: int
    what: str
    """The part of the step that takes most."""
    decodes: int
    prefills: tuple[tuple[int, int, int], ...]
    """(request, tokens cached before, new tokens) of every prefill in the batch."""
    requests: int
    """Running requests that end with the engine, if it ends."""


@dataclass
class MemoryGuard:
    """Watches the steps of one replica. `room` is what its device has for a moment's tensors, in bytes."""

    transients: Transients
    mode: str = "crash"
    growth_per_hour: int = 0
    """Bytes that the process, or somebody else on the device, takes beyond its share in an hour of simulated time."""
    pool_blocks: int | None = None
    """Blocks of the KV pool, where it is not the plan's."""
    events: list[OomEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SimError(f"--oom must be one of {', '.join(MODES)}, not '{self.mode}'.")

    @property
    def crashed(self) -> bool:
        return self.mode == "crash" and bool(self.events)

    @property
    def every_step(self) -> bool:
        """Whether the need can change within a run of equal decode steps, so that every step has to be seen."""
        return self.transients.attention == "eager" or self.growth_per_hour > 0

    @property
    def room(self) -> int:
        """Bytes for transients at the start: the device less all that stays."""
        made = self.transients.plan
        stays = sum(term.bytes for term in made.terms if term.name != "activations")
        blocks = made.num_blocks if self.pool_blocks is None else self.pool_blocks
        return made.request.device.memory_bytes - stays - blocks * made.block_bytes

    def check(self, plan: StepPlan, now: int) -> None:
        """Notes the step if it does not fit at `now` ns."""
        if not plan.num_rows or self.crashed:
            return
        cohort = plan.decodes
        need, what = self.transients.need(list(plan.prefills), cohort.num, cohort.context_tokens)
        room = self.room - self.growth_per_hour * now // _HOUR_NS
        if need > room:
            batch = tuple((item.request, item.start, item.num_tokens) for item in plan.prefills)
            self.events.append(OomEvent(now, plan.seq, need, room, what, cohort.num, batch, plan.num_rows))

    def watching(self, clock: Callable[[], int], also: Callable[[StepPlan], None] | None) -> Callable[[StepPlan], None]:
        """What an executor calls with each explicit plan when it is submitted."""

        def observe(plan: StepPlan) -> None:
            if also is not None:
                also(plan)
            self.check(plan, clock())

        return observe

    def stopping(self, also: Callable[[], bool] | None) -> Callable[[], bool]:
        """Whether the replica is to stop: it has crashed, or somebody else says so."""
        return lambda: self.crashed or (also is not None and also())
