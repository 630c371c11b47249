"""Memory is invisible in what the engine says: the same tokens from any pool, block size, budget and pipeline."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from hypothesis import event, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from engine.exec.engine import EngineRequest, ListSource  # noqa: E402
from engine.exec.llm import LLM  # noqa: E402
from engine.exec.sampler import SamplingParams  # noqa: E402
from engine.exec.tiny import TINY  # noqa: E402
from engine.exec.weights import load_model  # noqa: E402

LONGEST = 150
"""Tokens of the longest request, prompt and output."""


@functools.cache
def loaded():
    return load_model("tiny")


def requests():
    """24 requests: a third share a long prefix, a third a short one; greedy, seeded, and stopped ones among them."""
    generator = torch.Generator().manual_seed(11)

    def draw(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=generator).tolist()

    long, short = draw(70), draw(9)
    prompts, params = [], []
    for i, tail in zip(range(24), itertools.cycle([1, 5, 16, 33, 40]), strict=False):
        prompts.append((long, short, [])[i % 3] + draw(tail))
        temperature = (0.0, 0.9, 1.3)[i % 3] if i % 4 else 0.7
        stops = list(range(i % 9, TINY.vocab_size, 9)) if i % 5 == 0 else None
        params.append(
            SamplingParams(
                temperature=temperature,
                top_p=0.95 if i % 2 else 1.0,
                top_k=40 if i % 7 == 0 else 0,
                seed=i,
                max_tokens=8 + (i * 7) % 32,
                stop_token_ids=stops,
                ignore_eos=i % 2 == 0,
            )
        )
    assert max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True)) <= LONGEST
    return prompts, params


def serve(**options):
    """Outputs (tokens, reason, text) of all requests in float64, and the recorder; every step is checked."""
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": LONGEST, **options}
    llm = LLM("tiny", loaded(), dtype="float64", **options)
    outputs = [result.outputs[0] for result in llm.generate(*requests(), check=True)]
    return [(o.token_ids, o.finish_reason, o.text) for o in outputs], llm.recorder


@functools.cache
def expected():
    """One request at a time, no prefix cache, ample memory: nothing to share, to evict or to preempt."""
    outputs, recorder = serve(num_gpu_blocks_override=200, max_num_seqs=1, enable_prefix_caching=False)
    assert sum(recorder.requests()["num_preemptions"]) == 0
    assert len({tuple(tokens) for tokens, _, _ in outputs}) == len(outputs)
    assert {reason for _, reason, _ in outputs} == {"stop", "length"}
    return outputs


def smallest_pool(block_size: int) -> int:
    return -(-LONGEST // block_size)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("steps", [1, 2], ids=["one-in-flight", "two-in-flight"])
def test_a_pool_that_just_fits_gives_the_outputs_of_an_ample_one(block_size, steps):
    """With memory for hardly more than the longest request, preemption and recompute change no token."""
    outputs, recorder = serve(
        num_gpu_blocks_override=smallest_pool(block_size), block_size=block_size, async_scheduling=steps == 2
    )
    assert outputs == expected()
    assert sum(recorder.requests()["num_preemptions"]) > 0


@settings(max_examples=15)
@given(
    block_size=st.sampled_from([1, 8, 16, 32]),
    room=st.floats(1.0, 8.0),
    caching=st.booleans(),
    budget=st.sampled_from([16, 17, 33, 64, 256, 2048]),
    seqs=st.sampled_from([2, 5, 16]),
    two=st.booleans(),
    preset=st.sampled_from(["vllm-0.19", "vllm-0.33"]),
    same_step=st.sampled_from(["share", "off", "defer"]),
)
def test_outputs_do_not_depend_on_how_memory_and_time_are_cut_up(
    block_size, room, caching, budget, seqs, two, preset, same_step
):
    """Pool size, block size, prefix cache, token budget, batch size, pipeline and preset change no output."""
    outputs, recorder = serve(
        num_gpu_blocks_override=int(smallest_pool(block_size) * room),
        block_size=block_size,
        enable_prefix_caching=caching,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        async_scheduling=two,
        preset=preset,
        same_step=same_step,
    )
    event(f"preempted: {sum(recorder.requests()['num_preemptions']) > 0}")
    event(f"prefix hits: {sum(recorder.requests()['cached_tokens']) > 0}")
    assert outputs == expected()


@functools.cache
def greedy():
    """The 24 prompts, greedy, and their outputs one at a time from ample paged memory."""
    prompts, params = requests()
    params = [dataclasses.replace(param, temperature=0.0, top_p=1.0, top_k=0) for param in params]
    return prompts, params, contiguous(prompts, params, max_num_seqs=1, num_gpu_blocks_override=200)[0]


def contiguous(prompts, params, lengths=None, **options):
    """Output tokens of all requests in float64 under an allocator, the steps, and most requests that ran at once."""
    llm = LLM("tiny", loaded(), dtype="float64", max_model_len=LONGEST, block_size=8, **options)
    source = ListSource(
        EngineRequest(row, prompt, param, oracle_tokens=lengths[row] if lengths else 0)
        for row, (prompt, param) in enumerate(zip(prompts, params, strict=True))
    )
    recorder = llm.engine.serve(source, check=True).recorder
    assert not source.reasons
    return [source.finishes[row][0][0].output_tokens for row in range(len(prompts))], recorder


@pytest.mark.parametrize("placement", ["first-fit", "best-fit", "buddy"])
@pytest.mark.parametrize("allocator", ["contiguous-max", "contiguous-pow2", "contiguous-oracle"])
def test_contiguous_runs_give_the_outputs_of_pages(allocator, placement):
    """Under pressure, with requests queueing for a hole, contiguous runs served by the same kernels change no token."""
    prompts, params, expected = greedy()
    blocks = 2 * 32 + 7  # two runs of the longest, and a rest that only shorter ones fit into
    outputs, recorder = contiguous(
        prompts,
        params,
        [len(tokens) for tokens in expected],
        allocator=allocator,
        placement=placement,
        num_gpu_blocks_override=blocks,
        async_scheduling=placement == "best-fit",
    )
    assert outputs == expected
    steps = recorder.steps()
    assert max(steps["num_waiting"]) > 0
    assert 2 <= max(steps["num_running"]) < len(prompts)
    assert sum(recorder.requests()["num_preemptions"]) == 0
    sums = sum(steps[name] for name in ("held", "tail", "reserved_may", "reserved_cannot", "external", "free"))
    assert set(sums.tolist()) == {blocks * 8}
    if allocator == "contiguous-max":
        assert min(steps["reserved_cannot"]) > 0
