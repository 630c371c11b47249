"""The parts of `experiments.gpu_validation` about the device and its kernels, and the list of all parts."""

from __future__ import annotations

import io
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.exec.runner import layout_on
from experiments import gpuengine
from experiments.errors import UsageError
from experiments.gpu_validation import Part, Validation
from experiments.gputime import time_ns
from kernels.attention import StepLayout, attend, attend_reference, layout_step
from kernels.cache import HostKVCache, PagedKVCache, copy_reference, load_reference, store_reference

__all__ = ["PARTS"]

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
"""The heads of Llama 3 8B."""
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Largest error over the largest value of the reference."""
DECODES = (("B 1, n 4k", 1, 4096), ("B 1, n 32k", 1, 32768), ("B 1, n 128k", 1, 131072), ("B 64, n 4k", 64, 4096))
DECODES_MANY = (("B 256, n 1k", 256, 1024),)
PREFILLS = (("q 2048, c 0", 2048, 0), ("q 8192, c 0", 8192, 0), ("q 2048, c 30k", 2048, 30720))
SMALL_DECODES, SMALL_PREFILLS = (("B 2, n 64", 2, 64),), (("q 32, c 0", 32, 0), ("q 16, c 32", 16, 32))


def device_part(v: Validation) -> dict[str, Any]:
    """What the device is, and what it does at best: copies, reads, bf16 matrix products."""
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": v.device.type}
    if v.device.type == "cuda":
        about = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        facts |= {"name": about.name, "capability": f"{about.major}.{about.minor}", "sms": about.multi_processor_count}
        facts |= {"total_bytes": total, "free_bytes": free, "cuda": torch.version.cuda}
    size = 1 << 20 if v.smoke else 4 << 30
    source = torch.ones(size // 4, dtype=torch.float32, device=v.device)
    target = torch.empty_like(source)
    copy = time_ns(lambda: target.copy_(source), v.device)
    read = time_ns(lambda: source.sum(), v.device)
    n = 128 if v.smoke else 8192
    left = torch.randn(n, n, device=v.device).bfloat16()
    right = torch.randn(n, n, device=v.device).bfloat16()
    gemm = time_ns(lambda: left @ right, v.device)
    facts |= {"copy_bytes_per_s": 2 * size / copy * 1e9, "read_bytes_per_s": size / read * 1e9}
    return facts | {"gemm_bf16_flop_per_s": 2 * n**3 / gemm * 1e9}


def _filled(cache: PagedKVCache, seed: int) -> None:
    generator = torch.Generator(cache.keys.device).manual_seed(seed)
    for tensor in (cache.keys, cache.values):
        tensor.normal_(generator=generator)


def _step(
    decodes: Sequence[int], chunks: Sequence[tuple[int, int]], block_size: int, device: torch.device, seed: int = 0
) -> tuple[StepLayout, int, int]:
    """A step over scattered blocks; contexts of decodes hold the new token. Returns (layout, tokens, blocks)."""
    lengths = [*decodes, *(start + new for new, start in chunks)]
    pages = [-(-length // block_size) for length in lengths]
    total = sum(pages)
    blocks = np.random.default_rng(seed).permutation(total).astype(np.int64)
    tables = np.split(blocks, np.cumsum(pages)[:-1])
    rows = [(length - 1, table) for length, table in zip(decodes, tables, strict=False)]
    parts = [(start, new, table) for (new, start), table in zip(chunks, tables[len(decodes) :], strict=True)]
    layout = layout_on(device, layout_step(rows, parts, block_size, total))
    return layout, len(decodes) + sum(new for new, _ in chunks), total


def kernels_part(v: Validation) -> dict[str, Any]:
    """Every kernel against its slow reference, over dtypes, block sizes and group sizes."""
    rows: list[dict[str, Any]] = []
    for dtype, bound in BOUNDS.items():
        for block_size in (8, 16) if v.smoke else (1, 16, 32, 128):
            for group in (1, 4):
                rows.append(_attention_error(v.device, dtype, block_size, group) | {"bound": bound})
        rows += [row | {"bound": 0.0} for row in _moves_errors(v.device, dtype)]
    v.table("kernels", rows)
    wrong = [row for row in rows if not row["error"] <= row["bound"]]
    if wrong:
        raise UsageError(f"{len(wrong)} of {len(rows)} kernels are off: {wrong[0]}")
    return {"kernels": rows}


def _attention_error(device: torch.device, dtype: torch.dtype, block_size: int, group: int) -> dict[str, Any]:
    layout, tokens, blocks = _step((33, 20, 5), ((9, 0), (6, 13)), block_size, device)
    heads, dim = 2, 32
    cache = PagedKVCache(1, blocks, block_size, heads, dim, dtype, device)
    _filled(cache, 1)
    exact = PagedKVCache(1, blocks, block_size, heads, dim, torch.float64)
    exact.keys.copy_(cache.keys)
    exact.values.copy_(cache.values)
    generator = torch.Generator(device).manual_seed(2)
    query = torch.randn(tokens, heads * group, dim, generator=generator, device=device).to(dtype)
    key, value = (torch.randn(tokens, heads, dim, generator=generator, device=device).to(dtype) for _ in range(2))
    ours = attend(query, key, value, cache, 0, layout, dim**-0.5).cpu().double()
    there = layout_on(torch.device("cpu"), layout)
    q, k, w = (x.cpu().double() for x in (query, key, value))
    true = attend_reference(q, k, w, exact, 0, there, dim**-0.5)
    return {
        "kernel": "attention",
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": block_size,
        "group": group,
        "error": float((ours - true).abs().max() / true.abs().max()),
    }


def _moves_errors(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    found = []
    sources, targets = [3, 0, 5], [1, 7, 2]
    for name in ("copy", "store", "load"):
        pair = [PagedKVCache(2, 8, 4, 2, 8, dtype, device) for _ in range(2)]
        hosts = [HostKVCache(cache, 8) for cache in pair]
        for cache, host in zip(pair, hosts, strict=True):
            _filled(cache, 3)
            host.pages.normal_(generator=torch.Generator().manual_seed(4))
        if name == "copy":
            pair[0].copy_blocks(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
            copy_reference(pair[1], sources, targets)
        elif name == "store":
            hosts[0].store(sources, targets)
            store_reference(pair[1], hosts[1], sources, targets)
        else:
            hosts[0].load(sources, targets)
            load_reference(pair[1], hosts[1], sources, targets)
        same = all(
            torch.equal(a, b)
            for a, b in (
                (pair[0].keys, pair[1].keys),
                (pair[0].values, pair[1].values),
                (hosts[0].pages, hosts[1].pages),
            )
        )
        error = 0.0 if same else 1.0
        row = {"kernel": f"block {name}", "dtype": str(dtype).removeprefix("torch."), "block_size": 4, "group": 1}
        found.append(row | {"error": error})
    return found


def attention_part(v: Validation) -> dict[str, Any]:
    """Bandwidth of decode and FLOP rate of prefill, with the floor, beside peers over contiguous keys and values."""
    device = v.found.get("device") or device_part(v)
    rows: list[dict[str, Any]] = []
    block_size = 16
    heads, dim = (2, 32) if v.smoke else (KV_HEADS, HEAD_DIM)
    decodes = SMALL_DECODES if v.smoke else (*DECODES, *DECODES_MANY)
    shapes: list[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]]
    shapes = [(name, (n,) * batch, ()) for name, batch, n in decodes]
    shapes += [(name, (), ((q, c),)) for name, q, c in (SMALL_PREFILLS if v.smoke else PREFILLS)]
    for name, decode, chunks in shapes:
        if v.left_s() < 0:
            break
        layout, tokens, blocks = _step(decode, chunks, block_size, v.device)
        cache = PagedKVCache(1, blocks, block_size, heads, dim, torch.bfloat16, v.device)
        _filled(cache, 5)
        query = torch.randn(tokens, heads * GROUP, dim, device=v.device).bfloat16()
        key, value = (torch.randn(tokens, heads, dim, device=v.device).bfloat16() for _ in range(2))
        scale = dim**-0.5
        context = sum(decode) + sum(q + c for q, c in chunks)
        moved = 2 * context * heads * dim * 2 + 2 * tokens * heads * GROUP * dim * 2
        work = 4 * heads * GROUP * dim * (sum(decode) + sum(q * c + q * (q + 1) // 2 for q, c in chunks))
        floor = max(moved / device["copy_bytes_per_s"], work / device["gemm_bf16_flop_per_s"]) * 1e9
        times: dict[str, Callable[[], Any]] = {"kvtwin": partial(attend, query, key, value, cache, 0, layout, scale)}
        times |= _peers(query, cache, len(decode), chunks, context, scale, v)
        for peer, call in times.items():
            try:
                took = time_ns(call, v.device, 3 if v.smoke else 10)
                note = ""
            except Exception as error:  # noqa: BLE001 (a peer that does not run here is a finding)
                took, note = float("nan"), " ".join(str(error).split())[:200]
            rows.append(
                {
                    "shape": name,
                    "kind": "decode" if decode else "prefill",
                    "peer": peer,
                    "kv_bytes": 2 * context * heads * dim * 2,
                    "ns": took,
                    "floor_ns": floor,
                    "share_of_floor": floor / took,
                    "bytes_per_s": moved / took * 1e9,
                    "flop_per_s": work / took * 1e9,
                    "note": note,
                }
            )
        v.table("attention", rows)
        v.plot("attention", _picture(rows))
    missing = "vLLM's Triton kernel: its files are not at hand"
    return {"rows": [{k: _plain(x) for k, x in row.items()} for row in rows], "left_out": [missing]}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _peers(
    query: Tensor,
    cache: PagedKVCache,
    batch: int,
    chunks: Sequence[tuple[int, int]],
    context: int,
    scale: float,
    v: Validation,
) -> dict[str, Callable[[], Any]]:
    """SDPA and flex_attention over keys and values in one piece, and SDPA with the gather that pages would need."""
    heads, dim = cache.num_kv_heads, cache.head_dim
    sequences = max(1, batch)
    length = context // sequences
    shape = (heads, sequences, -1, dim)
    pages = torch.randperm(cache.num_blocks, device=v.device)

    def gathered() -> tuple[Tensor, Tensor]:
        keys, values = cache.gather(0, pages)
        return tuple(x.view(shape)[:, :, :length].transpose(0, 1).contiguous() for x in (keys, values))  # type: ignore[return-value]

    keys, values = gathered()
    q = query.view(sequences, -1, heads * GROUP, dim).transpose(1, 2).contiguous()
    mask = None
    if chunks and chunks[0][1]:
        new, start = chunks[0]
        mask = torch.ones(new, start + new, dtype=torch.bool, device=v.device).tril_(start)
    causal = bool(chunks) and mask is None

    def sdpa(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
        )

    peers: dict[str, Callable[[], Any]] = {
        "SDPA, contiguous": lambda: sdpa(keys, values),
        "SDPA, gathered": lambda: sdpa(*gathered()),
    }
    if not chunks:  # a mask of a prefill would have to be compiled for each shape
        from torch.nn.attention.flex_attention import flex_attention

        flex: Any = torch.compile(flex_attention) if v.device.type == "cuda" else flex_attention
        peers["flex_attention, contiguous"] = lambda: flex(q, keys, values, scale=scale, enable_gqa=True)
    return peers


def _picture(rows: Sequence[dict[str, Any]]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.3 * len(rows) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh([f"{row['shape']}: {row['peer']}" for row in rows], [row["share_of_floor"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("floor over time (1: at the measured rates' limit)")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


PARTS = (
    Part("device", 100, 10, device_part),
    Part("kernels", 95, 15, kernels_part),
    Part("attention", 90, 90, attention_part),
    Part("equality", 85, 60, gpuengine.equality_part),
    Part("throughput", 80, 90, gpuengine.throughput_part),
    Part("async", 75, 30, gpuengine.async_part),
    Part("twin", 70, 150, gpuengine.twin_part),
    Part("graphs", 60, 20, gpuengine.graphs_part),
    Part("swap", 50, 20, gpuengine.swap_part),
)
