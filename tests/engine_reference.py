"""What transformers says, and how to hold the engine's output against it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.exec.llm import LLM
from engine.exec.sampler import SamplingParams

MARGIN = 1e-3
"""Below this difference of the two best logits either token may come out on top."""
LOGIT_TOLERANCE = 1e-4


def prompt_lengths(count: int, low: int, high: int) -> list[int]:
    """`count` lengths from `low` to `high`, evenly spread in the logarithm."""
    return [round(n) for n in np.geomspace(low, high, count)]


def save_random_llama(folder: Path, **changes: Any) -> Any:
    """A small random Llama with grouped-query attention, saved as config.json and model.safetensors; returns it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 500,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "eos_token_id": None,
        "bos_token_id": None,
        **changes,
    }
    model = LlamaForCausalLM(LlamaConfig(**options)).eval()
    model.save_pretrained(folder)
    return model


def assert_greedy_equal(model: Any, llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> int:
    """Hold all prompts' greedy outputs of `llm`, served together, against the logits of `model` along the way.

    The reference runs once over prompt + our output, which gives its logits at every position behind the tokens that
    we chose: where its margin is wide its best token must be ours, and where it is not, going on behind our choice
    re-aligns the two. Returns the number of near ties.
    """
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=5)
    results = llm.generate(prompts, greedy)
    ties = 0
    for prompt, result in zip(prompts, results, strict=True):
        ours = result.outputs[0].token_ids
        assert len(ours) == num_tokens
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ours[:-1]]), logits_to_keep=num_tokens).logits[0]
        best = logits.topk(2)
        margins = best.values[:, 0] - best.values[:, 1]
        for position, token in enumerate(ours):
            if margins[position] > MARGIN:
                assert token == int(best.indices[position, 0]), f"output {position} of a prompt of {len(prompt)} tokens"
            else:
                ties += 1
                assert token in best.indices[position].tolist()
        reference = torch.log_softmax(logits.double(), -1)
        assert result.outputs[0].logprobs is not None
        for position, table in enumerate(result.outputs[0].logprobs):
            for token, entry in table.items():
                assert abs(entry.logprob - float(reference[position, token])) < LOGIT_TOLERANCE
    return ties


def assert_logits_agree(model: Any, llm: LLM, prompt: list[int]) -> None:
    """All logits of all positions of `prompt`, read in unequal chunks and single tokens, within 1e-4 of `model`'s."""
    from engine.exec.runner import Row

    runner = llm.engine.runner
    blocks = np.random.default_rng(0).permutation(runner.cache.num_blocks)
    table = blocks[: -(-len(prompt) // runner.cache.block_size)].astype(np.int64)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    tokens = np.array(prompt, dtype=np.int64)
    start = 0
    for count in (len(prompt) // 2, len(prompt) // 3, *[1] * len(prompt)):
        if start + count > len(prompt):
            break
        got = runner.run([Row(0, start, count, True, table)], tokens[start : start + count])
        assert float((got[0] - expected[start + count - 1]).abs().max()) < LOGIT_TOLERANCE
        start += count
    assert start == len(prompt)
