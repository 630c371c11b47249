"""Why prompts were not hit: the account of prefix misses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from core_kit import Case
from hypothesis import HealthCheck, assume, given, settings
from shadow import play
from strategies import cases

from engine.core import ConfigError, RequestSpec, Scheduler, SchedulerConfig, SpanIdentity, TokenIdentity
from engine.core.drive import StepOutcome
from engine.core.prefixstats import PrefixStats
from engine.core.request import Request
from engine.core.types import PrefixRow


class Remembering(PrefixStats):
    """The slow reference: whole contents instead of keys."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.contents: set[tuple[bytes, tuple[int, ...]]] = set()
        self.starts: dict[int, int] = {}

    def _content(self, request: Request, block: int) -> tuple[bytes, tuple[int, ...]]:
        identity = request.identity
        assert isinstance(identity, TokenIdentity)
        tokens = tuple(identity.tokens[: (block + 1) * self._block_size])
        assert len(tokens) == (block + 1) * self._block_size
        return identity._root, tokens

    def published(self, request: Request, start: int, stop: int) -> None:
        super().published(request, start, stop)
        if request.identity is not None:
            self.contents.update(self._content(request, i) for i in range(start, stop))

    def admitted(self, request: Request, device_blocks: int, host_blocks: int) -> None:
        before = len(self.rows())
        super().admitted(request, device_blocks, host_blocks)
        if request.epoch:
            assert len(self.rows()) == before
            return
        row = self.rows()[-1]
        expected: Counter[str] = Counter()
        bare = {tokens for _, tokens in self.contents}
        for i in range((request.num_prompt - 1) // self._block_size):
            content = None if request.identity is None else self._content(request, i)
            if i < device_blocks + host_blocks:
                assert content in self.contents
                expected["hit_tokens" if i < device_blocks else "host_hit_tokens"] += self._block_size
            elif content is None or content[1] not in bare:
                expected["never_seen_tokens"] += self._block_size
            else:
                expected["evicted_tokens" if content in self.contents else "other_salt_tokens"] += self._block_size
        expected["short_tokens"] = request.num_prompt - sum(expected.values())
        for name in PrefixRow._fields[3:]:
            assert getattr(row, name) == expected[name], name
        assert row.asked_tokens == request.num_prompt == sum(row[3:])
        self.starts[request.id] = request.sched


class Accounted(Scheduler):
    made: Accounted

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        assert self.prefix_stats is not None
        self.prefix_stats = self.manager.stats = Remembering(config.block_size)
        Accounted.made = self


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
            assert stats.starts[row.request] == row.hit_tokens + row.host_hit_tokens
            seen.update(name for name in PrefixRow._fields[3:] if getattr(row, name))

    quiet = settings(max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])
    quiet(given(cases())(check))()
    quiet(given(cases(of="tiers", min_jobs=6, max_jobs=14))(check))()
    for name in PrefixRow._fields[3:]:
        assert seen[name] >= 1, seen


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
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
    """Seen first, hit, hit but for the last block of the prompt, evicted by a longer prompt, and another's."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, max_model_len=17, block_size=4, prefix_stats=True))
    for tokens, salt in ((range(10), b""), (range(10), b""), (range(8), b""), (range(50, 65), b""), (range(10), b"x")):
        serve(scheduler, len(tokens), TokenIdentity(tokens, 4, salt))
    serve(scheduler, 10, TokenIdentity(range(10), 4))
    assert rows_of(scheduler) == [
        (10, 0, 0, 8, 0, 0, 2),
        (10, 8, 0, 0, 0, 0, 2),
        (8, 4, 0, 0, 0, 0, 4),
        (15, 0, 0, 12, 0, 0, 3),
        (10, 0, 0, 0, 0, 8, 2),
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


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"allocator": "contiguous-max"}])
def test_an_account_of_a_cache_that_is_not_there_is_refused(options: dict[str, object]) -> None:
    """Without a prefix cache there is nothing to keep account of, and the configuration says so."""
    with pytest.raises(ConfigError, match="prefix_stats needs enable_prefix_caching"):
        SchedulerConfig(num_blocks=8, max_model_len=16, prefix_stats=True, **options)  # type: ignore[arg-type]
