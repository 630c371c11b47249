"""P16 with every way to make room: outputs are the same with swaps, the host tier, forks and beams."""

from __future__ import annotations

import functools
import itertools

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from hypothesis import event, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from engine.core.cost import LinearCost  # noqa: E402
from engine.exec.llm import LLM  # noqa: E402
from engine.exec.sampler import SamplingParams  # noqa: E402
from engine.exec.weights import load_model  # noqa: E402

LONGEST = 110
"""Tokens of the longest request, prompt and output."""
MOVES = ("swap_out_blocks", "swap_in_blocks", "copied_blocks", "num_transfers")
HOST_GIB = 0.02
EVEN = LinearCost(token_ns=40.0, pair_ns=1.0, swap_latency_ns=100.0, block_ns=200.0)
"""Costs by which long sequences are swapped and short ones recomputed, at a block size of 8."""


@functools.cache
def loaded():
    return load_model("tiny")


def requests():
    """14 requests, many of which share a prefix: greedy, sampled and stopped ones, of one sequence or up to four, and
    two beams."""
    generator = torch.Generator().manual_seed(4)

    def draw(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=generator).tolist()

    long, short = draw(48), draw(9)
    prompts, params = [], []
    for i, tail in zip(range(14), itertools.cycle([1, 5, 16, 27]), strict=False):
        prompts.append((long, short, [])[i % 3] + draw(tail))
        if i in (4, 9):
            params.append(SamplingParams(beam_width=3, max_tokens=15 + i, stop_token_ids=list(range(0, 320, 11))))
            continue
        params.append(
            SamplingParams(
                n=(1, 3, 1, 4, 2)[i % 5],
                temperature=0.0 if i % 6 == 0 else 0.9,
                seed=100 * i,
                max_tokens=6 + (i * 7) % 26,
                stop_token_ids=list(range(i % 9, 320, 9)) if i % 4 == 1 else None,
                ignore_eos=i % 2 == 0,
            )
        )
    assert max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True)) <= LONGEST
    return prompts, params


def serve(prompts, params, **options):
    """Outputs of every sequence of every request in float64, and how many blocks moved; every step is checked."""
    options = {"max_num_seqs": 12, "max_model_len": LONGEST, "block_size": 8, **options}
    llm = LLM("tiny", loaded(), dtype="float64", **options)
    results = llm.generate(prompts, params, check=True)
    assert all(result.error is None for result in results)
    steps = llm.recorder.steps()
    counts = {name: int(steps[name].sum()) for name in MOVES}
    counts["preempted"] = int(steps["preempted"].sum())
    return [
        [(o.token_ids, o.finish_reason, o.text, o.score and round(o.score, 9)) for o in r.outputs] for r in results
    ], counts


@functools.cache
def expected():
    """Every sequence as a request of its own, one at a time, in ample memory without a prefix cache; beams alone."""
    outputs = []
    for prompt, params in zip(*requests(), strict=True):
        alone = [params]
        if not params.use_beam_search:
            alone = [
                SamplingParams(
                    temperature=params.temperature,
                    seed=params.seed + i,
                    max_tokens=params.max_tokens,
                    stop_token_ids=params.stop_token_ids,
                    ignore_eos=params.ignore_eos,
                )
                for i in range(params.n)
            ]
        options = {"num_gpu_blocks_override": 200, "max_num_seqs": 3, "enable_prefix_caching": False}
        found = [serve([prompt], [one], **options) for one in alone]
        assert all(counts["preempted"] == 0 for _, counts in found)
        outputs.append([output for results, _ in found for output in results[0]])
    sampled = [tuple(o[0]) for p, outs in zip(requests()[1], outputs, strict=True) if p.temperature for o in outs]
    assert len(set(sampled)) == len(sampled)
    return outputs


def smallest_pool(block_size: int) -> int:
    """Blocks that a beam of three may need at once, and that are the most that any request does."""
    return max(
        (p.n if p.use_beam_search else 1) * -(-(len(prompt) + p.max_tokens - 1) // block_size)
        for prompt, p in zip(*requests(), strict=True)
    )


MODES = {
    "recompute": ({"preemption_mode": "recompute"}, ()),
    "swap": ({"preemption_mode": "swap", "swap_space": HOST_GIB}, ("swap_out_blocks", "swap_in_blocks")),
    "swap-groups": ({"preemption_mode": "swap-groups", "swap_space": HOST_GIB}, ("swap_out_blocks", "swap_in_blocks")),
    "auto": (
        {"preemption_mode": "auto", "swap_space": HOST_GIB, "cost_model": EVEN},
        ("swap_out_blocks", "swap_in_blocks"),
    ),
    "host-tier": ({"kv_offloading_size": HOST_GIB}, ("num_transfers",)),
    "swap-and-host-tier": (
        {"preemption_mode": "swap", "swap_space": HOST_GIB, "kv_offloading_size": HOST_GIB},
        ("swap_out_blocks", "num_transfers"),
    ),
    "little-host-memory": ({"preemption_mode": "swap", "swap_space": 0.00008}, ("swap_out_blocks",)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [1, 2], ids=["one-in-flight", "two-in-flight"])
@pytest.mark.parametrize("index", ["hash", "radix"])
def test_no_way_to_make_room_changes_an_output(mode, steps, index):
    """With a pool that just fits: forks copy, preempted sequences are swapped or recomputed, and no token changes."""
    options, moved = MODES[mode]
    outputs, counts = serve(
        *requests(),
        num_gpu_blocks_override=smallest_pool(8),
        async_scheduling=steps == 2,
        prefix_index=index,
        **options,
    )
    assert outputs == expected()
    for name in ("preempted", "copied_blocks", *moved):
        assert counts[name] > 0, name


@pytest.mark.parametrize("steps", [1, 2], ids=["one-in-flight", "two-in-flight"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_requests_of_their_own_give_what_forks_give(mode, steps):
    """Several sequences served as requests that share by the prefix cache: the same outputs, without those copies."""
    prompts, params = requests()
    outputs, counts = serve(
        prompts,
        params,
        parallel_sampling="requests",
        num_gpu_blocks_override=smallest_pool(8),
        async_scheduling=steps == 2,
        **MODES[mode][0],
    )
    assert outputs == expected()
    assert counts["preempted"] > 0
    plain = [i for i, one in enumerate(params) if not one.use_beam_search]
    _, counts = serve(
        [prompts[i] for i in plain],
        [params[i] for i in plain],
        parallel_sampling="requests",
        num_gpu_blocks_override=60,
    )
    assert counts["copied_blocks"] == 0


@settings(max_examples=12)
@given(
    mode=st.sampled_from(sorted(MODES)),
    block_size=st.sampled_from([1, 4, 8, 16]),
    room=st.floats(1.0, 3.0),
    caching=st.booleans(),
    budget=st.sampled_from([12, 17, 64, 2048]),
    seqs=st.sampled_from([4, 7, 12]),
    two=st.booleans(),
    fork=st.sampled_from(["fork", "requests"]),
    same_step=st.sampled_from(["share", "off", "defer"]),
)
def test_outputs_depend_on_no_option_of_memory(mode, block_size, room, caching, budget, seqs, two, fork, same_step):
    """Way to make room, block size, pool, cache, budget, batch, pipeline and sharing change no output."""
    options = dict(MODES[mode][0])
    outputs, counts = serve(
        *requests(),
        num_gpu_blocks_override=int(smallest_pool(block_size) * room),
        block_size=block_size,
        enable_prefix_caching=caching or "kv_offloading_size" in options,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        async_scheduling=two,
        parallel_sampling=fork,
        same_step=same_step,
        **options,
    )
    event(f"preempted: {counts['preempted'] > 0}, swapped: {counts['swap_in_blocks'] > 0}")
    assert outputs == expected()


def test_best_of_gives_the_likeliest_of_its_sequences():
    """`best_of` returns the n outputs with the best mean log-probability, best first, however they are served."""
    llm = LLM("tiny", loaded(), dtype="float64", num_gpu_blocks_override=60, max_model_len=LONGEST)
    every = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=9, logprobs=0)
    prompt = list(range(30))
    outputs = llm.generate(prompt, every)[0].outputs
    means = [sum(t[k].logprob for k, t in zip(o.token_ids, o.logprobs, strict=True)) / 9 for o in outputs]
    ranked = [outputs[i].token_ids for i in sorted(range(5), key=lambda i: -means[i])]
    for served in ("fork", "requests"):
        llm = LLM(
            "tiny",
            loaded(),
            dtype="float64",
            num_gpu_blocks_override=60,
            max_model_len=LONGEST,
            parallel_sampling=served,
        )
        best = llm.generate(prompt, SamplingParams(n=2, best_of=5, temperature=1.0, seed=3, max_tokens=9))[0].outputs
        assert [output.token_ids for output in best] == ranked[:2]
        assert [output.index for output in best] == [0, 1]
        assert best[0].logprobs is None
        assert best[0].score >= best[1].score
