"""One request, alone in the core: what its block table looks like from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core import RequestSpec, Scheduler, SchedulerConfig, StepOutcome
from engine.core.types import Usage

__all__ = ["AloneStep", "serve_alone"]


@dataclass(frozen=True, slots=True)
class AloneStep:
    """The state once one step is planned."""

    tokens: int
    """Tokens of the request that have a slot with this step."""
    table: tuple[int, ...]
    """Its blocks."""
    copies: int
    """Blocks that the step copies."""
    usage: Usage


def serve_alone(prompt_tokens: int, output_tokens: int, block_size: int) -> list[AloneStep]:
    """The steps of one request in a pool that has room for it."""
    longest = prompt_tokens + output_tokens
    blocks = -(-longest // block_size)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=blocks,
            max_model_len=longest,
            block_size=block_size,
            max_num_seqs=1,
            max_num_batched_tokens=longest,
        )
    )
    request = scheduler.add(RequestSpec(0, prompt_tokens, output_tokens), 0)
    steps = []
    now = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule(now)
        usage = scheduler.usage()
        steps.append(AloneStep(usage.held, tuple(scheduler.table(request)), len(plan.copies), usage))
        now += 1
        scheduler.complete(plan, StepOutcome(now))
    return steps
