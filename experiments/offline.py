"""A trace's prompts through the core's prefix cache, one after another and without a clock: what a cache of a given
size hits. The scheduler itself decides; each request computes its whole prompt in one step, generates nothing that
counts, and has ended before the next comes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from engine.core.eviction import Belady
from engine.core.identity import SpanIdentity
from engine.core.presets import SchedulerConfig
from engine.core.scheduler import Scheduler
from engine.core.types import NO_LIMIT, BlockHash, RequestSpec, StepOutcome
from traces import Trace

__all__ = ["Replayed", "replay"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a cache did for a trace."""

    prompt_tokens: int
    full_block_tokens: int
    """Tokens of whole blocks: what a cache of blocks could hit at most."""
    hit_tokens: int
    refused: int
    """Prompts that are larger than the cache; they count as missed."""

    @property
    def share(self) -> float:
        """Of the tokens of whole blocks."""
        return self.hit_tokens / self.full_block_tokens if self.full_block_tokens else 0.0


def replay(trace: Trace, tokens: int, block_size: int, **options: Any) -> Replayed:
    """Replays the prompts of `trace` in a pool of `tokens` slots. `options` are those of SchedulerConfig.

    An eviction policy that needs to know the future (`belady`) is told when each block is asked for again.
    """
    longest = int(trace.prompt_tokens.max()) + 2
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=tokens // block_size,
            max_model_len=longest,
            block_size=block_size,
            max_num_seqs=1,
            max_num_batched_tokens=longest,
            **options,
        )
    )
    prompts = trace.prompt_tokens.tolist()
    shared = trace.shared_prompt_tokens().tolist()
    salts = trace.tenant.tolist()
    identities = [
        SpanIdentity(trace.spans(row), block_size, None, salts[row], shared[row]) for row in range(len(prompts))
    ]
    now = 0
    if options.get("eviction_policy") == "belady":
        uses = _uses(identities, prompts, block_size)

        def next_use(key: BlockHash) -> int:
            """The row that asks for this content next, after the present one."""
            rows = uses.get(key, ())
            at = bisect_right(rows, now)
            return rows[at] if at < len(rows) else NO_LIMIT

        ranked = scheduler.manager.ranked
        assert ranked is not None
        assert isinstance(ranked.policy, Belady)
        ranked.policy.next_use = next_use
    full = hit = refused = 0
    for now, prompt in enumerate(prompts):
        full += prompt // block_size * block_size
        if -(-prompt // block_size) > tokens // block_size:
            refused += 1
            continue
        scheduler.add(RequestSpec(now, prompt, 1, identities[now]), now)
        plan = scheduler.schedule(now)
        hit += plan.prefills[0].start
        scheduler.complete(plan, StepOutcome(now))
    return Replayed(sum(prompts), full, hit, refused)


def _uses(identities: list[SpanIdentity], prompts: list[int], block_size: int) -> dict[BlockHash, list[int]]:
    """Content -> the rows that ask for it, in order. Content that only one row can have is left out."""
    uses: dict[BlockHash, list[int]] = {}
    for row, (identity, prompt) in enumerate(zip(identities, prompts, strict=True)):
        for i in range(min(prompt, identity.shared_tokens) // block_size):
            uses.setdefault(identity.key(i), []).append(row)
    return uses
