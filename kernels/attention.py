"""Attention of a step's rows over the paged cache: a slow reference, and the path that CPUs run.

A step has T tokens. Decode rows (one new token each) come first, then the prefill chunks, each a run of tokens.
`StepLayout` says where every token's keys go and what every row reads; it is built once a step and serves all layers.

A slot that no live token owns may hold anything, also NaN. Such slots are gathered, since pages are gathered whole,
so both of their uses are guarded: their scores are replaced (not added to), and their values are zeroed, because a
probability of 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cache import PagedKVCache

__all__ = ["ChunkRow", "DecodeGroup", "StepLayout", "attend", "attend_reference", "layout_step"]

_GROUP_OVERHEAD_TOKENS = 512
"""What one more group of decodes costs in calls, expressed in gathered tokens. Measured on the 135M model."""


class DecodeGroup(NamedTuple):
    """Neighbouring decode rows of similar context, padded to the longest of them."""

    first: int
    last: int
    """Token indices [first, last) of the step."""
    blocks: Tensor
    """int64[rows * pages]: each row's pages, filled up with the padding page."""
    dead: Tensor
    """bool[rows, 1, pages * block_size]: the slots beyond a row's context."""
    dead_index: Tensor
    """The same as positions in [0, rows * pages * block_size)."""


class ChunkRow(NamedTuple):
    """A run of new tokens of one sequence, behind `start` tokens whose keys are cached."""

    first: int
    last: int
    start: int
    blocks: Tensor
    """int64[pages]: the pages of the start + (last - first) tokens."""
    visible: Tensor | None
    """bool[last - first, start + last - first]: what each token reads; None where start is 0."""


class StepLayout(NamedTuple):
    """Where the tokens of a step write and read."""

    positions: Tensor
    """int64[T]"""
    slots: Tensor
    """int64[T]: block * block_size + slot of each token's own key and value."""
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkRow, ...]


def layout_step(
    decodes: Sequence[tuple[int, np.ndarray]],
    chunks: Sequence[tuple[int, int, np.ndarray]],
    block_size: int,
    padding_block: int,
) -> StepLayout:
    """Lay out a step.

    `decodes`: (position of the new token, block table int64[>= position // block_size + 1]), best sorted by falling
    position, so that neighbours make groups of little padding. `chunks`: (start, number of new tokens, block table).
    """
    num_decodes = len(decodes)
    spot = np.fromiter((position for position, _ in decodes), dtype=np.int64, count=num_decodes)
    pages = spot // block_size + 1
    last_pages = np.fromiter(
        (table[n - 1] for (_, table), n in zip(decodes, pages.tolist(), strict=True)), dtype=np.int64, count=num_decodes
    )
    positions = [spot]
    slots = [last_pages * block_size + spot % block_size]
    groups = []
    for first, last in _group(spot + 1, block_size):
        width = int(pages[first:last].max())
        blocks = np.full((last - first, width), padding_block, dtype=np.int64)
        for row in range(first, last):
            blocks[row - first, : pages[row]] = decodes[row][1][: pages[row]]
        dead = np.arange(width * block_size) > spot[first:last, None]
        groups.append(
            DecodeGroup(
                first,
                last,
                torch.from_numpy(blocks.reshape(-1)),
                torch.from_numpy(dead).unsqueeze(1),
                torch.from_numpy(np.flatnonzero(dead)),
            )
        )
    rows = []
    first = num_decodes
    for start, count, table in chunks:
        span = np.arange(start, start + count, dtype=np.int64)
        used = np.asarray(table[: (start + count - 1) // block_size + 1], dtype=np.int64)
        positions.append(span)
        slots.append(used[span // block_size] * block_size + span % block_size)
        visible = torch.ones(count, start + count, dtype=torch.bool).tril_(start) if start else None
        rows.append(ChunkRow(first, first + count, start, torch.from_numpy(used), visible))
        first += count
    return StepLayout(
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(slots)),
        tuple(groups),
        tuple(rows),
    )


def _group(contexts: np.ndarray, block_size: int) -> list[tuple[int, int]]:
    """Cut rows into neighbours that are padded to one width: a cut where the padding saved outweighs a group's cost."""
    groups: list[tuple[int, int]] = []
    first = 0
    widest = 0
    used = 0
    for row, context in enumerate(contexts.tolist()):
        width = max(widest, context)
        padding = width * (row + 1 - first) - used - context
        if row > first and padding > _GROUP_OVERHEAD_TOKENS + used // 4:
            groups.append((first, row))
            first, widest, used = row, context, context
        else:
            widest, used = width, used + context
    if len(contexts):
        groups.append((first, len(contexts)))
    return groups


def attend(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, layer: int, layout: StepLayout, scale: float
) -> Tensor:
    """Write the step's keys and values [T, kv_head, D], then attend with `query` [T, head, D]; returns [T, head * D].

    Head h reads kv head h // (heads / kv_heads).
    """
    cache.write(layer, layout.slots, key, value)
    out = torch.empty_like(query)
    for group in layout.groups:
        _attend_decodes(query, out, cache, layer, group, scale)
    for chunk in layout.chunks:
        _attend_chunk(query, key, value, out, cache, layer, chunk, scale)
    return out.view(query.shape[0], -1)


def _attend_decodes(
    query: Tensor, out: Tensor, cache: PagedKVCache, layer: int, group: DecodeGroup, scale: float
) -> None:
    rows = group.last - group.first
    kv_heads, dim = cache.num_kv_heads, cache.head_dim
    keys, values = cache.gather(layer, group.blocks)
    values.index_fill_(1, group.dead_index, 0.0)
    grouped = query[group.first : group.last].view(rows, kv_heads, -1, dim).transpose(0, 1)
    shape = (kv_heads * rows, -1, dim)
    scores = torch.bmm(grouped.reshape(shape).mul(scale), keys.view(shape).transpose(1, 2))
    scores.view(kv_heads, rows, scores.shape[1], scores.shape[2]).masked_fill_(group.dead, -torch.inf)
    mixed = torch.bmm(_softmax(scores), values.view(shape))
    target = out[group.first : group.last].view(rows, kv_heads, -1, dim)
    target.copy_(mixed.view(kv_heads, rows, -1, dim).transpose(0, 1))


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis, in float32 at least."""
    if scores.dtype in (torch.float32, torch.float64):
        return torch.softmax(scores, -1)
    return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)


def _attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    cache: PagedKVCache,
    layer: int,
    chunk: ChunkRow,
    scale: float,
) -> None:
    new = slice(chunk.first, chunk.last)
    heads_first = query[new].transpose(0, 1).unsqueeze(0)
    if chunk.start == 0:
        # Nothing is cached before the chunk: what was just computed is all there is to read.
        fresh_keys, fresh_values = key[new].transpose(0, 1).unsqueeze(0), value[new].transpose(0, 1).unsqueeze(0)
        mixed = F.scaled_dot_product_attention(
            heads_first, fresh_keys, fresh_values, is_causal=True, scale=scale, enable_gqa=True
        )
        out[new].copy_(mixed[0].transpose(0, 1))
        return
    context = chunk.start + chunk.last - chunk.first
    keys, values = cache.gather(layer, chunk.blocks)
    # Cut at the context's end: what lies behind it in the last page is never read.
    keys, values = keys[:, :context].unsqueeze(0), values[:, :context].unsqueeze(0)
    mixed = F.scaled_dot_product_attention(
        heads_first, keys, values, attn_mask=chunk.visible, scale=scale, enable_gqa=True
    )
    out[new].copy_(mixed[0].transpose(0, 1))


def attend_reference(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedKVCache, layer: int, layout: StepLayout, scale: float
) -> Tensor:
    """The same as `attend`, one token and one head at a time, slot by slot, in the dtype of the cache."""
    cache.write(layer, layout.slots, key, value)
    size, heads_per_kv = cache.block_size, query.shape[1] // cache.num_kv_heads
    tables: dict[int, Tensor] = {}
    for group in layout.groups:
        for row, table in enumerate(group.blocks.view(group.last - group.first, -1)):
            tables[group.first + row] = table
    for chunk in layout.chunks:
        for token in range(chunk.first, chunk.last):
            tables[token] = chunk.blocks
    out = torch.empty_like(query)
    for token, table in tables.items():
        context = int(layout.positions[token]) + 1
        for head in range(query.shape[1]):
            kv_head = head // heads_per_kv
            pages = [(int(table[i // size]), i % size) for i in range(context)]
            keys = torch.stack([cache.keys[layer, kv_head, page, slot] for page, slot in pages])
            values = torch.stack([cache.values[layer, kv_head, page, slot] for page, slot in pages])
            weights = torch.softmax(keys @ query[token, head] * scale, 0)
            out[token, head] = weights @ values
    return out.view(query.shape[0], -1)
