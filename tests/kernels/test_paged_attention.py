"""The paged attention that CPUs run against its slow reference, and against everything that may lie around."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kernels.attention import attend, attend_reference, layout_step  # noqa: E402
from kernels.cache import PagedKVCache  # noqa: E402

DIM = 8
SCALE = DIM**-0.5


class Case:
    """Random sequences with block tables scattered over a pool; every slot that no token owns holds NaN."""

    def __init__(self, contexts, chunks, block_size, kv_heads, group, seed, spare=3, poison=float("nan")):
        random = np.random.default_rng(seed)
        contexts = sorted(contexts, reverse=True)
        needed = [-(-n // block_size) for n in contexts] + [-(-(c + q) // block_size) for c, q in chunks]
        num_blocks = sum(needed) + spare
        ids = random.permutation(num_blocks)
        tables, at = [], 0
        for n in needed:
            tables.append(ids[at : at + n].astype(np.int64))
            at += n
        self.unowned = ids[at:]
        self.decodes = [(n - 1, table) for n, table in zip(contexts, tables, strict=False)]
        self.chunks = [(c, q, table) for (c, q), table in zip(chunks, tables[len(contexts) :], strict=True)]
        self.block_size, self.kv_heads = block_size, kv_heads
        self.tokens = len(contexts) + sum(q for _, q in chunks)
        generator = torch.Generator().manual_seed(seed)
        self.query, self.key, self.value = (
            torch.randn(self.tokens, h, DIM, dtype=torch.float64, generator=generator)
            for h in (kv_heads * group, kv_heads, kv_heads)
        )
        self.cache = PagedKVCache(1, num_blocks, block_size, kv_heads, DIM, torch.float64)
        self.cache.keys.fill_(poison)
        self.cache.values.fill_(poison)
        for start, table in [(p, t) for p, t in self.decodes] + [(c, t) for c, _, t in self.chunks]:
            for i in range(start):
                for tensor in (self.cache.keys, self.cache.values):
                    tensor[0, :, table[i // block_size], i % block_size] = torch.randn(
                        kv_heads, DIM, dtype=torch.float64, generator=generator
                    )

    def layout(self):
        return layout_step(self.decodes, self.chunks, self.block_size, self.cache.padding_block)

    def run(self, function=attend):
        return function(self.query, self.key, self.value, self.cache, 0, self.layout(), SCALE)


cases = st.builds(
    Case,
    contexts=st.lists(st.integers(1, 70), max_size=6),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=3),
    block_size=st.sampled_from([1, 8, 16, 32]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**16),
).filter(lambda case: case.tokens > 0)


@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_fast_path_equals_the_reference_with_nan_in_every_slot_that_nobody_owns(case):
    """Attention reads exactly the slots that the block table and the context length name, whatever else lies there."""
    fast = case.run()
    slow = case.run(attend_reference)
    assert not torch.isnan(fast).any()
    assert torch.allclose(fast, slow, rtol=0, atol=1e-12)


def test_every_block_size_gives_the_same_numbers():
    """How tokens are cut into pages does not change what attention returns."""
    results = []
    for block_size in (1, 8, 16, 32):
        case = Case([33, 5, 64, 1], [(16, 9), (0, 12)], block_size, 2, 3, seed=1)
        results.append(case.run())
    # The random contents are drawn in the order of tokens, so they are the same for every block size.
    for other in results[1:]:
        assert torch.allclose(results[0], other, rtol=0, atol=1e-12)


def test_writes_touch_only_the_slots_of_the_new_tokens():
    """A step changes its own tokens' slots and no other slot of the pool, and not the padding page."""
    case = Case([40, 17, 3], [(5, 11), (0, 4)], 8, 2, 2, seed=3, spare=5, poison=7.5)
    before_keys, before_values = case.cache.keys.clone(), case.cache.values.clone()
    case.run()
    touched = torch.zeros((case.cache.num_blocks + 1) * 8, dtype=torch.bool)
    touched[case.layout().slots] = True
    touched = touched.view(case.cache.num_blocks + 1, 8)
    assert int(touched.sum()) == case.tokens
    for before, after in ((before_keys, case.cache.keys), (before_values, case.cache.values)):
        changed = (before != after).any(-1)[0]
        assert not changed[:, ~touched].any()
        assert changed[:, touched].all()
    assert (case.cache.keys[:, :, case.cache.padding_block] == 7.5).all()
    assert (case.cache.keys[:, :, case.unowned] == 7.5).all()


def test_a_row_gets_the_same_numbers_alone_and_in_a_batch():
    """Batch invariance: neighbours change a row by no more than rounding in float64 (1e-12)."""
    case = Case([900, 130, 64, 33, 20, 9, 2], [(30, 25), (0, 17)], 16, 2, 2, seed=5)
    together = case.run()
    for index, decode in enumerate(case.decodes):
        one = slice(index, index + 1)
        layout = layout_step([decode], [], 16, case.cache.padding_block)
        alone = attend(case.query[one], case.key[one], case.value[one], case.cache, 0, layout, SCALE)
        assert torch.allclose(alone, together[one], rtol=0, atol=1e-12)
    first = len(case.decodes)
    for chunk in case.chunks:
        rows = slice(first, first + chunk[1])
        layout = layout_step([], [chunk], 16, case.cache.padding_block)
        alone = attend(case.query[rows], case.key[rows], case.value[rows], case.cache, 0, layout, SCALE)
        assert torch.allclose(alone, together[rows], rtol=0, atol=1e-12)
        first += chunk[1]


def test_a_chunk_equals_its_tokens_decoded_one_by_one():
    """Prefill behind cached context in one chunk and token by token agree to 1e-12."""
    case = Case([], [(20, 300)], 16, 1, 2, seed=9, spare=1)
    whole = case.run()
    start, count, table = case.chunks[0]
    for i in (0, 1, 255, 256, 299):
        layout = layout_step([(start + i, table)], [], 16, case.cache.padding_block)
        one = slice(i, i + 1)
        alone = attend(case.query[one], case.key[one], case.value[one], case.cache, 0, layout, SCALE)
        assert torch.allclose(alone, whole[one], rtol=0, atol=1e-12)
    assert count == 300


def test_rows_of_unlike_length_are_padded_in_groups():
    """Padding of decode rows stays within a quarter of the tokens and one group's cost, and groups cover all rows."""
    contexts = [4000, 3900, 1000, 990, 980, 100] + [16] * 200
    decodes = [(n - 1, np.arange(-(-n // 16))) for n in contexts]
    layout = layout_step(decodes, [], 16, 9999)
    edges = [(g.first, g.last) for g in layout.groups]
    assert edges[0][0] == 0
    assert edges[-1][1] == len(contexts)
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    assert len(edges) > 1
    gathered = sum(len(g.blocks) * 16 for g in layout.groups)
    assert gathered < 1.25 * sum(contexts) + 1024 * len(edges)


def test_copy_blocks_copies_whole_pages_of_every_layer():
    """A block copy moves all layers, heads and slots of a page, and leaves the other pages alone."""
    cache = PagedKVCache(2, 6, 4, 2, DIM, torch.float32)
    cache.keys.normal_()
    cache.values.normal_()
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.copy_blocks(torch.tensor([0, 5]), torch.tensor([3, 1]))
    assert torch.equal(cache.keys[:, :, [3, 1]], keys[:, :, [0, 5]])
    assert torch.equal(cache.values[:, :, [3, 1]], values[:, :, [0, 5]])
    assert torch.equal(cache.keys[:, :, [0, 2, 4, 5, 6]], keys[:, :, [0, 2, 4, 5, 6]])


def test_transformers_imports_beside_our_package_of_the_same_name():
    """Another library's optional package bears the name `kernels`; importing transformers works with ours in place."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert LlamaForCausalLM(config) is not None
