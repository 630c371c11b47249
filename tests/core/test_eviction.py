"""Eviction policies: what is given up first, and that it is never what something else is reached through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from core_kit import Case, simulate
from hypothesis import given, settings
from shadow import play
from strategies import cases, fast_cases

from engine.core import ConfigError, PolicyError, RequestSpec, Scheduler, SchedulerConfig, StepOutcome, TokenIdentity
from engine.core.eviction import EVICTIONS, LRU
from engine.core.policies import BlockFacts, Eviction
from engine.core.ranked import RankedOrder
from engine.core.types import BlockHash, BlockId


def config(**options: object) -> SchedulerConfig:
    defaults: dict[str, object] = {"num_blocks": 6, "block_size": 2, "max_model_len": 40}
    return SchedulerConfig(**{**defaults, **options})  # type: ignore[arg-type]


class BruteForce(RankedOrder):
    """The same by looking at every free cached block, each time: nothing comes back from aside."""

    def published(self, key: BlockHash) -> None:
        pass

    def _evict(self) -> BlockId:
        index = self._index
        free = [block for block in self._rank if not index.is_needed(block)]
        block = min(free, key=lambda block: (self._rank[block], self._ticket[block]))
        rank = self._rank.pop(block)
        index.remove([block])
        self._ticket[block] = 0
        self.policy.evicted(rank)
        return block


def scheduler_with(order: type[RankedOrder]) -> type[Scheduler]:
    class With(Scheduler):
        def __init__(self, options: SchedulerConfig) -> None:
            super().__init__(options)
            ranked = self.manager.ranked
            if ranked is not None:
                new = order(options.num_blocks, options.block_size, self.manager.index, ranked.policy)
                self.manager.ranked = self.manager.pool._order = new

    return With


@pytest.mark.parametrize("name", [name for name in EVICTIONS if name != "belady"])
@settings(max_examples=40)
@given(case=cases(of="tiers"))
def test_a_ranked_order_is_the_minimum_over_all_candidates(name: str, case: Case) -> None:
    """With its heap and what it puts aside it gives up the same blocks as a search through all of them."""
    case = replace(case, config=replace(case.config, eviction_policy=name, free_order="blank-first"))
    assert play(case) == play(case, scheduler_with(BruteForce))


@settings(max_examples=150)
@given(cases(aborts=False))
def test_lru_ranked_is_lru_queued(case: Case) -> None:
    """Least recently used as a policy of rank decides like the queues that do it in O(1)."""
    options = replace(case.config, eviction_policy="lru", free_order="blank-first", host_tier=False)
    jobs = tuple(replace(job, private=False, n=1, beam=False) for job in case.jobs)
    ranked = play(Case(replace(options, policies=(LRU(),)), jobs, luck=case.luck))
    assert ranked == play(Case(options, jobs, luck=case.luck))


@pytest.mark.parametrize("name", [name for name in EVICTIONS if name != "belady"])
@settings(max_examples=40)
@given(case=fast_cases())
def test_both_indices_and_fast_forward_agree_under_every_policy(name: str, case: Case) -> None:
    """Every state is the same by hash and by radix, step by step and in runs of steps."""
    case = replace(case, config=replace(case.config, eviction_policy=name, free_order="blank-first"))
    trails = []
    for index in ("hash", "radix"):
        for fast in (False, True):
            ran = simulate(replace(case, config=replace(case.config, prefix_index=index)), fast)
            trails.append((ran.trail, ran.scheduler.digest(), ran.scheduler.usage()))
    assert all(trail == trails[0] for trail in trails)


class Cache:
    """Prompts one after another, in which each token stands for a block of two."""

    def __init__(self, **options: object) -> None:
        self.scheduler = Scheduler(config(**options))
        self.now = 0

    def ask(self, *tokens: int, priority: int = 0) -> int:
        """Returns how many of them were hit."""
        prompt = [token for token in tokens for _ in range(2)] + [99]  # the last token is always computed
        self.now += 1
        spec = RequestSpec(self.now, len(prompt), 1, TokenIdentity(prompt, 2), priority)
        self.scheduler.add(spec, self.now)
        plan = self.scheduler.schedule(self.now)
        self.scheduler.complete(plan, StepOutcome(self.now, {plan.prefills[0].request: 1}))
        self.scheduler.check()
        return plan.prefills[0].start // 2

    def cached(self, *prompts: Sequence[int]) -> Iterator[bool]:
        """Whether each of these is still there, asked without a trace."""
        for tokens in prompts:
            identity = TokenIdentity([token for token in tokens for _ in range(2)], 2)
            yield len(self.scheduler.manager.index.match(identity.key, len(tokens))) == len(tokens)


def filled(**options: object) -> Cache:
    """1 is old and often used, 2 is used once, 3 is young: then one of them has to go."""
    cache = Cache(num_blocks=5, **options)
    for token, priority in ((1, 0), (1, 0), (2, 5), (1, 0), (3, 1)):
        cache.ask(token, priority=priority)
    cache.ask(7, 8, priority=9)
    return cache


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("lru", [True, False, True]),
        ("fifo", [False, True, True]),
        ("lfu", [True, False, True]),
        ("2q", [True, False, True]),
        ("cost-aware", [True, False, True]),
        ("priority", [True, False, True]),
    ],
)
def test_what_each_policy_gives_up(policy: str, kept: list[bool]) -> None:
    """Of three cached prompts: the oldest, the rarest, or the least important."""
    cache = filled(eviction_policy=policy)
    assert list(cache.cached([1], [2], [3])) == kept


def test_frequency_outlives_a_scan_and_recency_does_not() -> None:
    """What was used three times outlives a few prompts that come once; under lru and fifo it does not."""
    for policy, survives in (("lru", False), ("fifo", False), ("lfu", True), ("2q", True), ("cost-aware", True)):
        cache = Cache(num_blocks=4, eviction_policy=policy)
        for _ in range(3):
            cache.ask(1)
        for token in range(10, 14):
            cache.ask(token)
        assert list(cache.cached([1])) == [survives], policy


def test_a_block_outlives_what_follows_it() -> None:
    """The first block of a chain is the oldest, and yet it goes last: all else is reached through it."""
    cache = Cache(num_blocks=5, eviction_policy="fifo")
    cache.ask(1, 2, 3)
    cache.ask(50, 51)
    left = list(cache.cached([1], [1, 2], [1, 2, 3]))
    assert left == sorted(left, reverse=True)
    assert left[2] is False


def test_an_own_policy_ranks_and_its_fault_is_named() -> None:
    """A user's class is asked; what it raises or answers wrongly ends with one sentence that names it."""

    class Youngest(Eviction):
        def rank(self, block: BlockFacts) -> tuple[int, ...]:
            return (-block.last_use,)

    cache = Cache(num_blocks=5, policies=(Youngest(),))
    for token in (1, 2, 3):
        cache.ask(token)
    cache.ask(7, 8)
    assert list(cache.cached([1], [3])) == [True, False]

    class Broken(Eviction):
        def rank(self, block: BlockFacts) -> tuple[int, ...]:
            raise ValueError("no idea")

    with pytest.raises(PolicyError, match="policy Broken failed: ValueError: no idea"):
        Cache(policies=(Broken(),)).ask(1)

    class Wrong(Eviction):
        def rank(self, block: BlockFacts) -> tuple[int, ...]:
            return 7  # type: ignore[return-value]

    with pytest.raises(PolicyError, match=r"policy Wrong: rank\(\) must give a tuple of whole numbers, and gave 7"):
        Cache(policies=(Wrong(),)).ask(1)


def test_belady_needs_the_future() -> None:
    """Only an offline replay knows it; elsewhere one sentence says so."""
    with pytest.raises(PolicyError, match="belady needs to know the future"):
        Cache(eviction_policy="belady").ask(1)


def test_a_policy_and_a_single_queue_contradict_each_other() -> None:
    """A ranked order gives out blanks first, which a single queue does not."""
    with pytest.raises(ConfigError, match=r"eviction_policy is 'lfu'.*free_order 'single-queue'"):
        config(eviction_policy="lfu", free_order="single-queue")


def test_a_rank_sees_tokens_and_not_blocks() -> None:
    """A block's place in its prompt is given in tokens, so that a cost does not depend on the block size."""
    seen: list[int] = []

    class Spy(Eviction):
        def rank(self, block: BlockFacts) -> tuple[int, ...]:
            seen.append(block.position_tokens)
            return ()

    Cache(num_blocks=8, policies=(Spy(),)).ask(1, 2, 3)
    assert sorted(seen) == [0, 2, 4]
