"""Synthetic kernel tables and run folders in the public layout, small and with a known answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

DENSE = {"qkv_proj": 40.0, "o_proj": 30.0, "gate_up_proj": 90.0, "down_proj": 50.0}
SMALL = {"layernorm": 3.0, "rotary_emb": 3.0, "act_fn": 2.0, "embedding": 4.0, "final_layernorm": 3.0}
CHUNKS = (0, 16, 256, 2048)
BEHIND = (0, 64, 512, 4096)
DECODES = (0, 1, 8, 64, 256)
CONTEXTS = (16, 256, 2048, 16384)
MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MOE = MODEL | {
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}


def attention_us(chunk: int, behind: int, decodes: int, context: int) -> float:
    """Linear in each argument where the table interpolates: chunk, its context, decodes and their context."""
    return 5.0 + 0.05 * chunk + 0.001 * behind * (chunk > 0) + 0.5 * decodes + 0.002 * decodes * context


def write_profile(folder: Path, tp: int = 1, *, moe: bool = False, rows_to_fill: float | None = 6.0) -> Path:
    """tp<N> tables in `folder`; mixes of unequal decodes cost as if it took so many rows to keep the device busy."""
    root = folder / f"tp{tp}"
    root.mkdir(parents=True, exist_ok=True)
    tokens = (1, 8, 64, 256, 512, 1024, 2048)
    layers = {name: us for name, us in (DENSE | SMALL).items() if not (moe and name in ("gate_up_proj", "down_proj"))}
    rows = [(name, n, us / tp + 0.01 * us * n / 8) for name, us in layers.items() for n in tokens]
    pd.DataFrame(rows, columns=["layer", "tokens", "time_us"]).to_csv(root / "dense.csv", index=False)
    rows = [(name, n, us + 0.1 * n) for name, us in (("lm_head", 200.0), ("sampler", 30.0)) for n in (1, 8, 64, 256)]
    pd.DataFrame(rows, columns=["layer", "sequences", "time_us"]).to_csv(root / "per_sequence.csv", index=False)
    grid = []
    for chunk, behind, decodes, context in product(CHUNKS, BEHIND, DECODES, (0, *CONTEXTS)):
        if (decodes == 0) != (context == 0) or (chunk == 0 and (behind or not decodes)):
            continue
        grid.append((chunk, behind, decodes, context, attention_us(chunk, behind, decodes, context)))
    columns = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    pd.DataFrame(grid, columns=columns).to_csv(root / "attention.csv", index=False)
    if rows_to_fill is not None:
        skew_table(rows_to_fill).to_csv(root / "skew.csv", index=False)
    if moe:
        cells = [
            (n, experts, 10.0 + 6.0 * experts + 0.05 * n)
            for n in (1, 8, 64, 512, 2048)
            for experts in (2, 4, 8, 16)
            if experts <= 2 * n
        ]
        pd.DataFrame(cells, columns=["tokens", "activated_experts", "time_us"]).to_csv(root / "moe.csv", index=False)
    return folder


def skew_table(rows_to_fill: float, repetitions: int = 3) -> pd.DataFrame:
    """Times of bimodal mixes, as sums of several runs."""
    found = []
    for n, ratio, chunk, short in product((2, 8, 32, 128), (0.0625, 0.25, 0.5), (0, 256), (128, 1024)):
        long = max(1, round(ratio * n))
        big = 4 * short
        mean = (long * big + (n - long) * short) / n
        excess = max(0.0, min(rows_to_fill, n) - long) * (big - short)
        times = [attention_us(chunk, 0, n, c) for c in (mean, big, mean + excess / n)]
        found.append((n, long, chunk, mean, *(repetitions * us for us in times)))
    return pd.DataFrame(found, columns=["n", "nb", "pc", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us"])


def settings(**changes: Any) -> dict[str, Any]:
    """An engine.json."""
    found: dict[str, Any] = {
        "model": "test/model",
        "hardware": "RTXPRO6000",
        "vllm_version": "0.19.0",
        "engine_kwargs": {
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
        },
        "kv_cache": {"num_gpu_blocks": 801, "block_size": 16, "enable_prefix_caching": True},
        "scheduler": {"async_scheduling": True},
        "cudagraph": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
        "model_dims": MODEL,
    }
    for key, value in changes.items():
        part, _, name = key.rpartition("__")
        if part:
            found[part] = dict(found[part])
            found[part][name] = value
        else:
            found[key] = value
    return found


def write_run(
    folder: Path,
    engine: dict[str, Any],
    serve: Callable[[Path], dict[str, np.ndarray]] | None = None,
    count: int = 40,
    seed: int = 0,
) -> Path:
    """A run folder: engine.json and requests.csv, whose times are what `serve` makes of the folder (a table of
    seconds: queued, first and last token), else made up. Requests share the first blocks of three prompts."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.json").write_text(json.dumps(engine))
    prompts = rng.integers(20, 600, count)
    outputs = rng.integers(2, 100, count)
    arrival = np.cumsum(rng.exponential(0.05, count))
    arrival -= arrival[0]
    ids: list[int] = []
    offsets = [0]
    fresh = 1000
    for row, length in enumerate(prompts.tolist()):
        full = length // 16
        shared = min(full, 4)
        ids += [10 * (row % 3) + i for i in range(shared)]
        ids += list(range(fresh, fresh + full - shared))
        fresh += full - shared
        offsets.append(len(ids))
    np.savez(folder / "prompt_blocks.npz", block_ids=np.array(ids, np.int32), offsets=np.array(offsets, np.int32))
    table = pd.DataFrame(
        {
            "idx": range(count),
            "prompt_tokens": prompts,
            "output_tokens": outputs,
            "arrival_s": arrival,
            "queued_s": arrival + 0.01,
            "first_token_s": arrival + 0.1,
            "last_token_s": arrival + 0.1 + 0.01 * outputs,
        }
    )
    table.to_csv(folder / "requests.csv", index=False)
    if serve is not None:
        for name, values in serve(folder).items():
            table[name] = values
        table.to_csv(folder / "requests.csv", index=False)
    return folder
