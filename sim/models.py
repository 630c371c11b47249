"""What a model is to a simulator: its shape, and what follows from that in bytes and operations.

The shapes are those of the checkpoints' own config.json files; parameter counts are exact (they equal the number of
elements in the published checkpoints) and tested.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import ModelError

__all__ = ["DTYPE_BYTES", "PRESETS", "ModelSpec", "dtype_bytes", "from_config", "load_model", "preset"]

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
"""Bytes of one element, by the names that the command line and checkpoints use."""


def dtype_bytes(dtype: str | int) -> int:
    """Bytes of one element of `dtype`; a number of bytes stands for itself. Raises ModelError."""
    if isinstance(dtype, int):
        if dtype < 1:
            raise ModelError(f"An element cannot have {dtype} bytes; give a dtype such as bfloat16.")
        return dtype
    size = DTYPE_BYTES.get(dtype.removeprefix("torch."))
    if size is None:
        raise ModelError(f"Unknown dtype '{dtype}'; known ones are {', '.join(DTYPE_BYTES)}.")
    return size


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder of the Llama family.

    A layer is: RMS norm, attention with `heads` query and `kv_heads` key/value heads, RMS norm, gated MLP (or `experts`
    of them, of which each token visits `experts_per_token`).
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; of one expert where there are experts."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    tied: bool = False
    """Whether the output head is the embedding table."""
    experts: int = 0
    """0: a dense MLP."""
    experts_per_token: int = 0
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """An RMS norm over each query and key head (Qwen3)."""
    dtype: str = "bfloat16"
    """What the published weights are stored in."""

    def __post_init__(self) -> None:
        counts = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "max_position")
        for field in counts:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"Model '{self.name}': {field} must be a positive integer, not {value!r}.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"Model '{self.name}': {self.heads} attention heads are no multiple of {self.kv_heads} key/value heads."
            )
        if self.experts < 0 or (self.experts and not 1 <= self.experts_per_token <= self.experts):
            raise ModelError(
                f"Model '{self.name}': each token must visit 1 to {self.experts} experts, not {self.experts_per_token}."
            )
        dtype_bytes(self.dtype)

    # What the parts hold, in elements. Norms and routers are kept apart: tensor parallelism does not split them.

    @property
    def _attention_elements(self) -> int:
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        bias = queries + 2 * keys if self.qkv_bias else 0
        return 2 * self.hidden * queries + 2 * self.hidden * keys + bias

    @property
    def _mlp_elements(self) -> int:
        """One MLP, or one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def _norm_elements(self) -> int:
        return 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    def num_parameters(self) -> int:
        """Elements of all weights, as published."""
        mlp = max(1, self.experts) * self._mlp_elements + self.experts * self.hidden
        layer = self._attention_elements + mlp + self._norm_elements
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + tables + self.hidden

    def weights_bytes(self, dtype: str | int | None = None, tp: int = 1) -> int:
        """Bytes of weights on one of `tp` devices.

        Projections, MLPs, embedding and head are split; norms and routers are on every device, and so are key and value
        heads where there are fewer of them than devices. Raises ModelError where the model cannot be split so.
        """
        self.check_tp(tp)
        keys = 2 * self.hidden * self.kv_heads * self.head_dim
        keys += 2 * self.kv_heads * self.head_dim if self.qkv_bias else 0
        split = self._attention_elements - keys + max(1, self.experts) * self._mlp_elements
        copied = self._norm_elements + self.experts * self.hidden
        layer = split // tp + keys * self.kv_heads_per_device(tp) // self.kv_heads + copied
        rows = -(-self.vocab // tp)
        tables = rows * self.hidden * (1 if self.tied else 2)
        return (self.layers * layer + tables + self.hidden) * dtype_bytes(self.dtype if dtype is None else dtype)

    def kv_heads_per_device(self, tp: int) -> int:
        """Key/value heads on each device: at least one, so that they are repeated where there are too few."""
        return max(1, self.kv_heads // tp)

    def kv_bytes_per_token(self, dtype: str | int = 2, tp: int = 1) -> int:
        """Bytes of keys and values that one token takes on one of `tp` devices."""
        self.check_tp(tp)
        return 2 * self.layers * self.kv_heads_per_device(tp) * self.head_dim * dtype_bytes(dtype)

    def check_tp(self, tp: int) -> None:
        """Raise ModelError where the model cannot be split over `tp` devices."""
        if tp < 1:
            raise ModelError(f"Tensor parallel size must be 1 or more, not {tp}.")
        fits_kv = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        if self.heads % tp or self.intermediate % tp or not fits_kv:
            raise ModelError(
                f"Model '{self.name}' ({self.heads} heads, {self.kv_heads} key/value heads, MLP width "
                f"{self.intermediate}) cannot be split over {tp} devices; choose a size that divides its heads."
            )

    def gemm_flops_per_token(self) -> int:
        """Floating point operations of all matrix products for one token on all devices, the head left out."""
        mlp = max(1, self.experts_per_token) * self._mlp_elements + self.experts * self.hidden
        return 2 * self.layers * (self._attention_elements + mlp)

    def attention_flops(self) -> int:
        """Operations for one (query token, key token) pair over all layers: the scores and the weighted values."""
        return 4 * self.layers * self.heads * self.head_dim

    def expected_experts(self, tokens: int) -> float:
        """Distinct experts that `tokens` tokens visit in one layer, on average, if the router is even."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)


def _llama(name: str, shape: tuple[int, ...], vocab: int, max_position: int, **more: Any) -> ModelSpec:
    """`shape` is (layers, hidden, intermediate, heads, kv_heads, head_dim)."""
    layers, hidden, intermediate, heads, kv_heads, head_dim = shape
    return ModelSpec(name, layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, max_position, **more)


_SPECS = [
    # The random model that the tests run for real.
    _llama("tiny", (2, 64, 128, 4, 2, 16), 320, 4096, dtype="float32"),
    # The default model, SmolLM2-135M-Instruct.
    _llama("smollm2", (30, 576, 1536, 9, 3, 64), 49152, 8192, tied=True),
    _llama("smollm2-360m", (32, 960, 2560, 15, 5, 64), 49152, 8192, tied=True),
    _llama("smollm2-1.7b", (24, 2048, 8192, 32, 32, 64), 49152, 8192, tied=True),
    _llama("tinyllama-1.1b", (22, 2048, 5632, 32, 4, 64), 32000, 2048),
    _llama("llama-2-7b", (32, 4096, 11008, 32, 32, 128), 32000, 4096, dtype="float16"),
    _llama("llama-2-13b", (40, 5120, 13824, 40, 40, 128), 32000, 4096, dtype="float16"),
    _llama("llama-2-70b", (80, 8192, 28672, 64, 8, 128), 32000, 4096, dtype="float16"),
    _llama("llama-3-8b", (32, 4096, 14336, 32, 8, 128), 128256, 8192),
    _llama("llama-3-70b", (80, 8192, 28672, 64, 8, 128), 128256, 8192),
    _llama("llama-3.1-8b", (32, 4096, 14336, 32, 8, 128), 128256, 131072),
    _llama("llama-3.1-70b", (80, 8192, 28672, 64, 8, 128), 128256, 131072),
    _llama("llama-3.1-405b", (126, 16384, 53248, 128, 8, 128), 128256, 131072),
    _llama("llama-3.2-1b", (16, 2048, 8192, 32, 8, 64), 128256, 131072, tied=True),
    _llama("llama-3.2-3b", (28, 3072, 8192, 24, 8, 128), 128256, 131072, tied=True),
    _llama("mistral-7b", (32, 4096, 14336, 32, 8, 128), 32000, 32768),
    _llama("mixtral-8x7b", (32, 4096, 14336, 32, 8, 128), 32000, 32768, experts=8, experts_per_token=2),
    _llama("qwen2.5-0.5b", (24, 896, 4864, 14, 2, 64), 151936, 32768, tied=True, qkv_bias=True),
    _llama("qwen2.5-1.5b", (28, 1536, 8960, 12, 2, 128), 151936, 32768, tied=True, qkv_bias=True),
    _llama("qwen2.5-3b", (36, 2048, 11008, 16, 2, 128), 151936, 32768, tied=True, qkv_bias=True),
    _llama("qwen2.5-7b", (28, 3584, 18944, 28, 4, 128), 152064, 32768, qkv_bias=True),
    _llama("qwen2.5-14b", (48, 5120, 13824, 40, 8, 128), 152064, 32768, qkv_bias=True),
    _llama("qwen2.5-32b", (64, 5120, 27648, 40, 8, 128), 152064, 32768, qkv_bias=True),
    _llama("qwen2.5-72b", (80, 8192, 29568, 64, 8, 128), 152064, 32768, qkv_bias=True),
    _llama("qwen3-0.6b", (28, 1024, 3072, 16, 8, 128), 151936, 40960, tied=True, qk_norm=True),
    _llama("qwen3-4b", (36, 2560, 9728, 32, 8, 128), 151936, 40960, tied=True, qk_norm=True),
    _llama("qwen3-8b", (36, 4096, 12288, 32, 8, 128), 151936, 40960, qk_norm=True),
    _llama("qwen3-14b", (40, 5120, 17408, 40, 8, 128), 151936, 40960, qk_norm=True),
    _llama(
        "qwen3-30b-a3b",
        (48, 2048, 768, 32, 4, 128),
        151936,
        40960,
        experts=128,
        experts_per_token=8,
        qk_norm=True,
    ),
    _llama("qwen3-32b", (64, 5120, 25600, 64, 8, 128), 151936, 40960, qk_norm=True),
]

PRESETS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}
"""Shapes of published checkpoints, by name."""

_ALIASES = {
    "smollm2-135m": "smollm2",
    "smollm2-135m-instruct": "smollm2",
    "mistral-7b-v0.1": "mistral-7b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "llama-3-8b-instruct": "llama-3-8b",
    "meta-llama-3-8b": "llama-3-8b",
    "qwen3-30b-a3b-instruct-2507": "qwen3-30b-a3b",
    "meta-llama-3-70b": "llama-3-70b",
}
_SUFFIXES = ("-hf", "-v0.1", "-instruct", "-chat", "-base")


def preset(name: str) -> ModelSpec:
    """The preset called `name`, also under its hub name (`meta-llama/Llama-3.1-8B-Instruct`).

    Raises ModelError with the nearest names for an unknown one.
    """
    key = name.strip().lower().rsplit("/", 1)[-1].replace("_", "-")
    candidates = [key, key.removeprefix("meta-")]
    for suffix in _SUFFIXES:
        candidates += [candidate.removesuffix(suffix) for candidate in candidates if candidate.endswith(suffix)]
    for candidate in candidates:
        found = PRESETS.get(_ALIASES.get(candidate, candidate))
        if found is not None:
            return found
    near = difflib.get_close_matches(key, PRESETS, n=4, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"known models are {', '.join(PRESETS)}."
    raise ModelError(f"Unknown model '{name}'; {hint}")


_ARCHITECTURES = {
    # model_type -> (biases on q, k, v; norms on query and key heads; mixture of experts)
    "llama": (False, False, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (False, True, False),
    "mixtral": (False, False, True),
    "qwen3_moe": (False, True, True),
}


def from_config(config: Mapping[str, Any], name: str | None = None) -> ModelSpec:
    """A model from the contents of a Hugging Face config.json. Raises ModelError naming what is missing or wrong."""
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"The configuration has model_type {kind!r}; the ones that can be simulated are {known}.")
    bias, qk_norm, moe = _ARCHITECTURES[kind]
    label = name or config.get("_name_or_path") or str(kind)

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if value is None:
            raise ModelError(f"The configuration of '{label}' has no {key}.")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"The configuration of '{label}' has {key} = {value!r}; it must be a positive integer.")
        return value

    hidden = number("hidden_size")
    heads = number("num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return ModelSpec(
        name=label,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=number("moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab=number("vocab_size"),
        max_position=number("max_position_embeddings", 2048),
        # The default in transformers is untied for these families.
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=number(
            "num_experts" if kind == "qwen3_moe" else "num_local_experts", None if kind == "qwen3_moe" else 8
        )
        if moe
        else 0,
        experts_per_token=number("num_experts_per_tok", 2) if moe else 0,
        qkv_bias=bool(config.get("attention_bias", bias)) if kind != "qwen2" else True,
        qk_norm=qk_norm,
        dtype=stored.removeprefix("torch."),
    )


def load_model(model: str | Path | Mapping[str, Any]) -> ModelSpec:
    """A model from a preset's name, a config.json, a folder that has one, or a configuration.

    Raises ModelError: an unknown name, no such file, or a file that is no configuration.
    """
    if isinstance(model, Mapping):
        return from_config(model)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"The folder '{model}' has no config.json; name a checkpoint's folder.")
    looks_like_file = path.suffix in {".json", ".gguf", ".safetensors"} or str(model).startswith((".", "/", "~"))
    if not path.is_file():
        if looks_like_file:
            raise ModelError(f"There is no file '{model}'; name a config.json, a checkpoint's folder or a preset.")
        return preset(str(model))
    if path.suffix != ".json":
        raise ModelError(f"'{model}' is not a config.json; name one, a checkpoint's folder or a preset.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"'{path}' is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ModelError(f"'{path}' does not hold a configuration; it must be a JSON object.")
    label = path.resolve().parent.name if path.name == "config.json" else path.stem
    return from_config(config, name=label or None)
