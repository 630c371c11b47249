"""An executor without tensors that knows what must be in every slot: it checks each read, write and copy of a step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from core_kit import Case, Job, beam_parents, full_prompt, output_token, request_of

from engine.core import (
    BlockCopy,
    Finish,
    PlanItem,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    StepOutcome,
    StepPlan,
    TokenIdentity,
    Transfer,
    TransferEnd,
)

__all__ = ["Played", "ShadowExecutor", "check_order", "check_plan", "expected_key", "expected_output", "play"]

GARBAGE = -(10**9)
"""What is in a slot of which nothing can be said."""


class ShadowExecutor:
    """Remembers, per slot, the exact prefix that was computed into it, and checks every read and write of a step."""

    def __init__(self, scheduler: Scheduler, case: Case) -> None:
        self.scheduler = scheduler
        self.size = scheduler.config.block_size
        self.jobs: Sequence[Job] = case.jobs
        self.luck = case.luck
        self.slots: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.prefix: dict[int, list[int]] = {}
        """Per sequence, a name for each of its prefixes."""
        self.names: dict[tuple[int, int], int] = {}
        self.root: dict[int, int] = {}
        self.job_of: dict[int, tuple[int, int]] = {}
        """Which sequence of which job a request id is."""
        scheduler.manager.taken = []
        self.confirmed: dict[int, bool] = {}
        """Blocks that a completed step left full and listed."""
        self.outcomes: deque[StepOutcome] = deque()
        self.prompt_len: dict[int, int] = {}
        self.open: dict[int, tuple[Transfer, int, list[list[int | None]]]] = {}
        """Transfers that run: how many more steps they take, and what their sources held when they began."""
        self.moved: Counter[str] = Counter()

    def register(self, request: int, job: int, prompt: tuple[int, ...], root: int) -> None:
        self.tokens[request] = list(prompt)
        self.prompt_len[request] = len(prompt)
        self.prefix[request] = []
        self.root[request] = root
        self.job_of[request] = (job, 0)

    def name(self, request: int, length: int) -> int:
        """A number for the first `length` tokens of the sequence (and what else decides their KV)."""
        names = self.prefix[request]
        while len(names) < length:
            parent = names[-1] if names else -1 - self.root[request]
            step = (parent, self.tokens[request][len(names)])
            names.append(self.names.setdefault(step, len(self.names)))
        return names[length - 1]

    # ---- the phases of a step

    def submit(self, plan: StepPlan, view: Scheduler, now: int) -> None:
        rows = view.scheduled_order(plan)
        assert len({row.request for row in rows}) == len(rows), "a request has two rows in one step"
        for block in view.manager.taken or ():
            self.confirmed.pop(block, None)
        view.manager.taken = []
        for id in plan.revoked:
            if id in self.open:  # or else it has ended, and the scheduler has not heard of it yet
                self._end(id, False)
        self._phase("swap_out", plan.swap_out, self.slots, self.host)
        self._phase("swap_in", plan.swap_in, self.host, self.slots)
        self._phase("copies", plan.copies, self.slots, self.slots)
        for transfer in plan.transfers:
            self._begin(transfer)
        self._write(rows, view)
        tokens: dict[int, int] = {}
        parents: dict[int, int] = {}
        finished: list[Finish] = []
        for row in rows:
            self._read(row, view)
            if row.samples:
                self._sample(row, tokens, parents, finished)
        self._reorder(parents)
        for request, token in tokens.items():
            self.tokens[request].append(token)
        self.outcomes.append(StepOutcome(now + 1, tokens, tuple(finished), parents or None, self._ended()))

    def collect(self) -> StepOutcome:
        return self.outcomes.popleft()

    def _content(self, memory: dict[int, int], block: int) -> list[int | None]:
        return [memory.get(block * self.size + i) for i in range(self.size)]

    def _put(self, memory: dict[int, int], block: int, content: list[int | None]) -> None:
        for i, value in enumerate(content):
            if value is None:
                memory.pop(block * self.size + i, None)
            else:
                memory[block * self.size + i] = value

    def _phase(self, phase: str, copies: tuple[BlockCopy, ...], source: dict[int, int], target: dict[int, int]) -> None:
        """All copies at once, as one kernel would."""
        targets = [copy.dst for copy in copies]
        assert len(set(targets)) == len(targets), f"a block is written twice in {phase}"
        if source is target:
            assert not set(targets) & {copy.src for copy in copies}, f"a block is read and written in {phase}"
        for block in targets:
            assert not self._in_transfer(block, target is self.host), f"a block in transfer is written in {phase}"
        for copy, content in [(copy, self._content(source, copy.src)) for copy in copies]:
            self._put(target, copy.dst, content)
        self.moved[phase] += len(copies)

    def _write(self, rows: list[PlanItem], view: Scheduler) -> None:
        pool, index = view.manager.pool, view.manager.index
        writer: dict[int, int] = {}
        for row in rows:
            table = view.table(row.request)
            assert row.num_tokens >= 1
            assert row.start + row.num_tokens <= len(self.tokens[row.request]), "a token is computed that is not known"
            assert row.start + row.num_tokens <= len(table) * self.size
            for position in range(row.start, row.start + row.num_tokens):
                block = table[position // self.size]
                assert writer.setdefault(block, row.request) == row.request, "two requests write to one block"
                key = index.key_of(block)
                provisional = view.config.same_step == "share" and key is not None
                assert provisional or key is None, f"request {row.request} writes to a block that can be hit"
                assert pool.refs(block) == 1 or provisional, f"request {row.request} writes to a shared block"
                assert block not in self.confirmed, "a confirmed block is written again"
                assert not self._in_transfer(block, False), f"request {row.request} writes to a block in transfer"
                self.slots[block * self.size + position % self.size] = self.name(row.request, position + 1)

    def _read(self, row: PlanItem, view: Scheduler) -> None:
        table = view.table(row.request)
        for position in range(row.start + row.num_tokens):
            slot = table[position // self.size] * self.size + position % self.size
            wanted = self.name(row.request, position + 1)
            assert self.slots.get(slot) == wanted, f"request {row.request} reads another prefix at {position}"
        reaches_end = row.start + row.num_tokens == len(self.tokens[row.request])
        assert row.samples == reaches_end, "samples is wrong"

    def _sample(self, row: PlanItem, tokens: dict[int, int], parents: dict[int, int], finished: list[Finish]) -> None:
        request = row.request
        number, q = self.job_of[request]
        job = self.jobs[number]
        k = len(self.tokens[request]) - self.prompt_len[request]
        sequences = [request]
        if job.n > 1 and k == 0:
            sequences = list(range(request, request + job.n))
            for i, child in enumerate(sequences[1:], 1):
                self.tokens[child] = list(self.tokens[request])
                self.prompt_len[child] = self.prompt_len[request]
                self.prefix[child] = list(self.prefix[request])
                self.root[child] = self.root[request]
                self.job_of[child] = (number, i)
        elif job.beam:
            parents[request] = request - q + beam_parents(number, k, job.n)[q]
        for sequence in sequences:
            tokens[sequence] = output_token(number, k, self.job_of[sequence][1])
            if k + 1 == job.out < job.cap:
                finished.append(Finish(sequence, "stop"))

    def _reorder(self, parents: dict[int, int]) -> None:
        tokens = {child: list(self.tokens[parent]) for child, parent in parents.items()}
        prefix = {child: self.prefix[parent][: len(tokens[child])] for child, parent in parents.items()}
        self.tokens.update(tokens)
        self.prefix.update(prefix)

    # ---- transfers

    def _in_transfer(self, block: int, on_host: bool) -> bool:
        for transfer, _, _ in self.open.values():
            for copy in transfer.copies:
                if block == (copy.src if transfer.load == on_host else copy.dst):
                    return True
        return False

    def _begin(self, transfer: Transfer) -> None:
        source, target = (self.host, self.slots) if transfer.load else (self.slots, self.host)
        contents = []
        for copy in transfer.copies:
            assert not self._in_transfer(copy.dst, not transfer.load), "a block in transfer is the target of another"
            content = self._content(source, copy.src)
            assert None not in content, "a block that is not full is transferred"
            assert GARBAGE not in content, "a block with unknown content is transferred"
            contents.append(content)
            self._put(target, copy.dst, [GARBAGE] * self.size)
        luck = (transfer.id * 7 + self.luck * 13) % 11
        steps = 10**6 if luck == 10 and self.luck % 2 else luck % 4
        self.open[transfer.id] = (transfer, steps, contents)
        self.moved["load" if transfer.load else "store"] += len(transfer.copies)

    def _end(self, id: int, ok: bool) -> None:
        transfer, _, contents = self.open.pop(id)
        source, target = (self.host, self.slots) if transfer.load else (self.slots, self.host)
        for copy, content in zip(transfer.copies, contents, strict=True):
            assert self._content(source, copy.src) == content, "the source of a transfer was written before its end"
            assert self._content(target, copy.dst) == [GARBAGE] * self.size, "the target of a transfer was written"
            if ok:
                self._put(target, copy.dst, content)

    def _ended(self) -> tuple[TransferEnd, ...]:
        ends = []
        for id, (transfer, steps, contents) in list(self.open.items()):
            if steps:
                self.open[id] = (transfer, steps - 1, contents)
                continue
            ok = (id + self.luck) % 5 != 4
            self._end(id, ok)
            self.moved["failed"] += not ok
            ends.append(TransferEnd(id, ok))
        return tuple(ends)

    def confirm(self) -> None:
        """To be called when no step is in flight: whatever the index lists now has been written."""
        index = self.scheduler.manager.index
        for _, blocks in index.entries():
            self.confirmed.update(dict.fromkeys(blocks, True))


@dataclass
class Played:
    """What a program did."""

    outputs: dict[int, list[int]]
    """Of each job's first sequence."""
    finished: dict[int, str]
    preemptions: int
    hits: int
    turns: int
    preempted: dict[int, int]
    """How often each job's first sequence was preempted."""
    moved: Counter[str]
    """Blocks moved, by phase and kind of transfer, and how many transfers failed."""


def play(case: Case, scheduler_type: type[Scheduler] = Scheduler) -> Played:
    """Run a program over the shadow executor, checking everything at every step. Aborts come between any two calls."""
    config = case.config
    scheduler = scheduler_type(config)
    jobs = case.jobs
    shadow = ShadowExecutor(scheduler, case)
    arrivals = deque(sorted(range(len(jobs)), key=lambda i: (jobs[i].at, i)))
    id_of: dict[int, int] = {}
    finished: dict[int, str] = {}
    """By request id."""
    flight: deque[StepPlan] = deque()
    turn = hits = 0
    preempted: Counter[int] = Counter()
    order: dict[int, tuple[int, ...]] = {}
    """The place of each request, by what its sender said."""
    work = sum((len(full_prompt(jobs, i)) + job.cap) * job.n for i, job in enumerate(jobs))
    lease = config.transfer_lease_ns if config.host_tier else 0
    bound = 50 + (40 + lease) * work + max(j.at for j in jobs)

    def ended(finish: Finish) -> None:
        assert finish.request not in finished, "a request ends twice"
        finished[finish.request] = finish.reason

    def abort(in_flight: bool) -> None:
        for i, job in enumerate(jobs):
            if job.abort_at == turn and job.abort_in_flight == in_flight and i in id_of:
                for finish in scheduler.abort(id_of[i]):
                    assert finish.num_output_tokens <= job.cap
                    ended(finish)

    def transfers_run() -> bool:
        return scheduler.transfers is not None and bool(scheduler.transfers.open)

    while arrivals or scheduler.has_unfinished or transfers_run():
        while arrivals and jobs[arrivals[0]].at <= turn:
            i = arrivals.popleft()
            job = jobs[i]
            prompt = full_prompt(jobs, i)
            identity = None if job.private else TokenIdentity(prompt, config.block_size, job.salt)
            spec = request_of(job, turn, len(prompt), identity)
            id_of[i] = scheduler.add(spec, turn)
            root = 10_000 + i if job.private else int.from_bytes(job.salt + b"\0", "little")
            shadow.register(id_of[i], i, prompt, root)
            place = expected_key(config, spec, scheduler, id_of[i])
            for id in range(id_of[i], id_of[i] + job.n):
                order[id] = (*place, turn, id)
        abort(in_flight=False)
        plan = scheduler.schedule(turn)
        preempted.update(plan.preempted)
        for finish in plan.rejected:
            ended(finish)
        assert plan.runs or not plan.num_rows
        if plan.runs:
            check_plan(plan, scheduler)
            check_order(plan, scheduler, order)
            for row in scheduler.scheduled_order(plan):
                assert row.epoch == preempted[row.request], "the epoch is not the number of preemptions"
            hits += sum(item.start for item in plan.prefills if item.request in plan.admitted)
            shadow.submit(plan, scheduler, turn)
            flight.append(plan)
        scheduler.check()
        abort(in_flight=True)
        scheduler.check()
        completed = False
        while flight and (len(flight) >= config.steps_in_flight or not plan.runs):
            completed = True
            oldest = flight.popleft()
            for finish in scheduler.complete(oldest, shadow.collect()).finished:
                ended(finish)
            if not flight:
                shadow.confirm()
            scheduler.check()
            if plan.runs:
                break
        turn += 1
        assert turn < bound, "no end in sight: " + "; ".join(map(repr, scheduler._requests.values()))
        stuck = not (plan.runs or plan.preempted or plan.rejected or completed or arrivals)
        stuck = stuck and scheduler.has_unfinished
        aborts_later = any(j.abort_at is not None and j.abort_at >= turn for j in jobs)
        assert not stuck or aborts_later, "requests wait, nothing runs, and nothing will come"
    pool = scheduler.manager.pool
    assert pool.num_free == pool.num_blocks, "blocks are lost"
    if scheduler.host is not None:
        assert scheduler.host.pool.num_free == scheduler.host.pool.num_blocks, "host blocks are lost"
    for i, id in id_of.items():
        _check_ends(case, i, id, shadow, finished)
    outputs = {i: shadow.tokens[id][shadow.prompt_len[id] :] for i, id in id_of.items()}
    reasons = {i: finished[id] for i, id in id_of.items()}
    losses = Counter({i: preempted[id] for i, id in id_of.items() if preempted[id]})
    return Played(outputs, reasons, preempted.total(), hits, turn, losses, shadow.moved)


def _check_ends(case: Case, i: int, id: int, shadow: ShadowExecutor, finished: dict[int, str]) -> None:
    """Every sequence of the job has ended, with the tokens that it had to get."""
    job = case.jobs[i]
    assert id in finished, "requests are lost"
    begun = [id + q for q in range(job.n) if id + q in shadow.tokens]
    for sequence in begun:
        reason = finished.get(sequence, "")
        # Where the request was aborted before it forked, the core never had the others.
        if not reason:
            assert finished[id] == "abort", "a sequence is lost"
            continue
        if reason in ("abort", "no-memory"):
            continue
        assert len(begun) == job.n
        got = shadow.tokens[sequence][shadow.prompt_len[sequence] :][: job.out]
        assert got == expected_output(i, job.n, job.beam, sequence - id, job.out), "the output is another one"


def expected_output(job: int, n: int, beam: bool, q: int, out: int) -> list[int]:
    """What sequence q of a job generates, by following the beam's parents back."""
    if not beam:
        return [output_token(job, k, q) for k in range(out)]
    histories = [[output_token(job, 0, i)] for i in range(n)]
    for k in range(1, out):
        parents = beam_parents(job, k, n)
        histories = [[*histories[parents[i]], output_token(job, k, i)] for i in range(n)]
    return histories[q]


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    config = scheduler.config
    assert plan.num_tokens <= config.max_num_batched_tokens
    assert plan.num_rows <= config.max_num_seqs
    assert not ((plan.preempted or plan.rejected) and plan.admitted), "a step that preempted admits somebody"
    rows: list[PlanItem] = scheduler.scheduled_order(plan)
    assert not set(plan.preempted) & {row.request for row in rows}, "preempted and scheduled in one step"
    assert plan.num_rows == len(rows)
    assert plan.decodes.context_tokens == sum(row.start for row in plan.decodes.rows())
    for row in rows:
        assert row.start + row.num_tokens <= config.max_model_len
    sampling = Counter(scheduler._requests[row.request].root_id for row in rows if row.samples)
    for root, num in sampling.items():
        group = scheduler._groups.get(root)
        if group is not None and group.beam and group.forked:
            assert num == len(group.members), "a beam takes a step in part"


def check_order(plan: StepPlan, scheduler: Scheduler, order: dict[int, tuple[int, ...]]) -> None:
    """Rows, admissions and victims follow the policy's order, which preemption does not change."""
    placed = [(row.request in plan.admitted, order[row.request]) for row in scheduler.scheduled_order(plan)]
    running = [place for new, place in placed if not new]
    begun = [place for new, place in placed if new]
    admitted = [order[request] for request in plan.admitted]
    waiting = [order[request.id] for request in scheduler._waiting.ordered()]
    config = scheduler.config
    _check_batch(plan, scheduler)
    assert config.batching == "decode-first" or running == sorted(running), "running requests are not placed in order"
    if config.scheduling_policy != "lpm":
        assert admitted == sorted(admitted), "requests are not admitted in order"
        assert begun == sorted(begun), "admitted requests are not placed in order"
        assert not admitted or not waiting or admitted[-1] < waiting[0], "a waiting request was overtaken"
    victims = [order[request] for request in plan.preempted]
    if config.batching == "mixed" and config.victim_policy == "last-in" and not config.policies:
        assert victims == sorted(victims, reverse=True), "the last in order is not preempted first"
        assert not victims or not running or running[-1] < victims[-1], "a request behind the victim was spared"
    if config.admission_reserve == "max_tokens":
        assert not victims, "somebody lost blocks that were promised"


def _check_batch(plan: StepPlan, scheduler: Scheduler) -> None:
    """A step holds what the batching policy says that it may hold."""
    config = scheduler.config
    rows = scheduler.scheduled_order(plan)
    admitted = set(plan.admitted)
    runs = [row for row in rows if row.request not in admitted]
    decodes = [row.num_tokens == 1 and row.samples for row in runs]
    if config.batching == "decode-first":
        assert decodes == sorted(decodes, reverse=True), "a prompt has its place before a decode"
        for kind in (True, False):
            keys = [scheduler._requests[row.request].key for row, one in zip(runs, decodes, strict=True) if one == kind]
            assert keys == sorted(keys), "running requests are not placed in order"
    if config.batching == "prefill-first" and (admitted or not all(decodes)):
        assert not any(decodes), "a step of prompts holds decodes"
        assert not plan.preempted, "a step of prompts took somebody's blocks"
        whole = [row.samples or config.long_prefill_token_threshold > 0 for row in rows if row.request in admitted]
        assert all(whole) or len(rows) == 1, "a prompt was cut that was not alone"
    if config.batching == "static" and admitted:
        assert not runs, "somebody was admitted while others ran"
        assert len(admitted) == scheduler.num_running


def expected_key(config: SchedulerConfig, spec: RequestSpec, scheduler: Scheduler, id: int) -> tuple[int, ...]:
    """The key that the scheduling policy gives a request."""
    if config.scheduling_policy == "fair":
        return (scheduler._requests[id].key[0],)  # it depends on all that came before
    return {
        "fcfs": (),
        "lpm": (),
        "priority": (spec.priority,),
        "sjf": (spec.max_tokens,),
        "sjf-predicted": (min(spec.predicted_tokens or spec.max_tokens, spec.max_tokens),),
        "sjf-oracle": (spec.oracle_tokens,),
        "edf": (spec.deadline,),
        "aging": (spec.arrival + 1_000_000_000 * spec.priority,),
    }[config.scheduling_policy]
