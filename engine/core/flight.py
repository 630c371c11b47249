"""Plans that were made and not completed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.request import Request
from engine.core.types import BlockHash, PlanItem, StepPlan

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["CohortRows", "InFlight"]


class CohortRows:
    """The decode rows of one plan."""

    __slots__ = ("_scheduler", "_seq", "context_tokens", "num")

    def __init__(self, scheduler: Scheduler, seq: int, num: int, context_tokens: int) -> None:
        self._scheduler = scheduler
        self._seq = seq
        self.num = num
        self.context_tokens = context_tokens

    def rows(self) -> list[PlanItem]:
        return self._scheduler.decode_rows(self._seq) if self.num else []


class InFlight:
    """A plan that was made and not completed, and what its completion has to see to."""

    __slots__ = ("detached", "pending_keys", "plan", "resumed")

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.detached: list[Request] = []
        """Requests that were cohort rows of this plan and have left the cohort since, but still want its token."""
        self.pending_keys: list[BlockHash] = []
        """Content that this plan writes, where same_step is `defer`."""
        self.resumed: list[tuple[int, int]] = []
        """(request, the plan that sampled for it before), of rows that sample after a pause."""
