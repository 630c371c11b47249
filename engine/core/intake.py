"""Requests come in: what can never be served is refused at once, with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core import groups
from engine.core.errors import InvalidRequest
from engine.core.request import Request
from engine.core.types import NO_LIMIT, RequestSpec

if TYPE_CHECKING:
    from engine.core.scheduler import Scheduler

__all__ = ["add"]


def add(scheduler: Scheduler, spec: RequestSpec, now: int) -> int:
    """Put a request into the queue; returns its id. The ids that follow are those of its other sequences.

    Raises:
        InvalidRequest: it can never be served. It is refused, and takes no id.
    """
    config = scheduler.config
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
    if spec.n > 1 and scheduler._reserve:
        raise InvalidRequest(f"n is {spec.n}, but admission_reserve 'max_tokens' is for requests with n = 1")
    if spec.beam and spec.n > 1 and not scheduler._plain_batching:
        raise InvalidRequest("a beam needs batching 'mixed'; other ways of batching would tear it apart")
    cap = scheduler.manager.limit(spec, min(spec.max_tokens, config.max_model_len - spec.num_prompt_tokens))
    blocks = -(-scheduler._most_tokens(spec.num_prompt_tokens, cap) // config.block_size)
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
    id = scheduler._next_id
    key = (*scheduler._policies.key(scheduler._view(id, spec, scheduler._policies.order.oracle)), spec.arrival, id)
    request = Request(id, spec, cap, shared, key)
    if scheduler._indexes_all:
        # What is copied to the host, or given up, must not depend on who can be known to share it.
        request.shared_blocks = NO_LIMIT
        request.publishes_output = True
    if spec.n > 1:
        groups.begin(scheduler, request)
    scheduler._next_id += spec.n
    scheduler._requests[id] = request
    scheduler._waiting.push(request)
    return id
