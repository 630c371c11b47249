"""An executor made of a clock: it runs no tensors, it says when a step ends and who stops in it.

Steps run one after another: a step starts when the one before it has ended, or when it was submitted, whichever is
later. True output lengths are known here and nowhere else; the scheduler hears of a stop when its step completes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from engine.core.types import NO_LIMIT, Finish, PlanView, StepOutcome, StepPlan
from sim.errors import SimError
from sim.steptime import BatchShape, StepTime

__all__ = ["SimExecutor", "shape_of"]


class SimExecutor:
    """Runs plans on a step-time model (a `FastExecutor` of the core).

    `stops` has the number of output tokens after which a request stops by itself, for those that stop before their
    max_tokens; a request is put there before it is scheduled. `observe` is called with each explicit plan when it is
    submitted, while its rows can be read.
    """

    def __init__(self, step_time: StepTime, *, observe: Callable[[StepPlan], None] | None = None) -> None:
        self._model = step_time
        self._observe = observe
        self.stops: dict[int, int] = {}
        self._flight: deque[tuple[StepPlan, int, tuple[Finish, ...]]] = deque()
        """Plans submitted and not collected, when they end, and who stops in them."""
        self._free_at = 0
        """When the newest plan ends."""
        self._preview: list[int] = []
        """When the plans in flight end, and the repetitions after them."""
        self._due: dict[int, dict[int, None]] = {}
        """Requests that stop in a plan, by its number, in the order in which that became known."""
        self._due_heap: list[int] = []
        self._stop_seq: dict[int, int] = {}
        """The plan in which a request stops, as long as it keeps decoding."""

    # ---- Executor -------------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan, view: PlanView, now: int) -> None:
        if self._observe is not None:
            self._observe(plan)
        if self.stops:
            self._follow(plan)
        start = self._free_at
        if now > start:
            start = now
        self._free_at = end = start + self._model.duration(shape_of(plan), plan.seq)
        self._flight.append((plan, end, self._stopping(plan)))

    def collect(self) -> StepOutcome:
        if not self._flight:
            raise SimError("No step is in flight; submit one before collecting.")
        _, end, finished = self._flight.popleft()
        for finish in finished:
            self.forget(finish.request)
        return StepOutcome(end, None, finished)

    # ---- FastExecutor ---------------------------------------------------------------------------------------------

    def finish_bound(self) -> int:
        oldest = self._flight[0][0].seq
        for plan, _, finished in self._flight:
            if finished:
                return plan.seq - oldest
        heap = self._due_heap
        while heap and heap[0] not in self._due:
            heapq.heappop(heap)
        return heap[0] - oldest if heap else NO_LIMIT

    def preview(self, turns: int) -> Sequence[int]:
        newest, last, _ = self._flight[-1]
        rows = newest.decodes.num
        context = newest.decodes.context_tokens + rows
        ends = [end for _, end, _ in self._flight]
        ends += self._model.decode_ends(rows, context, turns, newest.seq + 1, last)
        self._preview = ends
        return ends[:turns]

    def advance(self, ends: Sequence[int], plans: Sequence[StepPlan]) -> None:
        done = len(ends)
        known = self._preview
        # With two steps in flight, the newer one may still be in flight afterwards, and its stops were told already.
        told = {plan.seq: finished for plan, _, finished in self._flight}
        self._flight.clear()
        for plan, end in zip(plans, known[done : done + len(plans)], strict=True):
            finished = told[plan.seq] if plan.seq in told else self._stopping(plan, repeated=True)
            self._flight.append((plan, end, finished))
            self._free_at = end

    # ---- who stops when -------------------------------------------------------------------------------------------

    def forget(self, request: int) -> None:
        """The request has ended: nothing is due for it any more."""
        self.stops.pop(request, None)
        self._unschedule(request)

    def _follow(self, plan: StepPlan) -> None:
        """Keep the calendar of stops in step with who decodes from now on."""
        for request in plan.preempted:
            # What a plan in flight samples for it still counts.
            if self._stop_seq.get(request, 0) >= plan.seq:
                self._unschedule(request)
        for request, _, outputs in plan.joined:
            stop = self.stops.get(request)
            if stop is None:
                continue
            self._unschedule(request)
            # It has `outputs` tokens after this plan, and one more after each plan that follows.
            seq = plan.seq + max(0, stop - outputs)
            self._stop_seq[request] = seq
            due = self._due.get(seq)
            if due is None:
                self._due[seq] = due = {}
                heapq.heappush(self._due_heap, seq)
            due[request] = None

    def _unschedule(self, request: int) -> None:
        seq = self._stop_seq.pop(request, 0)
        due = self._due.get(seq)
        if due is not None and request in due:
            del due[request]
            if not due:
                del self._due[seq]

    def _stopping(self, plan: StepPlan, repeated: bool = False) -> tuple[Finish, ...]:
        """Those due in this plan that have a row in it.

        A request may lose its turn to a prefill before it; it is told of again when it joins again. In a plan that
        repeats the one before, everybody has a row.
        """
        due = self._due.pop(plan.seq, None)
        if due is None:
            return ()
        if not repeated:
            rows = {item.request for item in plan.prefills if item.samples}
            if not due.keys() <= rows:
                rows.update(item.request for item in plan.decodes.rows())
            for request in due.keys() - rows:
                del due[request], self._stop_seq[request]
        return tuple(Finish(request, "stop") for request in due)


def shape_of(plan: StepPlan) -> BatchShape:
    """What of a plan decides how long it takes. Only prefill rows count for `max_context`."""
    decodes = plan.decodes
    rows = decodes.num
    if not plan.prefills:
        return BatchShape(rows, rows, decodes.context_tokens, 0, rows)
    n, ones, context, work, longest = rows, rows, decodes.context_tokens, 0, 0
    for item in plan.prefills:
        q, c = item.num_tokens, item.start
        n += q
        if q == 1:
            ones += 1
            context += c
        else:
            work += q * c + q * (q + 1) // 2
        if q + c > longest:
            longest = q + c
    return BatchShape(n, ones, context, work, rows + len(plan.prefills), len(plan.admitted), longest)
