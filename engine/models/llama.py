"""Decoders of the Llama family: weights by their Hugging Face names in, hidden states and logits out.

Llama, Mistral, Qwen2, Qwen3 and Mixtral are one decoder. What differs follows from the configuration: biases on the
projections (Qwen2), norms over query and key heads (Qwen3), and a mixture of experts in place of the MLP (Mixtral).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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


class _Layer:
    """One decoder layer's weights, with the projections that read the same input joined."""

    __slots__ = ("input_norm", "key_norm", "mlp", "out", "post_norm", "qkv", "query_norm")

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: DecoderConfig) -> None:
        def joined(part: str, *names: str) -> Linear:
            matrices = [weights[f"{prefix}{part}.{name}.weight"] for name in names]
            biases = [weights.get(f"{prefix}{part}.{name}.bias") for name in names]
            present = [bias for bias in biases if bias is not None]
            return Linear(torch.cat(matrices), torch.cat(present) if present else None)

        self.input_norm = weights[prefix + "input_layernorm.weight"]
        self.post_norm = weights[prefix + "post_attention_layernorm.weight"]
        self.qkv = joined("self_attn", "q_proj", "k_proj", "v_proj")
        self.query_norm = weights.get(prefix + "self_attn.q_norm.weight")
        self.key_norm = weights.get(prefix + "self_attn.k_norm.weight")
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

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Convert `weights` to `dtype`; ModelError names the first weight that is missing or has another shape."""
        converted: dict[str, Tensor] = {}
        for name, shape in expected_weights(config):
            tensor = weights.get(name)
            if tensor is None:
                raise ModelError(f"the checkpoint has no weight {name}, which its configuration asks for")
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"the checkpoint's weight {name} has shape {tuple(tensor.shape)}; its configuration says {shape}"
                )
            converted[name] = tensor.to(dtype)
        self.config = config
        self.dtype = dtype
        self.embedding = converted["model.embed_tokens.weight"]
        self.layers = []
        for layer in range(config.num_layers):
            self.layers.append(_Layer(converted, f"model.layers.{layer}.", config))
        self.norm = converted["model.norm.weight"]
        self.head = Linear(self.embedding if config.tie_word_embeddings else converted["lm_head.weight"])
        self.cos, self.sin = _rope_tables(config, dtype)

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
