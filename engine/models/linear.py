"""One weight matrix and how this machine multiplies by it best."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Linear"]

_PACK_FROM_OUTPUTS = 2048
"""oneDNN's packed form wins from about this many outputs on; below it, a transposed copy does."""


class Linear:
    """y = x W' + b with x [tokens, inputs], W [outputs, inputs] (Hugging Face's order) and b [outputs] or None.

    Decode batches have few rows, and torch's `linear` reads its weights slowly there: at 8 rows a matrix stored the
    other way round is two to three times as fast on AVX-512, and oneDNN's blocked format is for wide matrices.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, borrowed: bool = False) -> None:
        """`borrowed`: the weight lies in memory that is not ours, such as a mapped file, and is not kept as it is."""
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        self._packed: Tensor | None = None
        self._turned: Tensor | None = None
        self._plain: Tensor | None = None
        if weight.device.type != "cpu" or weight.dtype == torch.float64 or isinstance(weight, FakeTensor):
            # A fake weight has a shape only, and every path gives the same result.
            self._plain = weight.clone() if borrowed else weight
        elif _can_pack(weight.dtype) and (weight.dtype == torch.bfloat16 or self.outputs >= _PACK_FROM_OUTPUTS):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        elif weight.dtype == torch.float32:
            self._turned = weight.t().contiguous()
        else:
            self._plain = weight.clone() if borrowed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._turned is not None:
            return x @ self._turned if self.bias is None else torch.addmm(self.bias, x, self._turned)
        if self._packed is not None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return result
        assert self._plain is not None
        return F.linear(x, self._plain, self.bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
