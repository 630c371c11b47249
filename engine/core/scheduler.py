"""Decides what runs in the next step, as vLLM V1 does: one token budget for prefill and decode, running requests
first, chunked prefill, recompute when memory runs out.

The loop of a caller, for one or two steps in flight (see drive.py):

    plan = schedule(now)            # decides; blocks are taken and promised
    ... the executor runs the plan ...
    events = complete(plan, outcome)

Plans are completed in the order in which they were made. `horizon` says for how many further completions nothing is
left to decide, and `advance` does all of them at once, with the same result.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence

from engine.core import admitting, checks, completing, fastforward, intake, leaving, placing, tiers, views
from engine.core.asking import Policies
from engine.core.cohort import DecodeCohort, by_key
from engine.core.contiguous import ContiguousManager
from engine.core.eviction import EVICTIONS
from engine.core.fastforward import Horizon
from engine.core.flight import CohortRows, InFlight
from engine.core.host import HostBlocks, Transfers
from engine.core.manager import BlockManager
from engine.core.policies import MIXED, Batch, Eviction, RequestView, StepView
from engine.core.prefixstats import PrefixStats
from engine.core.presets import SchedulerConfig
from engine.core.request import Group, Request
from engine.core.types import (
    FOR_KV,
    FOR_NOTHING,
    FOR_POLICY,
    NO_LIMIT,
    BlockCopy,
    BlockHash,
    BlockId,
    Finish,
    PlanItem,
    RequestSpec,
    StepEvents,
    StepOutcome,
    StepPlan,
    Transfer,
    Usage,
)
from engine.core.waiting import WaitingQueue

__all__ = ["CohortRows", "Horizon", "Scheduler"]


def _eviction(config: SchedulerConfig) -> Eviction | None:
    """A user's own, or the one that is named; None for lru, which needs none."""
    for policy in config.policies:
        if isinstance(policy, Eviction):
            return policy
    return None if config.eviction_policy == "lru" else EVICTIONS[config.eviction_policy]()


def _manager(config: SchedulerConfig) -> BlockManager:
    if config.allocator == "paged":
        return BlockManager(
            config.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            config.free_order,
            config.prefix_index,
            _eviction(config),
        )
    return ContiguousManager(
        config.num_blocks,
        config.block_size,
        config.allocator,
        config.placement,
        config.max_model_len,
        config.num_lookahead_tokens,
    )


class Scheduler:
    """Requests in, step plans out. Deterministic; knows no clock and no executor."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.manager = _manager(config)
        self._cohort = DecodeCohort(config.block_size, config.num_lookahead_tokens)
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        """All requests that hold blocks, in order."""
        self._chunks: list[Request] = []
        """Running requests outside the cohort that have tokens to compute, in order."""
        self._seq = 0
        self._done = 0
        self._flight: deque[InFlight] = deque()
        self._sched_tokens = 0
        """Sum of sched over running requests."""
        self._filled = 0
        """Fills of cohort members up to this plan are published (same_step `share`)."""
        self._writing: dict[BlockHash, int] = {}
        """Content that plans in flight write (same_step `defer`)."""
        self._new_writes: list[BlockHash] = []
        self.run_kept_free: list[int] = []
        """Kept free blocks after each plan of the last `advance`."""
        self.run_unreachable: list[int] = []
        """`reserved_cannot` after each plan of the last `advance`, where blocks are reserved; otherwise empty."""
        self._sampled: dict[int, Mapping[int, int]] = {}
        """What the latest completed plans sampled, by plan: as far back as a block takes to fill, and a little more."""
        self._lag = 0
        """Plans that were in flight when the newest plan was made."""
        self.waits_for = FOR_NOTHING
        """Why the first of the waiting was not admitted to the newest plan (FOR_NOTHING: nobody waits)."""
        self.headroom = NO_LIMIT
        """Where it was refused by an admission policy: the free blocks beyond those that it needs."""
        self.num_preempted_tokens = 0
        """Tokens whose blocks preemptions have taken so far."""
        self.num_recomputed_tokens = 0
        """Tokens that plans so far compute although their request had them in its blocks before it was preempted."""
        self._threshold = config.long_prefill_token_threshold
        """Most prompt tokens of one request in this step; 0: no limit."""
        self._groups: dict[int, Group] = {}
        """Requests with several sequences, by the id of the first, until all of those have ended."""
        self._num_beams = 0
        self._seats_kept = 0
        """Sequences that running requests are going to have beside their first."""
        self._rejected: list[Finish] = []
        """Requests that the plan being made has given up."""
        self.host = HostBlocks(config.num_host_blocks, config.host_tier) if config.num_host_blocks else None
        self.transfers: Transfers | None = None
        """Of the host tier, where there is one."""
        self._loading: dict[int, Request] = {}
        """Running requests that wait for a load."""
        self._ripe: list[tuple[BlockHash, BlockId]] = []
        """Content that plans so far have written, and that may be stored on the host."""
        self._plan_loads: list[tuple[int, int]] = []
        self._swap_in: list[BlockCopy] = []
        self._new_transfers: list[Transfer] = []
        self._revoked: list[int] = []
        """Parts of the plan being made."""
        if config.host_tier and self.host is not None:
            self.transfers = Transfers(self.host, self.manager.pool, config.transfer_lease_ns)
            self.manager.new_keys = []
        self.prefix_stats: PrefixStats | None = None
        if config.prefix_stats:
            tier = self.host if config.host_tier else None
            self.prefix_stats = PrefixStats(config.block_size, self.manager.index, tier)
        self.manager.stats = self.prefix_stats
        self._indexes_all = config.host_tier or self.manager.ranked is not None
        """Whether content that nobody else can have is published like any other."""
        self._share = config.same_step == "share"
        self._defer = config.same_step == "defer"
        # A contiguous run is promised to its request as a whole anyway.
        self._reserve = config.admission_reserve == "max_tokens" and config.allocator == "paged"
        self._policies = Policies(config)
        self._dynamic = self._policies.dynamic is not None
        self._window = 0 if self._policies.dynamic is None else self._policies.dynamic.window
        self._chosen: Request | None = None
        """Whom a dynamic order named last, what it was told then, and up to when it promised to name it again."""
        self._chosen_of = (0, 0)
        self._chosen_until = 0
        self._plain_admission = self._policies.plain_admission
        self._plain_victim = self._policies.plain_victim
        self._plain_batching = self._policies.plain_batching
        self._keeps_account = self._policies.keeps_account
        self._batch: Batch = MIXED
        """What the newest plan was to hold."""
        self._turns: dict[int, int] = {}
        """In the step that is being decided: who has its place before whom (see `_turn`). Empty: by key alone."""

    # ---- requests ----

    def add(self, spec: RequestSpec, now: int) -> int:
        """Put a request into the queue; returns its id. The ids that follow are those of its other sequences.

        Raises:
            InvalidRequest: it can never be served. It is refused, and takes no id.
        """
        return intake.add(self, spec, now)

    def abort(self, id: int) -> list[Finish]:
        """Forget a request with all its sequences, or one sequence of several, wherever it is; tokens being sampled
        for it are dropped. A beam goes as a whole. Empty: it was not there.
        """
        request = self._requests.get(id)
        group = self._groups.get(id) if request is None else request.group
        if group is not None and (group.beam or id in self._groups):
            return [leaving.end(self, member, "abort") for member in list(group.members)]
        return [] if request is None else [leaving.end(self, request, "abort")]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._flight)

    @property
    def last_seq(self) -> int:
        """Number of the newest plan."""
        return self._seq

    # ---- what others may read

    def table(self, id: int) -> Sequence[BlockId]:
        """The block table of a running request."""
        return self._requests[id].table

    def num_output_tokens(self, id: int) -> int:
        """Outputs of completed steps."""
        request = self._requests[id]
        return self._known(request) - request.num_prompt

    def view_of(self, request: Request, oracle: bool = False) -> RequestView:
        """What a policy may know of a request; `oracle`: one that says that it asks for the true length."""
        sched = request.base + self._seq if request.in_cohort else request.sched
        return self._view(
            request.id,
            request.spec,
            oracle,
            self._known(request) - request.num_prompt,
            sched,
            len(request.table),
            request.epoch,
        )

    @staticmethod
    def _view(
        id: int, spec: RequestSpec, oracle: bool, outputs: int = 0, computed: int = 0, blocks: int = 0, epoch: int = 0
    ) -> RequestView:
        return RequestView(
            id,
            spec.arrival,
            spec.num_prompt_tokens,
            spec.max_tokens,
            spec.priority,
            spec.deadline,
            spec.tenant,
            outputs,
            computed,
            blocks,
            epoch,
            spec.predicted_tokens,
            spec.oracle_tokens if oracle else 0,
        )

    def num_blocks_taken(self, steps: int) -> list[int]:
        """Blocks that the cohort as it is will take in each of the next `steps` plans."""
        return [self._cohort.num_crossing(self._seq + step) for step in range(1, steps + 1)]

    def decode_rows(self, seq: int) -> list[PlanItem]:
        """The cohort rows of plan `seq`, in order. Only right after `schedule` made that plan."""
        return views.decode_rows(self, seq)

    def scheduled_order(self, plan: StepPlan) -> list[PlanItem]:
        """All rows in the order in which they got their place. Only right after `schedule` made that plan."""
        return views.scheduled_order(self, plan)

    def usage(self) -> Usage:
        """Where every slot is, once the plans so far have run."""
        return Usage(*self.usage_row())

    def usage_row(self) -> tuple[int, ...]:
        """The same as a plain tuple, in the order of Usage."""
        return views.usage_row(self)

    # ---- a step ----

    def schedule(self, now: int) -> StepPlan:
        """Decide the next step. A plan without rows means that nothing can run now; it is not in flight."""
        seq = self._seq + 1
        preempted: list[Request] = []
        items: list[PlanItem] = []
        self.waits_for = FOR_NOTHING
        self.headroom = NO_LIMIT
        if not self.config.long_prefill_threshold_alone:
            others = len(self._running) + len(self._waiting) > 1
            self._threshold = self.config.long_prefill_token_threshold if others else 0
        if self.host is not None:
            tiers.begin_step(self, now)
        batch = MIXED if self._plain_batching else self._choose_batch(now)
        placing.place_running(self, seq, batch, items, preempted)
        num_decodes = self._cohort.num  # after preemptions
        budget = self.config.max_num_batched_tokens - num_decodes
        for item in items:
            budget -= item.num_tokens
        admitted: list[int] = []
        blocked = False
        if self._waiting and not preempted and not self._rejected:
            blocked = not batch.admit or admitting.admit(self, now, budget, batch.whole_prompts, items, admitted)
            if not batch.admit and not self.waits_for:
                self.waits_for = FOR_POLICY  # or why the head that the policy looked at does not fit
        elif self._waiting:
            self.waits_for = FOR_KV
        if batch is not MIXED and self._chunks and not (num_decodes or items or preempted):
            # No policy can stall those that run.
            placing.place_running(self, seq, batch._replace(decodes=True, prefills=True), items, preempted)
        runs = num_decodes > 0 or bool(items)
        if self.transfers is not None:
            runs = tiers.must_run(self, runs, now)
        if not runs:
            plan = StepPlan(0, now, (), CohortRows(self, 0, 0, 0), (), tuple(r.id for r in preempted), (), False)
            plan.rejected = self._take_rejected()
            return plan
        return self._commit_plan(seq, now, num_decodes, items, admitted, preempted, blocked)

    def _take_rejected(self) -> tuple[Finish, ...]:
        rejected = tuple(self._rejected)
        if rejected:
            self._rejected = []
        return rejected

    def _choose_batch(self, now: int) -> Batch:
        """What the batching policy wants the next step to hold."""
        policies = self._policies
        running = len(self._running)
        ones = sum(1 for request in self._chunks if request.known + request.pending - request.sched == 1)
        fits = policies.batching.look_at_head and admitting.head_fits(self, now)
        decoding = self._cohort.num + ones
        state = StepView(len(self._waiting), running, decoding, len(self._chunks) - ones, fits, now)
        batch = policies.step(state)
        return batch if running else batch._replace(admit=True)

    def _plan_item(self, request: Request, num: int, seq: int, items: list[PlanItem]) -> None:
        """`request` computes its next `num` tokens in plan `seq`, as a row of its own."""
        start = request.sched
        if start < request.computed:
            self.num_recomputed_tokens += min(start + num, request.computed) - start
        samples = start + num == request.known + request.pending
        items.append(PlanItem(request.id, request.epoch, start, num, samples))
        request.sched = start + num
        self._sched_tokens += num
        if self._share:
            request.written = max(request.written, min(request.sched, request.known))
            self.manager.publish(request, request.written)
        elif self._defer:
            self._note_writes(request, start)

    def _seats(self, request: Request) -> int:
        """How many running sequences `request` counts for."""
        return request.spec.n if request.unforked else 1

    def _most_tokens(self, num_prompt: int, cap: int) -> int:
        """Slots that a request takes at most: the last output needs none."""
        return self._with_lookahead(num_prompt + cap - 1)

    def _with_lookahead(self, num_tokens: int) -> int:
        return min(num_tokens + self.config.num_lookahead_tokens, self.config.max_model_len)

    def _commit_plan(
        self,
        seq: int,
        now: int,
        num_decodes: int,
        items: list[PlanItem],
        admitted: list[int],
        preempted: list[Request],
        blocked: bool,
    ) -> StepPlan:
        """The plan is made: count it, let finished prefills join the cohort and last rows leave it."""
        cohort = self._cohort
        self._seq = seq
        self._lag = len(self._flight)
        self._filled = seq - self._lag
        context = cohort.context_tokens
        cohort.advance(1)
        self._sched_tokens += num_decodes
        joined: list[tuple[int, int, int]] = []
        plan = StepPlan(
            seq,
            now,
            tuple(items),
            CohortRows(self, seq, num_decodes, context),
            tuple(admitted),
            tuple(request.id for request in preempted),
            (),
            not (items or preempted or self._chunks or self._rejected or self.config.num_lookahead_tokens)
            and (self.transfers is None or not tiers.is_busy(self))
            and (self.manager.ranked is None or not cohort.num_sharing)
            and self._stays_blocked(blocked),
        )
        plan.copies = tuple(self.manager.end_step())
        plan.rejected = self._take_rejected()
        if self.host is not None:
            tiers.end_step(self, plan)
        flight = InFlight(plan)
        if self._defer:
            flight.pending_keys = self._new_writes
            self._new_writes = []
        self._flight.append(flight)
        if num_decodes:
            self._retire_capped(seq)
        for item in items:
            if not item.samples:
                continue
            request = self._requests[item.request]
            request.pending += 1
            if request in self._chunks:
                self._chunks.remove(request)
            outputs = request.known + request.pending - request.num_prompt
            if outputs > 1:
                flight.resumed.append((request.id, request.sample_seq))
            request.sample_seq = seq
            if outputs >= request.cap or request.unforked or request.is_beam:
                request.waits = True
            else:
                cohort.join(request, seq)
                request.told = seq
                joined.append((request.id, request.epoch, outputs))
        if joined:
            plan.joined = tuple(joined)
        return plan

    def _stays_blocked(self, blocked: bool) -> bool:
        """Whether nobody can be admitted as long as nothing finishes, arrives, or frees a block.

        With every further token of the cohort, blocks get fewer and the running stay as many, so a head that was
        refused is refused again; unless generated tokens are published that it could hit, or blocks that are lost to
        the cache make another one the head.
        """
        if not self._waiting:
            return True
        full = len(self._running) >= self.config.max_num_seqs
        return blocked and (full or not (self._cohort.num_sharing or self._dynamic))

    def _retire_capped(self, seq: int) -> None:
        """Members that sample their last token in plan `seq` take no part in later ones."""
        for request in self._cohort.capped(seq):
            leaving.leave_cohort(self, request)
            request.waits = True
            request.row_seq = seq

    # ---- leaving, ending

    def _known(self, request: Request) -> int:
        return request.base + max(self._done, request.floor) + 1 if request.in_cohort else request.known

    def _insert_running(self, request: Request) -> None:
        running = self._running
        if not running or running[-1].key < request.key:
            running.append(request)
        else:
            insort(running, request, key=by_key)

    def _remove_running(self, request: Request) -> None:
        running = self._running
        if running[-1] is request:
            running.pop()
        else:
            del running[bisect_left(running, request.key, key=by_key)]

    def _insert_chunk(self, request: Request) -> None:
        insort(self._chunks, request, key=by_key)

    # ---- same-step sharing

    def _publish_fills(self, upto: int) -> None:
        """Members that filled a block in a plan up to `upto` publish it."""
        for seq in range(self._filled + 1, upto + 1):
            for request in self._cohort.filling(seq):
                self._catch_up(request)
                self.manager.publish(request, request.base + seq)

    def _note_writes(self, request: Request, start: int) -> None:
        """Remember which contents the plan being made writes, so that nobody computes them a second time."""
        size = self.config.block_size
        known = min(request.sched, request.known)  # a token that is still being sampled has no content yet
        for i in range(start // size, min(known // size, request.shared_blocks)):
            key = request.block_key(i)
            self._writing[key] = self._writing.get(key, 0) + 1
            self._new_writes.append(key)

    def _is_being_written(self, request: Request, num_hits: int) -> bool:
        """Whether the first block that `request` misses is being computed for another."""
        limit = min((request.known - 1) // self.config.block_size, request.shared_blocks)
        return num_hits < limit and request.block_key(num_hits) in self._writing

    # ---- the end of a step

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> StepEvents:
        """The oldest plan in flight has run.

        Raises:
            InvariantError: another plan is older.
        """
        return completing.complete(self, plan, outcome)

    def _catch_up(self, request: Request) -> None:
        """Tell the identity of a cohort member what completed steps have sampled for it since it was told last.

        That is as often as it fills a block or leaves: a step need not touch those that do neither.
        """
        identity = request.identity
        if identity is not None and self._sampled:
            sampled = self._sampled
            id = request.id
            for seq in range(request.told + 1, self._done + 1):
                tokens = sampled.get(seq)
                if tokens is not None and id in tokens:
                    identity.append(tokens[id])
        if request.told < self._done:
            request.told = self._done

    def digest(self) -> str:
        """A fingerprint of everything that decides what happens next (see checks.py)."""
        return checks.digest(self)

    def check(self) -> None:
        """Every promise about requests and blocks, by walking all of them (see checks.py).

        Raises:
            InvariantError: with the state that breaks it.
        """
        checks.check(self)

    # ---- many steps at once (see fastforward.py)

    def horizon(self, finish_bound: int) -> Horizon:
        """For how many completions from now on nothing is to be decided, and what ends that.

        Each is followed by a plan that is the last one again, one token later. `finish_bound`: as many completions
        surely meet no stop. Policies add a limit in time: `stable_until`.
        """
        return fastforward.horizon(self, finish_bound)

    def stable_until(self, now: int) -> int:
        """The time in ns up to which all policies promise to answer as they did."""
        return self._policies.stable_until(now)

    def advance(self, ends: Sequence[int]) -> list[StepPlan]:
        """So many completions at once, at these times in ns, each followed by the next plan of the same cohort.

        At most as many as `horizon` says. Returns the plans that are in flight now, oldest first.
        """
        return fastforward.advance(self, ends)
