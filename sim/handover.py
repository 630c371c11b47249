"""Prompts that are computed on one replica and decoded on another: the link between, and the executor of the second.

As with vLLM's connectors, the second replica takes blocks for the whole prompt, finds all of it but the last token
computed, computes that one and generates the whole output. Its core does not know: it plans prefills as ever, and they
cost no more than that last token. A request that is preempted there is computed again there, at the full price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.types import PlanItem, PlanView, StepOutcome, StepPlan
from sim.errors import SimError
from sim.executor import SimExecutor

__all__ = ["KvLink", "ReceivingExecutor"]


@dataclass(frozen=True, slots=True)
class KvLink:
    """A network port of a replica: prompts come over it one after another."""

    bytes_per_s: float = 0.0
    """0: without end."""
    latency_ns: int = 0
    """From the end of sending to the end of receiving."""

    def __post_init__(self) -> None:
        if not 0 <= self.bytes_per_s < float("inf") or self.latency_ns < 0:
            raise SimError(f"A link cannot have {self.bytes_per_s} bytes/s and a latency of {self.latency_ns} ns.")

    def sending_ns(self, num_bytes: int) -> int:
        """How long the port is busy with so many bytes."""
        return round(num_bytes / self.bytes_per_s * 1e9) if self.bytes_per_s else 0


class ReceivingExecutor:
    """A SimExecutor to which the prompts of requests in `received` cost their last token alone."""

    def __init__(self, executor: SimExecutor) -> None:
        self.received: set[int] = set()
        self._executor = executor

    def submit(self, plan: StepPlan, view: PlanView, now: int) -> None:
        if any(self._has_come(item) for item in plan.prefills):
            plan = self._lighter(plan)
        self._executor.submit(plan, view, now)

    def _has_come(self, item: PlanItem) -> bool:
        """Whether the row's keys and values have come, but for the last token's; a preempted request's are gone."""
        return item.request in self.received and not item.epoch

    def collect(self) -> StepOutcome:
        return self._executor.collect()

    def finish_bound(self) -> int:
        return self._executor.finish_bound()

    def preview(self, turns: int) -> Sequence[int]:
        return self._executor.preview(turns)

    def advance(self, ends: Sequence[int], plans: Sequence[StepPlan]) -> None:
        self._executor.advance(ends, plans)

    def forget(self, request: int) -> None:
        self.received.discard(request)
        self._executor.forget(request)

    def _lighter(self, plan: StepPlan) -> StepPlan:
        """The plan as the device has to compute it: of prompts that have come, only the last token."""
        items = []
        for item in plan.prefills:
            if not self._has_come(item):
                items.append(item)
            elif item.samples:
                items.append(PlanItem(item.request, item.epoch, item.start + item.num_tokens - 1, 1, True))
        lighter = StepPlan(
            plan.seq, plan.now, tuple(items), plan.decodes, plan.admitted, plan.preempted, plan.joined, plan.steady
        )
        lighter.copies, lighter.swap_out, lighter.swap_in = plan.copies, plan.swap_out, plan.swap_in
        lighter.transfers, lighter.revoked, lighter.loading = plan.transfers, plan.revoked, plan.loading
        return lighter
