"""The paged KV cache. One class knows how it lies in memory; everybody else asks it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HostKVCache", "PagedKVCache", "copy_reference", "load_reference", "store_reference"]


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

    @property
    def block_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.keys.element_size()

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole pages, all layers; `sources` and `destinations` int64[n], no page in both, no destination twice.

        A source may be named several times.
        """
        for tensor in (self.keys, self.values):
            tensor.index_copy_(2, destinations, tensor.index_select(2, sources))

    def gather_blocks(self, blocks: Tensor) -> Tensor:
        """Copies of whole pages, one piece of memory a page: [n, 2, layer, kv_head, slot, head_dim]."""
        halves = [t.index_select(2, blocks).permute(2, 0, 1, 3, 4) for t in (self.keys, self.values)]
        return torch.stack(halves, 1)

    def scatter_blocks(self, blocks: Tensor, pages: Tensor) -> None:
        """Put what `gather_blocks` gave at the pages `blocks` int64[n], none of them named twice."""
        for half, tensor in enumerate((self.keys, self.values)):
            tensor.index_copy_(2, blocks, pages[:, half].permute(1, 2, 0, 3, 4))


class HostKVCache:
    """Pages in host memory, for what was swapped out or is kept behind the device's pool.

    Layout: [block, keys or values, layer, kv_head, slot, head_dim], so that one page is one piece of memory: scattered
    device pages are gathered into a buffer first, and cross the link as few long copies. Page-locked where there is
    CUDA, unless `pinned` says otherwise; a CPU has no link, and its copies are plain ones.
    """

    def __init__(self, device: PagedKVCache, num_blocks: int, pinned: bool | None = None) -> None:
        self.num_blocks = num_blocks
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        shape = (
            *(num_blocks, 2, device.num_layers, device.num_kv_heads),
            *(device.block_size, device.head_dim),
        )
        self.pages = torch.zeros(shape, dtype=device.dtype, pin_memory=self.pinned)
        self._device = device

    @property
    def num_bytes(self) -> int:
        return self.pages.numel() * self.pages.element_size()

    def store(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Device pages `sources` go to host pages `destinations`, none of these named twice. Complete on return."""
        buffer = self._device.gather_blocks(torch.tensor(sources, device=self._device.keys.device))
        for at, first, count in _runs(destinations):
            self.pages[first : first + count].copy_(buffer[at : at + count], non_blocking=self.pinned)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()

    def load(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Host pages `sources` go to device pages `destinations`, none of these named twice. Complete on return."""
        where = self._device.keys.device
        if where.type == "cpu":
            buffer = self.pages.index_select(0, torch.tensor(sources))
        else:
            buffer = torch.empty((len(sources), *self.pages.shape[1:]), dtype=self.pages.dtype, device=where)
            for at, first, count in _runs(sources):
                buffer[at : at + count].copy_(self.pages[first : first + count], non_blocking=self.pinned)
        self._device.scatter_blocks(torch.tensor(destinations, device=where), buffer)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(place in `blocks`, first block, count) of every stretch of consecutive ids."""
    runs: list[tuple[int, int, int]] = []
    for at, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((at, block, 1))
    return runs


# Slow references: page by page, layer by layer.


def copy_reference(cache: PagedKVCache, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """What `copy_blocks` does."""
    for source, destination in zip(sources, destinations, strict=True):
        for layer in range(cache.num_layers):
            cache.keys[layer, :, destination] = cache.keys[layer, :, source]
            cache.values[layer, :, destination] = cache.values[layer, :, source]


def store_reference(
    cache: PagedKVCache, host: HostKVCache, sources: Sequence[int], destinations: Sequence[int]
) -> None:
    """What `HostKVCache.store` does."""
    for source, destination in zip(sources, destinations, strict=True):
        for layer in range(cache.num_layers):
            host.pages[destination, 0, layer] = cache.keys[layer, :, source]
            host.pages[destination, 1, layer] = cache.values[layer, :, source]


def load_reference(cache: PagedKVCache, host: HostKVCache, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """What `HostKVCache.load` does."""
    for source, destination in zip(sources, destinations, strict=True):
        for layer in range(cache.num_layers):
            cache.keys[layer, :, destination] = host.pages[source, 0, layer]
            cache.values[layer, :, destination] = host.pages[source, 1, layer]
