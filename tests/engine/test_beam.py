"""Beam search against transformers' and against a plain search without a cache; several sequences of one prompt."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from engine_reference import save_random_llama  # noqa: E402

from engine.exec.beam import BeamGroup  # noqa: E402
from engine.exec.llm import LLM  # noqa: E402
from engine.exec.sampler import SamplingParams  # noqa: E402
from engine.exec.weights import load_model  # noqa: E402

SCORES = 2e-4
"""Hypotheses with scores this close may change places."""
LENGTHS = (1, 7, 16, 33, 60)


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def assert_same_hypotheses(model, llm, asked, params: SamplingParams, eos: list[int] | None) -> int:
    """All hypotheses of all prompts are those of `model.generate`, by scores where these are close; returns how many
    of them ended by a stop token."""
    stopped = 0
    for prompt, result in zip(asked, llm.generate(asked, params, check=True), strict=True):
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.n,
            num_return_sequences=params.n,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        theirs = found.sequences_scores.tolist()
        ours = [output.score for output in result.outputs]
        assert ours == pytest.approx(theirs, abs=SCORES)
        for i, output in enumerate(result.outputs):
            sequence = found.sequences[i][len(prompt) :].tolist()
            near = [j for j in range(params.n) if j != i and abs(theirs[j] - theirs[i]) < SCORES]
            if not near:
                assert output.token_ids == sequence[: len(output.token_ids)], f"hypothesis {i} of {len(prompt)} tokens"
                assert set(sequence[len(output.token_ids) :]) <= {0, *(eos or [])[:1]}
            stopped += output.finish_reason == "stop"
    return stopped


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("penalty", "early"), [(1.0, False), (0.0, True), (2.0, "never"), (-0.5, False)])
def test_a_random_model_from_safetensors_gives_the_hypotheses_of_transformers(tmp_path, width, penalty, early):
    """For widths, penalties and ways to stop: the same hypotheses with the same scores, many ended by a stop token."""
    model = save_random_llama(tmp_path, vocab_size=60)
    llm = LLM(tmp_path, dtype="float32", num_gpu_blocks_override=120, max_num_seqs=16, max_num_batched_tokens=128)
    stops = [1, 2, 11, 30]
    params = SamplingParams(
        beam_width=width,
        length_penalty=penalty,
        early_stopping=early,
        max_tokens=24,
        stop_token_ids=stops,
        detokenize=False,
    )
    assert assert_same_hypotheses(model, llm, prompts(60), params, stops) > 0 or early == "never"
    assert sum(llm.recorder.steps()["copied_blocks"]) > 0


def test_the_tiny_model_gives_the_hypotheses_of_transformers():
    """With a small pool that preempts beams: the same hypotheses, up to the length limit."""
    loaded = load_model("tiny")
    config = loaded.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            eos_token_id=None,
            bos_token_id=None,
        )
    ).eval()
    missing = model.load_state_dict(loaded.weights, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])
    llm = LLM("tiny", loaded, dtype="float32", num_gpu_blocks_override=20, max_model_len=90, max_num_seqs=12)
    params = SamplingParams(beam_width=3, max_tokens=30, ignore_eos=True, detokenize=False)
    assert_same_hypotheses(model, llm, prompts(256), params, None)
    assert sum(llm.recorder.requests()["num_preemptions"]) > 0


def test_a_wide_beam_finds_the_best_of_all_outputs():
    """With a beam as wide as the number of prefixes, the result is the exhaustive one."""
    vocab, length = 3, 3
    generator = torch.Generator().manual_seed(1)
    table = {
        prefix: torch.log_softmax(torch.randn(vocab, generator=generator, dtype=torch.float64), -1)
        for n in range(length)
        for prefix in itertools.product(range(vocab), repeat=n)
    }
    beam = BeamGroup(vocab ** (length - 1), length, 0, (), 1.0, False)
    rows = [()]
    while not beam.done:
        step = beam.step(torch.stack([table[row] for row in rows]))
        rows = [tuple(beam.output(i)) for i in range(beam.width)]
        assert len(step.parents) == len(step.tokens) == beam.width
    every = {
        outputs: sum(float(table[outputs[:k]][token]) for k, token in enumerate(outputs)) / length
        for outputs in itertools.product(range(vocab), repeat=length)
    }
    best = sorted(every, key=lambda outputs: -every[outputs])[: beam.width]
    assert [tuple(found.tokens) for found in beam.results()] == best
    assert [found.score for found in beam.results()] == pytest.approx([every[outputs] for outputs in best])
