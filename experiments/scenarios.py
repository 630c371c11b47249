"""Reported cases of serving at the edge of memory, as loads and options, for the experiment `capacity` and for tests.

Each case keeps its report's shares of memory and its numbers of requests; models and devices that the catalogue has not
are replaced by near ones, so that times are comparable within a case and not with the report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine.core.presets import SchedulerConfig
    from sim.steptime import StepTime
    from traces import Trace

__all__ = [
    "CLIFF_SHARE",
    "cliff",
    "cliff_load",
    "closed",
    "drain",
    "drain_load",
    "evict_load",
    "evict_options",
    "full_prompt_gate",
    "limits_by_option",
    "step_time",
]

CLIFF_SHARE = 0.132
"""Of the pool, that each request took on average in vllm-ascend issue 5859: 79.4 % with 6, 92.4 % with 7."""
CLIFF_PROMPT, CLIFF_OUTPUT = 32_768, 1_024


def closed(concurrency: int | None, count: int, prompt: int, output: int, name: str, seed: int | None = None) -> Trace:
    """`count` requests from `concurrency` clients, or all there at once; equal, or with a seed with outputs between
    half and one and a half of `output`, so that clients do not march in step."""
    from traces import make_trace

    zeros = np.zeros(count, dtype=np.int64)
    outputs = zeros + output
    if seed is not None:
        outputs = np.random.default_rng(seed).integers(max(1, output // 2), output + output // 2, count, endpoint=True)
    return make_trace(zeros, zeros + prompt, outputs, name=name, concurrency=concurrency)


def step_time(model: str, hardware: str, tp: int = 1, dtype: str | None = None) -> StepTime:
    """A roofline."""
    from sim.hardware import device
    from sim.models import preset
    from sim.steptime import roofline

    return roofline(preset(model), device(hardware), tp, dtype)


# ---- eight requests of 32,768 tokens (vllm-ascend issue 5859): GLM-4.7 on eight A2, here Llama-3.1-70B on eight H100


def cliff_load(concurrency: int, rounds: int = 3) -> Trace:
    return closed(concurrency, concurrency * rounds, CLIFF_PROMPT, CLIFF_OUTPUT, f"closed loop of {concurrency}")


def cliff(**options: Any) -> SchedulerConfig:
    """The report's pool, in shares: one request with half its output takes CLIFF_SHARE of it. Requests start when
    their first chunk fits, as with vLLM before it looked at whole prompts, and nothing is found in a prefix cache."""
    from engine.core.presets import SchedulerConfig

    given: dict[str, Any] = {"scheduler_reserve_full_isl": False, "enable_prefix_caching": False, **options}
    blocks = int((CLIFF_PROMPT + CLIFF_OUTPUT / 2) / CLIFF_SHARE / 16)
    return SchedulerConfig(num_blocks=blocks, max_model_len=40_960, **given)


# ---- 987 open requests (vLLM issue 6737): Qwen2-0.5B on an H800 with vLLM 0.4.2


def drain_load(output: int = 700) -> Trace:
    return closed(None, 987, 1_000, output, "987 at once")


def drain() -> SchedulerConfig:
    """A pool in which 247 running requests lose 28 of their number for 175 tokens that the others gain: 338,000 tokens
    by the report's 5-second log (247 (x) = 219 (x + 175) at 2,100 tokens/s)."""
    from engine.core.presets import PRESETS, SchedulerConfig

    given: dict[str, Any] = {**PRESETS["vllm-v0"], "max_num_batched_tokens": 8192}
    return SchedulerConfig(num_blocks=338_000 // 16, max_model_len=8192, **given)


# ---- GUARANTEED_NO_EVICT and MAX_UTILIZATION (TensorRT-LLM issue 16827): Llama-3.3-70B-FP8 on one H200


def evict_load(concurrency: int = 32, count: int = 128) -> Trace:
    return closed(concurrency, count, 16_384, 512, f"closed loop of {concurrency}")


def evict_options(policy: str) -> SchedulerConfig:
    """`policy`: no-evict or max-utilization. The KV cache is FP8 as the weights are, and takes 90 % of what they leave.

    No blocks are reused, prompts are computed in chunks of 2,048, and under max-utilization a request starts when its
    first chunk fits. What changes with each of these is in docs/decisions.md.
    """
    from engine.core.presets import PRESETS, SchedulerConfig
    from sim.hardware import device
    from sim.models import preset

    spec, card = preset("llama-3.1-70b"), device("h200")
    room = 0.9 * (card.memory_bytes - spec.weights_bytes(1, 1))
    given: dict[str, Any] = {**PRESETS[f"trtllm-{policy}"], "enable_prefix_caching": False}
    given["max_num_batched_tokens"] = given["max_num_seqs"] = 2048
    if policy == "max-utilization":
        given["scheduler_reserve_full_isl"] = False
    blocks = int(room // (given["block_size"] * spec.kv_bytes_per_token(1)))
    return SchedulerConfig(num_blocks=blocks, max_model_len=32_768, **given)


# ---- the full-prompt gate (dynamo issue 9718)


def full_prompt_gate(on: bool) -> SchedulerConfig:
    """The cliff's pool with and without a look at the whole prompt."""
    return cliff(scheduler_reserve_full_isl=on)


# ---- one load, and which limit binds (vLLM issues 13508 and 11517)


def limits_by_option() -> dict[str, SchedulerConfig]:
    """Options under which the same crowd of chats meets another limit each."""
    from engine.core.presets import SchedulerConfig

    plenty = SchedulerConfig(num_blocks=20_000, max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192)
    return {
        "KV memory": replace(plenty, num_blocks=600),
        "sequences": replace(plenty, max_num_seqs=16),
        "step tokens": replace(plenty, max_num_batched_tokens=256),
        "static batches": replace(plenty, batching="static"),
        "none of them": plenty,
    }
