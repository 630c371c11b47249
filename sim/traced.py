"""The peak of a step, from running the engine's own model code on fake tensors: no weights, no device, no formula.

Fake tensors have shapes and no values, and torch's memory tracker counts the bytes of those that are alive. This is the
one module of the simulator that imports the engine's models, and it is imported when somebody asks (it needs torch).

A layer's transients are the same in every layer, so two layers are run; a test holds that against all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode

from engine.models.config import DecoderConfig
from engine.models.llama import Decoder, expected_weights
from kernels.attention import layout_step
from kernels.cache import PagedKVCache
from sim.errors import SimError
from sim.models import ModelSpec

__all__ = ["ATTENTIONS", "Attention", "TracedPeak", "decoder_config", "traced_layers_bytes", "traced_peak"]

ATTENTIONS = ("flash", "cpu", "eager")
"""`flash`: a fused kernel that reads grouped keys as they are, and builds no matrix. `cpu`: what torch runs on a CPU,
which repeats grouped keys and values first. `eager`: scores of all heads, and their probabilities in float32."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LAYERS = 2


@dataclass(frozen=True, slots=True)
class TracedPeak:
    """Bytes that are alive at most, beside weights and KV cache."""

    layers: int
    """In the forward pass."""
    logits: int
    """In the pass over the rows that sample, their hidden states' product with the head."""


def decoder_config(spec: ModelSpec) -> DecoderConfig:
    """The engine's own configuration of a simulated model."""
    return DecoderConfig(
        architecture="traced",
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_heads=spec.heads,
        num_kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab,
        max_position=spec.max_position,
        tie_word_embeddings=spec.tied,
        qkv_bias=spec.qkv_bias,
        qk_norm=spec.qk_norm,
        num_experts=spec.experts,
        experts_per_token=spec.experts_per_token,
    )


class Attention(TorchFunctionMode):
    """Puts the kind of attention in place that is asked for; what torch would pick by itself depends on the device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args
        causal, scale, mask = kwargs.get("is_causal", False), kwargs.get("scale"), kwargs.get("attn_mask")
        if self._kind == "flash":
            torch.empty(query.shape[:-1], dtype=torch.float32)  # the logarithms of the sums, gone at once
            return torch.empty_like(query)
        if key.shape[1] != query.shape[1]:
            group = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        if self._kind == "cpu":
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return fused(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)[0]
        scores = (query @ key.transpose(-1, -2)).mul_(scale)
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril_()
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def traced_peak(
    config: DecoderConfig,
    chunks: tuple[tuple[int, int], ...],
    decodes: tuple[int, ...] = (),
    *,
    samples: int = 0,
    dtype: str = "bfloat16",
    attention: str = "flash",
    block_size: int = 16,
    layers: int | None = _LAYERS,
) -> TracedPeak:
    """The peak of one step.

    Args:
        chunks: (tokens cached before, new tokens) of every prefill.
        decodes: the context of every decode, its new token left out.
        samples: rows that sample; 0: one for each chunk and decode.
        layers: how many layers to run; None: all of them.

    Raises:
        SimError: an unknown attention or dtype.
    """
    if attention not in ATTENTIONS:
        raise SimError(f"Unknown attention '{attention}'; known ones are {', '.join(ATTENTIONS)}.")
    if dtype not in _DTYPES:
        raise SimError(f"Peaks can be traced in {', '.join(_DTYPES)}, but not in {dtype}.")
    return _trace(config, chunks, decodes, samples, dtype, attention, block_size, layers)


@cache
def _trace(
    config: DecoderConfig,
    chunks: tuple[tuple[int, int], ...],
    decodes: tuple[int, ...],
    samples: int,
    dtype: str,
    attention: str,
    block_size: int,
    layers: int | None,
) -> TracedPeak:
    shape = replace(config, num_layers=min(layers or config.num_layers, config.num_layers))
    element = _DTYPES[dtype]
    tokens = sum(new for _, new in chunks) + len(decodes)
    longest = max([0, *(before + new for before, new in chunks), *(context + 1 for context in decodes)])
    pages = -(-longest // block_size)
    table = np.arange(pages)
    rows = samples or len(chunks) + len(decodes)
    # All requests have the same pages: what is written does not matter here, only how much is read.
    layout = layout_step(
        [(context, table) for context in decodes], [(before, new, table) for before, new in chunks], block_size, pages
    )
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        weights = {name: torch.empty(size, dtype=element) for name, size in expected_weights(shape)}
        decoder = Decoder(shape, weights, element)
        cache = PagedKVCache(shape.num_layers, pages, block_size, shape.num_kv_heads, shape.head_dim, element)
        ids = torch.zeros(tokens, dtype=torch.int64)
        last = torch.zeros(min(rows, tokens), shape.hidden_size, dtype=element)
        hidden = tokens * shape.hidden_size * element.itemsize
        there = [*_tensors([decoder, cache, list(layout)]), ids, last]
        in_layers = _peak(lambda: decoder.forward(ids, layout, cache), there, attention)
        in_logits = _peak(lambda: decoder.logits(last), there, attention)
    sampled = last.numel() * element.itemsize if rows < tokens else 0
    return TracedPeak(in_layers, in_logits + hidden + sampled)


def _peak(run: Callable[[], Tensor], there: Sequence[Tensor], attention: str) -> int:
    """The most bytes of tensors that are alive at once while `run` runs, beyond those that were there before."""
    tracker = MemTracker()
    tracker.track_external(*there)
    with Attention(attention), tracker:
        before = _bytes(tracker, "current")
        run()
        return _bytes(tracker, "peak") - before


def _bytes(tracker: MemTracker, moment: str) -> int:
    return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot(moment).values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor that hangs on an object of the engine."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif type(value).__module__.startswith(("engine.models", "kernels")):
        for name in (*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())):
            yield from _tensors(getattr(value, name))


def traced_layers_bytes(spec: ModelSpec, tokens: int, dtype: str = "bfloat16", tp: int = 1) -> int:
    """Peak of the layers in a profiling run: one prompt of so many tokens, on one of `tp` devices."""
    config = decoder_config(spec)
    return traced_peak(config if tp == 1 else config.shard(tp), ((0, tokens),), dtype=dtype).layers
