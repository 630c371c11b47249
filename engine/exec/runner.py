"""One step as one forward pass: rows in, logits of the rows that sample out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.llama import Decoder
from kernels.attention import layout_step
from kernels.cache import HostKVCache, PagedKVCache

__all__ = ["ModelRunner", "Row"]


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
        hidden = self.decoder.forward(torch.from_numpy(tokens), layout, self.cache)
        last, wanted = -1, []
        for row in rows:
            last += row.num
            if row.samples:
                wanted.append(last)
        if len(wanted) != hidden.shape[0]:
            hidden = hidden[wanted]
        return self.decoder.logits(hidden)
