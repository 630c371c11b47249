"""What a decoder looks like, read from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.models.errors import ModelError

__all__ = ["ARCHITECTURES", "DecoderConfig", "RopeScaling"]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
)
_WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM")
"""Architectures that slide a window wherever the configuration has one."""
_SWITCHED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that do so only where use_sliding_window says so."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length that a model was first trained on."""

    kind: str
    """`linear` or `llama3`."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def stretch(self, frequency: float) -> float:
        """The scaled angular frequency in radians a position.

        `llama3`: long wavelengths are stretched by `factor`, short ones are kept, and those between the two limits
        are blended (Llama 3.1's published scheme).
        """
        if self.kind == "linear":
            return frequency / self.factor
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_position / self.high_freq_factor:
            return frequency
        if wavelength > self.original_max_position / self.low_freq_factor:
            return frequency / self.factor
        kept = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and constants of a decoder."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMS norm over each query and key head, before they are turned (Qwen3)."""
    num_experts: int = 0
    """MLPs of a layer, of which the router chooses; 0: one MLP without a router."""
    experts_per_token: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_position",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"the model's configuration has {name} = {value!r}; it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model's configuration has {self.num_heads} attention heads and {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        if self.num_experts < 0 or (self.num_experts and not 1 <= self.experts_per_token <= self.num_experts):
            raise ModelError(
                f"the model's configuration has {self.num_experts} experts of which a token visits "
                f"{self.experts_per_token}; it must be at least 1 and at most all"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"the model's configuration has head_dim = {self.head_dim}; rotary embedding needs an even one"
            )

    def shard(self, tp: int) -> DecoderConfig:
        """The part of one of `tp` devices: heads, MLP and vocabulary are split, all else is on every device.

        A shape only: nothing here adds up what the devices compute. Key/value heads are repeated where they are fewer
        than devices.

        Raises:
            ModelError: the heads or the MLP cannot be split so.
        """
        fits = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        if tp < 1 or self.num_heads % tp or self.intermediate_size % tp or not fits:
            raise ModelError(
                f"the model ({self.num_heads} heads, {self.num_kv_heads} KV heads, MLP width {self.intermediate_size}) "
                f"cannot be split over {tp} devices"
            )
        return replace(
            self,
            num_heads=self.num_heads // tp,
            num_kv_heads=max(1, self.num_kv_heads // tp),
            intermediate_size=self.intermediate_size // tp,
            vocab_size=-(-self.vocab_size // tp),
        )

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the contents of a `config.json`; ModelError for anything we would compute wrongly."""
        names = config.get("architectures") or []
        architecture = names[0] if names else None
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"the model's architecture is {architecture or 'not named'}; "
                f"this engine runs {', '.join(ARCHITECTURES)}"
            )
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"the model's activation is {activation!r}; this engine computes only 'silu'")
        windowed = architecture in _WINDOWED and (config.get("sliding_window") or 0) > 0
        if windowed or (architecture in _SWITCHED and config.get("use_sliding_window")):
            raise ModelError("the model uses sliding-window attention, which this engine does not compute")
        heads = _field(config, "num_attention_heads")
        hidden = _field(config, "hidden_size")
        theta, scaling = _rope(config)
        bias = bool(config.get("attention_bias", False))
        moe = architecture == "MixtralForCausalLM"
        eos = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            num_layers=_field(config, "num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=_field(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // max(heads, 1),
            vocab_size=_field(config, "vocab_size"),
            max_position=int(config.get("max_position_embeddings", 2048)),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            num_experts=_field({"num_local_experts": 8, **config}, "num_local_experts") if moe else 0,
            experts_per_token=_field({"num_experts_per_tok": 2, **config}, "num_experts_per_tok") if moe else 0,
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
        )


def _field(config: Mapping[str, Any], name: str) -> int:
    if name not in config:
        raise ModelError(f"the model's config.json has no {name}")
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"the model's config.json has {name} = {value!r}; it must be an integer")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in (None, "default"):
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ModelError(f"the model's rope scaling is {kind!r}; this engine computes 'linear' and 'llama3'")
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", float(parameters["factor"]))
        return theta, RopeScaling(
            "llama3",
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise ModelError(f"the model's rope scaling {kind!r} has no {missing.args[0]}") from None
