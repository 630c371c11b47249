"""Whether paged attention computes what attention computes: the kernel that CPUs run against plain attention over the
same keys and values in one piece, and the tokens of an engine that pages against those of one that never reads a page.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.experiment import Column, Context, ExperimentResult, Settled, Table

if TYPE_CHECKING:
    from torch import Tensor

    from engine.exec.llm import LLM

__all__ = ["dense_attention", "run"]

BLOCK_SIZES = (8, 16, 32)
DTYPES = ("float64", "float32")
ROWS, KV_HEADS, GROUP, HEAD_DIM = 32, 3, 3, 64
"""Sequences, and the heads of SmolLM2-135M: 9 that read 3."""
LONGEST = 1024
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 40, 32
ROUNDINGS = 64
"""A sum of a thousand products in another order may differ by some tens of roundings of the largest term."""


def run(context: Context) -> ExperimentResult:
    """The experiment."""
    kernels = []
    for dtype in DTYPES:
        for size in context.track(BLOCK_SIZES, dtype):
            kernels.append(context.part(f"kernel-{dtype}-{size}", partial(_kernel, dtype, size, context.seed)))
    tokens = context.part("tokens", partial(_tokens, context.seed))
    columns = [
        Column("dtype", "numbers"),
        Column("block_size", "block size", "d"),
        Column("outputs", form=",d"),
        Column("equal_bits", "equal bit for bit", ".1%"),
        Column("difference", "largest difference", ".1e"),
        Column("roundings", "in roundings", ".1f"),
    ]
    rows = [[kernel[column.name] for column in columns] for kernel in kernels]
    note = (
        f"Tokens: {tokens['equal']} of {tokens['tokens']} greedy ones of a small random model in float64 are those of "
        "an engine that computes every prefix anew and reads no page."
    )
    return ExperimentResult(
        [Table("kernel", "Paged attention beside attention in one piece", columns, rows)],
        {"equality": _picture(kernels)},
        {"kernel": kernels, "tokens": tokens},
        [_settled(kernels, tokens)],
        [note],
    )


def dense_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q k / sqrt(d)) v of one token over one sequence: [head, d] over [context, kv_head, d] -> [head, d]."""
    import torch

    group = query.shape[0] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("hd,chd->hc", query, keys) * query.shape[1] ** -0.5
    return torch.einsum("hc,chd->hd", torch.softmax(scores, -1), values)


def _kernel(dtype: str, block_size: int, seed: int) -> dict[str, Any]:
    """Decodes over pages that lie anywhere: how far they are from attention over the same in one piece."""
    import torch

    from kernels.attention import attend, layout_step
    from kernels.cache import PagedKVCache

    random = np.random.default_rng(seed)
    contexts = np.sort(random.integers(1, LONGEST + 1, ROWS))[::-1]
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    pages = -(-contexts // block_size)
    cache = PagedKVCache(1, int(pages.sum()), block_size, KV_HEADS, HEAD_DIM, kind)
    places = random.permutation(int(pages.sum())).astype(np.int64)
    tables = np.split(places, np.cumsum(pages)[:-1])
    shapes = {"heads": (ROWS, KV_HEADS * GROUP, HEAD_DIM), "kv": (LONGEST, KV_HEADS, HEAD_DIM)}
    query = torch.randn(shapes["heads"], dtype=kind, generator=generator)
    last_keys, last_values, dense = [], [], []
    for row, (length, table) in enumerate(zip(contexts.tolist(), tables, strict=True)):
        keys, values = (torch.randn(shapes["kv"], dtype=kind, generator=generator)[:length] for _ in range(2))
        slots = torch.from_numpy(table[np.arange(length) // block_size] * block_size + np.arange(length) % block_size)
        cache.write(0, slots[:-1], keys[:-1], values[:-1])
        last_keys.append(keys[-1])
        last_values.append(values[-1])
        dense.append(dense_attention(query[row], keys, values))
    layout = layout_step(
        [(length - 1, table) for length, table in zip(contexts.tolist(), tables, strict=True)],
        [],
        block_size,
        cache.padding_block,
    )
    scale = HEAD_DIM**-0.5
    paged = attend(query, torch.stack(last_keys), torch.stack(last_values), cache, 0, layout, scale)
    whole = torch.stack(dense).view(ROWS, -1)
    difference = float((paged - whole).abs().max())
    return {
        "dtype": dtype,
        "block_size": block_size,
        "outputs": paged.numel(),
        "equal_bits": float((paged == whole).double().mean()),
        "difference": difference,
        "roundings": difference / float(torch.finfo(kind).eps * whole.abs().max()),
    }


def _tokens(seed: int) -> dict[str, int]:
    """Greedy tokens by block size and allocator, against prompts that are computed anew for each token."""
    from engine.exec.llm import LLM
    from engine.exec.weights import load_model

    loaded = load_model("tiny", seed=seed)

    def llm(**options: Any) -> LLM:
        return LLM("tiny", loaded, dtype="float64", num_gpu_blocks_override=400, max_model_len=256, **options)

    prompts = np.random.default_rng(seed).integers(5, 250, (PROMPTS, PROMPT_TOKENS)).tolist()
    anew = llm(enable_prefix_caching=False)
    grown = [list(prompt) for prompt in prompts]
    for _ in range(OUTPUT_TOKENS):
        for text, output in zip(grown, _greedy(anew, grown, 1), strict=True):
            text += output
    anew.close()
    equal = total = 0
    for options in ({"block_size": size} for size in BLOCK_SIZES):
        paged = llm(**options)
        for text, output in zip(grown, _greedy(paged, prompts, OUTPUT_TOKENS), strict=True):
            theirs = text[PROMPT_TOKENS:]
            equal += sum(a == b for a, b in zip(output, theirs, strict=True))
            total += OUTPUT_TOKENS
        paged.close()
    return {"equal": equal, "tokens": total}


def _greedy(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    from engine.exec.sampler import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


def _settled(kernels: list[dict[str, Any]], tokens: dict[str, int]) -> Settled:
    """B14: equal up to the order of sums, or not."""
    worst = max(kernel["roundings"] for kernel in kernels)
    bits = min(kernel["equal_bits"] for kernel in kernels)
    by = {dtype: max(k["difference"] for k in kernels if k["dtype"] == dtype) for dtype in DTYPES}
    same = worst <= ROUNDINGS and tokens["equal"] == tokens["tokens"]
    text = (
        f"largest difference {by['float64']:.0e} in float64 and {by['float32']:.0e} in float32 ({worst:.1f} roundings "
        f"of the largest output), {bits:.0%} of the outputs equal bit for bit; {tokens['equal']} of {tokens['tokens']} "
        "greedy tokens equal"
    )
    numbers = {"difference": by, "roundings": worst, "equal_bits": bits, **tokens}
    if same and bits == 1.0:
        return Settled("B14", "reproduced", text, numbers=numbers)
    if same:
        condition = "numbers are compared up to rounding: pages change the order of sums, not what is summed"
        return Settled("B14", "reproduced-only-if", text, condition, numbers)
    return Settled("B14", "does-not-follow", text, "the kernel adds up something else", numbers)


def _picture(kernels: list[dict[str, Any]]) -> bytes:
    import matplotlib.pyplot as plt

    from experiments.plots import STYLE, to_png

    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.0, 3.8), layout="constrained")
        for i, (dtype, colour) in enumerate(zip(DTYPES, ("#0072B2", "#D55E00"), strict=True)):
            rows = [kernel for kernel in kernels if kernel["dtype"] == dtype]
            at = [BLOCK_SIZES.index(row["block_size"]) + (i - 0.5) * 0.36 for row in rows]
            bars = axis.bar(at, [row["roundings"] for row in rows], 0.34, color=colour, label=dtype)
            axis.bar_label(bars, [f"{row['difference']:.0e}" for row in rows], fontsize=8, padding=2)
        axis.set_xticks(range(len(BLOCK_SIZES)), [str(size) for size in BLOCK_SIZES])
        axis.set(
            xlabel="block size (tokens)",
            ylabel="largest difference (roundings)",
            title="Paged attention beside attention in one piece",
        )
        axis.margins(y=0.2)
        axis.legend(fontsize=8, ncols=2, loc="upper center")
        return to_png(figure)
