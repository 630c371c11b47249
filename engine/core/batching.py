"""What a step holds, prefills and decodes: what `--batching` names."""

from __future__ import annotations

from typing import ClassVar

from engine.core.policies import MIXED, Batch, Batching, StepView
from engine.core.types import NO_LIMIT

__all__ = ["BATCHINGS", "DecodeFirst", "Mixed", "PrefillFirst", "Static"]


class Mixed(Batching):
    """One token budget for all, in order: chunks of prompts share steps with decodes. vLLM V1."""

    look_at_head: ClassVar[bool] = False

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def step(self, state: StepView) -> Batch:
        return MIXED


class DecodeFirst(Batching):
    """All decodes get their token before any prompt gets a chunk, wherever they stand in the order.

    Decodes may take blocks from prompts in chunks, and never the other way round. Under FCFS most decodes stand before
    most chunks anyway; under other orders this keeps the time between tokens apart from who is urgent.
    """

    look_at_head: ClassVar[bool] = False

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def step(self, state: StepView) -> Batch:
        return Batch(decodes_first=True)


class PrefillFirst(Batching):
    """As long as a waiting request can be admitted, steps compute whole prompts and no decodes. vLLM V0.

    Decodes keep their blocks through such steps, and go on when nobody can be admitted any more. A prompt longer than a
    step goes on before anything else does. Such a step takes nobody's blocks: whoever is admitted gets all its prompt's
    blocks at once. Decode steps preempt as usual, and admit nobody.
    """

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def step(self, state: StepView) -> Batch:
        if state.head_fits or state.num_prefilling:
            return Batch(decodes=False, whole_prompts=True)
        return Batch(admit=False, whole_prompts=True)


class Static(Batching):
    """A batch is admitted only when nothing runs, and runs until its last request has ended.

    Requests that end before leave their blocks; the places that they leave in the batch stay empty.
    """

    look_at_head: ClassVar[bool] = False

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def step(self, state: StepView) -> Batch:
        return Batch(admit=False)


BATCHINGS: dict[str, type[Batching]] = {
    "mixed": Mixed,
    "decode-first": DecodeFirst,
    "prefill-first": PrefillFirst,
    "static": Static,
}
"""The batching policies by name."""
