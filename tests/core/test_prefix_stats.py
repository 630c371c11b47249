"""Why prompts were not hit: the account of prefix misses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from core_kit import Case, Job
from hypothesis import HealthCheck, assume, given, settings
from shadow import play
from strategies import cases

from engine.core import NO_LIMIT, ConfigError, RequestSpec, Scheduler, SchedulerConfig, SpanIdentity, TokenIdentity
from engine.core.drive import StepOutcome
from engine.core.prefixstats import PrefixStats
from engine.core.request import Request
from engine.core.types import PrefixRow, StepPlan


class Remembering(PrefixStats):
    """The slow reference: whole contents instead of keys, and a walk over both tiers instead of lists of blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self.tiers = [scheduler.manager.index]
        if config.host_tier and scheduler.host is not None:
            self.tiers.append(scheduler.host.index)
        super().__init__(config.block_size, scheduler.manager.index, scheduler.host if config.host_tier else None)
        self.contents: dict[object, tuple[bytes, tuple[int, ...]]] = {}
        """All that ever was in one of the tiers, by key."""

    def _content(self, request: Request, block: int) -> tuple[bytes, tuple[int, ...]]:
        identity = request.identity
        assert isinstance(identity, TokenIdentity)
        tokens = tuple(identity.tokens[: (block + 1) * self._block_size])
        assert len(tokens) == (block + 1) * self._block_size
        return identity._root, tokens

    def published(self, request: Request, start: int, stop: int) -> None:
        super().published(request, start, stop)
        if request.identity is not None:
            self.contents |= {request.block_key(i): self._content(request, i) for i in range(start, stop)}

    def stored(self, request: Request, num_blocks: int) -> None:
        super().stored(request, num_blocks)
        if request.identity is not None:
            self.contents |= {request.block_key(i): self._content(request, i) for i in range(num_blocks)}

    def admitted(self, request: Request, device_blocks: int, host_blocks: int) -> None:
        before = len(self.rows())
        super().admitted(request, device_blocks, host_blocks)
        if request.epoch or request.id != request.root_id:
            assert len(self.rows()) == before
            return
        row = self.rows()[-1]
        expected: Counter[str] = Counter()
        ever = set(self.contents.values())
        now = {self.contents[key][1] for tier in self.tiers for key, _ in tier.entries() if key in self.contents}
        for i in range((request.num_prompt - 1) // self._block_size):
            content = None if request.identity is None else self._content(request, i)
            if i < device_blocks + host_blocks:
                assert content in ever
                expected["hit_tokens" if i < device_blocks else "host_hit_tokens"] += self._block_size
            elif content in ever:
                expected["evicted_tokens"] += self._block_size
            elif content is not None and content[1] in now:
                expected["other_salt_tokens"] += self._block_size
            else:
                expected["never_seen_tokens"] += self._block_size
        expected["short_tokens"] = request.num_prompt - sum(expected.values())
        for name in PrefixRow._fields[3:]:
            assert getattr(row, name) == expected[name], name
        assert row.asked_tokens == request.num_prompt == sum(row[3:])


class Accounted(Scheduler):
    made: Accounted

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        assert self.prefix_stats is not None
        self.prefix_stats = self.manager.stats = Remembering(self)
        self.starts: dict[int, int] = {}
        """What each request need not compute when it is admitted first."""
        Accounted.made = self

    def schedule(self, now: int) -> StepPlan:
        plan = super().schedule(now)
        found = [
            *plan.loading,
            *((item.request, item.start) for item in plan.prefills if item.request in plan.admitted),
        ]
        for request, start in found:
            self.starts.setdefault(request, start)
        return plan


def test_misses_are_those_of_a_memory_of_whole_contents() -> None:
    """On random programs over both indices, all evictions and the host tier, every miss has the reason that a memory of
    all published contents gives it, and each reason occurs."""
    seen: Counter[str] = Counter()

    def check(case: Case) -> None:
        assume(case.config.caches_prefixes)
        config = replace(case.config, prefix_stats=True)
        play(replace(case, config=config), Accounted)
        stats = Accounted.made.prefix_stats
        assert isinstance(stats, Remembering)
        for row in stats.rows():
            assert Accounted.made.starts[row.request] == row.hit_tokens + row.host_hit_tokens
            seen.update(name for name in PrefixRow._fields[3:] if getattr(row, name))

    for num, programs in (
        (60, cases()),
        (40, cases(of="tiers", min_jobs=6, max_jobs=10)),
        (30, cases(of="forks")),
    ):
        quiet = settings(max_examples=num, suppress_health_check=[HealthCheck.filter_too_much])
        quiet(given(programs)(check))()
    for name in PrefixRow._fields[3:]:
        assert seen[name] >= 1, seen


@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@given(cases())
def test_keeping_account_changes_nothing(case: Case) -> None:
    """The same program takes the same decisions with and without the account."""
    assume(case.config.caches_prefixes)
    assert play(case) == play(replace(case, config=replace(case.config, prefix_stats=True)))


def serve(scheduler: Scheduler, prompt: int, identity: TokenIdentity | SpanIdentity) -> None:
    scheduler.add(RequestSpec(0, prompt, 1, identity), 0)
    plan = scheduler.schedule(0)
    scheduler.complete(plan, StepOutcome(1, {plan.prefills[0].request: 0}))


def rows_of(scheduler: Scheduler) -> list[tuple[int, ...]]:
    assert scheduler.prefix_stats is not None
    return [row[2:] for row in scheduler.prefix_stats.rows()]


def test_each_reason_is_told_from_the_others() -> None:
    """Seen first, hit, hit but for the last block of the prompt, another's, and evicted by a longer prompt."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, max_model_len=17, block_size=4, prefix_stats=True))
    for tokens, salt in ((range(10), b""), (range(10), b""), (range(8), b""), (range(10), b"x"), (range(50, 65), b"")):
        serve(scheduler, len(tokens), TokenIdentity(tokens, 4, salt))
    serve(scheduler, 10, TokenIdentity(range(10), 4))
    assert rows_of(scheduler) == [
        (10, 0, 0, 8, 0, 0, 2),
        (10, 8, 0, 0, 0, 0, 2),
        (8, 4, 0, 0, 0, 0, 4),
        (10, 0, 0, 0, 0, 8, 2),
        (15, 0, 0, 12, 0, 0, 3),
        (10, 0, 0, 0, 8, 0, 2),
    ]


def test_a_salt_is_told_from_a_first_sight() -> None:
    """Spans and tokens alike: what another tenant has cached is a miss of its own kind."""
    for identity in (
        lambda salt: SpanIdentity([(7, 10)], 4, salt=salt),
        lambda salt: TokenIdentity(range(10), 4, salt=bytes([salt])),
    ):
        scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=16, block_size=4, prefix_stats=True))
        for salt in (1, 2, 1):
            serve(scheduler, 10, identity(salt))
        assert rows_of(scheduler) == [(10, 0, 0, 8, 0, 0, 2), (10, 0, 0, 0, 0, 8, 2), (10, 8, 0, 0, 0, 0, 2)]


def test_what_is_lost_is_nobodys() -> None:
    """What another tenant had in the cache once, and has lost, is a first sight and not a matter of salts."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, max_model_len=17, block_size=4, prefix_stats=True))
    for tokens, salt in ((range(10), b""), (range(50, 65), b""), (range(10), b"x")):
        serve(scheduler, len(tokens), TokenIdentity(tokens, 4, salt))
    assert rows_of(scheduler)[-1] == (10, 0, 0, 8, 0, 0, 2)


def test_one_of_several_blocks_is_enough() -> None:
    """Content that another tenant has twice is there as long as one of its blocks is."""
    options = SchedulerConfig(num_blocks=6, max_model_len=20, block_size=2, same_step="off", prefix_stats=True)
    scheduler = Scheduler(options)
    tokens = range(5)
    for _ in range(2):  # side by side, so that both compute it
        scheduler.add(RequestSpec(0, 5, 2, TokenIdentity(tokens, 2)), 0)
    plan = scheduler.schedule(0)
    first, second = (item.request for item in plan.prefills)
    scheduler.complete(plan, StepOutcome(1, {first: 0, second: 0}))
    scheduler.abort(second)
    serve(scheduler, 5, TokenIdentity(range(20, 25), 2))  # takes the blocks of the second
    listed = dict(scheduler.manager.index.entries())
    assert len(listed[TokenIdentity(tokens, 2).key(1)]) == 1
    scheduler.abort(first)
    serve(scheduler, 5, TokenIdentity(tokens, 2, b"x"))
    assert rows_of(scheduler)[-1] == (5, 0, 0, 0, 0, 4, 1)


def test_a_sequence_that_forks_asks_for_nothing() -> None:
    """A request that forks while it waits for blocks again has one row, for all of its sequences."""
    options = SchedulerConfig(
        num_blocks=5, max_model_len=5, block_size=1, max_num_seqs=3, steps_in_flight=2, prefix_stats=True
    )
    played = play(Case(options, (Job(0, (0, 0), 3, 3), Job(1, (1, 1), 2, 2, n=2))), Accounted)
    assert played.preempted
    stats = Accounted.made.prefix_stats
    assert stats is not None
    assert [row.request for row in stats.rows()] == [0, 1]


def test_what_a_swap_stored_was_there() -> None:
    """A block that a swap brought to the host tier before the device could list it was in the cache."""
    stats = Remembering(Scheduler(SchedulerConfig(num_blocks=4, max_model_len=9, block_size=2, prefix_stats=True)))
    for id in (0, 1):
        request = Request(id, RequestSpec(0, 5, 1, TokenIdentity(range(5), 2)), 1, NO_LIMIT, (id,))
        stats.admitted(request, 0, 0)
        stats.stored(request, 2)
    assert [row[2:] for row in stats.rows()] == [(5, 0, 0, 4, 0, 0, 1), (5, 0, 0, 0, 4, 0, 1)]


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"allocator": "contiguous-max"}])
def test_an_account_of_a_cache_that_is_not_there_is_refused(options: dict[str, object]) -> None:
    """Without a prefix cache there is nothing to keep account of, and the configuration says so."""
    with pytest.raises(ConfigError, match="prefix_stats needs enable_prefix_caching"):
        SchedulerConfig(num_blocks=8, max_model_len=16, prefix_stats=True, **options)  # type: ignore[arg-type]
