"""What it costs to give up a request's blocks and get them back, in the two ways there are.

The scheduler asks this where `preemption_mode` is `auto`. The engine and the simulator load the same coefficients, from
one calibration.json, so that both take the same way.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["CostModel", "LinearCost"]


class CostModel(Protocol):
    """Predicts both ways; integers, so that equal inputs give equal choices everywhere."""

    def recompute_ns(self, num_tokens: int) -> int:
        """Time in ns to compute the KV of a sequence's first `num_tokens` tokens again."""
        ...

    def swap_ns(self, num_blocks: int) -> int:
        """Time in ns to move `num_blocks` blocks to the host and back."""
        ...


class LinearCost(NamedTuple):
    """A prefill as step, tokens and attention; a swap as a latency, copies and bytes, each way.

    recompute = step_ns + token_ns t + pair_ns t (t + 1) / 2, with t tokens;
    swap      = 2 (swap_latency_ns + block_ns b), with b blocks, where block_ns is a copy's own cost plus its bytes over
    the link's bandwidth.
    """

    step_ns: float = 0.0
    """Of one more step; 0 where the tokens ride along in a step that happens anyway."""
    token_ns: float = 0.0
    pair_ns: float = 0.0
    """Per pair of a query and a key that it attends to."""
    swap_latency_ns: float = 0.0
    block_ns: float = 0.0

    def recompute_ns(self, num_tokens: int) -> int:
        pairs = num_tokens * (num_tokens + 1) // 2
        return round(self.step_ns + self.token_ns * num_tokens + self.pair_ns * pairs)

    def swap_ns(self, num_blocks: int) -> int:
        return round(2 * (self.swap_latency_ns + self.block_ns * num_blocks))
