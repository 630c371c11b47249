"""The part of a layer behind attention: one gated MLP, or several of which a router chooses for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.models.linear import Linear

__all__ = ["GatedMlp", "MixtureOfExperts"]


class GatedMlp:
    """down(silu(gate x) * up x), with the gate and up projections joined."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] of x [tokens, hidden]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))


class MixtureOfExperts:
    """The weighted sum of the experts that the router chooses for a token (Mixtral).

    A token's weights are the softmax over all experts, in float32 at least, of those chosen, scaled to sum to 1. Rows
    are sorted by expert, so that each expert runs once over the rows that are its own.
    """

    __slots__ = ("chosen", "experts", "router")

    def __init__(self, router: Linear, experts: Sequence[GatedMlp], chosen: int) -> None:
        self.router = router
        self.experts = list(experts)
        self.chosen = chosen

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] of x [tokens, hidden]."""
        scores = self.router(x)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        weights, ids = torch.softmax(wide, -1).topk(self.chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype).view(-1)
        flat = ids.view(-1)
        order = flat.argsort(stable=True)
        tokens = order // self.chosen
        rows = x.index_select(0, tokens)
        first = 0
        for expert, count in zip(self.experts, self._counts(flat), strict=True):
            if count:
                part = rows[first : first + count]
                part.copy_(expert(part))
                first += count
        rows.mul_(weights.index_select(0, order).unsqueeze(1))
        return torch.zeros_like(x).index_add_(0, tokens, rows)

    def _counts(self, flat: Tensor) -> list[int]:
        """Rows of each expert. Fake tensors have no values: there the rows are spread evenly."""
        experts = len(self.experts)
        if isinstance(flat, FakeTensor):
            share, more = divmod(flat.shape[0], experts)
            return [share + (index < more) for index in range(experts)]
        counts: list[int] = torch.bincount(flat, minlength=experts).tolist()
        return counts
