"""Decoders of the Llama family: weights by their Hugging Face names in, hidden states and logits out.

Llama, Mistral, Qwen2, Qwen3 and Mixtral are one decoder. What differs follows from the configuration: biases on the
projections (Qwen2), norms over query and key heads (Qwen3), and a mixture of experts in place of the MLP (Mixtral).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import DecoderConfig
from engine.models.errors import ModelError
from engine.models.linear import Linear
from engine.models.mlp import GatedMlp, MixtureOfExperts
from kernels.attention import StepLayout, attend
from kernels.cache import PagedKVCache

__all__ = ["Decoder", "expected_weights"]


def expected_weights(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight, as Hugging Face names them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for name, outputs in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
            yield f"{prefix}self_attn.{name}.weight", (outputs, hidden)
            if config.qkv_bias:
                yield f"{prefix}self_attn.{name}.bias", (outputs,)
        if config.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (config.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (config.head_dim,)
        yield prefix + "self_attn.o_proj.weight", (hidden, query)
        if config.output_bias:
            yield prefix + "self_attn.o_proj.bias", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if config.num_experts:
            yield prefix + "block_sparse_moe.gate.weight", (config.num_experts, hidden)
            for expert in range(config.num_experts):
                part = f"{prefix}block_sparse_moe.experts.{expert}."
                yield part + "w1.weight", (inner, hidden)
                yield part + "w2.weight", (hidden, inner)
                yield part + "w3.weight", (inner, hidden)
            continue
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            yield f"{prefix}mlp.{name}.weight", shape
            if config.mlp_bias:
                yield f"{prefix}mlp.{name}.bias", shape[:1]
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


class _Weights:
    """A checkpoint's weights, in the model's dtype, each read when it is asked for."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._borrowed: bool = getattr(weights, "borrowed", False)
        """Whether tensors lie in memory that is not ours, such as a mapped file."""

    def check(self, config: DecoderConfig) -> None:
        """Raises ModelError: a weight is missing, or has another shape than the configuration says."""
        shape_of = getattr(self._weights, "shape_of", None)
        for name, shape in expected_weights(config):
            if name not in self._weights:
                raise ModelError(f"the checkpoint has no weight {name}, which its configuration asks for")
            found = tuple(shape_of(name) if shape_of is not None else self._weights[name].shape)
            if found != shape:
                raise ModelError(f"the checkpoint's weight {name} has shape {found}; its configuration says {shape}")

    def kept(self, name: str) -> Tensor:
        """A weight that stays as it is."""
        return self._weights[name].to(self._device, self._dtype, copy=self._borrowed)

    def optional(self, name: str) -> Tensor | None:
        return self.kept(name) if name in self._weights else None

    def linear(self, *names: str) -> Linear:
        """Matrices of one input, one above the other, with their biases."""
        matrices = [self._weights[f"{name}.weight"].to(self._device, self._dtype) for name in names]
        biases = [bias for name in names if (bias := self.optional(f"{name}.bias")) is not None]
        whole = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        return Linear(whole, torch.cat(biases) if biases else None, self._borrowed and len(matrices) == 1)


class _Layer:
    """One decoder layer's weights, with the projections that read the same input joined."""

    __slots__ = ("input_norm", "key_norm", "mlp", "out", "post_norm", "qkv", "query_norm")

    def __init__(self, weights: _Weights, prefix: str, config: DecoderConfig) -> None:
        def joined(part: str, *names: str) -> Linear:
            return weights.linear(*(f"{prefix}{part}.{name}" for name in names))

        self.input_norm = weights.kept(prefix + "input_layernorm.weight")
        self.post_norm = weights.kept(prefix + "post_attention_layernorm.weight")
        self.qkv = joined("self_attn", "q_proj", "k_proj", "v_proj")
        self.query_norm = weights.optional(prefix + "self_attn.q_norm.weight")
        self.key_norm = weights.optional(prefix + "self_attn.k_norm.weight")
        self.out = joined("self_attn", "o_proj")
        self.mlp: GatedMlp | MixtureOfExperts
        if config.num_experts:
            part = "block_sparse_moe.experts"
            experts = [
                GatedMlp(joined(f"{part}.{i}", "w1", "w3"), joined(f"{part}.{i}", "w2"))
                for i in range(config.num_experts)
            ]
            self.mlp = MixtureOfExperts(joined("block_sparse_moe", "gate"), experts, config.experts_per_token)
        else:
            self.mlp = GatedMlp(joined("mlp", "gate_proj", "up_proj"), joined("mlp", "down_proj"))


class Decoder:
    """The decoder. It holds weights and constants only; all state of requests is in the cache and the layout."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        on_layer: Callable[[int, int], None] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Convert `weights` to `dtype`, a layer at a time; `on_layer` is told of each one, and of how many.

        Weights of a mapping that says `borrowed` are copied, and looked at one after another; one that has `shape_of`
        is asked for shapes by it.

        Raises:
            ModelError: names the first weight that is missing or has another shape.
        """
        read = _Weights(weights, dtype, torch.device(device))
        read.check(config)
        self.config = config
        self.dtype = dtype
        # The largest matrices first: they need room beside themselves while they are turned or packed.
        self.embedding = read.kept("model.embed_tokens.weight")
        self.head = Linear(self.embedding) if config.tie_word_embeddings else read.linear("lm_head")
        self.layers = []
        for layer in range(config.num_layers):
            if on_layer is not None:
                on_layer(layer, config.num_layers)
            self.layers.append(_Layer(read, f"model.layers.{layer}.", config))
        self.norm = read.kept("model.norm.weight")
        self.cos, self.sin = (table.to(device) for table in _rope_tables(config, dtype))
        if on_layer is not None:
            on_layer(config.num_layers, config.num_layers)

    def forward(self, tokens: Tensor, layout: StepLayout, cache: PagedKVCache) -> Tensor:
        """Hidden states [T, hidden] after the final norm of `tokens` int64[T]; their keys and values go to `cache`."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        turned = heads + kv_heads
        eps, scale = config.norm_eps, dim**-0.5
        count = tokens.shape[0]
        cos = self.cos.index_select(0, layout.positions).unsqueeze(1)
        sin = self.sin.index_select(0, layout.positions).view(count, 1, 2, dim // 2)
        hidden = self.embedding.index_select(0, tokens)
        shape = (config.hidden_size,)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(F.rms_norm(hidden, shape, layer.input_norm, eps)).view(count, turned + kv_heads, dim)
            bare = qkv[:, :turned]
            if layer.query_norm is not None:
                bare = _head_norms(bare, heads, layer, dim, eps)
            # Rotation by halves: x cos + swap(x) sin, with the minus of the swapped half kept in the sine table.
            swapped = bare.view(count, turned, 2, dim // 2).flip(2).mul_(sin).view(count, turned, dim)
            roped = torch.addcmul(swapped, bare, cos)
            mixed = attend(roped[:, :heads], roped[:, heads:], qkv[:, turned:], cache, index, layout, scale)
            hidden = hidden + layer.out(mixed)
            hidden = hidden + layer.mlp(F.rms_norm(hidden, shape, layer.post_norm, eps))
        return F.rms_norm(hidden, shape, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab], in float32 at least, of hidden states [rows, hidden]."""
        logits = self.head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()


def _head_norms(bare: Tensor, heads: int, layer: _Layer, dim: int, eps: float) -> Tensor:
    """Queries and keys [tokens, heads + kv_heads, dim], each head normed."""
    return torch.cat(
        [
            F.rms_norm(bare[:, :heads], (dim,), layer.query_norm, eps),
            F.rms_norm(bare[:, heads:], (dim,), layer.key_norm, eps),
        ],
        1,
    )


def _rope_tables(config: DecoderConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [max_position, head_dim]; the sine's first half carries the rotation's minus sign.

    In float32 the frequencies follow Hugging Face to the bit (float32 arithmetic); in float64 all is float64.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, config.head_dim, 2, dtype=exact) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        frequencies = torch.tensor([scaling.stretch(f) for f in frequencies.tolist()], dtype=exact)
    angles = torch.outer(torch.arange(config.max_position, dtype=exact), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], 1).to(dtype), torch.cat([-sin, sin], 1).to(dtype)
