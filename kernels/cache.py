"""The paged KV cache. One class knows how it lies in memory; everybody else asks it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """Keys and values of all layers, in pages of `block_size` slots.

    Layout: [layer, kv_head, block, slot, head_dim]. With the head outside of the block, one `index_select` along the
    block axis gathers the pages of many sequences for all heads at once, and yields what a batched matrix product
    wants, without a transposition.

    Pages 0 .. num_blocks - 1 belong to whoever hands out block ids. One more page, `padding_block`, lies behind
    them: rows that exist only to fill up a shape write there, so that they can never touch a page of the pool.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (num_layers, num_kv_heads, num_blocks + 1, block_size, head_dim)
        # Zeroed, so that a page costs its first touch here and not in the middle of a timed step.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._key_layers = list(self.keys.unbind(0))
        self._value_layers = list(self.values.unbind(0))
        flat = (num_layers, num_kv_heads, (num_blocks + 1) * block_size, head_dim)
        self._key_slots = list(self.keys.view(flat).unbind(0))
        self._value_slots = list(self.values.view(flat).unbind(0))

    @property
    def padding_block(self) -> int:
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` [tokens, kv_head, head_dim] at `slots` int64[tokens] (block * block_size + slot)."""
        self._key_slots[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self._value_slots[layer].index_copy_(1, slots, values.transpose(0, 1))

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the pages `blocks` int64[n], as keys and values [kv_head, n * block_size, head_dim]."""
        shape = (self.num_kv_heads, -1, self.head_dim)
        keys = self._key_layers[layer].index_select(1, blocks).view(shape)
        values = self._value_layers[layer].index_select(1, blocks).view(shape)
        return keys, values

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole pages, all layers; `sources` and `destinations` int64[n], no page in both."""
        for tensor in (self.keys, self.values):
            tensor.index_copy_(2, destinations, tensor.index_select(2, sources))
