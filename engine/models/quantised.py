"""Checkpoints whose matrices are stored in fewer bits: AWQ, GPTQ and FP8, and what each number stands for.

    AWQ     W[o, i] = (q - zero) scale    eight 4-bit numbers of neighbouring outputs in an int32, interleaved
    GPTQ    W[o, i] = (q - zero) scale    numbers of neighbouring inputs in an int32; format `gptq` stores zero - 1
    FP8     W[o, i] = w scale             float8_e4m3fn; a scale for the matrix, a row, or a tile (weight_scale_inv)

The layouts are those that AutoAWQ (`gemm`), AutoGPTQ and GPTQModel, DeepSeek and compressed-tensors write, which
transformers and vLLM read. Scale and zero point of a group belong to `group_size` neighbouring inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.models.errors import ModelError

__all__ = ["Quantisation", "QuantisedWeights", "awq_matrix", "fp8_matrix", "gptq_matrix"]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs each four bits of an int32 hold, from the lowest on (AutoAWQ's packing)."""


@dataclass(frozen=True)
class Quantisation:
    """What a config.json says under `quantization_config`."""

    method: str
    """`awq`, `gptq` or `fp8`."""
    bits: int
    group_size: int = -1
    """Inputs that share a scale; -1: all of them."""
    zeros_are_less_one: bool = False
    """Whether stored zero points are one less than they stand for (GPTQ's first format)."""
    tile: tuple[int, int] | None = None
    """Outputs and inputs that share a scale (FP8)."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Quantisation | None:
        """None: the checkpoint is not quantised. Raises ModelError for a kind that is not read."""
        section = config.get("quantization_config")
        if not section:
            return None
        method = str(section.get("quant_method", "")).lower()
        bits = section.get("bits", section.get("w_bit", 4))
        group = section.get("group_size", section.get("q_group_size", -1))
        if method == "awq":
            version = str(section.get("version", "gemm")).lower()
            if bits != 4 or version != "gemm":
                raise ModelError(
                    f"the checkpoint is AWQ with {bits} bits, version {version!r}; 4 bits in 'gemm' are read"
                )
            return cls("awq", 4, int(group))
        if method == "gptq":
            if bits not in (2, 4, 8):
                raise ModelError(f"the checkpoint is GPTQ with {bits} bits; 2, 4 and 8 are read")
            layout = str(section.get("checkpoint_format", "gptq")).lower()
            if layout not in ("gptq", "gptq_v2"):
                raise ModelError(f"the checkpoint is GPTQ in the format {layout!r}; 'gptq' and 'gptq_v2' are read")
            return cls("gptq", int(bits), int(group), zeros_are_less_one=layout == "gptq")
        if method == "fp8":
            tile = section.get("weight_block_size")
            return cls("fp8", 8, tile=None if tile is None else (int(tile[0]), int(tile[1])))
        if method == "compressed-tensors":
            return _compressed(section)
        raise ModelError(
            f"the checkpoint's quantisation is {method or 'not named'!r}; awq, gptq, fp8 and compressed-tensors in FP8 "
            "are read"
        )


def _compressed(section: Mapping[str, Any]) -> Quantisation:
    for group in (section.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if weights.get("num_bits") != 8 or weights.get("type") != "float":
            raise ModelError(
                f"the checkpoint's compressed-tensors weights are {weights.get('num_bits')}-bit "
                f"{weights.get('type')}; 8-bit float is read"
            )
    return Quantisation("fp8", 8)


class QuantisedWeights(Mapping[str, Tensor]):
    """The matrices of a quantised checkpoint under their plain names, in float32, each made when it is asked for."""

    borrowed = True

    def __init__(self, stored: Mapping[str, Tensor], how: Quantisation) -> None:
        self._stored = stored
        self._how = how
        suffix = ".qweight" if how.method in ("awq", "gptq") else ""
        self._matrices = {name.removesuffix(suffix) + ".weight" for name in stored if suffix and name.endswith(suffix)}
        parts = (".qweight", ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".input_scale")
        self._plain = [name for name in stored if not name.endswith(parts)]
        self.num_bytes: int = getattr(stored, "num_bytes", 0)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._matrices:
            return self._matrix(name.removesuffix(".weight"))
        tensor = self._stored[name]
        if tensor.dtype == torch.float8_e4m3fn:
            return self._from_fp8(name, tensor)
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Of the tensor of that name, unpacked; None: there is none."""
        shape_of = getattr(self._stored, "shape_of", None) or (lambda key: _shape(self._stored, key))
        if name not in self._matrices:
            found: tuple[int, ...] | None = shape_of(name)
            return found
        packed = shape_of(name.removesuffix(".weight") + ".qweight")
        assert packed is not None  # its name is why the matrix is known
        rows, columns = packed
        per = 32 // self._how.bits
        return (columns * per, rows) if self._how.method == "awq" else (columns, rows * per)

    def __contains__(self, name: object) -> bool:
        return name in self._matrices or name in self._plain

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._matrices

    def __len__(self) -> int:
        return len(self._plain) + len(self._matrices)

    def _matrix(self, name: str) -> Tensor:
        packed = self._part(name, "qweight")
        zeros, scales = self._part(name, "qzeros"), self._part(name, "scales")
        if self._how.method == "awq":
            return awq_matrix(packed, zeros, scales)
        group_of = self._stored.get(f"{name}.g_idx")
        return gptq_matrix(packed, zeros, scales, group_of, self._how.bits, self._how.zeros_are_less_one)

    def _part(self, name: str, part: str) -> Tensor:
        tensor = self._stored.get(f"{name}.{part}")
        if tensor is None:
            raise ModelError(f"the checkpoint has {name}.qweight without {name}.{part}, which {self._how.method} needs")
        return tensor

    def _from_fp8(self, name: str, tensor: Tensor) -> Tensor:
        for suffix in ("_scale_inv", "_scale"):
            scale = self._stored.get(name + suffix)
            if scale is not None:
                return fp8_matrix(tensor, scale, self._how.tile if suffix == "_scale_inv" else None)
        raise ModelError(f"the checkpoint's weight {name} is FP8 and has no scale ({name}_scale or {name}_scale_inv)")


def _shape(stored: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    tensor = stored.get(name)
    return None if tensor is None else tuple(tensor.shape)


def _unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """int32 numbers of int32 `packed` [a, b], each split along `dim` into 32 / bits, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    wide = torch.bitwise_right_shift(packed.unsqueeze(dim + 1), shifts.view(-1, 1) if dim == 0 else shifts)
    parts = wide.bitwise_and((1 << bits) - 1)
    return parts.flatten(dim, dim + 1)


def awq_matrix(packed: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """float32 [outputs, inputs] of AWQ's int32 [inputs, outputs / 8], int32 [groups, outputs / 8] and scales
    [groups, outputs].

    Raises ModelError: the parts' shapes do not fit together.
    """
    order = torch.tensor(AWQ_ORDER).argsort()

    def numbers(tensor: Tensor) -> Tensor:
        flat = _unpacked(tensor, 4, 1)
        return flat.view(flat.shape[0], -1, 8)[:, :, order].reshape(flat.shape)

    values, centres = numbers(packed), numbers(zeros)
    inputs, groups = values.shape[0], scales.shape[0]
    if values.shape[1] != scales.shape[1] or centres.shape != scales.shape or inputs % groups:
        raise ModelError(_misfit("AWQ", packed, zeros, scales))
    each = inputs // groups
    wide = (values.view(groups, each, -1) - centres.unsqueeze(1)).float().mul_(scales.float().unsqueeze(1))
    return wide.view(inputs, -1).t()


def gptq_matrix(
    packed: Tensor,
    zeros: Tensor,
    scales: Tensor,
    group_of: Tensor | None,
    bits: int,
    zeros_are_less_one: bool,
) -> Tensor:
    """float32 [outputs, inputs] of GPTQ's int32 [inputs x bits / 32, outputs], int32 [groups, outputs x bits / 32],
    [groups, outputs], and the group of each input (with `desc_act`; None: in order).

    Raises ModelError: the parts' shapes do not fit together.
    """
    values, centres = _unpacked(packed, bits, 0), _unpacked(zeros, bits, 1)
    inputs, groups = values.shape[0], scales.shape[0]
    if values.shape[1] != scales.shape[1] or centres.shape != scales.shape or inputs % groups:
        raise ModelError(_misfit("GPTQ", packed, zeros, scales))
    if group_of is None:
        group_of = torch.arange(inputs) // (inputs // groups)
    elif tuple(group_of.shape) != (inputs,) or int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise ModelError(
            f"GPTQ's g_idx must name a group from 0 to {groups - 1} for each of {inputs} inputs, and does not"
        )
    if zeros_are_less_one:
        centres = (centres + 1).bitwise_and((1 << bits) - 1)
    group_of = group_of.long()
    wide = (values - centres.index_select(0, group_of)).float().mul_(scales.float().index_select(0, group_of))
    return wide.t()


def fp8_matrix(values: Tensor, scale: Tensor, tile: tuple[int, int] | None) -> Tensor:
    """float32 [outputs, inputs] of float8 values and their scale: one, [outputs, 1], or one for each `tile`.

    Raises ModelError: the scales do not cover the matrix.
    """
    wide, scale = values.float(), scale.float()
    outputs, inputs = wide.shape
    if tile is None:
        if scale.numel() not in (1, outputs):
            raise ModelError(f"an FP8 matrix of {outputs} x {inputs} has {scale.numel()} scales; 1 or {outputs} fit")
        return wide.mul_(scale.reshape(-1, 1))
    rows, columns = tile
    if tuple(scale.shape) != (-(-outputs // rows), -(-inputs // columns)):
        raise ModelError(
            f"an FP8 matrix of {outputs} x {inputs} in tiles of {rows} x {columns} has {tuple(scale.shape)} scales"
        )
    full = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    return wide.mul_(full)


def _misfit(what: str, packed: Tensor, zeros: Tensor, scales: Tensor) -> str:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (packed, zeros, scales))
    return f"{what}'s qweight, qzeros and scales have shapes that do not fit together: {shapes}"
