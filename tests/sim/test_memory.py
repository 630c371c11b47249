"""The memory budget: what is subtracted, what is left, and what real engines found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.errors import ModelError, SimError
from sim.hardware import device
from sim.memory import MemoryRequest, kv_blocks, longest, plan
from sim.models import preset
from sim.releases import RELEASES, release
from sim.transients import cublas_bytes, expert_bytes, layer_bytes, prompt_logprobs_bytes, sampler_bytes

GIB = 1 << 30
LLAMA = preset("llama-3.1-8b")


def rtx3090(length: int, seqs: int | None = None) -> MemoryRequest:
    """vllm#10517: Llama-3.1-8B on an RTX 3090, vLLM 0.6.4."""
    return MemoryRequest(LLAMA, device("rtx3090"), "0.6.4", max_model_len=length, max_num_seqs=seqs)


def test_the_budget_adds_up() -> None:
    """Every term inside the budget and the blocks fill the usable memory to within one block."""
    for version in ("0.2.7", "0.6.4", "0.19.1", "0.33.0"):
        made = plan(MemoryRequest(preset("llama-3-8b"), device("a100-80g"), version))
        used = sum(term.bytes for term in made.terms if term.inside) + made.num_blocks * made.block_bytes
        assert made.usable - made.block_bytes < used <= made.usable
        budget = made.budget_bytes()
        assert budget["total"] == made.usable + made.outside + budget["headroom"]


def test_a_real_rtx4090_is_met_within_five_percent() -> None:
    """vLLM 0.19.0 resolved 2,588 blocks; no constant is from that run, and 3 % is missed (it is +4.2 %)."""
    made = plan(MemoryRequest(LLAMA, device("rtx4090"), "0.19.0", utilization=0.9, max_model_len=32768))
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (2048, 256)
    assert made.num_blocks == pytest.approx(2588, rel=0.05)
    assert made.usable_blocks == made.num_blocks - 1


def test_other_logs_are_met() -> None:
    """Logs of other releases, models and devices: GiB for KV, to a few percent."""
    a6000 = MemoryRequest(
        preset("qwen2.5-32b"), device("a6000"), "0.6.4", max_model_len=4096, quantization="awq"
    )  # vllm#10360
    assert plan(a6000).available / GIB == pytest.approx(22.74, rel=0.015)
    card = MemoryRequest(preset("qwen3-8b"), device("rtx4090"), "0.21.0", utilization=0.9764, max_model_len=16384)
    assert plan(card).available / GIB == pytest.approx(6.37, rel=0.03)  # LMCache#3430, a card of 23.5 GiB


def test_experts_are_split_whole_or_cut() -> None:
    """Over four ranks a device has a quarter of the experts either way; whole ones need wider buffers, which stay."""
    spec = preset("mixtral-8x7b")
    cut = plan(MemoryRequest(spec, device("h100"), "0.19.1", tp=4, max_num_batched_tokens=2048, max_num_seqs=256))
    whole = plan(replace(cut.request, expert_ranks=4))
    assert whole.weights.matrices == cut.weights.matrices
    assert whole.layers_peak > cut.layers_peak
    early = plan(replace(cut.request, version="0.10.0"))
    kept = expert_bytes(spec, 2048, 2, 4)
    assert kept == 2048 * 2 * (2 * 14336 // 4 + 4096) * 2
    assert cut.layers_peak == early.layers_peak
    assert sampler_bytes("triton", 256, spec, 2, device("h100"), 2048) + kept + cublas_bytes(device("h100")) == (
        cut.sampler_peak
    )


@pytest.mark.parametrize(("length", "blocks", "peak"), [(20000, 1952, 17.06), (29000, 1478, 17.98)])
def test_a_real_rtx3090_is_met_within_three_percent(length: int, blocks: int, peak: float) -> None:
    """Whole prompts of 20,000 and 29,000 tokens left 1,952 and 1,478 blocks; the peak is the log's to 0.01 GiB."""
    made = plan(rtx3090(length))
    assert made.num_blocks == pytest.approx(blocks, rel=0.03)
    weights = sum(term.bytes for term in made.terms if term.name in ("weights", "rotary_tables", "activations"))
    assert weights / GIB == pytest.approx(peak, abs=0.01)
    assert made.num_cpu_blocks == 2048


def test_longer_contexts_start_where_shorter_ones_do_not() -> None:
    """29,000 is refused with vLLM's words, and 35,000 and 45,000 start, because prompts are cut above 32,768."""
    refused = plan(rtx3090(29000, 8))
    assert refused.refusal is not None
    assert refused.refusal.startswith("The model's max seq len (29000) is larger than the maximum number of tokens")
    assert plan(rtx3090(20000)).refusal is None
    for length in (35000, 45000):
        made = plan(rtx3090(length, 8))
        assert made.refusal is None
        assert (made.chunked, made.max_num_batched_tokens) == (True, 512)
        assert (made.weights.total + made.terms[1].bytes + made.layers_peak) / GIB == pytest.approx(15.05, abs=0.01)
    ranges = longest(rtx3090(20000, 8))
    assert [low for low, _ in ranges] == [1, 32769]
    assert ranges[0][1] < 29000
    assert ranges[1][1] > 45000
    for low, high in ranges:
        assert plan(rtx3090(low, 8)).refusal is None
        assert plan(rtx3090(high, 8)).refusal is None
        assert plan(rtx3090(high + 1, 8)).refusal is not None


def test_a_real_rtx4060_is_refused() -> None:
    """Qwen2.5-7B in 4 bits at utilization 0.7 of 8 GB leaves no KV, 4,681 CPU blocks, and the sampler is why."""
    request = MemoryRequest(
        preset("qwen2.5-7b"), device("rtx4060"), "0.7.3", utilization=0.7, max_model_len=4096, quantization="awq"
    )
    made = plan(request)
    assert made.num_blocks == 0
    assert made.num_cpu_blocks == 4681
    assert made.available / GIB == pytest.approx(-1.05, abs=0.1)
    assert made.refusal is not None
    assert made.refusal.startswith("No available memory for the cache blocks")
    assert made.weights.total / GIB == pytest.approx(5.20, abs=0.02)
    assert made.sampler_peak / GIB == pytest.approx(1.42, abs=0.01)
    assert made.largest_term().name == "activations"


def test_cpu_blocks_and_bytes_per_token_are_exact() -> None:
    """4 GiB of swap space are 2,048 blocks of Llama-3-8B and 512 of Llama-2-7B, at 524,288 bytes a token."""
    for name, blocks in (("llama-3-8b", 2048), ("llama-2-7b", 512)):
        made = plan(MemoryRequest(preset(name), device("a100-40g"), "0.5.2"))
        assert made.num_cpu_blocks == blocks
    assert preset("llama-2-7b").kv_bytes_per_token("float16") == 524_288
    assert 69_524_783_104 == 132_608 * 524_288


def test_a_given_number_of_blocks_is_judged_as_it_is() -> None:
    """229 blocks hold 3,664 tokens: 4,096 are refused with that number, and 3,664 is the longest that starts."""
    request = MemoryRequest(preset("llama-2-7b"), device("t4"), "0.2.7", max_model_len=4096, num_blocks=229)
    refusal = plan(request).refusal
    assert refusal is not None
    assert "max seq len (4096)" in refusal
    assert "KV cache (3664)" in refusal
    assert longest(request) == [(1, 3664)]


def test_declared_liveness_is_108_kib_a_token() -> None:
    """vLLM's layers keep 2 (3 I + 3 H) bytes a token: 108.0 KiB for Llama-3.1-8B."""
    assert layer_bytes(LLAMA, 1) == 2 * (3 * 14336 + 3 * 4096) == 108 * 1024


@pytest.mark.parametrize(
    ("name", "where", "tokens", "peak"),
    [
        ("llama-3-8b", "h100", 8192, 1.26),  # vllm#10511
        ("qwen2.5-1.5b", "rtx4060", 2048, 1.39),  # vllm#12529
        ("qwen2.5-32b", "a6000", 4096, 1.42),  # vllm#10360
    ],
)
def test_copies_of_the_logits_are_those_of_logs(name: str, where: str, tokens: int, peak: float) -> None:
    """With torch's sort, 256 sequences need what three engines logged as their activation peak."""
    gpu = device(where)
    found = sampler_bytes("sort", 256, preset(name), 2, gpu, tokens) + cublas_bytes(gpu)
    assert found / GIB == pytest.approx(peak, abs=0.011)


def test_samplers_are_counted_in_copies_of_the_logits() -> None:
    """In 16 bits: sort 9.5 copies, fewer than 128 rows 12.5, Triton 3.5 and a row a multiprocessor, FlashInfer 3.5."""
    spec, gpu = LLAMA, device("rtx4090")

    def copies(kind: str, rows: int) -> float:
        hidden = 2 * rows * spec.hidden * 2
        return (sampler_bytes(kind, rows, spec, 2, gpu, 0) - hidden) / (rows * spec.vocab * 4)

    assert copies("sort", 256) == copies("sort", 1) == 9.5
    assert copies("sort", 127) == 12.5
    assert copies("triton", 256) == 4.0
    assert copies("triton", 4) == 12.5
    assert copies("flashinfer", 256) == 3.5


def test_logits_of_a_whole_prompt_are_gigabytes() -> None:
    """Float32 logits of 32,768 tokens over 32,000 words are 3.91 GiB, of which vLLM keeps the 16-bit ones beside."""
    spec = preset("llama-2-70b")
    logits = 32768 * spec.vocab * 4
    assert logits / GIB == pytest.approx(3.91, abs=0.01)
    assert prompt_logprobs_bytes(spec, 32768) == 32768 * 32000 * 6


def test_defaults_follow_the_release() -> None:
    """Utilization 0.90 and then 0.92, swap space until V1, graphs in the budget from 0.21, larger batches."""
    assert release("0.19.1").utilization == release("0.4.0").utilization == 0.90
    assert release("0.22.1").utilization == release("0.33.0").utilization == 0.92
    assert release("0.6.6").swap_gib == 4
    assert release("0.19.1").swap_gib == 0
    assert not release("0.19.1").counts_graphs
    assert release("0.21.0").counts_graphs
    assert release("0.6.4.post1").since == (0, 6, 4)
    assert release("v0.19.0rc1").since == (0, 17, 0)
    assert [entry.since for entry in RELEASES] == sorted(entry.since for entry in RELEASES)
    h100 = plan(MemoryRequest(LLAMA, device("h100"), "0.19.1"))
    assert (h100.max_num_batched_tokens, h100.max_num_seqs) == (8192, 1024)
    a100 = plan(MemoryRequest(LLAMA, device("a100-80g"), "0.19.1"))
    assert (a100.max_num_batched_tokens, a100.max_num_seqs) == (2048, 256)


def test_graphs_count_where_the_release_counts_them() -> None:
    """The same terms lie inside or outside of the budget; without graphs there are none."""
    request = MemoryRequest(LLAMA, device("rtx4090"), "0.19.1", utilization=0.9)
    inside = {t.name: t.inside for t in plan(replace(request, version="0.21.0")).terms}
    assert {t.name: t.inside for t in plan(request).terms}["graphs"] is False
    assert inside["graphs"] is True
    assert "graphs" not in {t.name for t in plan(replace(request, enforce_eager=True)).terms}


def test_all_of_the_device_is_refused_at_start() -> None:
    """Utilization 1.0 asks for what the CUDA context has taken already."""
    refusal = plan(MemoryRequest(preset("llama-3-8b"), device("a100-80g"), "0.19.1", utilization=1.0)).refusal
    assert refusal is not None
    assert refusal.startswith("Free memory on device")


def test_quantised_weights_and_kv_make_room() -> None:
    """4-bit weights of an 8B model free about 9 GiB for KV, and 8-bit KV halves a block."""
    base = MemoryRequest(preset("llama-3-8b"), device("a100-80g"))
    small = replace(base, quantization="awq")
    freed = (plan(small).num_blocks - plan(base).num_blocks) * plan(base).block_bytes
    assert freed / GIB == pytest.approx(9.6, abs=0.3)
    assert plan(replace(base, kv_dtype="fp8")).block_bytes * 2 == plan(base).block_bytes


def test_tensor_parallelism_makes_room() -> None:
    """Llama-2-70B does not fit on one A100, and on four it has about 489,000 tokens of KV (16 a block)."""
    spec, gpu = preset("llama-2-70b"), device("a100-80g")
    with pytest.raises(SimError, match=r"no room for KV.*more devices"):
        kv_blocks(spec, gpu)
    budget = kv_blocks(spec, gpu, tp=4)
    assert budget.num_blocks * 16 == pytest.approx(489_000, rel=0.06)
    assert "predicted, not measured" in budget.text()
    assert str(budget.num_blocks) in budget.text()


def test_what_cannot_be_is_refused_by_name() -> None:
    """A utilization, block size, version or format that cannot be is one sentence that names it."""
    with pytest.raises(SimError, match="gpu_memory_utilization"):
        kv_blocks(preset("llama-3-8b"), device("h100"), 1.5)
    with pytest.raises(SimError, match="block_size"):
        kv_blocks(preset("llama-3-8b"), device("h100"), block_size=0)
    with pytest.raises(SimError, match="'latest' is no version"):
        release("latest")
    with pytest.raises(SimError, match=r"older than 0\.2\.5"):
        release("0.1.7")
    with pytest.raises(ModelError, match="Unknown weight format 'int3'"):
        plan(MemoryRequest(LLAMA, device("h100"), quantization="int3"))
    with pytest.raises(ModelError, match="over 3 devices"):
        plan(MemoryRequest(LLAMA, device("h100"), tp=3))
