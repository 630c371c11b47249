"""Mistral, Qwen2, Qwen3 and Mixtral against Hugging Face transformers' in float32, on small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from engine_reference import assert_greedy_equal, assert_logits_agree  # noqa: E402

from engine.exec.llm import LLM  # noqa: E402
from engine.models.config import DecoderConfig  # noqa: E402
from engine.models.errors import ModelError  # noqa: E402
from engine.models.linear import Linear  # noqa: E402
from engine.models.mlp import GatedMlp, MixtureOfExperts  # noqa: E402

SHAPE: dict[str, Any] = {
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
}
EXPERTS = {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}


def save_random(folder: Path, family: str, **changes: Any) -> Any:
    """A small random model of a family, its norms and biases random too; saved, and returned."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            assert parameter.isfinite().all(), name
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": None, "head_dim": 16}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 32}),
        ("Mixtral", EXPERTS),
    ],
)
def test_a_family_equals_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Logits at every position within 1e-4, in chunks and single tokens, and the same greedy tokens."""
    model = save_random(tmp_path, family, **changes)
    llm = LLM(tmp_path, dtype="float32", num_gpu_blocks_override=60, max_num_batched_tokens=64, max_num_seqs=16)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 500, (n,), generator=generator).tolist() for n in (8, 70, 33)]
    assert_logits_agree(model, llm, prompts[1])
    assert assert_greedy_equal(model, llm, prompts, 16) < 16


def test_experts_sorted_equal_experts_one_by_one() -> None:
    """The mixture over sorted rows gives what each token gives alone through its own experts; some experts see none."""
    generator = torch.Generator().manual_seed(1)

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(torch.randn(outputs, inputs, generator=generator, dtype=torch.float64))

    experts = [GatedMlp(linear(48, 16), linear(16, 24)) for _ in range(8)]
    router = linear(8, 16)
    mixture = MixtureOfExperts(router, experts, 2)
    x = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    for row, ours in zip(x, mixture(x), strict=True):
        best = torch.softmax(router(row[None])[0], -1).topk(2)
        share = best.values / best.values.sum()
        alone = sum(share[i] * experts[int(best.indices[i])](row[None])[0] for i in range(2))
        assert torch.allclose(ours, alone, rtol=1e-10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 5}, "4 experts"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding-window"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "sliding-window"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], message: str) -> None:
    """A configuration that the decoder does not cover is an error that names it."""
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_hf({**SHAPE, **changes})


def test_a_shard_has_its_part_of_heads_and_widths() -> None:
    """Heads, MLP and vocabulary are split; keys are repeated where there are fewer of them than devices."""
    config = DecoderConfig("x", 2, 64, 128, 8, 2, 8, 101, 256)
    shard = config.shard(4)
    assert (shard.num_heads, shard.num_kv_heads, shard.intermediate_size, shard.vocab_size) == (2, 1, 32, 26)
    assert config.shard(1) == config
    with pytest.raises(ModelError, match="over 3 devices"):
        config.shard(3)
