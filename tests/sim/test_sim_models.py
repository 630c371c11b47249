"""Model shapes: exact parameter counts, bytes per token, configurations and their errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import ModelError, SimError
from sim.models import PRESETS, ModelSpec, dtype_bytes, from_config, load_model, preset

# Elements in the published checkpoints (sum of the sizes of all tensors).
PUBLISHED = {
    "smollm2": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_are_those_of_the_published_checkpoints(name: str, count: int) -> None:
    """A preset has exactly as many parameters as the checkpoint it is named for."""
    assert preset(name).num_parameters() == count


@pytest.mark.parametrize(
    ("name", "kv_bytes", "weights_gib"),
    [
        ("llama-2-7b", 524_288, 12.6),
        ("llama-2-13b", 819_200, 24.3),
        ("llama-2-70b", 327_680, 128.5),
        ("llama-3-70b", 327_680, 131.4),
        ("qwen2.5-72b", 327_680, 135.4),
        ("llama-3-8b", 131_072, 15.0),
        ("mistral-7b", 131_072, 13.5),
        ("mixtral-8x7b", 131_072, 87.0),
        ("qwen2.5-7b", 57_344, 14.2),
        ("qwen2.5-14b", 196_608, 27.5),
        ("qwen2.5-32b", 262_144, 61.0),
    ],
)
def test_kv_and_weight_bytes_match_the_known_table(name: str, kv_bytes: int, weights_gib: float) -> None:
    """KV bytes per token in 16 bits are exact, and weights agree with the known GiB to its rounding."""
    spec = preset(name)
    assert spec.kv_bytes_per_token(2) == kv_bytes
    assert spec.weights_bytes("float16") == 2 * spec.num_parameters()
    assert spec.weights_bytes("float16") / 2**30 == pytest.approx(weights_gib, abs=0.07)


def test_tensor_parallel_splits_weights_and_kv() -> None:
    """Llama-2-70B over four devices: 80 KiB of KV a token, and a quarter of the weights plus the copied norms."""
    spec = preset("llama-2-70b")
    assert spec.kv_bytes_per_token(2, tp=4) == 80 * 1024
    quarter = spec.weights_bytes("float16", tp=4)
    assert quarter * 4 > spec.weights_bytes("float16")
    assert quarter / 2**30 == pytest.approx(32.1, abs=0.05)


def test_few_kv_heads_are_repeated_on_many_devices() -> None:
    """With more devices than key/value heads every device keeps one head, so KV stops shrinking."""
    spec = preset("llama-3.1-70b")
    assert spec.kv_bytes_per_token(2, tp=16) == spec.kv_bytes_per_token(2, tp=8)


@given(st.sampled_from(sorted(PRESETS)), st.sampled_from([1, 2, 4, 8]))
def test_shares_of_all_devices_cover_the_model(name: str, tp: int) -> None:
    """The devices of a tensor-parallel group together hold at least the whole model and its KV."""
    spec = PRESETS[name]
    try:
        spec.check_tp(tp)
    except ModelError:
        return
    assert tp * spec.weights_bytes("float16", tp) >= spec.weights_bytes("float16")
    assert tp * spec.kv_bytes_per_token(2, tp) >= spec.kv_bytes_per_token(2)


def test_a_model_that_cannot_be_split_says_so() -> None:
    """An impossible tensor parallel size is an error that names the model and the size."""
    with pytest.raises(ModelError, match=r"smollm2.*over 2 devices"):
        preset("smollm2").weights_bytes("float16", tp=2)
    with pytest.raises(ModelError, match="1 or more"):
        preset("llama-3-8b").kv_bytes_per_token(2, tp=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("SmolLM2-135M-Instruct", "smollm2"),
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
    ],
)
def test_hub_names_find_their_preset(name: str, expected: str) -> None:
    """A model may be named as on the hub."""
    assert preset(name).name == expected


def test_an_unknown_preset_names_the_nearest_ones() -> None:
    """A misspelt model is answered with the names that look like it."""
    with pytest.raises(SimError, match=r"llama-3\.1-8b"):
        load_model("lama-3.1-8b")


def _llama_config() -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def test_config_json_gives_the_same_shape_as_the_preset(tmp_path) -> None:
    """A checkpoint's config.json, by file or by folder, is read to the same shape as the preset."""
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_llama_config()))
    assert load_model(folder) == preset("llama-3.1-8b")
    assert load_model(str(folder / "config.json")) == preset("llama-3.1-8b")


def test_families_differ_where_their_checkpoints_do() -> None:
    """Qwen2 has biases, Qwen3 norms on heads, Mixtral experts; each follows from model_type."""
    base = _llama_config()
    assert from_config(base | {"model_type": "qwen2"}).qkv_bias
    assert from_config(base | {"model_type": "qwen3", "head_dim": 128}).qk_norm
    mixtral = from_config(base | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    assert (mixtral.experts, mixtral.experts_per_token) == (8, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"num_key_value_heads": 5}, "no multiple"),
        ({"torch_dtype": "float3"}, "float3"),
    ],
)
def test_a_wrong_configuration_is_one_clear_error(change: dict[str, object], message: str) -> None:
    """Whatever is wrong in a configuration, the error names it."""
    with pytest.raises(ModelError, match=message):
        from_config(_llama_config() | change, name="mine")


def test_missing_and_broken_files_are_clear_errors(tmp_path) -> None:
    """A file that is absent, is no JSON or is no configuration says so."""
    with pytest.raises(ModelError, match="no file"):
        load_model(tmp_path / "nothing.json")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model(broken)
    broken.write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        load_model(broken)


def test_dtype_names_and_sizes() -> None:
    """Element sizes are known by name or given as a number; an unknown name is an error."""
    assert [dtype_bytes(name) for name in ("float32", "torch.bfloat16", "fp8", 2)] == [4, 2, 1, 2]
    with pytest.raises(ModelError, match="int3"):
        dtype_bytes("int3")


def test_expected_experts_grow_from_k_to_all() -> None:
    """One token visits k experts; many tokens visit all of them."""
    spec = preset("mixtral-8x7b")
    assert spec.expected_experts(1) == pytest.approx(2)
    assert spec.expected_experts(1000) == pytest.approx(8)
    assert preset("llama-3-8b").expected_experts(5) == 0


def test_specs_refuse_impossible_shapes() -> None:
    """A shape that no model can have is refused when it is made."""
    with pytest.raises(ModelError, match="layers"):
        ModelSpec("x", 0, 64, 128, 4, 2, 16, 320, 2048)
    with pytest.raises(ModelError, match="visit 1 to 4"):
        ModelSpec("x", 2, 64, 128, 4, 2, 16, 320, 2048, experts=4, experts_per_token=5)


def test_tiny_is_the_model_that_the_engine_runs() -> None:
    """The preset `tiny` has the shape of the engine's random model."""
    pytest.importorskip("torch", reason="the engine's model needs torch")
    from engine.exec.tiny import TINY

    spec = preset("tiny")
    assert (spec.layers, spec.hidden, spec.intermediate) == (TINY.num_layers, TINY.hidden_size, TINY.intermediate_size)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (TINY.num_heads, TINY.num_kv_heads, TINY.head_dim)
    assert (spec.vocab, spec.max_position) == (TINY.vocab_size, TINY.max_position)
    assert spec.tied == TINY.tie_word_embeddings
