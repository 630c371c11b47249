"""The KV budget: what is subtracted, what is left, and when nothing is."""

from __future__ import annotations

import pytest

from sim.errors import SimError
from sim.hardware import device
from sim.memory import kv_blocks
from sim.models import preset


def test_the_budget_adds_up_and_states_its_assumption() -> None:
    """Weights, allowance and blocks fill the usable memory to within one block, and the text says what is assumed."""
    spec, gpu = preset("llama-3-8b"), device("a100-80g")
    budget = kv_blocks(spec, gpu)
    used = budget.weights + budget.allowance + budget.num_blocks * budget.block_bytes
    assert budget.memory - budget.block_bytes < used <= budget.memory
    assert budget.memory == int(0.9 * gpu.memory_bytes)
    assert budget.block_bytes == 2 * 2**20
    assert "assumed" in budget.text()
    assert str(budget.num_blocks) in budget.text()


def test_activations_follow_the_known_rule() -> None:
    """Llama-3.1-8B is allowed 108 KiB for each token of the largest step."""
    assert kv_blocks(preset("llama-3.1-8b"), device("h100"), max_num_batched_tokens=1).activations == 108 * 1024


def test_a_real_engine_is_met_within_ten_percent() -> None:
    """On the RTX 4090 whose engine resolved 2,588 blocks, the stated allowance gives that within 10 %."""
    assert kv_blocks(preset("llama-3.1-8b"), device("rtx4090")).num_blocks == pytest.approx(2588, rel=0.1)


def test_tensor_parallelism_makes_room() -> None:
    """Llama-2-70B does not fit on one A100, and on four it has about 489,000 tokens of KV (16 a block)."""
    spec, gpu = preset("llama-2-70b"), device("a100-80g")
    with pytest.raises(SimError, match=r"no room for KV.*more devices"):
        kv_blocks(spec, gpu)
    assert kv_blocks(spec, gpu, tp=4).num_blocks * 16 == pytest.approx(489_000, rel=0.06)


def test_options_out_of_range_are_refused() -> None:
    """A utilization or block size that cannot be is refused by name."""
    with pytest.raises(SimError, match="gpu_memory_utilization"):
        kv_blocks(preset("llama-3-8b"), device("h100"), 1.5)
    with pytest.raises(SimError, match="block_size"):
        kv_blocks(preset("llama-3-8b"), device("h100"), block_size=0)
