"""Who loses its blocks when memory runs out: what `--victim-policy` names.

Among equals, the last in the order.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.policies import RequestView, Victim
from engine.core.types import NO_LIMIT

__all__ = ["VICTIMS", "LastIn", "LeastWorkLost", "LowestPriority", "MostMemory"]


class LastIn(Victim):
    """The last in the order: under FCFS, the last that came. What vLLM does."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def choose(self, candidates: Sequence[RequestView]) -> int:
        return candidates[-1].id


class LowestPriority(Victim):
    """The least urgent (the largest priority value), whatever the order of service is."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def choose(self, candidates: Sequence[RequestView]) -> int:
        return max(reversed(candidates), key=lambda view: view.priority).id


class MostMemory(Victim):
    """The one with the most blocks: few preemptions, each of which loses much."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def choose(self, candidates: Sequence[RequestView]) -> int:
        return max(reversed(candidates), key=lambda view: view.num_blocks).id


class LeastWorkLost(Victim):
    """The one with the fewest computed tokens, which are what has to be computed again."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def choose(self, candidates: Sequence[RequestView]) -> int:
        return min(reversed(candidates), key=lambda view: view.num_computed_tokens).id


VICTIMS: dict[str, type[Victim]] = {
    "last-in": LastIn,
    "lowest-priority": LowestPriority,
    "most-memory": MostMemory,
    "least-work-lost": LeastWorkLost,
}
"""The victim policies by name."""
