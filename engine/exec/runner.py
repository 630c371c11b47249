"""One step as one forward pass: rows in, logits of the rows that sample out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.llama import Decoder
from kernels.attention import StepLayout, layout_step
from kernels.cache import HostKVCache, PagedKVCache

__all__ = ["ModelRunner", "Row", "layout_on"]


class Row(NamedTuple):
    """`num` new tokens of one request, behind `start` tokens whose KV is in the pages of `table`."""

    request: int
    start: int
    num: int
    samples: bool
    table: np.ndarray
    """int64[>= pages of start + num tokens]"""


class ModelRunner:
    """A decoder and its cache, and the pool in host memory where there is one."""

    def __init__(self, decoder: Decoder, cache: PagedKVCache, host: HostKVCache | None = None) -> None:
        self.decoder = decoder
        self.cache = cache
        self.host = host

    def order(self, rows: Sequence[Row]) -> list[Row]:
        """The order in which `run` wants rows: one-token rows by falling context (little padding), then chunks."""
        decodes = sorted((row for row in rows if row.num == 1), key=lambda row: -row.start)
        return decodes + [row for row in rows if row.num > 1]

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], tokens: np.ndarray) -> Tensor:
        """Logits [sampling rows, vocab] of ordered `rows`, whose new tokens `tokens` int64[T] are in the same order.

        Writes the KV of all new tokens to the rows' pages.
        """
        decodes = [(row.start, row.table) for row in rows if row.num == 1]
        chunks = [(row.start, row.num, row.table) for row in rows if row.num > 1]
        layout = layout_step(decodes, chunks, self.cache.block_size, self.cache.padding_block)
        fed = torch.from_numpy(tokens)
        device = self.cache.keys.device
        if device.type != "cpu":
            layout, fed = layout_on(device, layout), fed.to(device)
        hidden = self.decoder.forward(fed, layout, self.cache)
        last, wanted = -1, []
        for row in rows:
            last += row.num
            if row.samples:
                wanted.append(last)
        if len(wanted) != hidden.shape[0]:
            hidden = hidden[wanted]
        return self.decoder.logits(hidden)

    def release_unused(self) -> None:
        """Give back what the device's allocator keeps and no tensor holds."""
        if self.cache.keys.is_cuda:
            torch.cuda.empty_cache()


def layout_on(device: torch.device, layout: StepLayout) -> StepLayout:
    """The layout with its tensors on `device`."""
    return StepLayout(
        layout.positions.to(device),
        layout.slots.to(device),
        tuple(
            group._replace(
                blocks=group.blocks.to(device), dead=group.dead.to(device), dead_index=group.dead_index.to(device)
            )
            for group in layout.groups
        ),
        tuple(
            chunk._replace(
                blocks=chunk.blocks.to(device), visible=None if chunk.visible is None else chunk.visible.to(device)
            )
            for chunk in layout.chunks
        ),
    )
