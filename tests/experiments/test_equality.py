"""The experiment `engine_equality`: the attention in one piece that paged attention is compared with."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from experiments.equality import ROUNDINGS, _kernel, _settled, dense_attention  # noqa: E402


def test_attention_in_one_piece_is_the_formula():
    """softmax(q k / sqrt(d)) v, summed by hand, for two heads that read one."""
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((2, 4), (5, 1, 4), (5, 1, 4))
    )
    found = dense_attention(query, keys, values)
    for head in range(2):
        weights = [math.exp(float(query[head] @ keys[token, 0]) / 2) for token in range(5)]
        mixed = sum(weight * values[token, 0] for token, weight in enumerate(weights)) / sum(weights)
        assert torch.allclose(found[head], mixed, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_kernel_is_within_rounding_of_it(dtype: str):
    """Pages in any order differ from one piece by a few roundings."""
    assert _kernel(dtype, 16, 0)["roundings"] <= ROUNDINGS


@pytest.mark.parametrize(
    ("bits", "roundings", "equal", "status"),
    [
        (1.0, 0.0, 8, "reproduced"),
        (0.5, 2.0, 8, "reproduced-only-if"),
        (0.5, 1e6, 8, "does-not-follow"),
        (0.5, 2.0, 7, "does-not-follow"),
    ],
)
def test_the_verdict_follows_from_the_figures(bits: float, roundings: float, equal: int, status: str):
    """Equal bits; equal up to rounding; or neither."""
    kernels = [
        {"dtype": dtype, "equal_bits": bits, "roundings": roundings, "difference": 0.0}
        for dtype in ("float64", "float32")
    ]
    assert _settled(kernels, {"equal": equal, "tokens": 8}).status == status
