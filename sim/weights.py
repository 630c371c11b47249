"""Bytes of a model's weights on one device, by part, for each format that they can be stored in.

A quantised format holds the matrices of attention and MLPs (of all experts) in fewer bits. What stays in the
checkpoint's own type: embedding and output head, norms, biases and routers. The overhead of a format, scales and zero
points, is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sim.errors import ModelError
from sim.models import ModelSpec, dtype_bytes

__all__ = ["FORMATS", "WeightBytes", "WeightFormat", "weight_bytes", "weight_format"]

_GROUP = 128
"""Inputs that share a scale and a zero point in 4-bit formats: the group size that AWQ and GPTQ checkpoints have."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the matrices of the layers are stored. `bits` 0: in the type of the other weights."""

    name: str
    bits: int
    channel_scale_bytes: int = 0
    """Bytes of a scale for each output of a matrix."""
    group_bits: int = 0
    """Bits of a scale and a zero point for each group of `_GROUP` inputs of an output."""
    source: str = ""


FORMATS: dict[str, WeightFormat] = {
    form.name: form
    for form in (
        WeightFormat("bf16", 0, source="as published, in 16 bits"),
        WeightFormat("fp8", 8, channel_scale_bytes=4, source="compressed-tensors FP8: a float32 scale an output"),
        WeightFormat("int8", 8, channel_scale_bytes=4, source="compressed-tensors W8A8: a float32 scale an output"),
        WeightFormat("int4", 4, group_bits=20, source="AWQ and GPTQ: a 16-bit scale and a 4-bit zero for 128 inputs"),
    )
}
"""Formats by name."""

_ALIASES = {
    "auto": "bf16",
    "none": "bf16",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "w4a16": "int4",
    "w8a8": "int8",
}


def weight_format(name: str | None) -> WeightFormat:
    """The format of that name, or of a quantisation as vLLM calls it. Raises ModelError naming those there are."""
    if name is None:
        return FORMATS["bf16"]
    found = FORMATS.get(_ALIASES.get(name.lower(), name.lower()))
    if found is None:
        raise ModelError(f"Unknown weight format '{name}'; known ones are {', '.join((*FORMATS, *_ALIASES))}.")
    return found


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes on one device."""

    matrices: int
    """Attention and MLPs, in the format's bits."""
    scales: int
    """Scales and zero points of the format."""
    tables: int
    """Embedding and output head."""
    rest: int
    """Norms, biases and routers."""

    @property
    def total(self) -> int:
        return self.matrices + self.scales + self.tables + self.rest


def matrices(spec: ModelSpec, tp: int = 1, expert_ranks: int = 1) -> Iterator[tuple[int, int, int]]:
    """(outputs, inputs, how many) of every quantisable matrix on one of `tp` devices.

    With `expert_ranks` above 1 experts are not cut: each rank has its share of them, whole.
    """
    queries = spec.heads * spec.head_dim // tp
    keys = spec.kv_heads_per_device(tp) * spec.head_dim
    experts = max(1, spec.experts)
    inner = spec.intermediate // tp
    if spec.experts and expert_ranks > 1:
        experts, inner = -(-spec.experts // expert_ranks), spec.intermediate
    yield queries, spec.hidden, spec.layers
    yield keys, spec.hidden, 2 * spec.layers
    yield spec.hidden, queries, spec.layers
    yield inner, spec.hidden, 2 * spec.layers * experts
    yield spec.hidden, inner, spec.layers * experts


def weight_bytes(
    spec: ModelSpec, form: WeightFormat, dtype: str | int | None = None, tp: int = 1, expert_ranks: int = 1
) -> WeightBytes:
    """Bytes of the weights on one of `tp` devices; `dtype` is that of what the format does not quantise.

    Raises ModelError where the model cannot be split over `tp` devices.
    """
    spec.check_tp(tp)
    element = dtype_bytes(spec.dtype if dtype is None else dtype)
    bits = form.bits or 8 * element
    stored = scales = 0
    for outputs, inputs, count in matrices(spec, tp, expert_ranks):
        stored += outputs * inputs * count * bits // 8
        scales += outputs * count * form.channel_scale_bytes
        scales += outputs * -(-inputs // _GROUP) * count * form.group_bits // 8
    tables = -(-spec.vocab // tp) * spec.hidden * (1 if spec.tied else 2) * element
    elements = sum(outputs * inputs * count for outputs, inputs, count in matrices(spec, tp))
    # What is in no matrix and no table, of the exact count that the shape gives.
    rest = spec.weights_bytes(element, tp) - elements * element - tables
    return WeightBytes(stored, scales, tables, rest)
