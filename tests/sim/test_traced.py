"""The traced peak of a step against what a real CPU run of the same model code allocates."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tracing runs the engine's models, which need torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from engine.models.config import DecoderConfig  # noqa: E402
from engine.models.llama import Decoder, expected_weights  # noqa: E402
from kernels.attention import layout_step  # noqa: E402
from kernels.cache import PagedKVCache  # noqa: E402
from sim.errors import ModelError, SimError  # noqa: E402
from sim.models import PRESETS, preset  # noqa: E402
from sim.traced import Attention, decoder_config, traced_layers_bytes, traced_peak  # noqa: E402
from sim.weights import FORMATS, weight_bytes  # noqa: E402

LLAMA = DecoderConfig("x", 3, 256, 896, 8, 2, 32, 1000, 4096)


def real_peak(
    config: DecoderConfig,
    chunks: tuple[tuple[int, int], ...],
    decodes: tuple[int, ...],
    attention: str,
    block: int = 16,
) -> int:
    """The most bytes that a forward pass in float32 has allocated at once, by torch's profiler; weights were there."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in expected_weights(config)}
    decoder = Decoder(config, weights, torch.float32)
    pages = -(-max([0, *(old + new for old, new in chunks), *(context + 1 for context in decodes)]) // block)
    cache = PagedKVCache(config.num_layers, pages, block, config.num_kv_heads, config.head_dim, torch.float32)
    table = np.arange(pages)
    layout = layout_step([(n, table) for n in decodes], [(old, new, table) for old, new in chunks], block, pages)
    ids = torch.zeros(sum(new for _, new in chunks) + len(decodes), dtype=torch.int64)
    path = contextlib.nullcontext() if attention == "cpu" else Attention(attention)
    with torch.inference_mode(), path:
        decoder.forward(ids, layout, cache)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            decoder.forward(ids, layout, cache)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    alive = most = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return most


@pytest.mark.parametrize(
    ("changes", "chunks", "decodes", "attention"),
    [
        ({}, ((0, 512),), (), "cpu"),
        ({}, ((256, 300),), (), "cpu"),
        ({}, (), tuple(range(100, 400, 10)), "cpu"),
        ({}, ((0, 200), (64, 100)), (50, 60, 70), "cpu"),
        ({}, ((0, 512),), (), "eager"),
        ({"qk_norm": True}, ((0, 512),), (), "cpu"),
        ({"qkv_bias": True}, ((0, 300),), (40,), "cpu"),
        # Both experts see every token, so that the real router has no say in the sizes.
        ({"num_experts": 2, "experts_per_token": 2}, ((0, 512),), (), "cpu"),
    ],
)
def test_the_trace_equals_a_real_run(changes, chunks, decodes, attention) -> None:
    """Within 2 % of torch's profiler, for each family, for prefills, chunks, decodes and mixtures."""
    config = replace(LLAMA, **changes)
    traced = traced_peak(config, chunks, decodes, dtype="float32", attention=attention, layers=None)
    real = real_peak(config, chunks, decodes, attention)
    assert traced.layers == pytest.approx(real, rel=0.02)
    assert traced_peak(config, chunks, decodes, dtype="float32", attention=attention).layers == traced.layers


def test_eager_is_quadratic_and_flash_linear() -> None:
    """Twice the prompt: a fused attention needs twice as much, one with a score matrix nearly four times."""
    flash = [traced_peak(LLAMA, ((0, n),)).layers for n in (4096, 8192)]
    assert flash[1] / flash[0] == pytest.approx(2.0, abs=0.01)
    eager = [traced_peak(LLAMA, ((0, n),), attention="eager").layers for n in (4096, 8192)]
    assert 3.8 < eager[1] / eager[0] < 4.0
    assert eager[0] > 2 * 4 * LLAMA.num_heads * 4096 * 4096 // 2


def test_a_large_model_is_traced_in_seconds() -> None:
    """Llama-3.1-8B at 2,048 tokens: our engine keeps 148.5 KiB a token, more than vLLM's 108; shards keep less."""
    spec = preset("llama-3.1-8b")
    peak = traced_layers_bytes(spec, 2048)
    assert peak / 2048 / 1024 == pytest.approx(148.5, abs=1.5)
    assert traced_layers_bytes(spec, 2048, tp=4) < peak / 1.5


def test_logits_are_counted_beside_the_hidden_states() -> None:
    """Sampled rows have logits in the model's type and in float32, and all tokens' hidden states are alive."""
    found = traced_peak(LLAMA, ((0, 256),), samples=64).logits
    assert found == pytest.approx(64 * 1000 * (2 + 4) + (256 + 64) * 256 * 2, rel=0.02)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_shapes_are_those_of_the_weights(name: str) -> None:
    """The engine's own list of weights, whole and split over devices, has the bytes that the budget counts."""
    spec = PRESETS[name]
    config = decoder_config(spec)
    for tp in (1, 2, 4):
        try:
            spec.check_tp(tp)
        except ModelError:
            continue
        elements = sum(int(np.prod(shape)) for _, shape in expected_weights(config.shard(tp)))
        assert 2 * elements == weight_bytes(spec, FORMATS["bf16"], 2, tp).total


def test_what_cannot_be_traced_is_named() -> None:
    """An unknown attention or type is one sentence."""
    with pytest.raises(SimError, match="Unknown attention 'paged'"):
        traced_peak(LLAMA, ((0, 16),), attention="paged")
    with pytest.raises(SimError, match="not in int8"):
        traced_peak(LLAMA, ((0, 16),), dtype="int8")
