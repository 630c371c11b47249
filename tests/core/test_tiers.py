"""The host: swapped blocks, and the tier behind the prefix cache."""

from __future__ import annotations

from collections import deque

from core_kit import Case, Job
from hypothesis import given, settings
from shadow import play
from strategies import cases

from engine.core import RequestSpec, Scheduler, SchedulerConfig, StepOutcome, StepPlan, TokenIdentity, TransferEnd
from engine.core.host import HostBlocks
from engine.core.types import BlockCopy, BlockHash, BlockId


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def test_sequences_that_share_blocks_have_one_copy_of_each_on_the_host() -> None:
    """Two sequences swapped in one step: what they share is copied once, and referred to twice."""
    host = HostBlocks(4, keeps=False)
    key = BlockHash("a")
    one = host.swap_out(blocks(7, 8), [key, None])
    two = host.swap_out(blocks(7, 8, 9), [key, None, None])
    assert one is not None
    assert two is not None
    assert one == two[:2]
    assert len(host.plan_out()) == 3
    assert [host.pool.refs(block) for block in two] == [2, 2, 1]
    host.check([one, two])
    host.release(one)
    host.check([two])
    host.release(two)
    assert host.pool.num_free == 4
    assert host.index.find(key) is None


def test_content_with_a_key_is_found_in_later_steps_and_other_content_is_not() -> None:
    """Once the step is over a device block may hold something else: only a key says that it does not."""
    host = HostBlocks(4, keeps=False)
    one = host.swap_out(blocks(7, 8), [BlockHash("a"), None])
    host.begin_step()
    two = host.swap_out(blocks(5, 8), [BlockHash("a"), None])
    assert one is not None
    assert two is not None
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_a_swap_without_room_changes_nothing() -> None:
    """All or nothing: a host that is a block short takes none."""
    host = HostBlocks(2, keeps=True)
    before = host.digest()
    assert host.swap_out(blocks(1, 2, 3), [None, None, None]) is None
    assert host.digest() == before
    assert host.plan_out() == ()


def test_a_copy_for_a_request_that_is_gone_is_not_made() -> None:
    """Its host block may be the target of another copy in the same phase."""
    for keeps in (False, True):
        host = HostBlocks(1, keeps)
        gone = host.swap_out(blocks(5), [BlockHash("a")])
        assert gone is not None
        host.release(gone)
        host.begin_step()
        table = host.swap_out(blocks(6), [None])
        assert table is not None
        assert host.plan_out() == (BlockCopy(BlockId(6), table[0]),)


class Bench:
    """A scheduler whose steps are completed by hand, and whose transfers end when told."""

    def __init__(self, **options: object) -> None:
        defaults: dict[str, object] = {
            "num_blocks": 10,
            "block_size": 1,
            "max_model_len": 40,
            "num_host_blocks": 20,
            "host_tier": True,
        }
        self.scheduler = Scheduler(SchedulerConfig(**{**defaults, **options}))  # type: ignore[arg-type]
        self.now = 0
        self.ends: deque[TransferEnd] = deque()

    def add(self, prompt: list[int], max_tokens: int = 1) -> int:
        spec = RequestSpec(self.now, len(prompt), max_tokens, TokenIdentity(prompt, 1))
        return self.scheduler.add(spec, self.now)

    def step(self, transfers: bool = True, ok: bool = True) -> StepPlan:
        self.now += 1
        plan = self.scheduler.schedule(self.now)
        open_now = list(self.scheduler.transfers.open) if self.scheduler.transfers is not None else []
        ends = tuple(TransferEnd(id, ok) for id in open_now) if transfers else ()
        if plan.runs:
            tokens = {item.request: 9 for item in (*plan.decodes.rows(), *plan.prefills) if item.samples}
            self.scheduler.complete(plan, StepOutcome(self.now, tokens, transfers=ends))
        self.scheduler.check()
        return plan

    def cache_on_host(self, prompt: list[int]) -> None:
        """`prompt` is computed, stored on the host, and lost from the device."""
        self.add(prompt)
        self.step()
        self.step()
        self.add([100 + i for i in range(10)])
        self.step()
        self.step()
        assert self.scheduler.manager.pool.num_free == 10


def test_a_hit_on_the_host_is_loaded_and_not_computed() -> None:
    """A prompt that the device has lost comes back from the host; only what is behind it is computed."""
    bench = Bench()
    bench.cache_on_host([1, 2, 3, 4])
    request = bench.add([1, 2, 3, 4, 5, 6])
    plan = bench.step()
    assert plan.loading == ((request, 4),)
    assert [len(transfer.copies) for transfer in plan.transfers if transfer.load] == [4]
    assert plan.num_rows == 0
    plan = bench.step()
    assert [(item.start, item.num_tokens) for item in plan.prefills] == [(4, 2)]


def test_a_load_that_fails_is_computed() -> None:
    """Nothing is known of its blocks: they are given back, and the request computes its prompt."""
    bench = Bench()
    bench.cache_on_host([1, 2, 3, 4])
    bench.add([1, 2, 3, 4, 5, 6])
    bench.step(ok=False)
    plan = bench.step()
    assert [(item.start, item.num_tokens) for item in plan.prefills] == [(0, 6)]


def test_a_load_whose_lease_is_over_is_revoked_and_computed() -> None:
    """A transfer that never ends holds its blocks until its lease is over; the executor is told to forget it."""
    bench = Bench(transfer_lease_ns=3)
    bench.cache_on_host([1, 2, 3, 4])
    bench.add([1, 2, 3, 4, 5, 6])
    plan = bench.step(transfers=False)
    load = next(transfer for transfer in plan.transfers if transfer.load)
    plan = bench.step(transfers=False)
    assert (plan.runs, plan.num_rows, plan.revoked) == (True, 0, ())
    bench.step(transfers=False)
    plan = bench.step(transfers=False)
    assert plan.revoked == (load.id,)
    assert [(item.start, item.num_tokens) for item in plan.prefills] == [(0, 6)]


def test_a_block_in_transfer_is_not_given_to_anybody() -> None:
    """P8: an aborted request's blocks stay out of the pool until the load into them has ended."""
    bench = Bench()
    bench.cache_on_host([1, 2, 3, 4])
    request = bench.add([1, 2, 3, 4, 5, 6])
    plan = bench.step(transfers=False)
    targets = {copy.dst for transfer in plan.transfers if transfer.load for copy in transfer.copies}
    bench.scheduler.abort(request)
    bench.scheduler.check()
    assert bench.scheduler.usage().transfer == 4
    bench.scheduler.manager.taken = []
    bench.add([50 + i for i in range(6)])
    bench.step(transfers=False)
    assert len(bench.scheduler.manager.taken) == 6
    assert not targets & set(bench.scheduler.manager.taken)
    bench.step()
    assert bench.scheduler.usage().transfer == 0


def test_a_request_that_loads_is_no_victim() -> None:
    """Its blocks would not be free before its load has ended: who needs one waits for that, and preempts it then."""
    bench = Bench()
    bench.cache_on_host([1, 2, 3, 4])
    first = bench.add([31, 32, 33, 34], 6)
    bench.step()
    loading = bench.add([1, 2, 3, 4, 5])
    assert bench.step(transfers=False).loading == ((loading, 4),)
    lost: list[int] = []
    rows = 1
    while rows:
        plan = bench.step(transfers=False)
        rows = plan.num_rows
        lost += plan.preempted
    assert plan.runs
    assert (lost, bench.scheduler.num_running) == ([], 2)
    bench.step()
    plan = bench.step()
    assert plan.preempted == (loading,)
    assert [row.request for row in (*plan.decodes.rows(), *plan.prefills)] == [first]
    while bench.scheduler.has_unfinished:
        bench.step()
    assert bench.scheduler.manager.pool.num_free == 10


def test_what_a_loading_prompt_still_needs_is_promised_to_it() -> None:
    """Nobody is admitted to blocks that the rest of a prompt will take whose beginning is on its way."""
    bench = Bench()
    bench.cache_on_host([1, 2, 3, 4])
    loading = bench.add([1, 2, 3, 4, 11, 12, 13, 14, 15])
    later = bench.add([21, 22, 23, 24, 25])
    plan = bench.step(transfers=False)
    assert plan.loading == ((loading, 4),)
    assert later not in plan.admitted
    plan = bench.step()
    plan = bench.step()
    assert [item.request for item in plan.prefills] == [loading]


@settings(max_examples=400)
@given(cases(of="tiers"))
def test_programs_with_a_host_tier(case: Case) -> None:
    """P8, P10: transfers that are slow, fail or are lost harm nobody, and all of them end."""
    play(case)


@settings(max_examples=400)
@given(cases(of="swaps"))
def test_programs_with_swaps(case: Case) -> None:
    """P11: what comes back from the host is what went there, whoever shares it and whatever happens in between."""
    play(case)


def test_a_swapped_request_computes_nothing_twice() -> None:
    """Two requests that do not fit together: with room on the host the later loses no computed token."""
    jobs = (Job(0, (0, 0, 1), 9, 9), Job(0, (1, 0, 1), 9, 9))
    config = SchedulerConfig(
        num_blocks=6,
        block_size=2,
        max_model_len=12,
        num_host_blocks=6,
        preemption_mode="swap",
        free_order="blank-first",
    )
    played = play(Case(config, jobs))
    assert played.preempted == {1: 1}
    assert played.moved["swap_out"] > 0
    assert played.finished == {0: "length", 1: "length"}


def test_a_host_that_is_full_makes_a_swap_a_recompute() -> None:
    """P7: a request that finds no room on the host loses its blocks, and ends all the same."""
    jobs = (Job(0, (0, 0, 1), 9, 9), Job(0, (1, 0, 1), 9, 9))
    config = SchedulerConfig(num_blocks=6, block_size=2, max_model_len=12, num_host_blocks=1, preemption_mode="swap")
    played = play(Case(config, jobs))
    assert played.preempted == {1: 1}
    assert played.moved["swap_out"] == 0
    assert played.finished == {0: "length", 1: "length"}


def test_reject_ends_the_request_that_finds_no_block() -> None:
    """Fail fast: the later request is given up, and says why."""
    jobs = (Job(0, (0, 0, 1), 9, 9), Job(0, (1, 0, 1), 9, 9))
    config = SchedulerConfig(num_blocks=6, block_size=2, max_model_len=12, preemption_mode="reject")
    played = play(Case(config, jobs))
    assert played.finished == {0: "length", 1: "no-memory"}
    assert played.preemptions == 0
