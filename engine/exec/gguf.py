"""GGUF files: metadata, and tensors dequantised to float32.

Layout after the GGUF specification (version 3): header, key-value pairs, tensor descriptions, padding, data. A block of
Q8_0 is a float16 scale and 32 int8; of Q4_1 a float16 scale, a float16 minimum and 16 bytes, whose low nibbles are the
first 16 values and whose high nibbles are the last 16.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.config import DecoderConfig
from engine.models.errors import ModelError

__all__ = ["GGUFFile", "decoder_config", "decoder_weights", "dequantise"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
"""Type number -> name, values a block, bytes a block."""


class _Description(NamedTuple):
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """An open GGUF file. `metadata` maps its keys to Python values; `tensor(name)` dequantises one tensor."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ModelError(f"there is no GGUF file {self.path}") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the GGUF file {self.path}: {error}") from None
        if self._bytes[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF")
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError, KeyError):
            raise ModelError(f"the GGUF file {self.path} is cut short or damaged; fetch it again") from None

    def _read_header(self) -> None:
        version, tensors, keys = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in (2, 3):
            raise ModelError(f"the GGUF file {self.path} has version {version}; this reader knows 2 and 3")
        self._at = 24
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        self._descriptions: dict[str, _Description] = {}
        for _ in range(tensors):
            name = self._string()
            dims = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
            kind, offset = self._scalar("<I"), self._scalar("<Q")
            # GGUF names the fastest axis first.
            self._descriptions[name] = _Description(tuple(reversed(dims)), kind, offset)
        alignment = self.metadata.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        text = self._bytes[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if inner in (_STRING, _ARRAY):
            return [self._value(inner) for _ in range(count)]
        form = np.dtype(_SCALARS[inner])
        if self._at + count * form.itemsize > len(self._bytes):
            raise IndexError
        values = np.frombuffer(self._bytes, form, count, self._at).tolist()
        self._at += count * form.itemsize
        return values

    @property
    def tensor_names(self) -> list[str]:
        return list(self._descriptions)

    def tensor(self, name: str) -> Tensor:
        """One tensor in float32, in memory of its own; ModelError for a quantisation we do not read."""
        if name not in self._descriptions:
            raise ModelError(f"the GGUF file {self.path} has no tensor {name}")
        shape, kind, offset = self._descriptions[name]
        if kind not in _TYPES:
            readable = ", ".join(name for name, _, _ in _TYPES.values())
            raise ModelError(
                f"the tensor {name} of {self.path} has GGUF type {kind}, which this reader does not know; "
                f"it reads {readable}"
            )
        type_name, per_block, block_bytes = _TYPES[kind]
        count = int(np.prod(shape))
        size = count // per_block * block_bytes
        start = self._data + offset
        if start + size > len(self._bytes):
            raise ModelError(f"the GGUF file {self.path} is cut short or damaged; fetch it again")
        raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=size, offset=start)
        return dequantise(raw, type_name).view(shape)


def dequantise(raw: Tensor, type_name: str) -> Tensor:
    """Bytes uint8[n] of whole blocks -> float32[values]."""
    if type_name == "F32":
        return raw.clone().view(torch.float32)
    if type_name == "F16":
        return raw.clone().view(torch.float16).float()
    if type_name == "Q8_0":
        blocks = raw.view(-1, 34)
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        return (blocks[:, 2:].contiguous().view(torch.int8).float() * scale).view(-1)
    if type_name == "Q4_1":
        blocks = raw.view(-1, 20)
        scale_and_minimum = blocks[:, :4].contiguous().view(torch.float16).float()
        nibbles = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1).float()
        return nibbles.mul_(scale_and_minimum[:, :1]).add_(scale_and_minimum[:, 1:]).view(-1)
    raise ModelError(f"the GGUF type {type_name} is not known")


def decoder_config(file: GGUFFile) -> DecoderConfig:
    """The decoder that a GGUF file of architecture `llama` describes."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"the GGUF file {file.path} has architecture {architecture!r}; this engine runs 'llama'")

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{name}", default)
        if value is None:
            raise ModelError(f"the GGUF file {file.path} has no llama.{name}")
        return value

    if metadata.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file.tensor_names:
        raise ModelError(
            f"the GGUF file {file.path} scales its rotary embedding, which is not read from GGUF; use safetensors"
        )
    heads, hidden = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", hidden // heads)
    embedding = file._descriptions.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"the GGUF file {file.path} has no tensor token_embd.weight")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        num_layers=field("block_count"),
        hidden_size=hidden,
        intermediate_size=field("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=field("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position=field("context_length"),
        norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_theta=field("rope.freq_base", 10000.0),
        tie_word_embeddings="output.weight" not in file.tensor_names,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=() if eos is None else (eos,),
    )


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def decoder_weights(file: GGUFFile, config: DecoderConfig) -> dict[str, Tensor]:
    """All weights in float32, under their Hugging Face names and in Hugging Face's order of rows."""
    weights = {}
    for name in file.tensor_names:
        stem, _, suffix = name.rpartition(".")
        tensor = file.tensor(name)
        if stem in _NAMES:
            weights[f"{_NAMES[stem]}.{suffix}"] = tensor
            continue
        parts = stem.split(".")
        if len(parts) != 3 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
            raise ModelError(f"the GGUF file {file.path} has a tensor {name} that a Llama decoder has no place for")
        if parts[2] in ("attn_q", "attn_k"):
            tensor = _unpermute(tensor, config.head_dim)
        weights[f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"] = tensor
    return weights


def _unpermute(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of a head from llama.cpp's order (pairs that rotate together are neighbours) to halves."""
    rest = tensor.shape[1:]
    return tensor.view(-1, head_dim // 2, 2, *rest).transpose(1, 2).reshape(tensor.shape)
