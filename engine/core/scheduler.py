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

from engine.core import checks, fastforward, groups, tiers
from engine.core.asking import Policies
from engine.core.cohort import DecodeCohort, by_key
from engine.core.contiguous import ContiguousManager
from engine.core.errors import InvalidRequest, InvariantError
from engine.core.eviction import EVICTIONS
from engine.core.fastforward import Horizon
from engine.core.flight import CohortRows, InFlight
from engine.core.host import HostBlocks, Transfers
from engine.core.manager import BlockManager
from engine.core.policies import MIXED, Batch, Eviction, RequestView, StepView
from engine.core.prefixstats import PrefixStats
from engine.core.presets import SchedulerConfig
from engine.core.request import FINISHED, RUNNING, WAITING, Group, Request
from engine.core.types import (
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

_NO_TURN = 2


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
        self.prefix_stats = PrefixStats(config.block_size) if config.prefix_stats else None
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
        config = self.config
        if spec.num_prompt_tokens < 1:
            raise InvalidRequest(f"the prompt has {spec.num_prompt_tokens} tokens; it needs at least 1")
        if spec.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {spec.max_tokens}; it must be at least 1")
        if spec.num_prompt_tokens >= config.max_model_len:
            raise InvalidRequest(
                f"the prompt has {spec.num_prompt_tokens} tokens, which leaves no room for an output "
                f"within max_model_len = {config.max_model_len}"
            )
        if not 1 <= spec.n <= config.max_num_seqs:
            raise InvalidRequest(f"n is {spec.n}; it must be from 1 to max_num_seqs = {config.max_num_seqs}")
        if spec.n > 1 and self._reserve:
            raise InvalidRequest(f"n is {spec.n}, but admission_reserve 'max_tokens' is for requests with n = 1")
        if spec.beam and spec.n > 1 and not self._plain_batching:
            raise InvalidRequest("a beam needs batching 'mixed'; other ways of batching would tear it apart")
        cap = self.manager.limit(spec, min(spec.max_tokens, config.max_model_len - spec.num_prompt_tokens))
        blocks = -(-self._most_tokens(spec.num_prompt_tokens, cap) // config.block_size)
        if blocks > config.num_blocks:
            raise InvalidRequest(
                f"{spec.num_prompt_tokens} prompt and up to {cap} output tokens need {blocks} blocks of "
                f"{config.block_size}, and the pool has {config.num_blocks}; it can never fit"
            )
        if spec.beam and spec.n * blocks > config.num_blocks:
            raise InvalidRequest(
                f"a beam of {spec.n} sequences needs up to {spec.n} x {blocks} blocks of {config.block_size} at once, "
                f"and the pool has {config.num_blocks}; it can never fit"
            )
        identity = spec.identity
        shared = 0 if identity is None else identity.shared_tokens // config.block_size
        id = self._next_id
        key = (*self._policies.key(self._view(id, spec, self._policies.order.oracle)), spec.arrival, id)
        request = Request(id, spec, cap, shared, key)
        if self._indexes_all:
            # What is copied to the host, or given up, must not depend on who can be known to share it.
            request.shared_blocks = NO_LIMIT
            request.publishes_output = True
        if spec.n > 1:
            groups.begin(self, request)
        self._next_id += spec.n
        self._requests[id] = request
        self._waiting.push(request)
        return id

    def abort(self, id: int) -> list[Finish]:
        """Forget a request with all its sequences, or one sequence of several, wherever it is; tokens being sampled
        for it are dropped. A beam goes as a whole. Empty: it was not there.
        """
        request = self._requests.get(id)
        group = self._groups.get(id) if request is None else request.group
        if group is not None and (group.beam or id in self._groups):
            return [self._end(member, "abort") for member in list(group.members)]
        return [] if request is None else [self._end(request, "abort")]

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
        rows = []
        for request in self._running:
            if request.in_cohort:
                if request.join_seq < seq:
                    rows.append(PlanItem(request.id, request.epoch, request.base + seq - 1, 1, True))
            elif request.row_seq == seq:
                rows.append(PlanItem(request.id, request.epoch, request.sched - 1, 1, True))
        return rows

    def scheduled_order(self, plan: StepPlan) -> list[PlanItem]:
        """All rows in the order in which they got their place. Only right after `schedule` made that plan."""
        admitted = set(plan.admitted)
        rows = plan.decodes.rows() + [item for item in plan.prefills if item.request not in admitted]
        rows.sort(key=lambda item: (self._turns.get(item.request, 0), self._requests[item.request].key))
        return rows + [item for item in plan.prefills if item.request in admitted]

    def usage(self) -> Usage:
        """Where every slot is, once the plans so far have run."""
        return Usage(*self.usage_row())

    def usage_row(self) -> tuple[int, ...]:
        """The same as a plain tuple, in the order of Usage."""
        manager = self.manager
        pool = manager.pool
        size = self.config.block_size
        reserved = manager.num_reserved_blocks * size
        unused = self.manager.num_table_blocks * size - self._sched_tokens
        if self.manager.cow:
            unused -= groups.unused_twice(self)
        transfer = 0
        if self.transfers is not None and self.transfers.open:
            transfer = self.transfers.blocks_held_alone() * size
        held = (pool.num_blocks - pool.num_free) * size - unused - transfer - reserved
        may = cannot = 0
        if self.config.num_lookahead_tokens or self._num_beams or not self._plain_batching:
            for request in self._running:
                sched = request.base + self._seq if request.in_cohort else request.sched
                first = -(-sched // size) * size
                slots = len(request.table) * size
                limit = min(max(request.num_prompt + request.cap, first), slots)
                may += limit - first
                cannot += slots - limit
        external = manager.external_blocks(self._waiting.peek()) * size if self._waiting else 0
        cached = pool.num_kept_free * size
        free = pool.num_free * size - cached - external
        tail = unused - may - cannot
        beyond = manager.reserved_cannot
        may += reserved - beyond
        cannot += beyond
        return held, tail, may, cannot, external, transfer, cached, free, self._sched_tokens - held

    # ---- a step ----

    def schedule(self, now: int) -> StepPlan:
        """Decide the next step. A plan without rows means that nothing can run now; it is not in flight."""
        seq = self._seq + 1
        preempted: list[Request] = []
        items: list[PlanItem] = []
        if not self.config.long_prefill_threshold_alone:
            others = len(self._running) + len(self._waiting) > 1
            self._threshold = self.config.long_prefill_token_threshold if others else 0
        if self.host is not None:
            tiers.begin_step(self, now)
        batch = MIXED if self._plain_batching else self._choose_batch(now)
        self._place_running(seq, batch, items, preempted)
        num_decodes = self._cohort.num  # after preemptions
        budget = self.config.max_num_batched_tokens - num_decodes
        for item in items:
            budget -= item.num_tokens
        admitted: list[int] = []
        blocked = False
        if self._waiting and not preempted and not self._rejected:
            blocked = not batch.admit or self._admit(now, budget, batch.whole_prompts, items, admitted)
        if batch is not MIXED and self._chunks and not (num_decodes or items or preempted):
            # No policy can stall those that run.
            self._place_running(seq, batch._replace(decodes=True, prefills=True), items, preempted)
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
        fits = policies.batching.look_at_head and self._head_fits(now)
        decoding = self._cohort.num + ones
        state = StepView(len(self._waiting), running, decoding, len(self._chunks) - ones, fits, now)
        batch = policies.step(state)
        return batch if running else batch._replace(admit=True)

    def _head_fits(self, now: int) -> bool:
        """Whether the next waiting request could be admitted with its whole prompt, but for the step's budget."""
        if not self._waiting:
            return False
        request = self._next_waiting(now)
        if len(self._running) + self._seats_kept + self._seats(request) > self.config.max_num_seqs:
            return False
        hits = self.manager.lookup(request)
        if request.host:
            hits = tiers.hits_of_swapped(self, request, hits)
            if request.known + request.pending == request.sched:
                return False
        elif self._defer and self._is_being_written(request, len(hits)):
            return False
        return self._has_room(request, hits, self._with_lookahead(max(request.known, request.sched)), now)

    def _place_running(self, seq: int, batch: Batch, items: list[PlanItem], preempted: list[Request]) -> None:
        """Running requests get their tokens and blocks, in order; the last ones lose theirs if blocks run out.

        Those that `batch` leaves out keep their blocks, unless somebody with a place needs them.
        """
        budget = self.config.max_num_batched_tokens
        if not batch.decodes:
            self._dissolve(0)
        elif self._chunks and batch.prefills and not batch.decodes_first:
            self._dissolve_behind_chunks(budget)
        self._batch = batch
        self._turns = {}
        cohort = self._cohort
        crossing = cohort.crossing(seq)
        fills_upto = seq - len(self._flight)
        publishes = self._share and cohort.num_sharing > 0
        if not self._chunks and self.manager.fits_each(len(crossing)) and not self.config.num_lookahead_tokens:
            if crossing:
                self.manager.append_block_each(crossing)
            if publishes:
                self._publish_fills(fills_upto)
            return
        turns = {request.id: request for request in crossing}
        filled: dict[int, int] = {}
        if publishes:
            for fill_seq in range(self._filled + 1, fills_upto + 1):
                for request in cohort.filling(fill_seq):
                    turns[request.id] = request
                    filled[request.id] = request.base + fill_seq
        for request in self._chunks:
            turns[request.id] = request
        threshold = self._threshold
        spent = 0
        placed = sorted(turns.values(), key=by_key)
        if batch is not MIXED:
            self._turns = {request.id: self._turn(request) for request in self._running}
            placed = [request for request in placed if self._turns[request.id] < _NO_TURN]
            placed.sort(key=lambda request: self._turns[request.id])
        for request in placed:
            if request.state != RUNNING:
                continue  # it was a victim in this very step
            if request.in_cohort:
                if self._make_room(request, request.base + seq, preempted) and request.id in filled:
                    self._catch_up(request)
                    self.manager.publish(request, filled[request.id])
                continue
            if request.group is not None and request.group.beam and request.group.forked:
                if request.group.turn != seq:
                    spent += groups.place_beam(self, request.group, budget - cohort.num - spent, items, preempted)
                continue
            num = min(request.known + request.pending - request.sched, budget - cohort.num - spent)
            if 0 < threshold < num:
                num = threshold
            if num > 0 and self._make_room(request, request.sched + num, preempted):
                spent += num
                self._plan_item(request, num, seq, items)

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Blocks for `num_tokens` tokens (and the lookahead) of a running request, at the expense of those behind it.

        Returns whether the request still runs.
        """
        manager = self.manager
        if self.config.num_lookahead_tokens:
            num_tokens = self._with_lookahead(num_tokens)
        while not manager.fits(request, (), num_tokens):
            victim = self._choose_victim(request)
            if victim is request and self._loads_behind(request):
                self._pause(request)
                return False
            self._preempt(victim, preempted)
            if request.state != RUNNING:
                return False
        manager.append_slots(request, num_tokens)
        return True

    def _loads_behind(self, request: Request) -> bool:
        """Whether blocks will come free without `request` losing its own: those of a load behind it that ends."""
        return any(loading.key > request.key for loading in self._loading.values())

    def _pause(self, request: Request) -> None:
        """It keeps its blocks and gets no row in this step."""
        if request.in_cohort:
            self._leave_cohort(request)
            self._insert_chunk(request)

    def _turn(self, request: Request) -> int:
        """Whether a running request has its place in the step before others (0), after them (1), or none."""
        batch = self._batch
        decodes = request.in_cohort or request.known + request.pending - request.sched <= 1
        if not (batch.decodes if decodes else batch.prefills):
            return _NO_TURN
        return 0 if decodes or not batch.decodes_first else 1

    def _choose_victim(self, request: Request) -> Request:
        """One of the running requests from `request` on: those before it have their place in this step.

        Not one that waits for a load: what it would give up is not free before the load has ended. The first of all is
        spared, unless nobody else can be chosen: whatever the policy, it goes on until it ends.
        """
        loading = self._loading
        if self._plain_victim and not self._turns:
            last = len(self._running) - 1
            while loading and self._running[last].id in loading:
                last -= 1
            return self._running[last]
        candidates = self._without_place(request)
        if len(candidates) > 1 and self._is_first(request):
            del candidates[0]
        policies = self._policies
        oracle = policies.victim.oracle
        return candidates[policies.choose([self.view_of(candidate, oracle) for candidate in candidates])]

    def _without_place(self, request: Request) -> list[Request]:
        """`request` and those that have their place after it, or none: in the order of their places."""
        turns = self._turns
        loading = self._loading
        mine = (turns.get(request.id, 0), request.key)
        found = [
            other for other in self._running if (turns.get(other.id, 0), other.key) >= mine and other.id not in loading
        ]
        if turns:
            found.sort(key=lambda other: turns[other.id])
        return found

    def _is_first(self, request: Request) -> bool:
        """Whether nobody but its own beam has its place before it."""
        turns = self._turns
        mine = (turns.get(request.id, 0), request.key)
        for other in self._running:
            own = request.is_beam and other.group is request.group
            if (turns.get(other.id, 0), other.key) < mine and other.id not in self._loading and not own:
                return False
        return True

    def _plan_item(self, request: Request, num: int, seq: int, items: list[PlanItem]) -> None:
        """`request` computes its next `num` tokens in plan `seq`, as a row of its own."""
        start = request.sched
        samples = start + num == request.known + request.pending
        items.append(PlanItem(request.id, request.epoch, start, num, samples))
        request.sched = start + num
        self._sched_tokens += num
        if self._share:
            request.written = max(request.written, min(request.sched, request.known))
            self.manager.publish(request, request.written)
        elif self._defer:
            self._note_writes(request, start)

    def _admit(self, now: int, budget: int, whole_prompts: bool, items: list[PlanItem], admitted: list[int]) -> bool:
        """Waiting requests start, in order, while there is room. Returns whether the next was left for lack of it."""
        config = self.config
        manager = self.manager
        while self._waiting and budget > 0:
            request = self._next_waiting(now)
            if len(self._running) + self._seats_kept + self._seats(request) > config.max_num_seqs:
                return True
            if request.group is not None and request.group.beam and request.group.forked:
                spent = groups.admit_beam(self, request.group, budget, items, admitted)
                if not spent:
                    return True
                budget -= spent
                continue
            hits = manager.lookup(request)
            if self._defer and not request.host and self._is_being_written(request, len(hits)):
                return False
            start = len(hits) * config.block_size
            remaining = request.known - start
            sources: list[BlockId] = []
            if request.host:
                hits = tiers.hits_of_swapped(self, request, hits)
                start = request.sched
                remaining = request.known + request.pending - start
                if not remaining:
                    return True  # the token that ends it is in flight
            elif self.transfers is not None:
                sources = tiers.host_hits(self, request, len(hits))
                start += len(sources) * config.block_size
                remaining = 0 if sources else remaining
            num = remaining
            if 0 < self._threshold < num:
                num = self._threshold
            if num > budget:
                if whole_prompts and budget < config.max_num_batched_tokens:
                    return True  # it waits for a step of its own
                num = budget
            tokens = self._with_lookahead(start + num) if num else start
            if whole_prompts:
                tokens = max(tokens, self._with_lookahead(request.known))
            if not self._has_room(request, hits, tokens, now):
                return True
            manager.allocate(request, hits, tokens)
            if request.host:
                tiers.swap_in(self, request, len(hits))
            self._start_running(request, start, len(hits) * config.block_size)
            if self.prefix_stats is not None:
                self.prefix_stats.admitted(request, len(hits), len(sources))
            if sources:
                tiers.start_load(self, request, len(hits), sources, now)
                continue
            admitted.append(request.id)
            self._plan_item(request, num, self._seq + 1, items)
            if request.sched < request.known:
                self._insert_chunk(request)
            budget -= num
        return budget <= 0

    def _start_running(self, request: Request, start: int, written: int) -> None:
        """A waiting request has its blocks, `start` tokens in them, of which the first `written` are published."""
        self._waiting.remove(request)
        if self._keeps_account:
            self._policies.started(self.view_of(request, self._policies.order.oracle))
        self._seats_kept += self._seats(request) - 1
        request.state = RUNNING
        request.sched = start
        request.written = written
        self._sched_tokens += start
        self._insert_running(request)

    def _seats(self, request: Request) -> int:
        """How many running sequences `request` counts for."""
        return request.spec.n if request.unforked else 1

    def _next_waiting(self, now: int) -> Request:
        """Who is to be admitted next; somebody must be waiting."""
        if not self._dynamic:
            return self._waiting.peek()
        told = (self._waiting.changes, self.manager.index.changes)
        if self._chosen is not None and told == self._chosen_of and now <= self._chosen_until:
            return self._chosen
        window = self._waiting.first(self._window)
        oracle = self._policies.order.oracle
        views = [self.view_of(request, oracle) for request in window]
        size = self.config.block_size
        cached = [len(self.manager.lookup(request)) * size for request in window]
        self._chosen = window[self._policies.next(views, cached, now)]
        self._chosen_of, self._chosen_until = told, self._policies.stable_until(now)
        return self._chosen

    def _has_room(self, request: Request, hits: Sequence[BlockId], tokens: int, now: int) -> bool:
        """Whether a waiting request may have `tokens` slots, of which its hits are the first."""
        config = self.config
        manager = self.manager
        whole = max(tokens, request.known) if config.scheduler_reserve_full_isl else tokens
        spare = config.watermark_blocks if self._running else 0
        if self._reserve:
            whole = self._most_tokens(request.num_prompt, request.cap)
            spare += self._promised_blocks()
        elif self._loading:
            spare += tiers.promised(self)
        if not manager.fits(request, hits, whole, spare):
            return False
        if not self._running or self._plain_admission:
            return True
        need = manager.need(request, hits, whole)
        view = self.view_of(request, self._policies.admission.oracle)
        return self._policies.admits(view, need, manager.pool.num_free, len(self._running), now)

    def _promised_blocks(self) -> int:
        """Blocks that running requests will still take, up to prompt + max_tokens (admission_reserve `max_tokens`)."""
        size = self.config.block_size
        return sum(-(-self._most_tokens(r.num_prompt, r.cap) // size) - len(r.table) for r in self._running)

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
            self._leave_cohort(request)
            request.waits = True
            request.row_seq = seq

    def _dissolve_behind_chunks(self, budget: int) -> None:
        """If prefill chunks may leave no budget for decodes behind them, those decodes are placed one by one."""
        demand = self._cohort.num
        threshold = self._threshold or budget
        for request in self._chunks:
            demand += min(request.known + request.pending - request.sched, threshold)
        if demand <= budget:
            return
        self._dissolve(bisect_left(self._running, self._chunks[0].key, key=by_key))

    def _dissolve(self, first: int) -> None:
        """The members from place `first` of the running on leave the cohort: each of their tokens is to be planned."""
        for request in self._running[first:]:
            if request.in_cohort:
                self._leave_cohort(request)
                self._insert_chunk(request)

    # ---- leaving, ending

    def _leave_cohort(self, request: Request) -> None:
        """The request goes on outside the cohort; it still gets the tokens that plans in flight sample for it."""
        written = self._written(request)
        self._catch_up(request)
        self._cohort.leave(request, self._seq, self._done)
        request.written = written
        for flight in self._flight:
            if flight.plan.seq > request.join_seq:
                flight.detached.append(request)

    def _preempt(self, victim: Request, preempted: list[Request]) -> None:
        """`victim` loses its blocks, and waits in its old place; a beam does as a whole.

        What it had computed goes to the host and comes back, or is computed again where it is not hit, or the request
        is given up: see `preemption_mode`.
        """
        group = victim.group
        members = group.members if group is not None and group.beam else [victim]
        for request in reversed(members):
            if request.state == RUNNING:
                self._take_blocks_back(request, preempted)

    def _take_blocks_back(self, request: Request, preempted: list[Request]) -> None:
        if self.config.preemption_mode == "reject" and not request.waits:
            self._rejected.append(self._end(request, "no-memory"))
            return
        written = self._written(request)
        if request.in_cohort:
            self._leave_cohort(request)
        elif request in self._chunks:
            self._chunks.remove(request)
        self._sched_tokens -= request.sched
        if self.host is not None:
            tiers.swap_out(self, request)
        self.manager.free(request, written, ended=False)
        self._remove_running(request)
        self._seats_kept -= self._seats(request) - 1
        request.state = WAITING
        request.waits = False
        request.written = 0
        if not request.host:
            request.sched = 0
        request.epoch += 1
        self._waiting.push(request)
        preempted.append(request)

    def _end(self, request: Request, reason: str) -> Finish:
        """The request is finished or aborted: everything it holds goes back, and nothing waits for it any more."""
        outputs = self._known(request) - request.num_prompt
        if request.state == RUNNING:
            written = self._written(request)
            if request.in_cohort:
                self._catch_up(request)
                self._cohort.leave(request, self._seq, self._done)
            elif request in self._chunks:
                self._chunks.remove(request)
            self._sched_tokens -= request.sched
            self.manager.free(request, written, ended=True)
            self._remove_running(request)
            self._seats_kept -= self._seats(request) - 1
            self._loading.pop(request.id, None)
        elif request.state == WAITING:
            self._waiting.remove(request)
            if request.host and self.host is not None:
                self.host.release(request.host)
                request.host = []
        request.state = FINISHED
        del self._requests[request.id]
        if request.group is not None:
            groups.ended(self, request.group, request)
        return Finish(request.id, reason, outputs, request.epoch)

    def _written(self, request: Request) -> int:
        """Leading tokens whose blocks the cache may keep when the request gives them up now.

        They are written, or will be by a plan that runs. With same_step `share` that is what was published: at each
        turn what is planned and known, and at each completion what is computed but for the samples still pending. With
        two steps in flight the newest step's input is not known at its turn, so its block is not published yet.
        """
        if not request.in_cohort:
            return request.written
        newest = self._done
        if self._share:
            newest = max(newest, self._seq - self._lag)
        elif newest < request.join_seq:
            return request.written
        return max(request.written, request.base + newest)

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
        if not self._flight or self._flight[0].plan is not plan:
            raise InvariantError(f"plan {plan.seq} is completed out of order")
        flight = self._flight.popleft()
        self._done = seq = plan.seq
        requests = self._requests
        if outcome.transfers and self.transfers is not None:
            for end in outcome.transfers:
                tiers.transfer_ended(self, end.id, end.ok)
        tokens = outcome.tokens
        if tokens is not None:
            self._sampled[seq] = tokens
            self._sampled.pop(seq - 2 * self.config.block_size - 2, None)
        ends: dict[int, tuple[Request, str]] = {}
        first: list[int] = []
        forked: list[tuple[int, int]] = []
        stepped: list[Group] = []
        for item in plan.prefills:
            request = requests.get(item.request)
            if request is None:
                continue
            if item.samples:
                if not request.in_cohort:
                    self._got_token(request, ends)
                if self._known(request) == request.num_prompt + 1:
                    first.append(request.id)
            if not self._share and request.state == RUNNING and request.epoch == item.epoch:
                request.written = max(request.written, item.start + item.num_tokens)
                self.manager.publish(request, request.written)
            group = request.group
            if group is not None and item.samples and (group.beam or not group.forked) and group not in stepped:
                stepped.append(group)
        for group in stepped:
            if group.forked:
                groups.reorder(self, group, outcome.parents)
            else:
                for child in groups.fork(self, group):
                    forked.append((group.members[0].id, child.id))
                    first.append(child.id)
                    if child.known - child.num_prompt >= child.cap:
                        ends[child.id] = (child, "length")
            groups.go_on(self, group, ends)
        for request in flight.detached:
            if request.state != FINISHED and not request.in_cohort:
                self._got_token(request, ends)
        if tokens:
            apart = [item.request for item in plan.prefills if item.samples]
            apart += [request.id for request in flight.detached]
            apart += [child for _, child in forked]
            self._tell_apart(apart, tokens)
        for key in flight.pending_keys:
            if self._writing[key] == 1:
                del self._writing[key]
            else:
                self._writing[key] -= 1
        if not self._share and self._cohort.num_sharing:
            for request in self._cohort.filling(seq):
                if request.join_seq < seq:
                    self._catch_up(request)
                    self.manager.publish(request, request.base + seq)
        for finish in outcome.finished:
            request = requests.get(finish.request)
            if request is not None:
                ends[request.id] = (request, finish.reason)
        finished: list[Finish] = []
        for request, reason in sorted(ends.values(), key=lambda end: end[0].key):
            finished.append(self._end(request, reason))
        resumed = tuple((id, before) for id, before in flight.resumed if id in requests or id in ends)
        return StepEvents(tuple(first), resumed, tuple(finished), tuple(forked))

    def _tell_apart(self, ids: Sequence[int], tokens: Mapping[int, int]) -> None:
        """Tell the identities of requests that were not cohort rows, or are not any more, what a step sampled."""
        for id in ids:
            request = self._requests.get(id)
            if request is not None and request.identity is not None and id in tokens and not request.is_beam:
                request.identity.append(tokens[id])

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

    def _got_token(self, request: Request, ends: dict[int, tuple[Request, str]]) -> None:
        """A step has sampled a token for a request outside the cohort."""
        request.known += 1
        request.pending -= 1
        if request.state == RUNNING:
            request.written = max(request.written, request.sched - request.pending)
        elif request.state == WAITING:
            self._waiting.changes += 1  # it may ask for one block more
        if request.known - request.num_prompt >= request.cap:
            ends[request.id] = (request, "length")

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
