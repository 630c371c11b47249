"""The engine's greedy output and logits against Hugging Face transformers' in float32."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine_reference import assert_greedy_equal, assert_logits_agree, prompt_lengths, save_random_llama  # noqa: E402

from engine.exec import smollm2  # noqa: E402
from engine.exec.llm import LLM  # noqa: E402
from engine.exec.weights import load_model  # noqa: E402
from engine.models.errors import DownloadError  # noqa: E402


def random_prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in prompt_lengths(16, 8, 400)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="gqa"),
        pytest.param(
            {
                "tie_word_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
                "head_dim": 32,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            id="llama3-rope-tied-biased",
        ),
    ],
)
def test_a_random_model_from_safetensors_equals_transformers(tmp_path, changes):
    """16 prompts of 8 to 400 tokens, served together and preempted, give transformers' 64 greedy tokens."""
    model = save_random_llama(tmp_path, **changes)
    # 60 blocks hold about a quarter of the requests, and the token budget cuts the long prompts.
    llm = LLM(tmp_path, dtype="float32", num_gpu_blocks_override=60, max_num_batched_tokens=128, max_num_seqs=16)
    prompts = random_prompts(model.config.vocab_size)
    assert_greedy_equal(model, llm, prompts, 64)
    assert sum(llm.recorder.requests()["num_preemptions"]) > 0
    assert_logits_agree(model, llm, prompts[8])


def test_a_sharded_checkpoint_loads_like_a_whole_one(tmp_path):
    """A checkpoint cut into shards with an index gives the weights that the single file gives."""
    model = save_random_llama(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    whole, sharded = load_model(tmp_path / "whole").weights, load_model(tmp_path / "sharded").weights
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.weights
def test_the_default_model_equals_transformers():
    """SmolLM2: 16 prompts of 8 to 400 tokens give transformers' 64 greedy tokens, and its logits within 1e-4."""
    try:
        smollm2.fetch()
    except DownloadError as error:
        pytest.skip(str(error))
    from transformers import LlamaConfig, LlamaForCausalLM

    loaded = load_model("smollm2")
    config = loaded.config
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                max_position_embeddings=config.max_position,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                rms_norm_eps=config.norm_eps,
                tie_word_embeddings=True,
            )
        )
    model = model.to_empty(device="cpu")
    # Buffers (the rotary frequencies) are not part of the checkpoint, and were lost on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.load_state_dict(
        {**loaded.weights, "lm_head.weight": loaded.weights["model.embed_tokens.weight"]}, strict=True
    )
    model.tie_weights()
    model.eval()
    llm = LLM("smollm2", loaded, dtype="float32", num_gpu_blocks_override=300)
    ids = llm.engine.tokenizer.encode(TEXT)
    assert len(ids) >= 400
    lengths = prompt_lengths(16, 8, 400)
    prompts = [ids[first : first + n] for first, n in ((min(37 * i, len(ids) - n), n) for i, n in enumerate(lengths))]
    ties = assert_greedy_equal(model, llm, prompts, 64)
    assert ties < 32
    assert_logits_agree(model, llm, prompts[9])


TEXT = """
A library keeps many books and few shelves. Whoever orders them by the date of their arrival can find a new one at once
and an old one never; whoever orders them by name must move half of the house for every gift. In the year 1734 the
keeper of one such library, tired of moving, cut the shelves into boards of equal length. Each board holds sixteen
volumes, no more, and a list by the door says which boards, in which order, make up the works of one author. When a
work grows, it takes another board, wherever one is free; when it is sold, its boards go back. Nobody has ever had to
move a book since. Visitors complain that neighbours on a board have nothing to do with each other, but they find
what they look for: the list is short, and they read it first. Twice a year the keeper counts the boards. Those whose
last places are empty are the price of the arrangement, and he has written on the wall how small a price it is.
There were, he says, other ways. One was to give each author at the outset as much room as the longest life could
fill. Most authors died young, and dust lay on the empty boards. Another was to leave to every author twice what he
had; that was better, and still a third of the house stood empty. His successor had a different trouble: two authors
had begun with the same preface, word for word, and the house held it twice. She put the preface on boards of its own
and wrote these boards into both lists. Only when one of the two changed a sentence in it did she have that one board
copied out. So the library came to hold more works than it had places, which the auditors at first refused to believe.
They counted
the lists, then the boards, then the lists again, and went home to think about the difference.
"""
