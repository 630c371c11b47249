"""An executor made of a clock: it runs no tensors, it says when a step ends and who stops in it.

Steps run one after another: a step starts when the one before it has ended, or when it was submitted, whichever is
later. A step's own block moves come first and make it longer. Transfers of the host tier run beside steps: each
direction of the link takes them one after another, from the end of the copies of the step that begins them, and they
end by themselves; what a step itself moves waits for its direction to be free. A plan without rows that moves nothing
itself ends when the next transfer does.

True output lengths are known here and nowhere else; the scheduler hears of a stop when its step completes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from engine.core.types import NO_LIMIT, Finish, PlanView, StepOutcome, StepPlan, TransferEnd
from sim.errors import SimError
from sim.moves import FREE_MOVES, MoveTime
from sim.steptime import BatchShape, StepModel

__all__ = ["BEAM_CHURN", "SimExecutor", "beam_parents", "shape_of"]

BEAM_CHURN = 0.25
"""How likely a sequence of a beam is to be replaced by another one of it, each step, unless somebody says otherwise."""
_MASK = (1 << 64) - 1


def beam_parents(seed: int, group: int, step: int, width: int, churn: float) -> list[int]:
    """Which of `width` sequences each sequence of a beam continues in a step: itself, or with probability `churn` any.

    Depends on the arguments alone (splitmix64 of a counter), so that a run can be repeated, step by step or not.
    """
    parents = []
    for index in range(width):
        z = (seed * 0xD1342543DE82EF95 + group * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + index) & _MASK
        for _ in range(2):
            z = (z + 0x9E3779B97F4A7C15) & _MASK
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
            z ^= z >> 31
        drawn = (z >> 32) * 2.0**-32
        parents.append(int(drawn / churn * width) if drawn < churn else index)
    return parents


class _Group:
    """The sequences of a request with several."""

    __slots__ = ("beam", "num", "outputs")

    def __init__(self, num: int, beam: bool) -> None:
        self.num = num
        self.beam = beam
        self.outputs = 0
        """Steps in which it sampled: the first one only, if it is no beam."""


class SimExecutor:
    """Runs plans on a step-time model (a `FastExecutor` of the core).

    `stops` has the number of output tokens after which a request stops by itself, for those that stop before their
    max_tokens; a request is put there before it is scheduled, with all of its sequences (see `begin`). `observe` is
    called with each explicit plan when it is submitted, while its rows can be read. `moves` says what block moves cost;
    `beam_churn` and `seed` who continues whom in a beam.
    """

    def __init__(
        self,
        step_time: StepModel,
        *,
        moves: MoveTime = FREE_MOVES,
        beam_churn: float = BEAM_CHURN,
        seed: int = 0,
        observe: Callable[[StepPlan], None] | None = None,
    ) -> None:
        if not 0.0 <= beam_churn <= 1.0:
            raise SimError(f"beam_churn must be from 0 to 1, not {beam_churn!r}.")
        self._model = step_time
        self._needs_rows = step_time.needs_rows
        self._contexts: tuple[int, ...] = ()
        """What the decodes of the newest explicit plan had in the cache, longest first; only where the model asks."""
        self._moves = moves
        self._churn = beam_churn
        self._seed = seed
        self._observe = observe
        self._groups: dict[int, _Group] = {}
        """By the first sequence; those of a beam until it ends, others until they have begun."""
        self._leaders: dict[int, int] = {}
        """Sequence of a beam -> the first one of it."""
        self._links = [0, 0]
        """When the last store and the last load that have begun end."""
        self._transfers: dict[int, int] = {}
        """Transfers that no step has told of yet, and when they end."""
        self._told: dict[int, tuple[dict[int, int], tuple[TransferEnd, ...]]] = {}
        """Plan -> parents and transfers to tell with it."""
        self.stops: dict[int, int] = {}
        self._flight: deque[tuple[StepPlan, int, tuple[Finish, ...]]] = deque()
        """Plans submitted and not collected, when they end, and who stops in them."""
        self._view: PlanView | None = None
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
        self._view = view
        if self._observe is not None:
            self._observe(plan)
        stopped: tuple[Finish, ...] = ()
        parents: dict[int, int] = {}
        if self._groups:
            stopped, parents = self._take_group_steps(plan)
        if self.stops:
            self._follow(plan)
        start = max(self._free_at, now)
        computing = self._model.duration(self._shape(plan), plan.seq) if plan.num_rows else 0
        end = start
        ended: tuple[TransferEnd, ...] = ()
        if plan.swap_out or plan.swap_in or plan.copies or plan.transfers or plan.revoked or self._transfers:
            end = self._move(plan, start, computing)
            ended = self._ended_by(max(end + computing, start + 1))
        end = max(end + computing, start + 1)
        self._free_at = end
        if parents or ended:
            self._told[plan.seq] = parents, ended
        self._flight.append((plan, end, self._stopping(plan) + stopped))

    def collect(self) -> StepOutcome:
        if not self._flight:
            raise SimError("No step is in flight; submit one before collecting.")
        plan, end, finished = self._flight.popleft()
        for finish in finished:
            self.forget(finish.request)
        if not self._told:
            return StepOutcome(end, None, finished)
        parents, transfers = self._told.pop(plan.seq, ({}, ()))
        return StepOutcome(end, None, finished, parents or None, transfers)

    def _shape(self, plan: StepPlan) -> BatchShape:
        if not self._needs_rows:
            return shape_of(plan)
        rows = [(item.num_tokens, item.start) for item in (*plan.prefills, *plan.decodes.rows())]
        shape = BatchShape.from_rows(rows, len(plan.admitted))
        self._contexts = shape.contexts
        return shape

    # ---- block moves ----------------------------------------------------------------------------------------------

    def _move(self, plan: StepPlan, start: int, computing: int) -> int:
        """Does a step's block moves; returns when it can compute, or ends if it has nothing to compute."""
        moves, links = self._moves, self._links
        for id in plan.revoked:
            self._transfers.pop(id, None)
        at = start
        if plan.swap_out:
            at = links[0] = max(at, links[0]) + moves.store_ns(len(plan.swap_out))
        if plan.swap_in:
            at = links[1] = max(at, links[1]) + moves.load_ns(len(plan.swap_in))
        if plan.copies:
            at += moves.local_ns(len(plan.copies))
        for transfer in plan.transfers:
            took = moves.transfer_ns(transfer)
            if moves.beside:
                links[transfer.load] = max(at, links[transfer.load]) + took
                self._transfers[transfer.id] = links[transfer.load]
            else:
                at += took
                self._transfers[transfer.id] = at
        if not computing and at == start and self._transfers:
            at = max(at, min(self._transfers.values()))
        return at

    def _ended_by(self, time: int) -> tuple[TransferEnd, ...]:
        """Takes those transfers out that have ended by then, in order."""
        ended = sorted((end, id) for id, end in self._transfers.items() if end <= time)
        for _, id in ended:
            del self._transfers[id]
        return tuple(TransferEnd(id, True) for _, id in ended)

    # ---- requests with several sequences --------------------------------------------------------------------------

    def begin(self, request: int, num: int, beam: bool) -> None:
        """A request that will have `num` sequences, from its own id on; as a beam, they are reordered at each step."""
        if num > 1:
            self._groups[request] = _Group(num, beam)
            if beam:
                self._leaders.update((request + i, request) for i in range(num))

    def has_begun(self, request: int) -> bool:
        """Whether a request with several sequences has sampled for the first time."""
        group = self._groups.get(request)
        return group is None or group.outputs > 0

    def _take_group_steps(self, plan: StepPlan) -> tuple[tuple[Finish, ...], dict[int, int]]:
        """Who stops among the sequences that begin, and the beams, and who continues whom."""
        stopped: list[Finish] = []
        parents: dict[int, int] = {}
        stepped: dict[int, _Group] = {}
        for item in plan.prefills:
            first = self._leaders.get(item.request, item.request)
            if item.samples and first in self._groups:
                stepped[first] = self._groups[first]
        for first, group in stepped.items():
            ids = range(first, first + group.num)
            if group.outputs and group.beam:
                drawn = beam_parents(self._seed, first, group.outputs, group.num, self._churn)
                parents.update(zip(ids, (first + parent for parent in drawn), strict=True))
            group.outputs += 1
            stopped += [Finish(id, "stop") for id in ids if self.stops.get(id) == group.outputs]
            if not group.beam:
                del self._groups[first]
        return tuple(stopped), parents

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
        ends += self._model.decode_ends(rows, context, turns, newest.seq + 1, last, self._contexts)
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

    # ---- GlideExecutor --------------------------------------------------------------------------------------------

    def next_stop(self) -> int:
        heap = self._due_heap
        while heap and heap[0] not in self._due:
            heapq.heappop(heap)
        return heap[0] if heap else NO_LIMIT

    def stops_in(self, seq: int) -> list[Finish]:
        due = self._due.pop(seq, None)
        stopped = [] if due is None else [Finish(request, "stop") for request in due]
        for finish in stopped:
            self.forget(finish.request)
        return stopped

    def glide(self, rows: int, context: int, turns: int, seq: int, now: int, until: int) -> list[int]:
        start = max(self._free_at, now)
        ends = self._model.ends_until(rows, context, turns, seq, start, until)
        self._free_at = ends[-1]
        return ends

    # ---- who stops when -------------------------------------------------------------------------------------------

    def forget(self, request: int) -> None:
        """The request has ended: nothing is due for it any more."""
        self.stops.pop(request, None)
        self._unschedule(request)
        self._groups.pop(request, None)
        self._leaders.pop(request, None)

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
        repeats the one before, everybody who runs has a row. Who was preempted by a plan that had no rows does not.
        """
        due = self._due.pop(plan.seq, None)
        if due is None:
            return ()
        if repeated:
            view = self._view
            for request in [request for request in due if view is None or not view.table(request)]:
                del due[request], self._stop_seq[request]
        else:
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
